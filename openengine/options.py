"""From what a caller writes to `GenerateRequest`: keyword sugar, and telling one prompt from a batch.

generate("a", temperature=0.5, stop="x")  ->  GenerateRequest(prompt="a", sampling=…, stopping=…)
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_origin

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
from openengine.validation import check_guide

__all__ = [
    "Prompt",
    "batch_items",
    "batch_prompts",
    "build_guide",
    "build_one",
    "build_request",
    "check_options",
    "is_single_prompt",
    "request_id_of",
    "suggest",
    "take_chat_options",
]

Prompt = str | Sequence[int] | GenerateRequest


def _names(kind: type) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind))


_SAMPLING = _names(SamplingParams)
_STOPPING = _names(StoppingOptions)
_RESPONSE = _names(ResponseOptions)
_KV = _names(KvOptions)
_ONE_EACH = "; for a guide of its own for each prompt, make the batch of build_request(prompt, None, {'choice': […]}) and the like"
_GUIDES = {"json_schema", "regex", "choice", "grammar", "structural_tag", "json_object", "guided"}
_REQUEST = {"request_id", "model", "media", "lora_name", "priority", "metadata"}
_SUGAR = {"stop", "stop_token_ids", "logprobs", "prompt_logprobs"}
_ALL = _SAMPLING | _STOPPING | _RESPONSE | _KV | _GUIDES | _REQUEST | _SUGAR

# What other libraries call the same thing.
_ELSEWHERE = {
    "best_of": "num_sequences",
    "do_sample": "temperature",
    "guided_json": "json_schema",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "n": "num_sequences",
    "num_return_sequences": "num_sequences",
    "response_format": "json_schema",
    "stop_sequences": "stop",
    "top_logprobs": "logprobs",
    "gpu_memory_utilization": "kv_memory_fraction",
    "tokenizer": "model_path",
}


def is_single_prompt(value: object) -> bool:
    """Whether `value` is one prompt (text, token ids, a request) and not a batch of prompts.

    A non-empty sequence of integers is one prompt; an empty one is an empty batch. Arrays, tensors and
    series count as sequences. Raises InvalidArgument for what is neither a prompt nor a batch.
    """
    if isinstance(value, (str, GenerateRequest)):
        return True
    array = _as_array(value)
    if array is not None:
        return array.ndim == 1 and array.dtype.kind in "iu" and len(array) > 0
    if isinstance(value, (bytes, bytearray, memoryview, Mapping)) or not isinstance(value, Iterable):
        raise _no_prompt(value)
    first = next(iter(value), None) if hasattr(value, "__len__") else None
    return isinstance(first, (int, np.integer)) and not isinstance(first, bool)


def batch_items(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The items of a batch. Raises InvalidArgument for a single prompt, whose characters or ids are no items."""
    if is_single_prompt(prompts):
        raise InvalidArgument("a batch is a list of prompts, this is one prompt; put it into a list, or use generate")
    array = _as_array(prompts)
    return list(prompts if array is None else array)


def batch_prompts(
    prompts: Iterable[Prompt], sampling: SamplingParams | None, options: Mapping[str, Any]
) -> list[Prompt]:
    """The items of a batch that shares its options. Raises InvalidArgument for no batch, and options that none can have."""
    check_options(sampling, options)
    items = batch_items(prompts)
    if options.get("request_id") is not None and len(items) != 1:
        raise InvalidArgument(f"request_id names one request, the batch has {len(items)}; use GenerateRequests")
    return items


def check_options(sampling: object, options: Mapping[str, Any]) -> None:
    """Raises InvalidArgument for an unknown keyword, with a suggestion, and for a `sampling` of another type."""
    for name in options:
        if name not in _ALL:
            raise InvalidArgument(f"unknown option {name!r}{suggest(name, _ALL)}")
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise InvalidArgument(
            f"sampling must be a SamplingParams, not {type(sampling).__name__}; use keywords for single options"
        )


def build_one(prompt: Prompt, sampling: SamplingParams | None, options: dict[str, Any]) -> GenerateRequest:
    """`build_request`, for a call that takes no batch. Raises InvalidArgument for one."""
    if not is_single_prompt(prompt):
        raise InvalidArgument("this takes one prompt; use generate or as_completed for a batch")
    return build_request(prompt, sampling, options)


