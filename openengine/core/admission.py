"""`RequestPreparer`: from a request to a `SequenceGroup` that the loop can run, or a typed error.

Everything that can be wrong with a request is found here, in the caller's thread, before acceptance.
Immutable after construction, hence safe from any number of threads.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from openengine.core.output import OutputStream
from openengine.core.sequence import SequenceGroup
from openengine.core.tokenizer import Tokenizer
from openengine.errors import (
    InvalidArgument,
    ModelNotFound,
    RequestTooLarge,
    RoleMismatch,
    UnsupportedFeature,
    UnsupportedTask,
)
from openengine.types import (
    CandidateTokenSelection,
    GenerateRequest,
    ResponseOptions,
    SamplingParams,
    StoppingOptions,
    stop_token_ids,
    validate_request,
)

__all__ = ["MAX_TOP_N", "Limits", "RequestPreparer", "sampling_defaults"]

MAX_TOP_N = 256  # per position; beyond that a caller wants all candidates, and says so
_MAX_REPORTED_VALUES = 1 << 28  # candidates kept for one request: 4 GiB of ids, logprobs and ranks
_NEUTRAL = SamplingParams(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    repetition_penalty=1.0,
    num_sequences=1,
)
_FROM_GENERATION_CONFIG = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded model and its KV pool can take. `model_names`: every name a request may use."""

    model_names: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    max_num_sequences: int
    eos_token_ids: frozenset[int]

    @property
    def num_kv_tokens(self) -> int:
        return self.block_size * self.num_kv_blocks


def sampling_defaults(
    default_sampling: SamplingParams, generation_config: Mapping[str, Any]
) -> tuple[SamplingParams, int | None]:
    """Effective defaults, and `max_new_tokens` where the checkpoint names one.

    The engine's `default_sampling` comes first, then the checkpoint's generation_config.json, then neutral
    values (temperature 1, nothing cut). Of generation_config, sampling values count where `do_sample` is
    true; `do_sample: false` means greedy.
    """
    values = {name: getattr(_NEUTRAL, name) for name in SamplingParams.__dataclass_fields__}
    if generation_config.get("do_sample") is False:
        values["temperature"] = 0.0
    elif generation_config.get("do_sample"):
        for name in _FROM_GENERATION_CONFIG:
            if generation_config.get(name) is not None:
                values[name] = generation_config[name]
    for name in values:
        if getattr(default_sampling, name) is not None:
            values[name] = getattr(default_sampling, name)
    return SamplingParams(**values), generation_config.get("max_new_tokens")


