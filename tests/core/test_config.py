"""Every engine setting is checked when it is given."""

from __future__ import annotations

import pickle

import pytest

from openengine.core.config import EngineConfig
from openengine.errors import InvalidArgument, UnsupportedFeature
from openengine.types import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_path", 3),
        ("device", None),
        ("served_model_name", 1),
        ("aliases", "name"),
        ("aliases", (1,)),
        ("dtype", "float8"),
        ("dtype", ["float32"]),
        ("kernels", "fast"),
        ("role", "both"),
        ("seed", "1"),
        ("seed", -1),
        ("seed", 2**64),
        ("num_threads", 0),
        ("max_model_len", True),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 1.5),
        ("max_queued_requests", None),
        ("block_size", -4),
        ("num_kv_blocks", "many"),
        ("kv_memory_fraction", 0),
        ("kv_memory_fraction", "half"),
        ("event_buffer_size", -1),
        ("event_buffer_size", None),
        ("event_buffer_size", 5_000_000_000),
        ("event_buffer_size", 2**63),
        ("max_model_len", 1),
        ("served_model_name", ""),
        ("served_model_name", " "),
        ("aliases", ("a", "")),
        ("aliases", ("a\n",)),
        ("device", ""),
        ("device", "cpu:7"),
        ("device", "cuda:"),
        ("device", "tpu"),
        ("enable_prefix_cache", "yes"),
        ("generation_config", 1),
        ("default_sampling", {"temperature": 1}),
    ],
)
def test_a_bad_value_is_refused_naming_the_field(name, value):
    with pytest.raises(InvalidArgument, match=name):
        EngineConfig(**{"model_path": "m", name: value})


def test_int8_taken_for_a_dtype_names_the_option_it_is():
    with pytest.raises(InvalidArgument, match="quantization='int8'"):
        EngineConfig(model_path="m", dtype="int8")


def test_two_sizes_of_the_kv_pool_are_refused():
    with pytest.raises(InvalidArgument, match="num_kv_blocks 64 and kv_memory_fraction 0.5 both size the KV pool"):
        EngineConfig(model_path="m", num_kv_blocks=64, kv_memory_fraction=0.5)


def test_more_sequences_than_tokens_in_a_step_are_refused():
    with pytest.raises(InvalidArgument, match=r"max_num_seqs 64 exceeds max_num_batched_tokens 32"):
        EngineConfig("m", max_num_batched_tokens=32)


def test_defaults_that_no_request_may_have_are_refused():
    with pytest.raises(InvalidArgument, match=r"num_sequences 65 exceeds max_num_seqs 64"):
        EngineConfig("m", default_sampling=SamplingParams(num_sequences=65))


@pytest.mark.parametrize("option", [{"role": "prefill"}, {"quantization": "int3"}, {"tensor_parallel_size": 2}])
def test_what_is_not_supported_is_refused_by_name(option):
    with pytest.raises(UnsupportedFeature, match=next(iter(option))):
        EngineConfig("m", **option)


def test_a_config_can_be_pickled():
    config = EngineConfig("m", seed=1)
    assert pickle.loads(pickle.dumps(config)) == config
