"""Tiny random models of every kind that embeds, classifies or scores, and what transformers computes with them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openengine import EmbedRequest, Engine, ScoreGroup, ScoreOptions, ScoreRequest, TaskInput, TaskRequestContext
from tests.checkpoints import VOCAB_SIZE, write_model, write_tokenizer

__all__ = [
    "ENGINE_OPTIONS",
    "KINDS",
    "LABELS",
    "TEXTS",
    "WORDS",
    "add_tokens",
    "embed_request",
    "encode",
    "engine_of",
    "hidden_states",
    "logits",
    "score_request",
    "texts_of",
    "write_task_model",
]

ENGINE_OPTIONS = {"dtype": "float32", "num_threads": 1}
WORDS = "the quick brown fox jumps over lazy dog one two three four five hello world how are you".split()

LABELS = {0: "calm", 1: "glad", 2: "sad"}
TEXTS = (
    "the quick brown fox jumps over the lazy dog",
    "a",
    "Hello world, how are you today?",
    "one two three four five " * 4,
    "ü ß 日本 🦊",
    "",
)

# Kind -> (family, head, arguments of its config).
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "embedding": ("bert", "Model", {}),
    "classifier": ("distilbert", "ForSequenceClassification", {"id2label": LABELS, "num_labels": 3}),
    "tagger": ("roberta", "ForTokenClassification", {"id2label": LABELS, "num_labels": 3}),
    "cross": ("bert", "ForSequenceClassification", {"num_labels": 1}),
    "sparse": ("bert", "ForMaskedLM", {}),
    "causal": ("qwen2", "ForCausalLM", {}),
    "decoder_embedding": ("qwen3", "Model", {}),
}
KINDS = tuple(_MODELS)


def write_task_model(directory: Path, kind: str, **overrides: Any) -> Any:
    """Write one of `KINDS`; returns transformers' model in float32."""
    family, head, arguments = _MODELS[kind]
    model = write_model(directory, family, head, **{**arguments, **overrides})
    write_tokenizer(directory)
    return model


def encode(directory: Path, *texts: str, **options: bool) -> list[int]:
    """Token ids of a text, or of a pair."""
    return _tokenizer(directory).encode(*texts, **options).ids


def add_tokens(directory: Path, *texts: str) -> None:
    """Give the tokenizer tokens of its own for these texts, in place of its last ones."""
    path = directory / "tokenizer.json"
    state = json.loads(path.read_text())
    vocabulary, merges = state["model"]["vocab"], state["model"]["merges"]
    count = max(0, len(vocabulary) + len(texts) - VOCAB_SIZE)
    for merge in merges[len(merges) - count :]:
        del vocabulary["".join(merge)]
    state["model"]["merges"] = merges[: len(merges) - count]
    path.write_text(json.dumps(state))
    tokenizer = _tokenizer(directory)
    tokenizer.add_tokens(list(texts))
    tokenizer.save(str(path))


def _tokenizer(directory: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def _run(model: Any, token_ids: list[int], **options: Any) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([token_ids]), **options)


def logits(model: Any, token_ids: list[int]) -> np.ndarray:
    """f32: [C] of a classifier, [n, C] by token."""
    return _run(model, token_ids).logits[0].numpy()


def hidden_states(model: Any, token_ids: list[int]) -> np.ndarray:
    """f32 [n, D], of the last layer."""
    return _run(model, token_ids).last_hidden_state[0].numpy()


def engine_of(models: dict[str, tuple[Path, Any, Engine]], kind: str) -> Engine:
    """The engine of the fixture `models`."""
    return models[kind][2]


def texts_of(count: int, seed: int = 0, *, most: int = 30) -> list[str]:
    """Random texts of 1 to `most` words, the same for the same seed."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, most))) for _ in range(count)]


def embed_request(
    count: int = 1, *, request_id: str | None = None, priority: int | None = None, text: str = "hello world " * 8
) -> EmbedRequest:
    inputs = tuple(TaskInput(item_id=str(index), text=text) for index in range(count))
    return EmbedRequest(inputs=inputs, context=TaskRequestContext(request_id=request_id, priority=priority))


def score_request(documents: Sequence[str], **context: Any) -> ScoreRequest:
    """One query against `documents`, by the tokens 5 and 6."""
    candidates = tuple(TaskInput(item_id=f"c{index}", text=text) for index, text in enumerate(documents))
    group = ScoreGroup(group_id="g", query=TaskInput(item_id="q", text="how are you: "), candidates=candidates)
    return ScoreRequest(
        groups=(group,), options=ScoreOptions(label_token_ids=(5, 6)), context=TaskRequestContext(**context)
    )
