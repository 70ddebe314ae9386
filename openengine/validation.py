"""What can be judged of a request without a model: `validate_request`, and the checks of single values that it is made of.

A check takes the name that its error shall give, and a value; None passes, for it means "absent", unless the check says
otherwise. Does not own what a loaded model and its engine can take (core/admission.py, core/task_admission.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import TypeVar

import numpy as np

from openengine.errors import InvalidArgument
from openengine.types import (
    AllCandidates,
    CandidateTokenSelection,
    ChoiceConstraint,
    GenerateRequest,
    GuidedDecoding,
    JsonObjectConstraint,
    KvOptions,
    KvSessionRef,
    MediaItem,
    ResponseOptions,
    SamplingParams,
    StopCondition,
    StoppingOptions,
    stop_texts,
)

__all__ = [
    "check_encodable",
    "check_flag",
    "check_guide",
    "check_integer",
    "check_items",
    "check_number",
    "check_text",
    "check_type",
    "checked_type",
    "validate_request",
]

_T = TypeVar("_T")
_UINT32_MAX = 2**32 - 1
_UINT64_MAX = 2**64 - 1
_INT32_MAX = 2**31 - 1
_MAX_CONDITIONS = 1 << 18  # a whole vocabulary, of nearly every model
_MAX_STOP_CHARS = 1 << 16  # each is a node of the automaton that looks for stops, some 300 bytes
_GUIDE_FIELDS = {
    "json_schema": str,
    "regex": str,
    "ebnf_grammar": str,
    "structural_tag": str,
    "choice": ChoiceConstraint,
    "json_object": JsonObjectConstraint,
    "backend": str,
}
_GROUPS = {"sampling": SamplingParams, "stopping": StoppingOptions, "response": ResponseOptions, "kv": KvOptions}


# ---- requests ------------------------------------------------------------------------------------


def validate_request(request: GenerateRequest) -> None:
    """Check every field of `request` that can be judged without a model.

    Raises InvalidArgument naming the field, its value and its range (SMP-02..11, STP-06/07,
    LGP-07/16, KVO-04, GEN-03/04).
    """
    checked_type("a request", request, GenerateRequest)
    for name, kind in _GROUPS.items():
        checked_type(name, getattr(request, name), kind)
    for name in ("prompt", "request_id", "model", "lora_name"):
        check_text(name, getattr(request, name))
    if (request.prompt is None) == (request.token_ids is None):
        raise InvalidArgument("a request takes exactly one of prompt and token_ids; pass text or ids, not both")
    _validate_sampling(request.sampling)
    _validate_stopping(request.stopping)
    _validate_response(request.response)
    _validate_kv(request.kv)
    check_integer("priority", request.priority, -_INT32_MAX - 1, _INT32_MAX)
    if request.guided is not None:
        check_guide(request.guided)
    check_items("media", request.media, MediaItem)
    if not isinstance(request.metadata, Mapping):
        raise InvalidArgument(f"metadata must be a mapping of texts, not {request.metadata!r:.80}")
    for item in request.metadata.items():
        if None in item:
            raise InvalidArgument(f"metadata must be a mapping of texts; it has {item!r:.80}")
        for text in item:
            check_text("metadata: a key or value", text)


def check_guide(guide: object) -> None:
    """A GuidedDecoding whose fields have their types; what they hold is its compiler's to judge."""
    if not isinstance(guide, GuidedDecoding):
        raise InvalidArgument(
            f"guided must be a GuidedDecoding or what compile_guide returned, not {guide!r:.80}; what it describes goes into a "
            "keyword such as json_schema, regex or choice, of generate or of build_request(prompt, None, {…})"
        )
    for name, kind in _GUIDE_FIELDS.items():
        value = getattr(guide, name)
        if value is not None and not isinstance(value, kind):
            hint = f"; use json.dumps, or the keyword {name}=" if isinstance(value, Mapping) else ""
            raise InvalidArgument(f"guided.{name} must be a {kind.__name__}, not {value!r:.80}{hint}")
    if guide.output_type is not None and not hasattr(guide.output_type, "model_validate_json"):
        raise InvalidArgument(
            f"guided.output_type must be a class with model_validate_json, as pydantic's have it, not {guide.output_type!r:.80}"
        )
    if guide.choice is not None:
        check_items("guided.choice.choices", guide.choice.choices, str)


