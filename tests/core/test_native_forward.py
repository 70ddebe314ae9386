"""All layers in one native call compute what the layers compute one by one, to the last bit."""

from __future__ import annotations

import pytest
import torch

from openengine.core.loader import load_model, open_checkpoint
from openengine.core.models import CausalLM
from openengine.ops.attention import select_backend
from openengine.ops.batch import ForwardBatch
from openengine.ops.kv_cache import KvSpec
from openengine.ops.native import native_library
from tests.checkpoints import FAMILIES, VOCAB_SIZE, write_checkpoint

pytestmark = pytest.mark.skipif(native_library() is None, reason="the native kernels are not built")

CPU = torch.device("cpu")
BLOCKS_EACH, NUM_SEQS = 4, 4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Each family's checkpoint, written when it is first asked for, with heads that the native kernels serve."""
    written = {}

    def checkpoint(family):
        if family not in written:
            path = tmp_path_factory.mktemp(family)
            overrides = {"head_dim": 16} if family in ("mistral", "ministral") else {}
            written[family] = write_checkpoint(path, family, **overrides)
        return written[family]

    return checkpoint


def load(path, dtype, quantization=None, kernels="native") -> CausalLM:
    backend = select_backend(CPU, dtype, kernels)
    return load_model(open_checkpoint(path), dtype=dtype, device=CPU, backend=backend, quantization=quantization)


class Cache:
    """Two KV caches of equal content, and ragged batches over them."""

    def __init__(self, model: CausalLM, seed: int, block_size: int = 16) -> None:
        config = model.config
        spec = KvSpec(config.num_layers, config.num_kv_heads, config.head_dim, model.dtype, CPU)
        self._model = model
        self._caches = [model.backend.allocate(spec, NUM_SEQS * BLOCKS_EACH, block_size) for _ in range(2)]
        self._random = torch.Generator().manual_seed(seed)
        self._tables = torch.randperm(NUM_SEQS * BLOCKS_EACH, generator=self._random).view(NUM_SEQS, -1).int()
        self._lengths = [0] * NUM_SEQS
        self._block_size, self._room = block_size, BLOCKS_EACH * block_size

    def _draw(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=self._random))

    def step(self) -> None:
        """One more step of random work, both ways."""
        most = self._room // 3
        counts = [min(self._draw(1, most) if self._draw(0, 2) else 1, self._room - start) for start in self._lengths]
        work = sorted((count, seq) for seq, count in enumerate(counts) if count)
        counts, seqs = [count for count, _ in work], [seq for _, seq in work]
        starts = [self._lengths[seq] for seq in seqs]
        positions = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts)])
        tables = self._tables[seqs]
        tables_of_tokens = tables.repeat_interleave(torch.tensor(counts), 0)
        blocks = tables_of_tokens.gather(1, (positions // self._block_size)[:, None])[:, 0]
        ends = torch.tensor(counts).cumsum(0)
        wanted = torch.randperm(len(positions), generator=self._random)
        wanted = wanted[: self._draw(0, len(positions) + 1) if self._draw(0, 2) else self._draw(0, 3)]
        parts = {
            "input_ids": torch.randint(VOCAB_SIZE, positions.shape, generator=self._random),
            "positions": positions,
            "slot_mapping": blocks.long() * self._block_size + positions % self._block_size,
            "cu_seqlens_q": torch.tensor([0, *ends.tolist()], dtype=torch.int32),
            "seq_lens": torch.tensor([start + count for start, count in zip(starts, counts)], dtype=torch.int32),
            "block_tables": tables,
            "query_lens": counts,
            "context_lens": [start + count for start, count in zip(starts, counts)],
            "num_decodes": sum(count == 1 for count in counts),
            "logits_rows": wanted.sort().values,
        }
        for seq, count in zip(seqs, counts):
            self._lengths[seq] += count
        assert torch.equal(*(self._run(parts, kv, together) for kv, together in zip(self._caches, (True, False))))

    def _run(self, parts: dict, kv, together: bool) -> torch.Tensor:
        model, native_forward = self._model, self._model.native_forward
        batch = ForwardBatch(**parts, kv=kv)
        model.backend.prepare(batch, windows=model.windows)
        model.native_forward = native_forward if together else None
        try:
            return model.forward(batch)
        finally:
            model.native_forward = native_forward

    @property
    def is_full(self) -> bool:
        return all(length == self._room for length in self._lengths)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_equals_the_layers_one_by_one(family, dtype, quantization, checkpoints):
    model = load(checkpoints(family), dtype, quantization)
    assert model.native_forward is not None
    cache = Cache(model, seed=1)
    with torch.inference_mode():
        while not cache.is_full:
            cache.step()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_long_contexts_too_of_which_few_results_are_wanted(family, checkpoints):
    model = load(checkpoints(family), torch.bfloat16)
    cache = Cache(model, seed=3, block_size=256)
    with torch.inference_mode():
        while not cache.is_full:
            cache.step()


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(num_threads, checkpoints):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        test_one_call_equals_the_layers_one_by_one("llama", torch.bfloat16, "int8", checkpoints)
    finally:
        torch.set_num_threads(before)


def test_without_native_kernels_the_layers_run_one_by_one(checkpoints):
    assert load(checkpoints("llama"), torch.float32, kernels="torch").native_forward is None
    assert load(checkpoints("llama"), torch.float16, kernels="torch").native_forward is None


def test_timing_tells_the_kernels_apart_and_is_off_unless_asked_for(checkpoints):
    model = load(checkpoints("llama"), torch.float32)
    program = model.native_forward.program
    with torch.inference_mode():
        Cache(model, seed=2).step()
        assert set(program.take_seconds().values()) == {0.0}
        program.is_timed = True
        Cache(model, seed=2).step()
    assert all(seconds > 0 for seconds in program.take_seconds().values())
