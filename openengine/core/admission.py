"""`RequestPreparer`: from a request to a `SequenceGroup` that the loop can run, or a typed error.

Everything that can be wrong with a request is found here, in the caller's thread, before acceptance.
Its only state is an atomic counter, hence it is safe from any number of threads.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import sys
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from openengine.core.guides.compiled import CompiledGuide
from openengine.core.guides.compiler import GuideCompiler, NoGuides
from openengine.core.output import OutputStream
from openengine.core.sequence import SequenceGroup
from openengine.core.tokenizer import Tokenizer
from openengine.errors import (
    InvalidArgument,
    RequestTooLarge,
    RoleMismatch,
    UnsupportedFeature,
    UnsupportedTask,
)
from openengine.names import check_request_id, check_served
from openengine.types import (
    CandidateTokenSelection,
    GenerateRequest,
    ResponseOptions,
    SamplingParams,
    StoppingOptions,
    stop_token_ids,
)
from openengine.validation import validate_request

__all__ = ["MAX_TOP_N", "Limits", "RequestPreparer", "as_token_ids", "sampling_defaults"]

_Options = TypeVar("_Options", SamplingParams, StoppingOptions, ResponseOptions, CandidateTokenSelection)

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


def sampling_defaults(default_sampling: SamplingParams, generation_config: Mapping[str, Any]) -> SamplingParams:
    """Effective values of what a request leaves open.

    The engine's `default_sampling` comes first, then the checkpoint's generation_config.json, then neutral
    values (temperature 1, nothing cut). Of generation_config, sampling values count where `do_sample` is
    true; `do_sample: false` means greedy. Its `max_new_tokens` does not count: that is where one library stops
    by default, no limit of the model, and an output without `max_tokens` goes on until the model or the context ends it.

    A request has one output unless it says otherwise. Raises InvalidArgument for another number of them in
    `default_sampling`, and for a value that no request may have.
    """
    if not isinstance(default_sampling, SamplingParams):
        raise InvalidArgument(f"default_sampling must be a SamplingParams, not {default_sampling!r:.80}")
    if default_sampling.num_sequences not in (None, 1):
        raise InvalidArgument(
            f"default_sampling has num_sequences {default_sampling.num_sequences!r:.80}; a request that names none has one "
            "output: leave it out, and give num_sequences to the requests that want several"
        )
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
    defaults = SamplingParams(**values)
    try:
        validate_request(GenerateRequest(prompt="", sampling=defaults))
    except InvalidArgument as exc:
        raise InvalidArgument(
            f"default_sampling or the model's generation_config.json: {exc.message}; "
            "correct it, or pass generation_config=False to leave the file out"
        ) from exc
    return _plain(defaults)


class RequestPreparer:
    """Validates, tokenizes and fills in defaults. `seed` makes requests without one reproducible in order of arrival."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: Limits,
        *,
        defaults: SamplingParams,
        seed: int | None,
        guides: GuideCompiler | NoGuides,
        jump_ahead: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._guides = guides
        self._jump_ahead = jump_ahead
        self._defaults = defaults
        self._seed = seed
        self._counter = itertools.count()

    def check(self, request: GenerateRequest) -> None:
        """Find what is wrong with `request` that neither its prompt nor its guide decides. Raises as `prepare`."""
        check_request_id(request.request_id)
        if isinstance(request.model, str):  # else it is malformed, as `validate_request` says
            check_served(request.model, self._limits.model_names)
        validate_request(request)
        _refuse_unsupported(request)
        self._check_ids(request)

    def warn(self, requests: Iterable[GenerateRequest | object]) -> None:
        """Warn the caller of this package, in whose thread this runs, of prompts that would get a second BOS."""
        if not self._tokenizer.adds_bos:
            return
        prompts = (request.prompt for request in requests if isinstance(request, GenerateRequest))
        if any(isinstance(prompt, str) and self._tokenizer.starts_with_bos(prompt) for prompt in prompts):
            warnings.warn(
                "the prompt begins with the text of the BOS token and the tokenizer adds one too, so the model sees "
                "two; use chat() or messages= for chat templates, or pass token ids",
                stacklevel=_caller_level(),
            )

    def prepare(self, request: GenerateRequest) -> SequenceGroup:
        """Check `request` against the model and build its group (no sink yet). Waits for its guide to be compiled.

        Raises the error that a server would answer with instead of accepting the request.
        """
        self.check(request)
        limits = self._limits
        sampling = self._effective_sampling(request.sampling)
        stopping = _plain(request.stopping)
        prompt_ids = self._prompt_ids(request)
        max_len, reason = self._max_len(len(prompt_ids), stopping)
        if (stopping.min_tokens or 0) > max_len - len(prompt_ids):
            raise InvalidArgument(
                f"min_tokens {stopping.min_tokens} exceeds the {max_len - len(prompt_ids)} tokens that may follow a prompt of "
                f"{len(prompt_ids)} ({reason.removesuffix(' reached')}); lower it or make room"
            )
        response = self._effective_response(request.response, len(prompt_ids), max_len, sampling.num_sequences)
        guide = None if request.guided is None else self._guides.compile(request.guided)
        group = SequenceGroup(
            request_id=request.request_id or str(uuid.uuid4()),
            prompt_ids=prompt_ids,
            sampling=sampling,
            stopping=replace(stopping, max_tokens=max_len - len(prompt_ids), conditions=tuple(stopping.conditions)),
            response=response,
            seed=sampling.seed if sampling.seed is not None else self._fresh_seed(),
            max_len=max_len,
            max_len_reason=reason,
            stop_token_ids=frozenset(map(int, stop_token_ids(stopping))),
            eos_token_ids=limits.eos_token_ids,
            sink=None,
            priority=int(request.priority or 0),
            cache_salt=request.kv.cache_salt,
            bypass_prefix_cache=bool(request.kv.bypass_prefix_cache),
            score_start=max(1, response.prompt_logprob_start or 0) if response.return_prompt_logprobs else None,
            guide=guide,
            # A token that is not drawn has no logprob.
            jumps_ahead=self._jump_ahead and guide is not None and not response.return_output_logprobs,
        )
        if guide is not None and group.stop_token_ids:
            _check_leaves_token(guide, group)
        for seq in group.sequences:
            seq.stream = OutputStream(
                self._tokenizer.detokenizer(prompt_ids),
                output_index=seq.index,
                stopping=group.stopping,
                like=group.leader.stream,
            )
        return group

    # ---- the prompt ------------------------------------------------------------------------------

    def _prompt_ids(self, request: GenerateRequest) -> np.ndarray:
        limits = self._limits
        if request.prompt is not None:
            if len(request.prompt) >= limits.max_model_len:  # else it is short enough to be tokenized
                self._check_fewest_tokens(request.prompt)
            ids = np.asarray(self._tokenizer.encode(request.prompt), dtype=np.int64)
        else:
            ids = as_token_ids(request.token_ids)
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

    def _check_fewest_tokens(self, prompt: str) -> None:
        """Refuse what cannot fit whatever its tokens are: a huge prompt takes seconds to tokenize."""
        limits, fewest = self._limits, self._tokenizer.fewest_tokens(prompt)
        if fewest >= limits.max_model_len:
            raise InvalidArgument(
                f"the prompt of {len(prompt)} characters has at least {fewest} tokens, max_model_len is {limits.max_model_len} "
                "and at least one must be left for the output; shorten the prompt or raise max_model_len",
                details={"prompt_tokens_at_least": fewest, "max_model_len": limits.max_model_len},
            )

    def _max_len(self, num_prompt: int, stopping: StoppingOptions) -> tuple[int, str]:
        limits, max_tokens = self._limits, stopping.max_tokens
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
        held_back = set(stop_token_ids(request.stopping))
        if not request.stopping.ignore_eos:
            held_back |= self._limits.eos_token_ids
        if request.stopping.min_tokens and len(held_back) >= self._limits.vocab_size:
            raise InvalidArgument(
                f"min_tokens {request.stopping.min_tokens} leaves nothing to sample: all {len(held_back)} token ids are stops"
            )
        for name in ("prompt_candidates", "output_candidates"):
            selection = getattr(request.response, name)
            if selection is None:
                continue
            self._check_vocabulary(f"{name}: token id", () if selection.token_ids is None else selection.token_ids)
            if selection.top_n is not None and selection.top_n > self.max_top_n:
                raise InvalidArgument(
                    f"{name}: top_n {selection.top_n} exceeds the limit of {self.max_top_n}; ask for fewer, or for all"
                )

    def _check_vocabulary(self, name: str, ids: Iterable[int]) -> None:
        for token_id in ids:
            if not 0 <= token_id < self._limits.vocab_size:
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
        return _plain(SamplingParams(**values))

    def _effective_response(
        self, response: ResponseOptions, num_prompt: int, max_len: int, num_sequences: int
    ) -> ResponseOptions:
        response = _plain(response)
        start = response.prompt_logprob_start
        if start is not None and start >= num_prompt:
            raise InvalidArgument(
                f"prompt_logprob_start {start} is not inside the prompt of {num_prompt} tokens; lower it"
            )
        wants_prompt = bool(response.return_prompt_logprobs or response.prompt_candidates)
        if start and not wants_prompt:
            raise InvalidArgument(
                f"prompt_logprob_start {start} needs return_prompt_logprobs or prompt_candidates; ask for one of them"
            )
        if wants_prompt:
            self._check_size("prompt_candidates", response.prompt_candidates, num_prompt - (start or 0))
        self._check_size("output_candidates", response.output_candidates, (max_len - num_prompt) * num_sequences)
        return replace(
            response,
            prompt_candidates=_plain_selection(response.prompt_candidates),
            output_candidates=_plain_selection(response.output_candidates),
            return_prompt_logprobs=wants_prompt,
            return_output_logprobs=bool(response.return_output_logprobs or response.output_candidates),
        )

    def _check_size(self, name: str, selection: CandidateTokenSelection | None, num_positions: int) -> None:
        if selection is None or selection.top_n is not None:
            return
        width = len(selection.token_ids) if selection.token_ids is not None else self._limits.vocab_size
        count = num_positions * width
        if count > _MAX_REPORTED_VALUES:
            raise InvalidArgument(
                f"{name}: {width} candidates at {num_positions} positions are {count} values, the limit is "
                f"{_MAX_REPORTED_VALUES}; bound the output with max_tokens, or ask for fewer candidates"
            )

    def _fresh_seed(self) -> int:
        if self._seed is None:
            return secrets.randbits(64)
        digest = hashlib.sha256(f"{self._seed}:{next(self._counter)}".encode()).digest()
        return int.from_bytes(digest[:8], "little")