def _validate_sampling(sampling: SamplingParams) -> None:
    check_number("temperature", sampling.temperature, "finite and >= 0", lambda v: v >= 0)
    check_number("top_p", sampling.top_p, "in (0, 1]", lambda v: 0 < v <= 1)
    check_integer("top_k", sampling.top_k, -1, _INT32_MAX, note="; 0 and -1 switch it off")
    check_number("min_p", sampling.min_p, "in [0, 1]", lambda v: 0 <= v <= 1)
    check_number("frequency_penalty", sampling.frequency_penalty, "in [-2, 2]", lambda v: -2 <= v <= 2)
    check_number("presence_penalty", sampling.presence_penalty, "in [-2, 2]", lambda v: -2 <= v <= 2)
    check_number("repetition_penalty", sampling.repetition_penalty, "finite and > 0", lambda v: v > 0)
    check_integer("seed", sampling.seed, 0, _UINT64_MAX)
    check_integer("num_sequences", sampling.num_sequences, 1, _UINT32_MAX)


def _validate_stopping(stopping: StoppingOptions) -> None:
    check_integer("max_tokens", stopping.max_tokens, 0, _UINT32_MAX)
    check_integer("min_tokens", stopping.min_tokens, 0, _UINT32_MAX)
    check_flag("ignore_eos", stopping.ignore_eos)
    check_flag("include_stop_in_output", stopping.include_stop_in_output)
    if stopping.max_tokens is not None and (stopping.min_tokens or 0) > stopping.max_tokens:
        raise InvalidArgument(
            f"min_tokens {stopping.min_tokens} exceeds max_tokens {stopping.max_tokens}; lower one or raise the other"
        )
    check_items("conditions", stopping.conditions, StopCondition)
    if len(stopping.conditions) > _MAX_CONDITIONS:
        raise InvalidArgument(
            f"{len(stopping.conditions)} stop conditions, the limit is {_MAX_CONDITIONS}; give fewer, each once"
        )
    for index, condition in enumerate(stopping.conditions):
        if (condition.stop_text is None) == (condition.stop_token_id is None):
            raise InvalidArgument(f"stop condition {index} takes exactly one of stop_text and stop_token_id")
        check_text(f"stop condition {index}: stop_text", condition.stop_text)
        check_integer(f"stop condition {index}: stop_token_id", condition.stop_token_id, 0, _UINT32_MAX)
        if condition.stop_text == "":
            raise InvalidArgument(f"stop condition {index} has an empty stop_text; it would match everywhere")
    num_chars = sum(len(text) for text in stop_texts(stopping))
    if num_chars > _MAX_STOP_CHARS:
        raise InvalidArgument(
            f"the stop texts have {num_chars} characters together, the limit is {_MAX_STOP_CHARS}; give fewer or shorter ones"
        )


def _validate_response(response: ResponseOptions) -> None:
    check_flag("return_prompt_logprobs", response.return_prompt_logprobs)
    check_flag("return_output_logprobs", response.return_output_logprobs)
    check_integer("prompt_logprob_start", response.prompt_logprob_start, 0, _UINT32_MAX)
    for name in ("prompt", "output"):
        selection = getattr(response, f"{name}_candidates")
        if selection is None:
            continue
        check_type(f"{name}_candidates", selection, CandidateTokenSelection)
        returned = getattr(response, f"return_{name}_logprobs")
        if returned is not None and not returned:
            raise InvalidArgument(f"{name}_candidates contradicts return_{name}_logprobs=False; drop one of them")
        variants = [v for v in (selection.top_n, selection.token_ids, selection.all) if v is not None]
        if len(variants) != 1:
            raise InvalidArgument(f"{name}_candidates takes exactly one of top_n, token_ids and all")
        check_integer(f"{name}_candidates: top_n", selection.top_n, 0, _UINT32_MAX)
        check_type(f"{name}_candidates: all", selection.all, AllCandidates)
        if selection.token_ids is not None:
            _validate_candidate_ids(name, selection.token_ids)


