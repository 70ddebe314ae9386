"""Which servers a client speaks with: the revisions and releases of the contract that it was tested with."""

from __future__ import annotations

from openengine import EngineInfo, InternalError, UnsupportedFeature

__all__ = ["check_revision", "first_model"]

_REVISION = 1  # of the contract that the client speaks
_TESTED_REVISIONS = range(1, 2)
_TESTED_RELEASES = {"d0f29fec31f31db5cfd49cf3e0f67da84d10c709"}


def check_revision(info: EngineInfo) -> None:
    """Raises UnsupportedFeature for a server outside the tested revisions and releases."""
    revision, minimum = info.schema_revision, info.minimum_client_revision
    if minimum > _REVISION or revision not in _TESTED_REVISIONS or info.schema_release not in _TESTED_RELEASES:
        raise UnsupportedFeature(
            f"the server speaks revision {revision} ({info.schema_release!r:.60}) and takes clients from {minimum} on; this "
            f"client speaks {_REVISION} and was tested with {_TESTED_REVISIONS.start} to {_TESTED_REVISIONS.stop - 1}"
        )


def first_model(info: EngineInfo) -> str:
    """The model that is meant where none is named. Raises InternalError for a server without."""
    if not info.supported_models:
        raise InternalError("the server names no models, against the contract; give Client(model=…) the one it serves")
    return info.supported_models[0]
