"""From what a caller writes to `GenerateRequest`: keyword sugar, and telling one prompt from a batch.

    generate("a", temperature=0.5, stop="x")  ->  GenerateRequest(prompt="a", sampling=…, stopping=…)
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from openengine.errors import InvalidArgument
from openengine.types import (
    CandidateTokenSelection,
    ChoiceConstraint,
    GenerateRequest,
    GuidedDecoding,
    JsonObjectConstraint,
    KvOptions,
    ResponseOptions,
    SamplingParams,
    StopCondition,
    StoppingOptions,
)

__all__ = ["Prompt", "build_request", "is_single_prompt", "suggest"]

Prompt = str | Sequence[int] | GenerateRequest


def _names(kind: type) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind))


_SAMPLING = _names(SamplingParams)
_STOPPING = _names(StoppingOptions)
_RESPONSE = _names(ResponseOptions)
_KV = _names(KvOptions)
_GUIDES = {"json_schema", "regex", "choice", "grammar", "structural_tag", "json_object", "guided"}
_REQUEST = {"request_id", "model", "media", "lora_name", "priority", "metadata"}
_SUGAR = {"stop", "stop_token_ids", "logprobs", "prompt_logprobs"}
_ALL = _SAMPLING | _STOPPING | _RESPONSE | _KV | _GUIDES | _REQUEST | _SUGAR


def is_single_prompt(value: object) -> bool:
    """Whether `value` is one prompt (text, token ids, a request) and not a batch of prompts.

    A non-empty sequence of integers is one prompt; an empty one is an empty batch.
    """
    if isinstance(value, (str, GenerateRequest)):
        return True
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iu" and len(value) > 0
    if isinstance(value, (bytes, dict)) or not isinstance(value, Iterable):
        raise InvalidArgument(
            f"a prompt is a str, a list of token ids or a GenerateRequest, not {type(value).__name__}; "
            "a list of those is a batch"
        )
    first = next(iter(value), None) if isinstance(value, Sequence) or hasattr(value, "__len__") else None
    return isinstance(first, (int, np.integer)) and not isinstance(first, bool)


def build_request(prompt: Prompt, sampling: SamplingParams | None, options: dict[str, Any]) -> GenerateRequest:
    """One request from a prompt, optional `SamplingParams` and keyword options, which override its fields.

    Raises InvalidArgument for an unknown keyword (with a suggestion), for options beside a
    `GenerateRequest`, and for anything that is not a prompt.
    """
    for name in options:
        if name not in _ALL:
            raise InvalidArgument(f"unknown option {name!r}{suggest(name, _ALL)}")
    if isinstance(prompt, GenerateRequest):
        if sampling is not None or options:
            named = ", ".join(["sampling"] * (sampling is not None) + sorted(options))
            raise InvalidArgument(f"a GenerateRequest carries its own options; move {named} into it")
        return prompt
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise InvalidArgument(f"sampling must be a SamplingParams, not {type(sampling).__name__}; use keywords for single options")
    return GenerateRequest(
        **_input(prompt),
        sampling=dataclasses.replace(sampling or SamplingParams(), **_pick(options, _SAMPLING)),
        stopping=StoppingOptions(**_pick(options, _STOPPING - {"conditions"}), conditions=_conditions(options)),
        response=_response(options),
        kv=KvOptions(**_pick(options, _KV)),
        guided=_guide(options),
        **{name: value for name, value in _pick(options, _REQUEST).items() if value is not None},
    )


def suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or the whole list when nothing is close."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"


def _input(prompt: str | Sequence[int]) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not is_single_prompt(prompt):
        raise InvalidArgument("a prompt with no token ids; give at least one, or a text" if not len(prompt) else
                              f"a prompt is a str, a list of token ids or a GenerateRequest, not {type(prompt).__name__}")
    return {"token_ids": prompt}


def _pick(options: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


def _conditions(options: dict[str, Any]) -> tuple[StopCondition, ...]:
    texts, ids = options.get("stop"), options.get("stop_token_ids")
    texts = [texts] if isinstance(texts, str) else texts or ()
    ids = [ids] if isinstance(ids, int) else () if ids is None else ids
    return (
        *(options.get("conditions") or ()),
        *(StopCondition(stop_text=text) for text in texts),
        *(StopCondition(stop_token_id=int(i) if isinstance(i, np.integer) else i) for i in ids),
    )


def _response(options: dict[str, Any]) -> ResponseOptions:
    response = _pick(options, _RESPONSE)
    for name, side in (("logprobs", "output"), ("prompt_logprobs", "prompt")):
        count = options.get(name)
        if count is None or count is False:
            continue
        if f"{side}_candidates" in response:
            raise InvalidArgument(f"{name} and {side}_candidates both choose candidates; keep one of them")
        response.setdefault(f"return_{side}_logprobs", True)
        if count is not True and count != 0:
            response[f"{side}_candidates"] = CandidateTokenSelection(top_n=count)
    return ResponseOptions(**response)


def _guide(options: dict[str, Any]) -> GuidedDecoding | None:
    given = {name: value for name, value in _pick(options, _GUIDES).items() if value is not None and value is not False}
    if not given:
        return None
    if len(given) > 1:
        raise InvalidArgument(f"{', '.join(sorted(given))} are {len(given)} guides; an output follows exactly one")
    ((name, value),) = given.items()
    if name == "guided":
        return value
    if name == "grammar":
        return GuidedDecoding(ebnf_grammar=value)
    if name == "choice":
        return GuidedDecoding(choice=ChoiceConstraint(tuple(value)))
    if name == "json_object":
        return GuidedDecoding(json_object=JsonObjectConstraint())
    if name == "json_schema" and isinstance(value, dict):
        value = json.dumps(value)
    return GuidedDecoding(**{name: value})