def _validate_candidate_ids(name: str, token_ids: Sequence[int]) -> None:
    if not isinstance(token_ids, (tuple, list, range, np.ndarray)) or getattr(token_ids, "ndim", 1) != 1:
        raise InvalidArgument(f"{name}_candidates: token_ids must be a sequence of token ids, not {token_ids!r:.80}")
    if not len(token_ids):
        raise InvalidArgument(f"{name}_candidates has an empty token_ids selection; name at least one id")
    seen: set[int] = set()
    for token_id in token_ids:
        if token_id is None:
            raise InvalidArgument(f"{name}_candidates: token id must be an integer, not None")
        check_integer(f"{name}_candidates: token id", token_id, 0, _UINT32_MAX)
        if token_id in seen:
            raise InvalidArgument(f"{name}_candidates names token id {token_id} twice; name each once")
        seen.add(token_id)


def _validate_kv(kv: KvOptions) -> None:
    check_text("cache_salt", kv.cache_salt)
    if kv.cache_salt == "":
        raise InvalidArgument("cache_salt is empty; leave it out to share the cache, or give a non-empty salt")
    check_flag("bypass_prefix_cache", kv.bypass_prefix_cache)
    check_integer("data_parallel_rank", kv.data_parallel_rank, 0, _UINT32_MAX)
    check_type("session", kv.session, KvSessionRef)


# ---- single values -------------------------------------------------------------------------------


def checked_type(name: str, value: object, kind: type[_T] | UnionType) -> _T:
    """`value`, which is a `kind`; None passes where the kind says so."""
    if not isinstance(value, kind):
        raise InvalidArgument(f"{name} must be a {getattr(kind, '__name__', kind)}, not {value!r:.80}")
    return value


def check_type(name: str, value: object, kind: type) -> None:
    if value is not None:
        checked_type(name, value, kind)


def check_flag(name: str, value: object) -> None:
    if value is not None and not isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(f"{name} must be True or False, not {value!r:.80}")


def check_text(name: str, value: object) -> None:
    """A text that can be encoded: keys are hashes of bytes, and a server sends bytes."""
    check_type(name, value, str)
    if value is not None:
        check_encodable(name, value)


def check_encodable(name: str, text: str) -> None:
    """A text without lone surrogates."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidArgument(
            f"{name} holds a lone surrogate ({text[exc.start]!r} at position {exc.start}), which is no character; "
            "decode the bytes it came from with errors='replace'"
        ) from None


def check_items(name: str, values: object, kind: type) -> None:
    """A tuple or list, never None."""
    if not isinstance(values, (tuple, list)):
        raise InvalidArgument(f"{name} must be a tuple of {kind.__name__}, not {values!r:.80}")
    for index, value in enumerate(values):
        checked_type(f"{name}[{index}]", value, kind)


def check_number(name: str, value: object, rule: str, accepts: Callable[[float], bool]) -> None:
    """A finite number that `accepts` takes; `rule` says which those are."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidArgument(f"{name} must be a number {rule}, not {value!r:.80}")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an int beyond the range of float
        finite = False
    if not finite or not accepts(value):
        raise InvalidArgument(f"{name} must be {rule}, not {value!r:.80}")


def check_integer(name: str, value: object, low: int, high: int, *, note: str = "") -> None:
    """An integer from `low` to `high`; `note` stands behind the range in the error."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidArgument(f"{name} must be an integer, not {value!r:.80}")
    if not low <= value <= high:
        raise InvalidArgument(f"{name} must be between {low} and {high}{note}, not {value!r:.80}")
