"""What is said of a model that has been loaded."""

from __future__ import annotations

import pytest
import torch

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
    with pytest.raises(
        InvalidArgument, match=f"num_threads 3000 exceeds the number of CPUs.*, {usable_cpus()};.*leave it out"
    ):
        Engine(str(tmp_path), num_threads=3000)


@pytest.mark.parametrize(("kernels", "is_told"), [("torch", True), ("auto", False)])
def test_int8_without_native_products_says_that_it_is_slow(kernels, is_told, tmp_path, caplog):
    checkpoint = write_checkpoint(tmp_path, "llama")
    with Engine(str(checkpoint), quantization="int8", kernels=kernels, progress=False) as engine:
        is_native = engine.info().attributes["matrix_kernels"] == "native"
    assert ("int8 runs without native kernels here" in caplog.text) == (is_told or not is_native)


@pytest.mark.parametrize(
    ("fails", "is_told"),
    [
        (lambda: torch.empty(1 << 55), True),
        (lambda: bytearray(1 << 60), True),
        (lambda: torch.ones(2) @ torch.ones(3), False),
    ],
)
def test_weights_that_do_not_fit_are_an_error_of_ours_and_other_faults_stay_what_they_are(
    fails, is_told, tmp_path, monkeypatch
):
    checkpoint = write_checkpoint(tmp_path, "llama")
    monkeypatch.setattr("openengine.loading.load_model", lambda *_args, **_options: fails())
    with pytest.raises(InvalidArgument if is_told else RuntimeError, match="do not fit.*int8" if is_told else "size"):
        Engine(str(checkpoint), progress=False)
