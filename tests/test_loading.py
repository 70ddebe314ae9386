"""What is said of a model that has been loaded."""

from __future__ import annotations

import pytest

from openengine import Engine, InvalidArgument
from openengine.core.memory import usable_cpus
from openengine.loading import start_line
from tests.checkpoints import write_checkpoint

FACTS = {"architecture": "LlamaForCausalLM", "dtype": "bfloat16", "device": "cpu", "kernels": "native"}
FACTS |= {"weight_bytes": 2**20, "max_model_len": 64, "load_seconds": 1.0}


@pytest.mark.parametrize(
    ("quantization", "words"), [("int8", "in int8 and bfloat16 on cpu"), (None, "in bfloat16 on cpu")]
)
def test_the_line_at_the_start_names_the_arithmetic(quantization, words):
    assert words in start_line({**FACTS, "quantization": quantization})


def test_more_threads_than_cpus_are_refused(tmp_path):
    with pytest.raises(InvalidArgument, match=f"num_threads 3000 exceeds the {usable_cpus()} CPUs.*leave it out"):
        Engine(str(tmp_path), num_threads=3000)


@pytest.mark.parametrize(("kernels", "is_told"), [("torch", True), ("auto", False)])
def test_int8_without_native_products_says_that_it_is_slow(kernels, is_told, tmp_path, caplog):
    checkpoint = write_checkpoint(tmp_path, "llama")
    with Engine(str(checkpoint), quantization="int8", kernels=kernels, progress=False) as engine:
        is_native = engine.info().attributes["matrix_kernels"] == "native"
    assert ("int8 runs without native kernels here" in caplog.text) == (is_told or not is_native)
