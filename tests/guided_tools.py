"""Shared by the tests of guided decoding: a compiler over bytes, and walks through a guide's masks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scripted import write_tokenizer

from openengine.core.guides.compiled import CompiledGuide
from openengine.core.guides.compiler import GuideCompiler
from openengine.core.guides.state import GuideState
from openengine.core.tokenizer import load_tokenizer
from openengine.types import GuidedDecoding

EOS = 256
OTHER_EOS = 257
NUM_TOKENS = 258


def byte_compiler(
    directory: Path, *, extra: tuple[bytes, ...] = (), vocab_size: int | None = None, **options: Any
) -> GuideCompiler:
    """A compiler whose token b is the byte b, 256 and 257 end an output, and `extra` tokens follow."""
    vocabulary = [*(bytes([value]) for value in range(256)), "<eos>", "<end>", *extra]
    write_tokenizer(directory, vocabulary, special=("<eos>", "<end>"))
    size = vocab_size or len(vocabulary)
    return GuideCompiler(load_tokenizer(directory), size, [EOS, OTHER_EOS], **options)


def compiled(compiler: GuideCompiler, schema: Any) -> CompiledGuide:
    """The guide of a JSON schema."""
    return compiler.compile(GuidedDecoding(json_schema=json.dumps(schema)))


def legal_tokens(compiler: GuideCompiler, state: GuideState) -> list[int]:
    """The tokens that the mask of `state` allows."""
    mask = np.zeros((1, -(-compiler.vocab_size // 32)), np.int32)
    compiler.fill_masks([state], mask)
    assert state.error is None, state.error
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: compiler.vocab_size]).tolist()


def start_after(guide: CompiledGuide, text: str) -> GuideState:
    """The state after the bytes of `text`."""
    return guide.start(list(text.encode()))


def greedy_output(
    compiler: GuideCompiler, guide: CompiledGuide, prefer: Callable[[list[int]], int], limit: int = 2000
) -> bytes:
    """The output that always takes the token that `prefer` picks among the legal ones, up to its end."""
    state, output = guide.start(), bytearray()
    while len(output) < limit:
        tokens = legal_tokens(compiler, state)
        assert tokens, f"a dead end after {bytes(output)!r}"
        token = prefer(tokens)
        if token in (EOS, OTHER_EOS):
            return bytes(output)
        state.accept(token)
        output.append(token)
    raise AssertionError(f"no end after {limit} bytes: {bytes(output[:200])!r}")


def random_output(compiler: GuideCompiler, guide: CompiledGuide, rng: random.Random) -> bytes:
    """A random output that tends to close what it opened."""

    def pick(tokens: list[int]) -> int:
        if EOS in tokens and (len(tokens) <= 2 or rng.random() < 0.5):
            return EOS
        tokens = [token for token in tokens if token < EOS]
        closing = [token for token in tokens if chr(token) in '"]},:']
        printable = [token for token in tokens if 32 < token < 127]
        return rng.choice(closing if closing and rng.random() < 0.6 else printable or tokens)

    return greedy_output(compiler, guide, pick, limit=20_000)
