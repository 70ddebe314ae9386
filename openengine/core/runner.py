"""`ModelRunner`: executes a step plan: slots → batch → model → logits → sampler.

Owns the model, the KV cache, the slot table and the sampler's state. Decides nothing: what to compute
comes in the plan, what to do with the tokens is the scheduler's and the output's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from openengine.core.config import EngineConfig
from openengine.core.guide_masks import StepMasks
from openengine.core.guides.compiler import GuideCompiler
from openengine.core.guides.state import GuideState
from openengine.core.item_pooling import ItemPooling
from openengine.core.memory import available_bytes
from openengine.core.models.layers import CausalLM
from openengine.core.sampler import SampledBatch, Sampler, SlotParams
from openengine.core.sequence import Sequence
from openengine.core.slots import SlotTable
from openengine.core.step_plan import ScheduledSeq, StepPlan
from openengine.errors import InvalidArgument
from openengine.ops.attention import AttentionBackend
from openengine.ops.attention_native import NativeAttention
from openengine.ops.kv_cache import KvCache, KvSpec
from openengine.ops.native import native_library

if TYPE_CHECKING:
    from openengine.core.pooler import Pooler

__all__ = ["KvPoolSize", "ModelRunner", "StepResult", "size_kv_pool"]

_SCORE_CHUNK = 512  # rows of full-vocabulary logits held at once for prompt logprobs
_CPU_POOL_BYTES = 4 << 30  # a machine that runs other things too keeps the rest


@dataclass(frozen=True, slots=True)
class KvPoolSize:
    """The KV pool: `num_blocks` blocks of `block_size` tokens; a sequence holds at most `max_model_len` tokens."""

    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(slots=True)
class StepResult:
    """What a step produced, on the host: `sampled` has one row per sampled output, in the order of the plan; `pooled` what
    the items of tasks have become."""

    sampled: SampledBatch | None
    pooled: list[tuple[Sequence, np.ndarray]] = field(default_factory=list)


def size_kv_pool(config: EngineConfig, spec: KvSpec, context_length: int, default_block_size: int) -> KvPoolSize:
    """Choose block size, number of blocks and context from the configuration, the model and free memory.

    Raises InvalidArgument when the context asked for exceeds the model's, or when not one block fits.
    """
    block_size = config.block_size or default_block_size
    if config.max_model_len is not None and config.max_model_len > context_length:
        raise InvalidArgument(
            f"max_model_len {config.max_model_len} exceeds the model's context of {context_length} tokens; lower it"
        )
    max_len = config.max_model_len or context_length
    num_blocks = config.num_kv_blocks
    if num_blocks is None:
        on_cpu = spec.device.type == "cpu"
        fraction = config.kv_memory_fraction or (0.25 if on_cpu else 0.85)
        budget = int(available_bytes(spec.device) * fraction)
        if on_cpu and config.kv_memory_fraction is None:
            budget = min(budget, _CPU_POOL_BYTES)
        wanted = config.max_num_seqs * -(-max_len // block_size)
        num_blocks = min(budget // KvCache.bytes_per_block(spec, block_size), wanted)
        if num_blocks < 1:
            raise InvalidArgument(
                f"no KV block of {KvCache.bytes_per_block(spec, block_size)} bytes fits into {budget} bytes; free memory, "
                "raise kv_memory_fraction, or set num_kv_blocks and a smaller block_size"
            )
    else:
        _check_fits(num_blocks, KvCache.bytes_per_block(spec, block_size), spec.device)
    if config.max_model_len is None:
        max_len = min(max_len, num_blocks * block_size)
    return KvPoolSize(num_blocks, block_size, max_len)


def _check_fits(num_blocks: int, block_bytes: int, device: torch.device) -> None:
    """A system that promises memory it lacks would end the process when the pool fills."""
    available = available_bytes(device)
    if num_blocks * block_bytes > available:
        raise InvalidArgument(
            f"a KV pool of {num_blocks} blocks takes {num_blocks * block_bytes} bytes, {available} are free on {device}; "
            f"lower num_kv_blocks to at most {available // block_bytes}, or leave it out"
        )


class ModelRunner:
    """Runs one model on one device. Called by the loop thread only, inside `torch.inference_mode`.

    `pooler` serves the items of tasks; without one there are none. So it is with `guides` and guided outputs.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        spec: KvSpec,
        pool: KvPoolSize,
        *,
        max_num_seqs: int,
        pooler: Pooler | None = None,
        guides: GuideCompiler | None = None,
    ) -> None:
        self._model = model
        self._masks = None if guides is None else StepMasks(guides, max_rows=max_num_seqs, device=spec.device)
        self._pooling = None if pooler is None else ItemPooling(pooler)
        self._backend = backend
        self._device = spec.device
        self._windows = tuple(dict.fromkeys(model.windows))
        self.kv = _allocate(backend, spec, pool)
        self._slots = SlotTable(
            max_num_seqs=max_num_seqs,
            max_len=min(pool.max_model_len, pool.num_tokens),
            block_size=pool.block_size,
        )
        # Memory that stays: the system takes back so large a block, and a step would spend up to 10 % on new pages.
        self._logits = None
        if spec.device.type == "cpu" and model.head is not None:
            self._logits = torch.empty(max_num_seqs, model.config.vocab_size)
        # Sampling takes the kernels that attention takes.
        native = native_library() if isinstance(backend, NativeAttention) else None
        self._sampler = Sampler(
            max_slots=max_num_seqs, vocab_size=model.config.vocab_size, device=spec.device, native=native
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute `plan`: write KV, sample, and collect prompt scores into their groups."""
        self._update_slots(plan)
        if not plan.scheduled:
            return StepResult(None)
        logits_rows, sample_rows, scored, chunks = _choose_rows(plan, self._pooling)
        batch = self._slots.build(plan, logits_rows, self.kv, self._device)
        self._backend.prepare(batch, windows=self._windows)
        if self._masks is not None:
            self._masks.begin(seq for item in plan.scheduled for seq in item.samples)
        hidden = self._model.forward(batch)  # [R, D]
        for item, first in scored:
            self._score_prompt(item, hidden, first)
        pooled = []
        if chunks:
            pooled = self._pooling.collect([(item, hidden[rows.start : rows.stop]) for item, rows in chunks])
        if not len(sample_rows):
            return StepResult(None, pooled)
        if scored or chunks:
            hidden = hidden[torch.from_numpy(sample_rows).to(self._device)]
        sampled = [item.samples for item in plan.scheduled if item.samples]
        slots = np.array([seq.slot for samples in sampled for seq in samples], dtype=np.int64)
        rows = np.repeat(np.arange(len(sampled)), [len(samples) for samples in sampled])
        logits = self._model.logits(hidden, out=self._logits)
        mask = None if self._masks is None else self._masks.finish()
        return StepResult(self._sampler.sample(logits, rows, slots, mask=mask), pooled)

    def close(self) -> None:
        """End the thread that works beside the loop's; nothing is executed any more."""
        if self._masks is not None:
            self._masks.close()

    def _update_slots(self, plan: StepPlan) -> None:
        for slot in plan.released:
            self._sampler.clear_slot(slot)
            if self._pooling is not None:
                self._pooling.drop(slot)
        for seq in plan.admitted:
            self._slots.admit(seq)
            if seq.item is not None:
                continue  # nothing of it is sampled
            self._sampler.set_slot(
                seq.slot, _slot_params(seq), seq.group.prompt_ids, seq.token_ids[seq.group.num_prompt :]
            )
            if seq.group.guide is not None:
                seq.guide_state = _start_guide(seq)
        for item in plan.scheduled[plan.num_decodes :]:
            if item.seq.guide_state is not None:
                self._sampler.catch_up(item.seq.slot, item.seq.token_ids[item.seq.num_prompt :])
        if plan.block_copies:
            self.kv.copy_blocks(plan.block_copies)
        self._slots.update(item.seq for item in plan.scheduled)
        if plan.block_copies:
            for item in plan.scheduled:
                self._slots.replace_tail(item.seq, item.start)

    def _score_prompt(self, item: ScheduledSeq, hidden: torch.Tensor, first: int) -> None:
        group, (start, end) = item.seq.group, item.score
        selection = group.response.prompt_candidates
        for low in range(start, end, _SCORE_CHUNK):
            high = min(low + _SCORE_CHUNK, end)
            logits = self._model.logits(hidden[first + low - start : first + high - start])
            targets = torch.from_numpy(group.prompt_ids[low:high].astype(np.int64)).to(self._device)
            group.prompt_scores.append(
                self._sampler.kernels.score_tokens(
                    logits,
                    targets,
                    top_n=selection.top_n if selection else None,
                    candidate_ids=selection.token_ids if selection else None,
                    all_candidates=bool(selection and selection.all),
                )
            )


def _allocate(backend: AttentionBackend, spec: KvSpec, pool: KvPoolSize) -> KvCache:
    try:
        return backend.allocate(spec, pool.num_blocks, pool.block_size)
    except (RuntimeError, MemoryError) as exc:
        size = KvCache.bytes_per_block(spec, pool.block_size) * pool.num_blocks
        raise InvalidArgument(
            f"the KV pool of {pool.num_blocks} blocks takes {size} bytes, which cannot be allocated on {spec.device}; "
            "make it smaller by num_kv_blocks or kv_memory_fraction"
        ) from exc


def _choose_rows(
    plan: StepPlan, pooling: ItemPooling | None
) -> tuple[np.ndarray, np.ndarray, list[tuple[ScheduledSeq, int]], list[tuple[ScheduledSeq, range]]]:
    """Rows of the batch whose hidden states are needed. Of those: the ones that are sampled, where each scored chunk
    begins, and the ones of each chunk of a task."""
    if plan.num_decodes == len(plan.scheduled):
        every = np.arange(plan.num_decodes)
        return every, every, [], []
    rows: list[np.ndarray | list[int]] = []
    sample_rows: list[int] = []
    scored: list[tuple[ScheduledSeq, int]] = []
    chunks: list[tuple[ScheduledSeq, range]] = []
    count = offset = 0
    for item in plan.scheduled:
        if item.seq.item is not None:
            wanted = pooling.rows(item)
            rows.append(np.arange(offset + wanted.start, offset + wanted.stop))
            chunks.append((item, range(count, count + len(wanted))))
            count += len(wanted)
        if item.score is not None:
            first, last = item.score
            rows.append(np.arange(offset + first - 1 - item.start, offset + last - 1 - item.start))
            scored.append((item, count))
            count += last - first
        offset += item.num_tokens
        if item.samples:
            rows.append([offset - 1])
            sample_rows.append(count)
            count += 1
    logits_rows = np.concatenate(rows).astype(np.int64) if rows else np.empty(0, dtype=np.int64)
    return logits_rows, np.array(sample_rows, dtype=np.int64), scored, chunks


def _start_guide(seq: Sequence) -> GuideState:
    group = seq.group
    return group.guide.start(
        seq.token_ids[seq.num_prompt :],
        stop_token_ids=group.stop_token_ids,
        ignore_eos=bool(group.stopping.ignore_eos),
    )


def _slot_params(seq: Sequence) -> SlotParams:
    group = seq.group
    sampling, stopping, response = group.sampling, group.stopping, group.response
    selection = response.output_candidates
    held_back = group.stop_token_ids | (frozenset() if stopping.ignore_eos else group.eos_token_ids)
    return SlotParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=group.seed,
        output_index=seq.index,
        min_tokens=stopping.min_tokens or 0,
        stop_token_ids=tuple(sorted(held_back)) if stopping.min_tokens else (),
        return_logprobs=bool(response.return_output_logprobs or selection),
        top_n=selection.top_n if selection else None,
        candidate_ids=selection.token_ids if selection else None,
        all_candidates=bool(selection and selection.all),
    )
