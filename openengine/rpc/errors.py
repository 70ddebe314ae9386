"""The error tree as the contract's `EngineError` and as gRPC statuses, which are names here: nothing imports grpc.

Which of the two a failure is depends on when it happens, and is the servicer's business: a status before acceptance,
one terminal `EngineError` after.
"""

from __future__ import annotations

from openengine import InternalError, OpenEngineError, Unreachable
from openengine.rpc import openengine_pb2 as pb
from openengine.rpc.structs import fill_struct, read_struct

__all__ = ["ACCEPTED_HEADERS", "ERROR_TRAILER", "error_of_status", "from_engine_error", "status_of", "to_engine_error"]

ERROR_TRAILER = "openengine-error-bin"
"""Trailing metadata beside a gRPC status: the `EngineError` that it stands for, serialized."""
ACCEPTED_HEADERS = (("openengine-accepted", "1"),)
"""Initial metadata of an accepted stream: a refused call has none, so its first header tells the two apart."""

_NAMESPACE = "openengine."  # of the details' keys
_OF_STATUS = {
    "INVALID_ARGUMENT": "INVALID_ARGUMENT",
    "OUT_OF_RANGE": "INVALID_ARGUMENT",
    "FAILED_PRECONDITION": "INVALID_ARGUMENT",
    "NOT_FOUND": "MODEL_NOT_FOUND",
    "ALREADY_EXISTS": "DUPLICATE_REQUEST",
    "RESOURCE_EXHAUSTED": "OVERLOADED",
    "UNIMPLEMENTED": "UNSUPPORTED_FEATURE",
    "UNAUTHENTICATED": "INVALID_ARGUMENT",
    "CANCELLED": "CANCELLED",
    "DEADLINE_EXCEEDED": "CANCELLED",
}
# A draining engine sends its own error with the status; these come from the transport, which knows no remedy.
_ADVICE = {
    "UNAVAILABLE": (
        'no server answers: check the address ("host:port"), that a server runs there, and that both sides use TLS '
        "(Client(tls=True), tls_ca=… for an authority of your own, tls_cert=… and tls_key=… where the server wants to see one) or "
        "neither"
    ),
    "UNAUTHENTICATED": "the server wants its bearer token, and got none or another: give Client(address, token=…) the text of its --token-file",
}


def status_of(exc: BaseException) -> str:
    """The name of the gRPC status that answers `exc`; what is no OpenEngineError is INTERNAL."""
    return exc.grpc_status if isinstance(exc, OpenEngineError) else InternalError.grpc_status


def to_engine_error(exc: BaseException) -> pb.EngineError:
    """The terminal event for `exc`; what is no OpenEngineError is INTERNAL. Keys of details are `openengine.<key>`."""
    if not isinstance(exc, OpenEngineError):
        exc = InternalError(f"{type(exc).__name__}: {exc}")
    error = pb.EngineError(
        code=pb.ErrorCode.Value(f"ERROR_CODE_{exc.code}"),
        message=exc.message,
        retryable=exc.retryable,
        retry_after_ms=exc.retry_after_ms if exc.retryable else None,
    )
    if exc.details:
        fill_struct(
            error.details, {f"{_NAMESPACE}{str(key).removeprefix(_NAMESPACE)}": exc.details[key] for key in exc.details}
        )
    return error


def from_engine_error(error: pb.EngineError, *, status: str | None = None) -> OpenEngineError:
    """The exception that `error` stands for, to be raised; a code that is unknown here is an InternalError.

    The wire names the code and not the class, so a refinement comes back where retryable, or the gRPC `status` that
    came with the error, tells it from its base.
    """
    names = {value.number: value.name for value in pb.ErrorCode.DESCRIPTOR.values}
    code = names.get(error.code, "").removeprefix("ERROR_CODE_")
    kind = _class_of(code, error.retryable, status)
    try:
        details = {key.removeprefix(_NAMESPACE): value for key, value in read_struct(error.details).items()}
    except ValueError:  # the error matters more than its details
        details = {}
    exc = kind(error.message, details=details)
    if exc.retryable != error.retryable:
        exc.retryable = error.retryable
    if error.retryable and error.HasField("retry_after_ms"):
        exc.retry_after_ms = error.retry_after_ms
    return exc


def error_of_status(status: str, message: str) -> OpenEngineError:
    """The exception for a call that ended with a gRPC `status` and says no more; unknown ones are InternalErrors."""
    code = _OF_STATUS.get(status, InternalError.code)
    if status in _ADVICE:
        message = f"{_ADVICE[status]}; gRPC says: {message}"
    return _class_of(code, None, status)(message, details={"grpc_status": status})


def _class_of(code: str, retryable: bool | None, status: str | None) -> type[OpenEngineError]:
    """The class of that code that fits best, the base of its branch where several do."""
    kinds = [kind for kind in _descendants(OpenEngineError) if kind.code == code] or [InternalError]
    if status != Unreachable.grpc_status:  # what a server says is not that there is none
        kinds = [kind for kind in kinds if kind is not Unreachable]
    return max(kinds, key=lambda kind: (status == kind.grpc_status, retryable == kind.retryable))


def _descendants(kind: type[OpenEngineError]) -> list[type[OpenEngineError]]:
    children = kind.__subclasses__()
    return children + [found for child in children for found in _descendants(child)]
