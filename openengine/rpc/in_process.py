"""`InProcessOnly`: the methods of `Engine` that a `Client` cannot have, each saying what to do instead.

Owns the refusals. What the methods do is said at those of `Engine`.
"""

from __future__ import annotations

from typing import Any, NoReturn

from openengine import UnsupportedFeature

__all__ = ["InProcessOnly"]

_NO_COMPILING = (
    "the contract has no call that compiles a guide: give the guide itself to each request, as in generate(…, "
    "json_schema=…) or build_request(prompt, None, {'json_schema': …}), which the server compiles once and keeps; an Engine in process has compile_guide, to test texts"
)


class InProcessOnly:
    """Every method raises UnsupportedFeature: the contract has no call for it, or it is for the server's own process."""

    def compile_guide(self, guide: Any = None, **options: Any) -> NoReturn:
        raise UnsupportedFeature(_NO_COMPILING)

    async def acompile_guide(self, guide: Any = None, **options: Any) -> NoReturn:
        raise UnsupportedFeature(_NO_COMPILING)

    def clear_prefix_cache(self) -> NoReturn:
        raise UnsupportedFeature(
            "the contract has no call that clears a server's prefix cache; bypass_prefix_cache=True, or a cache_salt of its "
            "own, keeps a request from it"
        )

    def advertise(self, host: str, port: int) -> NoReturn:
        raise UnsupportedFeature(
            "advertise is for the server's process; start `python -m openengine.rpc` with --advertise-host"
        )

    def check_accepting(self) -> NoReturn:
        raise UnsupportedFeature(
            "check_accepting is for the server's process; ask health().state, or send the request: a drain refuses it with "
            "Draining"
        )

    def prepare_task(self, request: Any) -> NoReturn:
        raise UnsupportedFeature(
            "prepare_task is for the server's process; give the request to embed, classify or score"
        )

    def submit_task(self, request: Any) -> NoReturn:
        raise UnsupportedFeature(
            "submit_task is for the server's process; give the request to embed, classify or score, or to aembed, aclassify "
            "or ascore"
        )
