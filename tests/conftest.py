"""Fixtures that every test may use: the real models, as paths in the model cache."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
from pathlib import Path

import pytest

from openengine.demo import registry_model
from openengine.errors import ModelNotFound

_MODELS = {"smollm2": "smollm2-135m-instruct", "gemma3": "gemma-3-270m", "minilm": "all-minilm-l6-v2"}

# A shell starts what it runs in the background with Ctrl-C ignored, and tests of Ctrl-C would wait for it in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    names = ("torch", "numpy", "tokenizers", "safetensors", "transformers")
    return "versions: " + ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not _MODELS.keys().isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.real)


def pytest_collection_finish(session: pytest.Session) -> None:
    # Here and not in the fixtures, so that a slow line does not use up the time limit of a test.
    if session.config.option.collectonly:
        return
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    for fixture in sorted(wanted & _MODELS.keys()):
        with contextlib.suppress(ModelNotFound):
            registry_model(_MODELS[fixture])


def _path_or_skip(fixture: str) -> Path:
    try:
        return registry_model(_MODELS[fixture])
    except ModelNotFound as exc:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"needs a real model: {exc.message}")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, GGUF: Llama architecture, byte-level BPE, chat template."""
    return _path_or_skip("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M, GGUF: SentencePiece vocabulary, sliding window of 512."""
    return _path_or_skip("gemma3")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2, a sentence-transformers folder: BERT, WordPiece, mean pooling, normalized."""
    return _path_or_skip("minilm")
