"""Engines over scripted models, so that every expected value is exact, and over tiny models of every task."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openengine import Engine
from tests.scripted import ABC, Gate, Switch, hashed, scripted_engine
from tests.task_models import ENGINE_OPTIONS, KINDS, write_task_model


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with scripted_engine(tmp_path, hashed(27), ABC) as engine:
        yield engine


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Engine]:
    """An engine whose steps wait until `engine.gate` is opened."""
    gate = Gate()
    with scripted_engine(tmp_path, gate, ABC) as engine:
        engine.gate = gate
        yield engine
        gate.opened.set()


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[Engine]:
    """An engine whose model fails as `engine.switch` says."""
    switch = Switch()
    with scripted_engine(tmp_path, switch, ABC) as engine:
        engine.switch = switch
        yield engine


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, Any, Engine]]]:
    """By kind of task model: its directory, transformers' model, an engine."""
    root = tmp_path_factory.mktemp("tasks")
    found = {}
    for kind in KINDS:
        reference = write_task_model(root / kind, kind)
        found[kind] = (root / kind, reference, Engine(root / kind, **ENGINE_OPTIONS))
    yield found
    for _directory, _reference, engine in found.values():
        engine.close()
