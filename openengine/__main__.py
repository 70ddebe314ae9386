"""The command line: `python -m openengine "prompt"` streams a continuation to standard output.

Owns arguments, printing and exit codes; everything else is the public API. Results go to standard output, and
progress bars, notes and errors to standard error.

    0  done        2  wrong usage, or an error that the engine explains        130  Ctrl-C        141  reader gone
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from openengine import __version__
from openengine.errors import InvalidArgument, OpenEngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from openengine import Engine, GenerationResult

__all__ = ["main"]

DEFAULT_MAX_TOKENS = 128

_EXAMPLES = """\
examples:
  python -m openengine "The capital of France is" --temperature 0
  python -m openengine --chat "Why is the sky blue?"
  python -m openengine --chat "Rome's founding, as JSON" --json-schema schema.json
  python -m openengine --model path/to/model.gguf --file prompts.txt --json > results.jsonl
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_complain(f"{message}; see --help"))


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m openengine",
        description="Generate text with a language model.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("prompt", nargs="?", help="text to continue; '-', or none when input is piped, reads standard input")
    add(
        "--model",
        metavar="PATH_OR_ID",
        help="a .gguf file, a directory of safetensors, or a hub id (default: the "
        "demo model SmolLM2-135M-Instruct, fetched once)",
    )
    add("--chat", action="store_true", help="the prompt is a user's message, and the answer runs to its natural end")
    add("--json", action="store_true", help="print the whole result as one line of JSON")
    add(
        "--file",
        metavar="FILE",
        help="run every line of FILE as a prompt, in one batch; empty lines are skipped, '-' "
        "is standard input; prints each text under its prompt, or with --json one line for each",
    )
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"most tokens to generate (default: {DEFAULT_MAX_TOKENS}; with --chat, as many as the context holds)",
    )
    add("--temperature", type=float, metavar="T", help="0 takes the likeliest token each time (default: the model's)")
    guide = parser.add_mutually_exclusive_group()
    guide.add_argument(
        "--json-schema", metavar="FILE_OR_TEXT", help="the text is JSON of this schema: a file, or the schema itself"
    )
    guide.add_argument("--regex", metavar="REGEX", help="the whole text matches this regular expression")
    add("--seed", type=int, metavar="N", help="the same seed draws the same tokens")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")
    add("--quantization", metavar="KIND", help="int8: multiply in 8-bit integers on a CPU (default: none)")
    add("--quiet", action="store_true", help="no progress bars and no notes")
    add("--version", action="version", version=f"openengine {__version__}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if hasattr(sys.stdout, "reconfigure"):
        # A terminal that cannot show a character shows '?', as elsewhere, and does not end the run.
        sys.stdout.reconfigure(errors="replace")
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except OpenEngineError as exc:
        return _complain(exc.message)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Python would complain at exit that it cannot flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(args: argparse.Namespace) -> int:
    prompts, schema = _prompts(args), _schema(args.json_schema)
    from openengine import Engine, demo_model

    progress = False if args.quiet else None
    model = demo_model(progress=progress) if args.model is None else args.model
    max_tokens = args.max_tokens if args.max_tokens is not None or args.chat else DEFAULT_MAX_TOKENS
    options = {"max_tokens": max_tokens, "temperature": args.temperature, "seed": args.seed}
    options |= {"json_schema": schema, "regex": args.regex}
    options = {name: value for name, value in options.items() if value is not None}
    with Engine(
        model, device=args.device, dtype=args.dtype, quantization=args.quantization, progress=progress
    ) as engine:
        if args.file is not None:
            return _run_file(engine, args, prompts, options, progress)
        if args.json:
            prompt, messages = _input(args, prompts[0])
            print(json.dumps(_row(engine, prompts[0], engine.generate(prompt, messages=messages, **options))))
            return 0
        return _run_stream(engine, args, prompts[0], options)


def _input(args: argparse.Namespace, text: str) -> tuple[str | None, list[dict[str, str]] | None]:
    return (None, [{"role": "user", "content": text}]) if args.chat else (text, None)


def _run_stream(engine: Engine, args: argparse.Namespace, prompt: str, options: dict[str, Any]) -> int:
    text, reason = "", None
    prompt, messages = _input(args, prompt)
    try:
        for event in engine.stream(prompt, messages=messages, **options):
            if event.text:
                text = event.text
                print(text, end="", flush=True)
            reason = getattr(event, "reason", reason)
    finally:
        if text and not text.endswith("\n"):
            print(flush=True)
    if reason == "length" and not args.quiet:
        print("[the limit of tokens ended the text; --max-tokens N sets it]", file=sys.stderr)
    return 0


def _run_file(
    engine: Engine, args: argparse.Namespace, prompts: list[str], options: dict[str, Any], progress: bool | None
) -> int:
    inputs = [engine.apply_chat_template(_input(args, text)[1]) for text in prompts] if args.chat else prompts
    if sys.stdout.isatty():
        progress = False  # The results themselves show how far it is.
    finished: dict[int, GenerationResult] = {}
    num_printed = num_failed = 0
    for index, result in engine.as_completed(inputs, on_error="return", progress=progress, **options):
        finished[index] = result
        # Lines come out in the order of the file, each as soon as all before it are out.
        while num_printed in finished:
            result, prompt = finished.pop(num_printed), prompts[num_printed]
            if result.error is not None:
                num_failed += 1
                _complain(f"prompt {num_printed + 1} of {len(prompts)}: {result.error.message}")
            if args.json:
                print(json.dumps({"index": num_printed, **_row(engine, prompt, result)}), flush=True)
            elif result.error is None:
                print(f"==> {prompt} <==\n{result.text}\n", flush=True)
            num_printed += 1
    return 2 if num_failed else 0


def _row(engine: Engine, prompt: str, result: GenerationResult) -> dict[str, Any]:
    row = {"prompt": prompt, "model": engine.model_info().served_model_name, **result.to_dict()}
    for name in ("sampling", "stopping", "stop_match"):
        value = getattr(result, name, None) if result.outputs else None
        row[name] = value and {k: v for k, v in dataclasses.asdict(value).items() if v is not None}
    return row


def _complain(message: str) -> int:
    # One line, whatever a library put into its own message.
    print(f"openengine: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


# ---- input ---------------------------------------------------------------------------------------


def _prompts(args: argparse.Namespace) -> list[str]:
    """The prompts to run, at least one; InvalidArgument says what is missing or unreadable."""
    if args.file is not None:
        if args.prompt is not None:
            raise InvalidArgument("give a prompt or --file, not both")
        prompts = [line.removesuffix("\r") for line in _read(args.file).split("\n") if line.strip()]
        if not prompts:
            raise InvalidArgument(f"--file {args.file} holds no prompt: every line is empty")
        return prompts
    if args.prompt is None and sys.stdin.isatty():
        raise InvalidArgument('no prompt: give one, as in `python -m openengine "The capital of France is"`, or --file')
    if args.prompt is not None and args.prompt != "-":
        return [_checked(args.prompt)]
    # The newline that `echo` ends with is not part of the prompt.
    text = _read("-").removesuffix("\n").removesuffix("\r")
    if not text:
        raise InvalidArgument("no prompt: standard input is empty")
    return [text]


def _schema(given: str | None) -> str | None:
    """The schema, as JSON text, of a flag that gives it or names its file; before a model is loaded in vain."""
    if given is None:
        return None
    text = given if given.lstrip()[:1] == "{" else _read(given)
    try:
        json.loads(text)
    except ValueError as exc:
        raise InvalidArgument(f"--json-schema {given!r:.80} is no JSON: {exc}") from exc
    return text


def _read(name: str) -> str:
    try:
        return (sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()).decode("utf-8-sig")
    except OSError as exc:
        raise InvalidArgument(f"cannot read {name}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        where = "standard input" if name == "-" else name
        raise InvalidArgument(f"{where} is not UTF-8: byte {exc.start} is 0x{exc.object[exc.start]:02x}") from exc


def _checked(prompt: str) -> str:
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise InvalidArgument(f"the prompt is not UTF-8 from character {exc.start} on") from exc
    return prompt


if __name__ == "__main__":
    sys.exit(main())
