"""How fast and how exact an encoder embeds: `python -m tests.bench.embed MODEL --vs "other/bin/python peer.py MODEL"`.

The work is 512 texts of 5 to 120 words of the model's own vocabulary, drawn with a fixed seed; a peer draws the same. Every
arithmetic runs in turns with the others and with the peer; a figure is the best of its rounds, as the peers' is. Beside each
stands the share of the machine's GEMM rate, and how far its vectors are from those in float32.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openengine import Engine
from tests.bench.arguments import at_least, names_of, num_threads
from tests.bench.machine import environment, measure
from tests.bench.processes import PeerFailed, run_peer

__all__ = ["VARIANTS", "Embedded", "draw_texts", "main", "spearman"]

# Name -> options of the engine.
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}
_NUM_TEXTS = 512


@dataclass(frozen=True, slots=True)
class Embedded:
    """One arithmetic. `limit_s`: its operations at the machine's GEMM rate. Cosines are those to float32's vectors."""

    name: str
    num_texts: int
    num_tokens: int
    seconds: float
    limit_s: float
    least_cosine: float
    mean_cosine: float
    spearman: float

    @property
    def rate(self) -> float:
        """Texts per second."""
        return self.num_texts / self.seconds


def draw_texts(words: Sequence[str], count: int = _NUM_TEXTS) -> list[str]:
    rng = random.Random(3)
    return [" ".join(rng.choice(words) for _ in range(rng.randint(5, 120))) for _ in range(count)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.embed", description=__doc__)
    parser.add_argument("model", type=Path, help="directory of a BERT-like embedder with vocab.txt or tokenizer.json")
    parser.add_argument(
        "--variants", type=names_of("variants", VARIANTS), default=list(VARIANTS), help=f"any of {','.join(VARIANTS)}"
    )
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--threads", type=num_threads, help="of the engine and of the limits (default: torch's)")
    parser.add_argument("--texts", type=at_least(1), default=_NUM_TEXTS, help=f"how many (default: {_NUM_TEXTS})")
    parser.add_argument("--vs", metavar="CMD", help='a peer\'s script; its last JSON line has "texts_s"')
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--quick", action="store_true", help="rough limits: tries the benchmark, measures nothing")
    args = parser.parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    texts = draw_texts(_words(args.model), args.texts)
    results, peer = _measure(args, args.variants, texts)
    for line in _lines(results, peer):
        print(line, flush=True)
    if args.json is not None:
        found = {"environment": environment(torch.get_num_threads()), "peer": peer, "works": list(map(asdict, results))}
        args.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 0


def _words(model: Path) -> list[str]:
    """Whole words of the vocabulary, the most usual and the rarest left out where there are many."""
    if (model / "vocab.txt").exists():
        entries = (model / "vocab.txt").read_text("utf-8").splitlines()
    else:
        entries = list(json.loads((model / "tokenizer.json").read_text("utf-8"))["model"]["vocab"])
    words = [word for entry in entries if (word := entry.strip()).isalpha()]
    return words[2000:9000] or words


def _measure(
    args: argparse.Namespace, names: Sequence[str], texts: list[str]
) -> tuple[list[Embedded], dict[str, Any] | None]:
    engines, vectors, peer = {}, {}, None
    seconds = dict.fromkeys(names, float("inf"))
    try:
        for name in dict.fromkeys(["float32", *names]):
            engines[name] = Engine(args.model, num_threads=args.threads, progress=False, **VARIANTS[name])
            vectors[name] = engines[name].embed(texts, normalize=True, truncate="right", progress=False).numpy()
        for _ in range(args.rounds):
            for name in names:
                start = time.perf_counter()
                response = engines[name].embed(texts, truncate="right", progress=False)
                seconds[name] = min(seconds[name], time.perf_counter() - start)
            if args.vs is not None:
                peer = _better(peer, run_peer(args.vs))
        lens = [len(engines[names[0]].tokenize(text)) for text in texts]
        longest = engines[names[0]].model_info().max_context_length
        operations = _operations(engines[names[0]], [min(n, longest) for n in lens])
    except PeerFailed as exc:
        sys.exit(str(exc))
    finally:
        for engine in engines.values():
            engine.close()
    results = []
    for name in names:
        machine = measure("int8" if name == "int8" else name, quick=args.quick)
        cosines = (vectors[name] * vectors["float32"]).sum(1)
        results.append(
            Embedded(
                name,
                len(texts),
                response.usage.input_tokens,
                seconds[name],
                operations / machine.gemm_rate,
                float(cosines.min()),
                float(cosines.mean()),
                spearman(_similarities(vectors[name]), _similarities(vectors["float32"])),
            )
        )
    return results, peer


def _better(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    return new if old is None or new["texts_s"] > old["texts_s"] else old


def _operations(engine: Engine, lens: Sequence[int]) -> float:
    """Of all matrix products and of attention."""
    config = engine._loop._runner._model.config
    width, inner = config.hidden_size, config.intermediate_size
    weights = config.num_layers * (4 * width * width + 2 * width * inner)
    return 2.0 * weights * sum(lens) + 4.0 * config.num_layers * width * sum(n * n for n in lens)


def _similarities(vectors: np.ndarray) -> np.ndarray:
    """Of every pair of texts."""
    return (vectors @ vectors.T)[np.triu_indices(len(vectors), 1)]


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of the ranks of two arrays without ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def _lines(results: Sequence[Embedded], peer: dict[str, Any] | None) -> Iterator[str]:
    yield f"{results[0].num_texts} texts, {results[0].num_tokens} tokens"
    yield f"{'arithmetic':<12}{'texts/s':>9}{'tokens/s':>10}{'of GEMM':>9}{'least cos':>11}{'mean cos':>10}{'Spearman':>10}"
    for r in results:
        told = f"{r.name:<12}{r.rate:>9.1f}{r.num_tokens / r.seconds:>10,.0f}{r.limit_s / r.seconds:>9.0%}"
        told += f"{r.least_cosine:>11.5f}{r.mean_cosine:>10.5f}{r.spearman:>10.5f}"
        yield told if peer is None else f"{told}   {r.rate / peer['texts_s']:.2f} x the peer"
    if peer is not None:
        name = " ".join(str(peer[key]) for key in ("engine", "dtype") if key in peer)
        yield f"{name or 'peer':<12} {peer['texts_s']:.1f} texts/s"


if __name__ == "__main__":
    sys.exit(main())
