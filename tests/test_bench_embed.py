"""The embedding benchmark measures what it says. No speed is asserted."""

from __future__ import annotations

import json
import shlex
import sys

import numpy as np
import pytest

from tests.bench.embed import VARIANTS, draw_texts, main, spearman
from tests.task_models import write_task_model


def test_every_arithmetic_stands_beside_its_limit_and_the_peer(tmp_path, capsys):
    write_task_model(tmp_path / "model", "embedding")
    (tmp_path / "peer.py").write_text('print(\'{"engine": "other", "texts_s": 10.0}\')')
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(tmp_path / 'peer.py'))}"
    arguments = ["--texts", "12", "--rounds", "1", "--threads", "1", "--quick", "--vs", command]
    assert main([str(tmp_path / "model"), *arguments, "--json", str(tmp_path / "out.json")]) == 0
    shown, found = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert "x the peer" in shown and "other" in shown and found["peer"]["texts_s"] == 10.0
    assert [work["name"] for work in found["works"]] == list(VARIANTS)
    for work in found["works"]:
        assert work["num_texts"] == 12 and work["seconds"] > 0 and work["limit_s"] > 0
        assert 0.9 < work["least_cosine"] <= work["mean_cosine"] < 1.0001


def test_the_texts_are_those_that_peers_draw():
    texts = draw_texts(["a", "b"], 4)
    assert texts == draw_texts(["a", "b"], 4) and all(5 <= len(text.split()) <= 120 for text in texts)


def test_ranks_correlate_by_order_alone():
    values = np.array([0.3, -1.0, 2.0, 0.1])
    assert spearman(values, np.exp(values)) == pytest.approx(1) and spearman(values, -values) == pytest.approx(-1)
