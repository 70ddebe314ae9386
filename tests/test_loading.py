"""What is said of a model that has been loaded."""

from __future__ import annotations

import pytest

from openengine.loading import start_line

FACTS = {"architecture": "LlamaForCausalLM", "dtype": "bfloat16", "device": "cpu", "kernels": "native"}
FACTS |= {"weight_bytes": 2**20, "max_model_len": 64, "load_seconds": 1.0}


@pytest.mark.parametrize(
    ("quantization", "words"), [("int8", "in int8 and bfloat16 on cpu"), (None, "in bfloat16 on cpu")]
)
def test_the_line_at_the_start_names_the_arithmetic(quantization, words):
    assert words in start_line({**FACTS, "quantization": quantization})
