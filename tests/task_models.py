"""Tiny random models of every kind that embeds, classifies or scores, and what transformers computes with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.checkpoints import VOCAB_SIZE, write_model, write_tokenizer

__all__ = ["KINDS", "LABELS", "TEXTS", "add_tokens", "encode", "hidden_states", "logits", "write_task_model"]

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
