"""`python -m openengine`: what it prints where, and how it exits."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openengine.__main__ import DEFAULT_MAX_TOKENS, main
from openengine.ops.native import native_absence

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "openengine"]
PROMPT = "The capital of France is"


def run(*args: str, stdin: bytes | None = None, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-m", "openengine", *args]
    done = subprocess.run(command, check=False, capture_output=True, input=stdin or b"", cwd=ROOT)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


def told(stderr: str | bytes) -> list[str]:
    """Lines of stderr, but for the one that says once that the native kernels are not built."""
    lines = (stderr.decode() if isinstance(stderr, bytes) else stderr).splitlines()
    return [line for line in lines if native_absence() is None or native_absence() not in line]


def pipe_in(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))


# ---- without a model -----------------------------------------------------------------------------


def test_help_explains_itself_with_examples_and_imports_nothing_heavy():
    done = run("--help", options=("-X", "importtime"))
    assert done.returncode == 0
    assert 'python -m openengine "The capital of France is"' in done.stdout
    assert f"default: {DEFAULT_MAX_TOKENS}" in done.stdout
    assert not [name for name in ("torch", "numpy", "tqdm") if f" {name}\n" in done.stderr]


def test_version_is_that_of_the_package():
    import openengine

    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"openengine {openengine.__version__}\n")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["a", "--temperature", "hot"], "argument --temperature: invalid float value: 'hot'"),
        (["a", "--max-tok", "3"], "unrecognized arguments: --max-tok 3"),
        (["a", "--file", "b"], "give a prompt or --file, not both"),
        (["--file", "no-such-file.txt"], "cannot read no-such-file.txt: No such file or directory"),
        ([], "no prompt: standard input is empty"),
        (["-"], "no prompt: standard input is empty"),
        (["a", "--regex", "b", "--json-schema", "{}"], "argument --json-schema: not allowed with argument --regex"),
        (["a", "--json-schema", "no-such-schema.json"], "cannot read no-such-schema.json: No such file or directory"),
        (["a", "--json-schema", '{"type": }'], "--json-schema '{\"type\": }' is no JSON"),
    ],
)
def test_wrong_usage_is_one_line_on_stderr_and_exit_2(args, words):
    done = run(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("openengine: error: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_terminal_without_a_prompt_is_told_how_to_give_one(monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main([]) == 2
    assert "no prompt: give one" in capsys.readouterr().err


def test_a_file_without_prompts_is_refused(tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("\n  \n")
    assert main(["--file", str(tmp_path / "empty.txt")]) == 2
    assert "holds no prompt" in capsys.readouterr().err


def test_a_file_that_is_not_utf8_is_refused_with_the_place(tmp_path, capsys):
    (tmp_path / "latin.txt").write_bytes("ab\xe9".encode("latin-1"))
    assert main(["--file", str(tmp_path / "latin.txt")]) == 2
    assert "latin.txt is not UTF-8: byte 2 is 0xe9" in capsys.readouterr().err


def test_a_prompt_that_is_not_utf8_is_refused(capsys):
    assert main(["ab\udce9"]) == 2
    assert "not UTF-8 from character 2 on" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_one_line_and_exit_2(tmp_path, capsys):
    assert main([PROMPT, "--model", str(tmp_path / "nothing.gguf")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "nothing.gguf" in err
    assert err.count("\n") == 1


def test_a_file_that_is_no_model_is_one_line_and_exit_2(tmp_path, capsys):
    (tmp_path / "text.gguf").write_text("not a model")
    assert main([PROMPT, "--model", str(tmp_path / "text.gguf")]) == 2
    assert capsys.readouterr().err.startswith("openengine: error: ")


# ---- with the demo model -------------------------------------------------------------------------


@pytest.mark.usefixtures("smollm2")
def test_a_prompt_is_continued_on_stdout_alone():
    done = run(PROMPT, "--temperature", "0", "--max-tokens", "8", "--quiet")
    assert done.returncode == 0
    assert done.stdout.startswith(" Paris")
    assert done.stdout.endswith("\n")
    assert told(done.stderr) == []


@pytest.fixture
def interruptible():
    """Ctrl-C works in what the test starts, also where a shell runs the tests in the background and ignores it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("smollm2", "interruptible")
