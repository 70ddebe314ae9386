"""Health of an engine: what is ready, and a probe that computes one token, or one small item of a model without tokens.

readiness ──▶ checks ◀── probe: begin one small request, wait for its end ──▶ overall ──▶ HealthResponse
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from openengine.core.loop import EngineLoop, LoopState
from openengine.core.sequence import SequenceGroup
from openengine.errors import InvalidArgument, OpenEngineError
from openengine.handle import Handle
from openengine.service_types import EngineRole, HealthCheck, HealthState
from openengine.types import GenerateRequest, SamplingParams, StoppingOptions

__all__ = ["aprobe", "as_probe", "overall", "probe", "probe_request", "readiness"]

_PROBE_TIMEOUT_S = 60.0
_PROBE_PRIORITY = 2**31 - 1
_LOOP_TO_HEALTH = {
    LoopState.STARTING: HealthState.STARTING,
    LoopState.READY: HealthState.READY,
    LoopState.DEGRADED: HealthState.DEGRADED,
    LoopState.DRAINING: HealthState.DRAINING,
    LoopState.STOPPED: HealthState.NOT_READY,
}


def readiness(loop: EngineLoop, role: EngineRole | None) -> list[HealthCheck]:
    """The state of the engine's parts, and where a `role` is expected whether it is that. Raises InvalidArgument for no role."""
    state = _LOOP_TO_HEALTH[loop.state] if loop.is_here else HealthState.NOT_READY
    checks = [HealthCheck("scheduler", state), HealthCheck("model", state)]
    if role is not None and role not in tuple(EngineRole):
        raise InvalidArgument(f"role must be one of {', '.join(EngineRole)}, not {role!r:.80}")
    if role is not None and role != EngineRole.AGGREGATED:
        message = f"expected {role}, this engine is {EngineRole.AGGREGATED}"
        checks.append(HealthCheck("role", HealthState.NOT_READY, message))
    elif role is not None:
        checks.append(HealthCheck("role", HealthState.READY))
    return checks


def overall(checks: Sequence[HealthCheck]) -> HealthState:
    """The state that checks, of which the first are those of `readiness`, amount to."""
    is_ready = all(check.state is not HealthState.NOT_READY for check in checks)
    return checks[0].state if is_ready else HealthState.NOT_READY


def probe_request() -> GenerateRequest:
    """The smallest thing that a model which generates can be asked."""
    return GenerateRequest(
        token_ids=[0],
        sampling=SamplingParams(temperature=0.0, num_sequences=1, seed=0),
        stopping=StoppingOptions(max_tokens=1),
    )


def as_probe(group: SequenceGroup) -> SequenceGroup:
    """`group`, which runs before all others, leaves nothing cached, and is no client's request."""
    group.publish, group.is_probe, group.priority = False, True, _PROBE_PRIORITY
    return group


def probe(loop: EngineLoop, start: Callable[[], Handle[Any]]) -> HealthCheck:
    """Wait for the probe that `start` begins. It may find the engine busy, which is ready as well."""
    handle, num_steps = None, loop.num_steps
    try:
        handle = start()
        handle.result(timeout=_PROBE_TIMEOUT_S)
    except (OpenEngineError, TimeoutError) as exc:
        return _failed(exc, has_moved=loop.num_steps > num_steps)
    finally:
        if handle is not None:
            handle.cancel()
    return HealthCheck("inference_probe", HealthState.READY)


async def aprobe(loop: EngineLoop, start: Callable[[], Handle[Any]]) -> HealthCheck:
    """`probe` for an event loop: nobody's thread waits, and the probe ends with the task that wanted it."""
    handle, num_steps = None, loop.num_steps
    try:
        handle = start()
        await asyncio.wait_for(handle.aresult(), _PROBE_TIMEOUT_S)
    except (OpenEngineError, TimeoutError, asyncio.TimeoutError) as exc:
        return _failed(exc, has_moved=loop.num_steps > num_steps)
    finally:
        if handle is not None:
            handle.cancel()
    return HealthCheck("inference_probe", HealthState.READY)


def _failed(exc: Exception, *, has_moved: bool) -> HealthCheck:
    if isinstance(exc, OpenEngineError):
        return HealthCheck("inference_probe", HealthState.NOT_READY, str(exc))
    if has_moved:
        return HealthCheck("inference_probe", HealthState.READY, "busy: other requests hold every slot and run")
    return HealthCheck("inference_probe", HealthState.NOT_READY, f"the engine made no step in {_PROBE_TIMEOUT_S:g} s")
