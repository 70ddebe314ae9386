"""`OutputProcessor`: from what a step computed to the events and errors of its requests.

    StepResult ──commit──▶ tokens ──process──▶ text, stops, guides ──▶ events ──┐
               ──finish_items──▶ raw arrays of tasks ─────────────────▶ events ──┼─ take ─▶ who delivers them
    cancel, fail ─────────────────────────────────────────────────────▶ errors ──┘

Owns the events that have not been delivered. It ends outputs, so the scheduler hears of their end from here alone. Does not
own the text of an output (output.py), when anything runs and who receives it (loop.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np

from openengine.core.encoder_scheduler import EncoderScheduler
from openengine.core.output import Candidates, PromptTokens
from openengine.core.runner import StepResult
from openengine.core.scheduler import Scheduler
from openengine.core.sequence import Sequence, SequenceGroup, SequenceState
from openengine.core.step_plan import StepPlan, TokenDelta
from openengine.core.task_work import TaskItemOutput
from openengine.errors import Cancelled, InternalError, InvalidArgument, OpenEngineError
from openengine.ops import sampling
from openengine.ops.sampling import TokenScores
from openengine.types import FinishReason, GenerateEvent, GenerationFinished, PromptOutput, StopMatch, TokenInfo

__all__ = ["OutputProcessor"]

Events = list[GenerateEvent | TaskItemOutput]


class OutputProcessor:
    """Called by the loop thread only. `token_text` gives a token's literal text."""

    def __init__(self, scheduler: Scheduler | EncoderScheduler, token_text: Callable[[int], str]) -> None:
        self._scheduler = scheduler
        self._token_text = token_text
        self._events: dict[SequenceGroup, Events] = {}
        self._errors: dict[SequenceGroup, OpenEngineError] = {}

    # ---- a step ----------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[tuple[TokenDelta, TokenInfo | None]]:
        """Record the step and wrap its tokens. Rows without a finite logit fail their request first."""
        sampled = result.sampled
        if sampled is None:
            return [(delta, None) for delta in self._scheduler.commit(plan, ())]
        if sampled.failed.any():
            self._fail_rows(plan, sampled.failed)
        token_ids = sampled.token_ids.tolist()
        deltas = self._scheduler.commit(plan, token_ids)
        return [(delta, self._token_info(delta, sampled.scores)) for delta in deltas]

    def process(self, deltas: list[tuple[TokenDelta, TokenInfo | None]]) -> None:
        """The one loop over sequences: text, stops, events."""
        now = time.monotonic()
        for delta, info in deltas:
            seq, group, stream = delta.seq, delta.seq.group, delta.seq.stream
            if group.first_token_time is None:
                group.first_token_time = now
                self._emit_prompt(group)
            if seq.is_finished:
                continue  # its prompt's scores were no numbers
            reason, match = delta.reason, delta.stop_match
            if info is None:
                pass  # max_tokens=0: an output without tokens
            elif match is not None and match.eos_token_id is not None:
                stream.push_eos(info)
            elif match is not None:
                stream.push_stop_token(info)
            else:
                match = stream.push(info, seq.num_output)
                reason = FinishReason.STOP if match is not None else reason
                if match is None and seq.guide_state is not None:
                    try:
                        reason, match = self._follow_guide(seq, info.token_id, reason)
                    except OpenEngineError as exc:
                        self.fail(group, exc)
                        continue
            output = stream.take() if reason is None else stream.finish()
            if output is not None:
                self._emit(group, output)
            if reason is not None:
                message = _length_message(seq, info) if reason is FinishReason.LENGTH else ""
                self._scheduler.finish(seq, reason, match)
                self._emit_finished(seq, message)

    def finish_items(self, pooled: list[tuple[Sequence, np.ndarray]]) -> None:
        """Emit what the items of tasks have become, and end them."""
        for seq, values in pooled:
            if seq.is_finished:
                continue  # its request failed with an item before it
            if not np.isfinite(values).all():
                self.fail(seq.group, InternalError("the model returned values that are not numbers (NaN)"))
                continue
            self._emit(seq.group, TaskItemOutput(seq.index, values))
            self._scheduler.finish(seq, FinishReason.STOP)

    def take(self) -> tuple[dict[SequenceGroup, Events], dict[SequenceGroup, OpenEngineError]]:
        """The events not delivered yet, by request, and the errors that ended requests; each of these has events, maybe none."""
        events, self._events = self._events, {}
        errors, self._errors = self._errors, {}
        return events, errors

    # ---- ends for other reasons ------------------------------------------------------------------

    def cancel(self, group: SequenceGroup, message: str = "") -> None:
        """End what has not ended of a request; `message` says why."""
        if group.task is not None:
            self._cancel_items(group, message)
            return
        for seq in group.sequences:
            if not seq.is_finished:
                output = seq.stream.finish()
                if output is not None:
                    self._emit(group, output)
                self._scheduler.finish(seq, FinishReason.CANCELLED)
                self._emit_finished(seq, message)

    def fail(self, group: SequenceGroup, error: OpenEngineError) -> None:
        """End a request with an error."""
        for seq in group.sequences:
            if not seq.is_finished:
                self._scheduler.fail(seq, error)
        self._end_with(group, error)

    def fail_all(self, groups: Iterable[SequenceGroup], error: OpenEngineError) -> None:
        """Fail all open requests and start from an empty scheduler, whose books can no longer be trusted."""
        self._events.clear()
        self._scheduler.reset()
        for group in groups:
            for seq in group.sequences:
                seq.error = error
                if not seq.is_finished:  # one that the scheduler had not got yet
                    seq.move_to(SequenceState.FAILED)
            self._end_with(group, error)

    def _cancel_items(self, group: SequenceGroup, message: str) -> None:
        """A task has no partial result: it ends with an error."""
        if group.is_finished:
            return
        for seq in group.sequences:
            if not seq.is_finished:
                self._scheduler.finish(seq, FinishReason.CANCELLED)
        reason = f": {message}" if message else ""
        self._end_with(group, Cancelled(f"request {group.request_id!r:.80} was cancelled{reason}"))

    # ---- tokens ----------------------------------------------------------------------------------

    def _fail_rows(self, plan: StepPlan, failed: np.ndarray) -> None:
        row = 0
        for item in plan.scheduled:
            for seq in item.samples:
                if failed[row] and not seq.is_finished:
                    self.fail(seq.group, _why_no_token(seq))
                row += 1

    def _token_info(self, delta: TokenDelta, scores: list[TokenScores | None] | None) -> TokenInfo | None:
        if delta.token_id < 0:
            return None
        token = self._token_text(delta.token_id)
        score = None if scores is None else scores[delta.row]
        if score is None:
            return TokenInfo(delta.token_id, token)
        candidates = ()
        if score.candidate_ids is not None:
            candidates = Candidates(
                score.candidate_ids[0], score.candidate_logprobs[0], score.candidate_ranks[0], self._token_text
            )
        return TokenInfo(delta.token_id, token, float(score.logprobs[0]), int(score.ranks[0]), candidates)

    def _follow_guide(
        self, seq: Sequence, token_id: int, reason: FinishReason | None
    ) -> tuple[FinishReason | None, StopMatch | None]:
        """Tell the guide of the drawn token, and append those that must come after it; says how they end the output."""
        state = seq.guide_state
        state.accept(token_id)
        while seq.group.jumps_ahead and state.forced and reason is None:
            token_id = state.forced[-1]
            reason = self._scheduler.append_forced(seq, token_id)
            match = seq.stream.push(TokenInfo(token_id, self._token_text(token_id)), seq.num_output)
            if match is not None:
                return FinishReason.STOP, match
            state.accept(token_id)
        return reason, None

    # ---- events ----------------------------------------------------------------------------------

    def _emit(self, group: SequenceGroup, event: GenerateEvent | TaskItemOutput) -> None:
        self._events.setdefault(group, []).append(event)

    def _emit_prompt(self, group: SequenceGroup) -> None:
        if group.score_start is None:
            return
        scores = sampling.concatenate(group.prompt_scores)
        group.prompt_scores = []
        if np.isnan(scores.logprobs).any():
            self.fail(group, InternalError("the model returned logits that are not numbers (NaN) for the prompt"))
            return
        self._emit(group, PromptOutput(PromptTokens(group.prompt_ids, self._token_text, group.score_start, scores)))

    def _emit_finished(self, seq: Sequence, message: str) -> None:
        group = seq.group
        usage = group.usage if group.is_finished else None
        self._emit(group, GenerationFinished(seq.index, seq.finish_reason, message, seq.stop_match, usage))

    def _end_with(self, group: SequenceGroup, error: OpenEngineError) -> None:
        self._errors[group] = error
        self._events.setdefault(group, [])


def _why_no_token(seq: Sequence) -> OpenEngineError:
    """Why no token could be drawn: the model's logits, or a guide that allows none."""
    state, group = seq.guide_state, seq.group
    if state is not None:
        is_early = seq.num_output < (group.stopping.min_tokens or 0)
        has_token = group.guide.leaves_token(state, min_tokens_left=is_early)
        if state.error is not None:
            return state.exhausted(state.error)
        if not has_token:
            return InvalidArgument(
                f"the guide and the stop token ids leave no token after {seq.num_output} tokens: all that the guide allows end "
                "the output, which it does not allow yet; take those out of stop_token_ids"
            )
    return InternalError("the model returned logits that are not numbers (NaN)")


def _length_message(seq: Sequence, last: TokenInfo | None) -> str:
    """Which limit ended an output, and under a guide what that cut."""
    message, state = seq.group.max_len_reason, seq.guide_state
    if state is None:
        return message
    if last is None:
        return f"{message}; nothing was generated under the guide"
    cut = (
        "might have ended here under its guide"
        if state.may_end
        else "was cut off before it was complete under its guide"
    )
    return f"{message}; the output {cut}"