def test_text_is_printed_as_it_comes_and_ctrl_c_exits_130():
    command = [*COMMAND, "Count: 1 2 3 4 5", "--temperature", "0", "--max-tokens", "4000", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout.read(1)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130
    assert told(err) == []


@pytest.mark.usefixtures("smollm2")
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX pipes")
def test_a_reader_that_goes_away_ends_the_run_quietly():
    command = [*COMMAND, "Count: 1 2 3 4 5", "--temperature", "0", "--max-tokens", "4000", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 141
    assert told(err) == []


def test_piped_input_is_the_prompt_without_its_last_newline(smollm2, monkeypatch, capsys):
    options = ["--temperature", "0", "--max-tokens", "4", "--model", str(smollm2), "--json"]
    pipe_in(monkeypatch, f"{PROMPT}\n".encode())
    assert main(options) == 0
    piped = json.loads(capsys.readouterr().out)
    assert main([PROMPT, *options]) == 0
    given = json.loads(capsys.readouterr().out)
    assert piped["prompt"] == given["prompt"] == PROMPT
    assert piped["token_ids"] == given["token_ids"]


def test_json_is_one_line_with_the_result_and_what_it_was_made_with(smollm2, capsys):
    assert main([PROMPT, "--model", str(smollm2), "--json", "--temperature", "0", "--seed", "7"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    row = json.loads(line)
    assert row["prompt"] == PROMPT
    assert row["text"].startswith(" Paris")
    assert row["completion_tokens"] == len(row["token_ids"]) <= DEFAULT_MAX_TOKENS
    assert row["sampling"]["temperature"] == 0
    assert row["sampling"]["seed"] == 7
    assert row["stopping"]["max_tokens"] == DEFAULT_MAX_TOKENS
    assert row["error"] is None


def test_chat_answers_a_message_and_stops_by_itself(smollm2, capsys):
    # In bfloat16 the rounding of PyTorch's kernels makes another answer of it.
    options = ["--model", str(smollm2), "--json", "--temperature", "0", "--quiet", "--dtype", "float32"]
    assert main(["--chat", "What is the capital of France?", *options]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["finish_reason"] == "stop"
    assert "Paris" in row["text"]


def test_a_file_gives_one_json_line_for_each_prompt_in_order_and_errors_in_their_place(smollm2, tmp_path, capsys):
    path = tmp_path / "prompts.txt"
    path.write_text(f"{PROMPT}\n\n{'too long ' * 9000}\nOne plus one is\r\n", "utf-8")
    options = ["--model", str(smollm2), "--temperature", "0", "--max-tokens", "4", "--quiet"]
    assert main(["--file", str(path), "--json", *options]) == 2
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert [row["prompt"][:8] for row in rows] == ["The capi", "too long", "One plus"]
    assert rows[2]["prompt"] == "One plus one is"
    assert [row["error"] is None for row in rows] == [True, False, True]
    assert rows[0]["text"].startswith(" Paris")
    assert err.count("\n") == 1
    assert "prompt 2 of 3" in err


def test_a_file_without_json_prints_each_text_under_its_prompt(smollm2, tmp_path, capsys):
    path = tmp_path / "prompts.txt"
    path.write_text(f"{PROMPT}\n", "utf-8")
    options = ["--model", str(smollm2), "--temperature", "0", "--max-tokens", "4", "--quiet"]
    assert main(["--file", str(path), *options]) == 0
    assert capsys.readouterr().out.startswith(f"==> {PROMPT} <==\n Paris")


def test_an_option_out_of_range_is_one_line_and_exit_2(smollm2, capsys):
    assert main([PROMPT, "--model", str(smollm2), "--temperature", "-1", "--quiet"]) == 2
    err = capsys.readouterr().err
    assert "temperature" in err
    assert err.count("\n") == 1


def test_a_text_cut_by_the_limit_says_so_on_stderr(smollm2, capsys):
    assert main(["1 2 3 4 5 6 7", "--model", str(smollm2), "--temperature", "0", "--max-tokens", "2"]) == 0
    assert "--max-tokens N sets it" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["file", "text"])
def test_a_schema_as_file_or_text_holds_the_output_to_it(smollm2, tmp_path, capsys, given):
    schema = (
        '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": false}'
    )
    (tmp_path / "schema.json").write_text(schema)
    value = schema if given == "text" else str(tmp_path / "schema.json")
    assert main(["A number: ", "--model", str(smollm2), "--json-schema", value, "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["a"] in (1, 2)


def test_a_regex_holds_the_output_to_it_and_int8_is_an_option(smollm2, capsys):
    options = ["--model", str(smollm2), "--quiet", "--json", "--quantization", "int8"]
    assert main(["A PIN: ", "--regex", r"\d{4}", *options]) == 0
    assert len(str(int("1" + json.loads(capsys.readouterr().out)["text"]))) == 5