def build_request(prompt: Prompt, sampling: SamplingParams | None, options: dict[str, Any]) -> GenerateRequest:
    """One request from a prompt, optional `SamplingParams` and keyword options, which override its fields.

    Raises InvalidArgument for an unknown keyword (with a suggestion), for options beside a
    `GenerateRequest`, and for anything that is not a prompt.
    """
    check_options(sampling, options)
    if isinstance(prompt, GenerateRequest):
        if sampling is not None or options:
            named = ", ".join(["sampling"] * (sampling is not None) + sorted(options))
            raise InvalidArgument(f"a GenerateRequest carries its own options; move {named} into it")
        return prompt
    return GenerateRequest(
        **_input(prompt),
        sampling=dataclasses.replace(sampling or SamplingParams(), **_pick(options, _SAMPLING)),
        stopping=StoppingOptions(**_pick(options, _STOPPING - {"conditions"}), conditions=_conditions(options)),
        response=_response(options),
        kv=KvOptions(**_pick(options, _KV)),
        guided=_guide(options),
        **{name: value for name, value in _pick(options, _REQUEST).items() if value is not None},
    )


def request_id_of(prompt: Any, options: Mapping[str, Any]) -> str:
    """The id the caller gave, if it is one; else ""."""
    request_id = prompt.request_id if isinstance(prompt, GenerateRequest) else options.get("request_id")
    return request_id if isinstance(request_id, str) else ""


def take_chat_options(
    prompt: Any, messages: Sequence[Any] | None, options: dict[str, Any]
) -> tuple[Sequence[Any] | None, Mapping[str, Any]]:
    """`tools` and `template_kwargs`, taken out of `options`: what a chat template is given beside `messages`.

    Raises InvalidArgument unless there is either a prompt or messages, and for these two without messages.
    """
    tools, template_kwargs = options.pop("tools", None), options.pop("template_kwargs", None)
    if messages is None:
        if prompt is None:
            raise InvalidArgument("give a prompt or messages=")
        if tools is not None or template_kwargs is not None:
            raise InvalidArgument("tools and template_kwargs belong to the chat template; they need messages=")
    elif prompt is not None:
        raise InvalidArgument("give a prompt or messages=, not both")
    if template_kwargs is not None and not isinstance(template_kwargs, Mapping):
        raise InvalidArgument(f"template_kwargs must be a mapping of names to values, not {template_kwargs!r:.80}")
    return tools, template_kwargs or {}


def build_guide(guide: GuidedDecoding | None, options: dict[str, Any]) -> GuidedDecoding:
    """The guide that is given, or that one keyword describes. Raises InvalidArgument for none, several or something else."""
    for name in options:
        if name not in _GUIDES:
            raise InvalidArgument(f"unknown guide {name!r}{suggest(name, _GUIDES)}")
    built = _guide({**options, "guided": guide} if guide is not None else options)
    if built is None:
        raise InvalidArgument(f"give a guide: one of {', '.join(sorted(_GUIDES))}")
    return built


def suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or the whole list when nothing is close."""
    known = sorted(known)
    if _ELSEWHERE.get(name) in known:
        return f"; did you mean {_ELSEWHERE[name]!r}?"
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"


def _input(prompt: str | Sequence[int]) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if is_single_prompt(prompt):
        return {"token_ids": prompt}
    if hasattr(prompt, "__len__") and not len(prompt):
        raise InvalidArgument("a prompt with no token ids; give at least one, or a text")
    raise _no_prompt(prompt)


def _as_array(value: object) -> np.ndarray | None:
    """What behaves like an array (numpy, torch, pandas) as one of numpy; None for everything else."""
    if isinstance(value, np.generic) or not hasattr(value, "__array__"):
        return None
    try:
        array = np.asarray(value)
    except Exception as exc:  # a tensor on another device, or anything else its library refuses to convert
        raise InvalidArgument(f"{type(value).__name__} does not become an array ({exc}); pass a list") from exc
    if array.ndim == 1 or (array.ndim == 2 and array.dtype.kind in "iu"):
        return array
    raise InvalidArgument(
        f"{type(value).__name__} with {array.ndim} dimensions of {array.dtype} is no batch of prompts; "
        "pass one column of texts, or rows of token ids"
    )


def _no_prompt(value: object) -> InvalidArgument:
    hint = "a chat goes into messages=, or chat()" if isinstance(value, dict) else "a list of those is a batch"
    return InvalidArgument(
        f"a prompt is a str, a list of token ids or a GenerateRequest, not {type(value).__name__}; {hint}"
    )


def _pick(options: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


def _conditions(options: dict[str, Any]) -> tuple[StopCondition, ...]:
    return (
        *_several("conditions", options, StopCondition),
        *(StopCondition(stop_text=text) for text in _several("stop", options, str)),
        *(StopCondition(stop_token_id=token_id) for token_id in _several("stop_token_ids", options, int, np.integer)),
    )


def _several(name: str, options: dict[str, Any], *kinds: type) -> tuple[Any, ...]:
    """One or more items of `kinds[0]`, as a tuple."""
    value = options.get(name)
    if value is None:
        return ()
    if isinstance(value, kinds):
        return (value,)
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) != 1:
        raise InvalidArgument(f"{name} must be a {kinds[0].__name__} or a list of them, not {value!r:.80}")
    return tuple(value)


def _response(options: dict[str, Any]) -> ResponseOptions:
    response = _pick(options, _RESPONSE)
    for name, side in (("logprobs", "output"), ("prompt_logprobs", "prompt")):
        count = options.get(name)
        if count is None:
            continue
        if isinstance(count, np.generic):
            count = count.item()
        if not isinstance(count, int) or count < 0:
            raise InvalidArgument(
                f"{name} must be a number of candidates, 0 or more, or True or False, not {count!r:.80}"
            )
        flag, candidates = f"return_{side}_logprobs", f"{side}_candidates"
        if response.get(flag) not in (None, count is not False):
            raise InvalidArgument(f"{name}={count} contradicts {flag}={response[flag]}; keep one of them")
        if response.get(candidates) is not None:
            raise InvalidArgument(f"{name} and {candidates} both choose candidates; keep one of them")
        response[flag] = count is not False
        if count is not True and count:
            response[candidates] = CandidateTokenSelection(top_n=count)
    return ResponseOptions(**response)


def _guide(options: dict[str, Any]) -> GuidedDecoding | None:
    given = {name: value for name, value in _pick(options, _GUIDES).items() if value is not None}
    if not isinstance(given.get("json_object", True), bool):
        raise InvalidArgument(f"json_object is True or False, not {given['json_object']!r:.80}")
    if given.get("json_object") is False:
        del given["json_object"]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidArgument(f"{', '.join(sorted(given))} are {len(given)} guides; an output follows exactly one")
    ((name, value),) = given.items()
    if name == "guided":
        check_guide(value)
        return value
    if name != "choice" and isinstance(value, (list, tuple)):
        raise InvalidArgument(f"{name} is one for all prompts, not {value!r:.80}{_ONE_EACH}")
    built = _guide_of(name, value)
    check_guide(built)
    return built


def _guide_of(name: str, value: Any) -> GuidedDecoding:
    if name == "grammar":
        return GuidedDecoding(ebnf_grammar=value)
    if name == "choice":
        choices = _several("choice", {name: value}, str)
        if isinstance(value, str) or any(not isinstance(text, str) for text in choices):
            raise InvalidArgument(f"choice must be a list of texts, not {value!r:.80}{_ONE_EACH}")
        return GuidedDecoding(choice=ChoiceConstraint(choices))
    if name == "json_object":
        return GuidedDecoding(json_object=JsonObjectConstraint())
    if name == "json_schema":
        return _schema_guide(value)
    if name == "structural_tag" and isinstance(value, Mapping):
        value = _json_text(name, value)
    return GuidedDecoding(**{name: value})


def _schema_guide(schema: Any) -> GuidedDecoding:
    """From JSON text, what such text says, or a class that knows its schema (as pydantic's do)."""
    if isinstance(schema, str):
        return GuidedDecoding(json_schema=schema)
    output_type = None
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        output_type, schema = schema, _schema_of(schema)
    if not isinstance(schema, (Mapping, bool)):
        hint = ""
        if isinstance(schema, type) or get_origin(schema) is not None:
            hint = "; pydantic.TypeAdapter(…).json_schema() makes a dict of other types, pydantic.RootModel[…] a class"
        elif hasattr(schema, "model_json_schema"):
            hint = f"; pass the class {type(schema).__name__}, not an instance"
        raise InvalidArgument(
            f"json_schema must be a dict, JSON text or a class with model_json_schema, not {schema!r:.80}{hint}"
        )
    return GuidedDecoding(json_schema=_json_text("json_schema", schema), output_type=output_type)


def _schema_of(output_type: Any) -> Any:
    try:
        return output_type.model_json_schema()
    except Exception as exc:  # it is the caller's code, and may fail in any way
        raise InvalidArgument(
            f"json_schema: {output_type.__name__}.model_json_schema() fails: {type(exc).__name__}: {exc}"
        ) from exc


def _json_text(name: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidArgument(f"{name} is no JSON: {exc}") from exc
