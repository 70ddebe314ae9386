"""A model whose logits come from a script, behind the real scheduler, KV cache, sampler and output path.

It stores each token id in the KV cache at the slot it was given and reads the whole history back through the
block table, so a wrong block, slot or copy changes its output. A real tokenizer names its tokens.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from openengine.core.config import EngineConfig
from openengine.core.runner import KvPoolSize
from openengine.core.task_profile import TaskProfile
from openengine.core.tokenizer import load_tokenizer
from openengine.engine import Engine, LoadedModel
from openengine.ops.batch import ForwardBatch
from openengine.ops.kv_cache import KvCache, KvSpec

Script = Callable[[tuple[int, ...]], Sequence[float]]

SPEC = KvSpec(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"))


class ScriptedBackend:
    """Allocates the cache; the model attends for itself."""

    name = "scripted"
    block_size = 4

    def allocate(self, spec: KvSpec, num_blocks: int, block_size: int) -> KvCache:
        cache = KvCache(spec, num_blocks, block_size)
        cache.key(0).fill_(float("nan"))
        return cache

    def prepare(self, batch: ForwardBatch, *, windows: Sequence[int | None]) -> None:
        pass


class ScriptedModel:
    """`script(history)` gives the logits after `history`; histories are read from the KV cache."""

    windows = (None,)
    matrix_kernels = "scripted"
    quantization = None
    num_bytes = 0
    head = None

    def __init__(self, script: Script, vocab_size: int) -> None:
        self.config = SimpleNamespace(vocab_size=vocab_size, architecture="Scripted")
        self.script = script
        self.batches: list[list[int]] = []  # query lengths of every step

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.batches.append(batch.query_lens)
        memory = batch.kv.key(0).view(-1)
        memory[batch.slot_mapping] = batch.input_ids.float()
        size, row, logits, wanted = batch.kv.block_size, 0, [], set(batch.logits_rows.tolist())
        for index, (query, context) in enumerate(zip(batch.query_lens, batch.context_lens)):
            blocks = batch.block_tables[index, : -(-context // size)].long()
            slots = (blocks[:, None] * size + torch.arange(size)).flatten()[:context]
            tokens = memory[slots].tolist()
            assert all(token == token for token in tokens), "a slot was read that nobody wrote"
            history = tuple(map(int, tokens))
            for position in range(context - query, context):
                if row in wanted:
                    logits.append(list(self.script(history[: position + 1])))
                row += 1
        return torch.tensor(logits, dtype=torch.float32).reshape(len(wanted), self.config.vocab_size)

    def logits(self, hidden: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return hidden.clone()


def write_tokenizer(directory: Path, vocabulary: Sequence[str | bytes], *, special: Sequence[str] = ("<eos>",)) -> None:
    """A byte-level tokenizer whose token i is `vocabulary[i]`; texts in `special` are special tokens."""
    alphabet = _byte_alphabet()
    spelled = [
        text if text in special else "".join(alphabet[b] for b in (text.encode() if isinstance(text, str) else text))
        for text in vocabulary
    ]
    backend = Backend(models.BPE(vocab={text: i for i, text in enumerate(spelled)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([text for text in special if text in vocabulary])
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def _byte_alphabet() -> dict[int, str]:
    """Byte -> character of byte-level BPE: printable bytes stand for themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def scripted_engine(
    directory: Path,
    script: Script,
    vocabulary: Sequence[str | bytes],
    *,
    eos_token_ids: tuple[int, ...] = (),
    num_kv_blocks: int = 64,
    context: int = 128,
    generation_config: dict | None = None,
    **options,
) -> Engine:
    """An engine that runs `script` over `vocabulary`."""
    write_tokenizer(directory, vocabulary)
    config = EngineConfig(str(directory), num_kv_blocks=num_kv_blocks, **options)
    block_size = config.block_size or ScriptedBackend.block_size
    max_len = config.max_model_len or min(context, num_kv_blocks * block_size)
    engine = Engine.__new__(Engine)
    engine._wire(
        config,
        LoadedModel(
            model=ScriptedModel(script, len(vocabulary)),
            tokenizer=load_tokenizer(directory),
            backend=ScriptedBackend(),
            spec=SPEC,
            pool=KvPoolSize(num_kv_blocks, block_size, max_len),
            revision="scripted",
            names=tuple(
                dict.fromkeys(("scripted", str(directory), config.served_model_name or "scripted", *config.aliases))
            ),
            eos_token_ids=eos_token_ids,
            generation_config=generation_config or {},
            load_seconds=0.0,
            profile=TaskProfile(),
            device=SPEC.device,
            dtype=SPEC.dtype,
            max_len=max_len,
        ),
    )
    return engine


def follow(*tokens: int, vocab_size: int, then: int | None = None) -> Script:
    """A script that continues any prompt of one token with `tokens`, then repeats `then` (or the last)."""

    def script(history: tuple[int, ...]) -> list[float]:
        position = len(history) - 1
        token = tokens[position] if position < len(tokens) else (tokens[-1] if then is None else then)
        return [10.0 if index == token else 0.0 for index in range(vocab_size)]

    return script


def hashed(vocab_size: int, *, spread: float = 3.0) -> Script:
    """A script whose logits depend on every token of the history, without ties."""

    def script(history: tuple[int, ...]) -> list[float]:
        state = 1469598103934665603
        for token in history:
            state = ((state ^ (token + 1)) * 1099511628211) % 2**64
        generator = torch.Generator().manual_seed(state % 2**63)
        return (torch.randn(vocab_size, generator=generator, dtype=torch.float32) * spread).tolist()

    return script


# ---- a vocabulary and scripts that many tests share ----------------------------------------------

ABC = ["<eos>", *"abcdefghijklmnopqrstuvwxyz"]
GREEDY = {"temperature": 0.0, "max_tokens": 5}
ENDLESS = {"ignore_eos": True, "max_tokens": 120}


def letters(text: str) -> list[int]:
    """Token ids of `text` in `ABC`."""
    return [ABC.index(char) for char in text]


def slow(history: tuple[int, ...]) -> list[float]:
    """`hashed`, at the pace of a model: 2 ms for each row."""
    time.sleep(0.002)
    return hashed(27)(history)


class Gate:
    """A script that waits at each row until it is opened; `entered` is set once a step has begun."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or hashed(27)
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, history: tuple[int, ...]) -> Sequence[float]:
        self.entered.set()
        assert self.opened.wait(30), "the test never opened the gate"
        return self.script(history)


class Switch:
    """A script that fails, or gives NaN, while told to."""

    def __init__(self) -> None:
        self.fails = lambda history: False
        self.is_nan = lambda history: False

    def __call__(self, history: tuple[int, ...]) -> Sequence[float]:
        if self.fails(history):
            raise ArithmeticError("the script was told to fail")
        return [float("nan")] * 27 if self.is_nan(history) else hashed(27)(history)