class RequestPreparer:
    """Validates, tokenizes and fills in defaults. `seed` makes requests without one reproducible in order of arrival."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: Limits,
        *,
        defaults: SamplingParams,
        default_max_tokens: int | None,
        seed: int | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._defaults = defaults
        self._default_max_tokens = default_max_tokens
        self._seed = seed
        self._counter = itertools.count()

    def prepare(self, request: GenerateRequest) -> SequenceGroup:
        """Check `request` against the model and build its group (no sink yet).

        Raises the error that a server would answer with instead of accepting the request.
        """
        limits = self._limits
        if request.request_id == "":
            raise InvalidArgument("request_id is empty; leave it out to get a fresh one")
        if request.model is not None and request.model not in limits.model_names:
            raise ModelNotFound(f"model {request.model!r} is not served; served are {', '.join(limits.model_names)}")
        validate_request(request)
        _refuse_unsupported(request)
        self._check_ids(request)
        sampling = self._effective_sampling(request.sampling)
        prompt_ids = self._prompt_ids(request)
        max_len, reason = self._max_len(len(prompt_ids), request.stopping)
        response = self._effective_response(request.response, len(prompt_ids), max_len)
        group = SequenceGroup(
            request_id=request.request_id or str(uuid.uuid4()),
            prompt_ids=prompt_ids,
            sampling=sampling,
            stopping=replace(request.stopping, max_tokens=max_len - len(prompt_ids)),
            response=response,
            seed=sampling.seed if sampling.seed is not None else self._fresh_seed(),
            max_len=max_len,
            max_len_reason=reason,
            stop_token_ids=frozenset(stop_token_ids(request.stopping)),
            eos_token_ids=limits.eos_token_ids,
            sink=None,
            priority=request.priority or 0,
            cache_salt=request.kv.cache_salt,
            bypass_prefix_cache=bool(request.kv.bypass_prefix_cache),
            score_start=max(1, response.prompt_logprob_start or 0) if response.return_prompt_logprobs else None,
        )
        for seq in group.sequences:
            seq.stream = OutputStream(
                self._tokenizer.detokenizer(prompt_ids),
                output_index=seq.index,
                stopping=group.stopping,
            )
        return group

    # ---- the prompt ------------------------------------------------------------------------------

    def _prompt_ids(self, request: GenerateRequest) -> np.ndarray:
        limits = self._limits
        if request.prompt is not None:
            if self._tokenizer.starts_with_bos(request.prompt):
                warnings.warn(
                    "the prompt begins with the text of the BOS token and the tokenizer adds one too, so the model sees "
                    "two; use chat() or messages= for chat templates, or pass token ids",
                    stacklevel=5,
                )
            ids = np.asarray(self._tokenizer.encode(request.prompt), dtype=np.int64)
        else:
            ids = _as_token_ids(request.token_ids)
        if not len(ids):
            raise InvalidArgument("the prompt has no tokens; give at least one")
        if ids.min() < 0 or ids.max() >= limits.vocab_size:
            bad = int(ids[(ids < 0) | (ids >= limits.vocab_size)][0])
            raise InvalidArgument(f"token id {bad} is outside the vocabulary of {limits.vocab_size}")
        if len(ids) >= limits.max_model_len:
            raise InvalidArgument(
                f"the prompt has {len(ids)} tokens, max_model_len is {limits.max_model_len} and at least one must be left "
                "for the output; shorten the prompt or raise max_model_len",
                details={"prompt_tokens": len(ids), "max_model_len": limits.max_model_len},
            )
        if len(ids) >= limits.num_kv_tokens:
            raise RequestTooLarge(
                f"the prompt needs KV memory for {len(ids) + 1} tokens, the whole pool holds {limits.num_kv_tokens}; "
                "shorten the prompt or raise num_kv_blocks",
                details={"needed_tokens": len(ids) + 1, "available_tokens": limits.num_kv_tokens},
            )
        return ids.astype(np.int32)

    def _max_len(self, num_prompt: int, stopping: StoppingOptions) -> tuple[int, str]:
        limits = self._limits
        max_tokens = stopping.max_tokens
        if max_tokens is None:
            max_tokens = self._default_max_tokens
        bounds = [
            (limits.max_model_len, f"the context of {limits.max_model_len} tokens is full"),
            (limits.num_kv_tokens, f"the KV pool of {limits.num_kv_tokens} tokens is full"),
        ]
        if max_tokens is not None:
            bounds.insert(0, (num_prompt + max_tokens, f"max_tokens {max_tokens} reached"))
        return min(bounds, key=lambda bound: bound[0])

    # ---- options ---------------------------------------------------------------------------------

    def _check_ids(self, request: GenerateRequest) -> None:
        self._check_vocabulary("stop_token_id", stop_token_ids(request.stopping))
        for name in ("prompt_candidates", "output_candidates"):
            selection = getattr(request.response, name)
            if selection is None:
                continue
            self._check_vocabulary(f"{name}: token id", selection.token_ids or ())
            if selection.top_n is not None and selection.top_n > self.max_top_n:
                raise InvalidArgument(
                    f"{name}: top_n {selection.top_n} exceeds the limit of {self.max_top_n}; ask for fewer, or for all"
                )

    def _check_vocabulary(self, name: str, ids: Iterable[int]) -> None:
        for token_id in ids:
            if not isinstance(token_id, (int, np.integer)) or not 0 <= token_id < self._limits.vocab_size:
                raise InvalidArgument(f"{name} {token_id!r} is outside the vocabulary of {self._limits.vocab_size}")

    @property
    def max_top_n(self) -> int:
        return min(MAX_TOP_N, self._limits.vocab_size)

    def _effective_sampling(self, sampling: SamplingParams) -> SamplingParams:
        values = {
            name: getattr(self._defaults, name) if getattr(sampling, name) is None else getattr(sampling, name)
            for name in SamplingParams.__dataclass_fields__
        }
        if values["num_sequences"] > self._limits.max_num_sequences:
            raise InvalidArgument(
                f"num_sequences {values['num_sequences']} exceeds max_num_seqs {self._limits.max_num_sequences}; "
                "ask for fewer, or create the engine with a larger max_num_seqs"
            )
        return SamplingParams(**values)

    def _effective_response(self, response: ResponseOptions, num_prompt: int, max_len: int) -> ResponseOptions:
        start = response.prompt_logprob_start
        if start is not None and start >= num_prompt:
            raise InvalidArgument(
                f"prompt_logprob_start {start} is not inside the prompt of {num_prompt} tokens; lower it"
            )
        wants_prompt = bool(response.return_prompt_logprobs or response.prompt_candidates)
        if wants_prompt:
            self._check_size("prompt_candidates", response.prompt_candidates, num_prompt - (start or 0))
        self._check_size("output_candidates", response.output_candidates, max_len - num_prompt)
        return replace(
            response,
            return_prompt_logprobs=wants_prompt,
            return_output_logprobs=bool(response.return_output_logprobs or response.output_candidates),
        )

    def _check_size(self, name: str, selection: CandidateTokenSelection | None, num_positions: int) -> None:
        if selection is None or selection.all is None:
            return
        count = num_positions * self._limits.vocab_size
        if count > _MAX_REPORTED_VALUES:
            raise InvalidArgument(
                f"{name}: all candidates at {num_positions} positions are {count} values, the limit is "
                f"{_MAX_REPORTED_VALUES}; bound the output with max_tokens, or ask for top_n or token_ids"
            )

    def _fresh_seed(self) -> int:
        if self._seed is None:
            return secrets.randbits(64)
        digest = hashlib.sha256(f"{self._seed}:{next(self._counter)}".encode()).digest()
        return int.from_bytes(digest[:8], "little")


def _as_token_ids(token_ids: Sequence[int]) -> np.ndarray:
    try:
        ids = np.asarray(token_ids)
    except (ValueError, TypeError):
        ids = None
    if ids is None or ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise InvalidArgument(f"token_ids must be a flat sequence of integers, not {token_ids!r:.80}")
    return ids.astype(np.int64, copy=False)


def _refuse_unsupported(request: GenerateRequest) -> None:
    if request.kv.session is not None:
        raise RoleMismatch("kv.session needs a decode engine; this engine is aggregated, leave it out")
    if request.kv.data_parallel_rank not in (None, 0):
        raise InvalidArgument(f"data_parallel_rank {request.kv.data_parallel_rank} does not exist; the engine has rank 0 only")
    if request.lora_name:
        raise UnsupportedTask(f"lora_name {request.lora_name!r}: this engine serves no LoRA adapters; leave it out")
    if request.media:
        raise UnsupportedFeature(f"{len(request.media)} media items: the model takes text only; leave them out")
    if request.guided is not None:
        raise UnsupportedFeature("guided decoding is not available in this engine; leave the guide out")