def as_token_ids(token_ids: Sequence[int]) -> np.ndarray:
    """i64[N] of a caller's ids, whatever kind of sequence holds them. Raises InvalidArgument unless all are integers."""
    try:
        ids = np.asarray(token_ids)
    except Exception:  # ragged, or a tensor that its library refuses to convert
        ids = None
    flat = ids is not None and ids.ndim == 1 and (not len(ids) or ids.dtype.kind in "iu")
    # numpy reads True as 1 among integers.
    if not flat or (isinstance(token_ids, (list, tuple)) and not {bool, np.bool_}.isdisjoint(map(type, token_ids))):
        raise InvalidArgument(f"token_ids must be a flat sequence of integers, not {token_ids!r:.80}")
    if ids.dtype.kind == "u" and len(ids) and ids.max() > np.iinfo(np.int64).max:
        raise InvalidArgument(f"token id {ids.max()} is outside every vocabulary")
    return ids.astype(np.int64, copy=False)


def _plain(options: _Options) -> _Options:
    """`options` with Python's numbers for numpy's, whose narrow and unsigned kinds overflow in arithmetic."""
    values = {name: getattr(options, name) for name in options.__dataclass_fields__}
    changes = {name: value.item() for name, value in values.items() if isinstance(value, np.generic)}
    return replace(options, **changes) if changes else options


