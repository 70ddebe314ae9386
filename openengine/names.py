"""What a request names: itself and a model. One refusal of each, for everyone who takes requests."""

from __future__ import annotations

from collections.abc import Collection

from openengine.errors import DuplicateRequest, InvalidArgument, ModelNotFound

__all__ = ["check_request_id", "check_served", "check_unrepeated"]


def check_request_id(request_id: object) -> None:
    """Raises InvalidArgument for an empty id; without one (None) a request gets a fresh id."""
    if isinstance(request_id, str) and not request_id:
        raise InvalidArgument("request_id is empty; leave it out to get a fresh one")


def check_served(model: object, names: Collection[str]) -> None:
    """Raises ModelNotFound unless `model` is among `names`, or None, which is the first of them."""
    if model is not None and not (isinstance(model, str) and model in names):
        raise ModelNotFound(f"model {model!r:.80} is not served; served are {', '.join(names)}")


def check_unrepeated(request_id: str, earlier: Collection[str]) -> None:
    """Raises DuplicateRequest where an earlier item of the same batch has this id."""
    if request_id in earlier:
        raise DuplicateRequest(f"request_id {request_id!r:.80} is used by an earlier item; give each item its own")
