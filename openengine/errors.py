"""The error tree: one direct subclass of `OpenEngineError` per `ErrorCode` of the OpenEngine contract.

    OpenEngineError
    ├ InvalidArgument      ├ OutOfRange · PreconditionFailed (IncompleteOutput) · ArtifactNotFound
    ├ UnsupportedFeature   └ UnsupportedTask
    ├ RoleMismatch
    ├ ModelNotFound        └ LoraNotFound
    ├ Overloaded           └ RequestTooLarge
    ├ RequestNotFound
    ├ DuplicateRequest     └ LoraConflict
    ├ KvSessionNotFound
    ├ KvTransferFailed
    ├ Cancelled
    ├ Draining
    └ InternalError        └ TokenizerChanged

A refinement keeps its parent's `code` and may answer with another gRPC status, or with another
word on whether a retry helps. Statuses are names, so that nothing here needs grpc.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "ArtifactNotFound",
    "Cancelled",
    "Draining",
    "DuplicateRequest",
    "IncompleteOutput",
    "InternalError",
    "InvalidArgument",
    "KvSessionNotFound",
    "KvTransferFailed",
    "LoraConflict",
    "LoraNotFound",
    "ModelNotFound",
    "OpenEngineError",
    "OutOfRange",
    "Overloaded",
    "PreconditionFailed",
    "RequestNotFound",
    "RequestTooLarge",
    "RoleMismatch",
    "TokenizerChanged",
    "Unauthenticated",
    "Unreachable",
    "UnsupportedFeature",
    "UnsupportedTask",
]


class OpenEngineError(Exception):
    """Base of every error the engine raises on purpose.

    `message` says what was wrong, the value, the limit and the fix. `details` is machine-readable
    context. `retry_after_ms` is the least delay worth waiting, only where `retryable` is true.
    """

    code: ClassVar[str] = "INTERNAL"
    grpc_status: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        details: dict[str, Any] | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        assert retry_after_ms is None or self.retryable, "retry_after_ms goes with retryable errors only"
        super().__init__(message)
        self.message = message
        self.details = details or {}
        self.retry_after_ms = retry_after_ms

    def __reduce__(self):
        return (_rebuild, (type(self), self.message, self.details, self.retry_after_ms))


def _rebuild(kind: type[OpenEngineError], message: str, details: dict, retry_after_ms: int | None) -> OpenEngineError:
    return kind(message, details=details, retry_after_ms=retry_after_ms)


class InvalidArgument(OpenEngineError, ValueError):
    """The caller's input is malformed or out of range."""

    code = "INVALID_ARGUMENT"
    grpc_status = "INVALID_ARGUMENT"


class OutOfRange(InvalidArgument):
    """A position outside what is kept, such as an event number that has left the buffer."""

    grpc_status = "OUT_OF_RANGE"


class PreconditionFailed(InvalidArgument):
    """A valid request that the present state of the engine cannot take."""

    grpc_status = "FAILED_PRECONDITION"


class ArtifactNotFound(InvalidArgument):
    """A file that was asked for by name does not exist."""

    grpc_status = "NOT_FOUND"


class Unauthenticated(InvalidArgument):
    """A server wants a token, and the client sent none or another."""

    grpc_status = "UNAUTHENTICATED"


class UnsupportedFeature(OpenEngineError):
    """An explicit option that this engine, model or installation cannot honour."""

    code = "UNSUPPORTED_FEATURE"
    grpc_status = "INVALID_ARGUMENT"


class UnsupportedTask(UnsupportedFeature):
    """A task the loaded model does not perform."""

    grpc_status = "FAILED_PRECONDITION"


class RoleMismatch(OpenEngineError):
    """A request that does not fit the engine's role."""

    code = "ROLE_MISMATCH"
    grpc_status = "FAILED_PRECONDITION"


class ModelNotFound(OpenEngineError):
    """No such model: not on disk, or not served by this engine."""

    code = "MODEL_NOT_FOUND"
    grpc_status = "NOT_FOUND"


class LoraNotFound(ModelNotFound):
    """No adapter of that name is loaded."""


class Overloaded(OpenEngineError):
    """The queue is full; the same request may be accepted later."""

    code = "OVERLOADED"
    grpc_status = "RESOURCE_EXHAUSTED"
    retryable = True


class RequestTooLarge(Overloaded):
    """The request needs more KV memory than the whole pool holds, or its answer a larger message than the server sends;
    waiting does not help."""

    retryable = False


class RequestNotFound(OpenEngineError):
    """No request of that id is known."""

    code = "REQUEST_NOT_FOUND"
    grpc_status = "NOT_FOUND"


class DuplicateRequest(OpenEngineError):
    """A request of that id is in flight."""

    code = "DUPLICATE_REQUEST"
    grpc_status = "ALREADY_EXISTS"


class LoraConflict(DuplicateRequest):
    """An adapter with that id, name or path is already loaded."""


class KvSessionNotFound(OpenEngineError):
    """No KV session of that id is open."""

    code = "KV_SESSION_NOT_FOUND"
    grpc_status = "NOT_FOUND"


class KvTransferFailed(OpenEngineError):
    """KV blocks were lost on their way between engines."""

    code = "KV_TRANSFER_FAILED"
    grpc_status = "UNAVAILABLE"
    retryable = True


class Cancelled(OpenEngineError):
    """The operation was cancelled."""

    code = "CANCELLED"
    grpc_status = "CANCELLED"


class Draining(OpenEngineError):
    """The engine takes no new requests."""

    code = "DRAINING"
    grpc_status = "UNAVAILABLE"
    retryable = True


class InternalError(OpenEngineError):
    """The engine failed; the request was valid."""

    code = "INTERNAL"
    grpc_status = "INTERNAL"


class TokenizerChanged(InternalError):
    """The tokenizer changed while its files were being read."""

    grpc_status = "ABORTED"


class Unreachable(OpenEngineError):
    """No server answers the client: none listens, it has stopped, or the connection broke. An engine never raises it."""

    grpc_status = "UNAVAILABLE"
    retryable = True


class IncompleteOutput(PreconditionFailed):
    """The value of an output was asked for that ended before it was complete.

    `text` is what there is of it, `finish_reason` how it ended.
    """

    def __init__(self, message: str, *, text: str = "", finish_reason: str | None = None, **context: Any) -> None:
        super().__init__(message, **context)
        self.text = text
        self.finish_reason = finish_reason

    def __reduce__(self):
        return (_rebuild_incomplete, (self.message, self.text, self.finish_reason, self.details))


def _rebuild_incomplete(message: str, text: str, finish_reason: str | None, details: dict) -> IncompleteOutput:
    return IncompleteOutput(message, text=text, finish_reason=finish_reason, details=details)