def _plain_selection(selection: CandidateTokenSelection | None) -> CandidateTokenSelection | None:
    if selection is None or selection.token_ids is None:
        return selection and _plain(selection)
    return CandidateTokenSelection(token_ids=tuple(map(int, selection.token_ids)))


def _refuse_unsupported(request: GenerateRequest) -> None:
    if request.kv.session is not None:
        raise RoleMismatch("kv.session needs a decode engine; this engine is aggregated, leave it out")
    if request.kv.data_parallel_rank not in (None, 0):
        raise InvalidArgument(
            f"data_parallel_rank {request.kv.data_parallel_rank} does not exist; the engine has rank 0 only"
        )
    if request.lora_name:
        raise UnsupportedTask(f"lora_name {request.lora_name!r}: this engine serves no LoRA adapters; leave it out")
    if request.media:
        raise UnsupportedFeature(f"{len(request.media)} media items: the model takes text only; leave them out")


def _check_leaves_token(guide: CompiledGuide, group: SequenceGroup) -> None:
    stopping = group.stopping
    state = guide.start(stop_token_ids=group.stop_token_ids, ignore_eos=bool(stopping.ignore_eos))
    if not guide.leaves_token(state, min_tokens_left=bool(stopping.min_tokens)):
        raise InvalidArgument(
            "the guide and the stop token ids leave no token to begin with: all that the guide allows end the output, which it "
            "does not allow yet; take those out of stop_token_ids"
        )


def _caller_level() -> int:
    """The `stacklevel`, for who calls this, of the first frame that is neither this package's nor an event loop's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NO_CALLERS:
        level, frame = level + 1, frame.f_back
    return level


_NO_CALLERS = (__name__.partition(".")[0], "asyncio")
