"""What a finished generation gives: its outputs with text, tokens and parsed value, its usage and its times.

Does not own how events become results (core/output.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from openengine.errors import IncompleteOutput, InvalidArgument, OpenEngineError, PreconditionFailed
from openengine.types import (
    FinishReason,
    GuidedDecoding,
    KvSessionRef,
    SamplingParams,
    StopMatch,
    StoppingOptions,
    TokenInfo,
    Usage,
    shortened,
)

__all__ = [
    "GenerationOutput",
    "GenerationResult",
    "Timing",
]

_NUMBER_CHARS = frozenset("0123456789.eE+-")


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: waiting for a slot, submission to first token, and between later tokens on average."""

    queue_s: float
    time_to_first_token_s: float | None
    time_per_token_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True, repr=False)
class GenerationOutput:
    """One of a request's `num_sequences` outputs."""

    index: int
    text: str
    tokens: tuple[TokenInfo, ...]
    finish_reason: FinishReason | None
    stop_match: StopMatch | None = None
    message: str = ""  # which limit a "length" reached, and what it cut
    guide: GuidedDecoding | None = None  # that it follows

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def parsed(self) -> Any:
        """What the text says under a JSON guide: its value, or an instance of the class given as `json_schema`.

        None under other guides and without one: take `text`. Raises IncompleteOutput where the output was cut,
        PreconditionFailed where the class refuses a value that meets its schema.
        """
        if self.guide is None or (self.guide.json_schema is None and self.guide.json_object is None):
            return None
        text, stop = self.text, self.stop_match
        if stop is not None and self.tokens and self.tokens[-1].token_id == stop.stop_token_id:
            text = text.removesuffix(self.tokens[-1].token)  # kept in the output, and no part of the value
        try:
            value = json.loads(text)
        except ValueError:
            raise self._incomplete() from None
        except RecursionError as exc:
            raise PreconditionFailed(
                f"output {self.index} is nested too deeply for json.loads; bound the depth in the schema, or take `text`"
            ) from exc
        # Digits may go on; any other value is closed by its last character.
        if text[-1].isdigit() and self._is_cut_within_a_number:
            raise self._incomplete("more digits could have followed")
        return value if self.guide.output_type is None else self._instance(text)

    def _instance(self, text: str) -> Any:
        kind = self.guide.output_type
        try:
            return kind.model_validate_json(text)
        except Exception as exc:  # validators are the caller's code
            raise PreconditionFailed(
                f"output {self.index} meets the JSON schema of {kind.__name__}, and the class refuses it: {exc}; say what "
                "its validators ask for in the schema (bounds, pattern, enum), or take json.loads(result.text)"
            ) from exc

    @property
    def _is_cut_within_a_number(self) -> bool:
        """Whether what ended the output could stand in the place of a number's next character."""
        if self.finish_reason is not FinishReason.STOP:
            return True
        stop = None if self.stop_match is None else self.stop_match.stop_text
        return bool(stop) and stop[0] in _NUMBER_CHARS

    def _incomplete(self, cause: str = "") -> IncompleteOutput:
        if cause:
            cause = (
                f"it ended with {str(self.finish_reason)!r}, and {cause}; raise max_tokens or leave out the stop text"
            )
        elif self.finish_reason is FinishReason.LENGTH:
            cause = f"{self.message or 'a limit was reached'}; raise max_tokens"
        elif self.stop_match is not None and self.stop_match.stop_text is not None:
            cause = f"the stop text {self.stop_match.stop_text!r:.80} ended it"
        else:
            cause = f"it ended with {str(self.finish_reason)!r}"
        return IncompleteOutput(
            f"output {self.index} is no complete JSON: {cause}", text=self.text, finish_reason=self.finish_reason
        )

    @property
    def logprobs(self) -> np.ndarray | None:
        """float32 [len(tokens)] raw logprobs, or None when they were not asked for."""
        if not self.tokens or self.tokens[0].logprob is None:
            return None
        return np.array([token.logprob for token in self.tokens], dtype=np.float32)

    def __repr__(self) -> str:
        return f"GenerationOutput({shortened(self.text)}, {len(self.tokens)} tokens, {self.finish_reason})"


@dataclass(frozen=True, slots=True, repr=False)
class GenerationResult:
    """Everything one request produced. Scalar properties read the first output.

    `sampling` and `stopping` are the effective parameters. `error` is set only in batch calls with
    `on_error="return"`; then there are no outputs.
    """

    request_id: str
    outputs: tuple[GenerationOutput, ...] = ()
    prompt: Sequence[TokenInfo] | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    sampling: SamplingParams | None = None
    stopping: StoppingOptions | None = None
    kv_session: KvSessionRef | None = None
    error: OpenEngineError | None = None

    def _first(self) -> GenerationOutput:
        if not self.outputs:
            raise self.error or InvalidArgument(f"request {self.request_id} has no output; see its kv_session")
        return self.outputs[0]

    @property
    def text(self) -> str:
        return self._first().text

    @property
    def token_ids(self) -> list[int]:
        return self._first().token_ids

    @property
    def tokens(self) -> tuple[TokenInfo, ...]:
        return self._first().tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._first().finish_reason

    @property
    def stop_match(self) -> StopMatch | None:
        return self._first().stop_match

    @property
    def logprobs(self) -> np.ndarray | None:
        return self._first().logprobs

    @property
    def parsed(self) -> Any:
        """See `GenerationOutput.parsed`. Raises IncompleteOutput, PreconditionFailed."""
        return self._first().parsed

    def to_dict(self) -> dict[str, Any]:
        """One flat row of plain values, as a pandas DataFrame takes it."""
        row: dict[str, Any] = {"request_id": self.request_id, "text": None, "finish_reason": None}
        if self.outputs:
            first = self.outputs[0]
            row["text"] = first.text
            row["token_ids"] = first.token_ids
            row["finish_reason"] = str(first.finish_reason)
            row["message"] = first.message
            row["logprobs"] = None if first.logprobs is None else first.logprobs.tolist()
            row["parsed"] = _parsed_or_none(first)
        if self.usage is not None:
            row.update(dataclasses.asdict(self.usage))
            del row["reasoning_tokens"]
        if self.timing is not None:
            row.update(dataclasses.asdict(self.timing))
        row["error"] = None if self.error is None else self.error.message
        return row

    def __repr__(self) -> str:
        if self.error is not None:
            return f"GenerationResult(error={shortened(self.error.message)})"
        if not self.outputs:
            return f"GenerationResult(kv_session={self.kv_session!r})"
        more = f", {len(self.outputs)} outputs" if len(self.outputs) > 1 else ""
        return f"GenerationResult({shortened(self.text)}, {len(self.tokens)} tokens, {self.finish_reason}{more})"


def _parsed_or_none(output: GenerationOutput) -> Any:
    try:
        return output.parsed
    except PreconditionFailed:  # IncompleteOutput is one
        return None
