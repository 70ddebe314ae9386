"""Every Python example of the README runs as written, in order, with the demo model."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")


@pytest.mark.timeout(300)
def test_the_examples_run_as_written(smollm2, minilm):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 8
    scope: dict[str, object] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for index, block in enumerate(blocks):
            exec(compile(block, f"README.md example {index + 1}", "exec"), scope)
    assert "Paris" in printed.getvalue() and "cancelled" in printed.getvalue()


def test_the_files_it_names_exist():
    root = Path(__file__).parents[1]
    for name in re.findall(r"`?((?:openengine|core|ops|tests|notebooks)/[\w/]+(?:\.\w+)?)`?", README):
        assert any((base / name).exists() for base in (root, root / "openengine")), name
