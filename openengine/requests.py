"""`Requests`: from what a caller of an engine writes to groups that its loop can run.

    prompts, options ── build ──▶ GenerateRequest ── compile guides (event loops) ── prepare ──▶ SequenceGroup

The twin of rpc/requests.py. Owns the order of the checks. Does not own keywords (options.py), what is wrong with a request
(core/admission.py), nor running it (batches.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from openengine.batches import check_on_error, failed_item
from openengine.core.admission import RequestPreparer
from openengine.core.guides.compiler import GuideCompiler, NoGuides
from openengine.core.loop import EngineLoop
from openengine.core.sequence import SequenceGroup
from openengine.core.task_capabilities import NoGeneration
from openengine.errors import OpenEngineError
from openengine.names import check_unrepeated
from openengine.options import Prompt, batch_prompts, build_one, build_request, request_id_of
from openengine.results import GenerationResult
from openengine.types import GenerateRequest, SamplingParams

__all__ = ["Requests"]

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


class Requests:
    """Safe from many threads and event loops. An engine that closes replaces `preparer` and `guides`.

    An item of a batch that is refused is a result with its error where `on_error` is "return"; else the error is raised,
    naming the item's index.
    """

    def __init__(
        self, preparer: RequestPreparer | NoGeneration, guides: GuideCompiler | NoGuides, loop: EngineLoop
    ) -> None:
        self.preparer = preparer
        self.guides = guides
        self._loop = loop

    # ---- one -------------------------------------------------------------------------------------

    def one(self, prompt: Any, sampling: SamplingParams | None, options: dict[str, Any]) -> GenerateRequest:
        """The request of one prompt. Raises InvalidArgument for anything else."""
        request = build_one(prompt, sampling, options)
        self.preparer.warn([request])
        return request

    def prepare(self, request: GenerateRequest) -> SequenceGroup:
        """A draining engine says so before it judges a request, so that no prompt is tokenized in vain."""
        self._loop.check_accepting()
        return self.preparer.prepare(request)

    async def aprepare(self, request: GenerateRequest) -> SequenceGroup:
        """`prepare` for an event loop."""
        return await asyncio.to_thread(self.prepare, await self._with_guide(request))

    # ---- a batch ---------------------------------------------------------------------------------

    def batch(
        self, prompts: Iterable[Prompt], sampling: SamplingParams | None, options: dict[str, Any], *, on_error: str
    ) -> list[SequenceGroup | GenerationResult]:
        """A group for every item, checked before any of them runs."""
        requests = _build(prompts, sampling, options, on_error)
        self.preparer.warn(requests)
        return self._prepare(requests, on_error)

    async def abatch(
        self, prompts: Iterable[Prompt], sampling: SamplingParams | None, options: dict[str, Any], *, on_error: str
    ) -> list[SequenceGroup | GenerationResult]:
        """`batch` for an event loop."""
        requests = await asyncio.to_thread(_build, prompts, sampling, options, on_error)
        self.preparer.warn(requests)
        requests = await self._with_guides(requests, on_error)
        return await asyncio.to_thread(self._prepare, requests, on_error)

    def _prepare(
        self, requests: Sequence[GenerateRequest | GenerationResult], on_error: str
    ) -> list[SequenceGroup | GenerationResult]:
        request_ids: set[str] = set()

        def prepare(request: GenerateRequest) -> SequenceGroup:
            group = self.prepare(request)
            # A batch runs in parts, so an id is looked for before any of it runs.
            check_unrepeated(group.request_id, request_ids)
            self._loop.check_unused(group.request_id)
            request_ids.add(group.request_id)
            return group

        return _each(requests, prepare, on_error)

    # ---- guides ----------------------------------------------------------------------------------

    async def _with_guide(self, request: GenerateRequest) -> GenerateRequest:
        """`request` with its guide compiled; no thread waits for that."""
        if request.guided is None:
            return request
        self._loop.check_accepting()
        await asyncio.to_thread(self.preparer.check, request)
        return replace(request, guided=await asyncio.wrap_future(self.guides.submit(request.guided)))

    async def _with_guides(
        self, requests: Sequence[GenerateRequest | GenerationResult], on_error: str
    ) -> list[GenerateRequest | GenerationResult]:
        async def compiled(
            index: int, request: GenerateRequest | GenerationResult
        ) -> GenerateRequest | GenerationResult:
            if isinstance(request, GenerationResult):
                return request
            try:
                return await self._with_guide(request)
            except OpenEngineError as exc:
                return failed_item(exc, request_id_of(request, {}), index=index, total=len(requests), on_error=on_error)

        return list(await asyncio.gather(*(compiled(*item) for item in enumerate(requests))))


def _build(
    prompts: Iterable[Prompt], sampling: SamplingParams | None, options: dict[str, Any], on_error: str
) -> list[GenerateRequest | GenerationResult]:
    check_on_error(on_error)
    items = batch_prompts(prompts, sampling, options)
    return _each(items, lambda prompt: build_request(prompt, sampling, options), on_error, options)


def _each(
    items: Sequence[_Item | GenerationResult],
    make: Callable[[_Item], _Made],
    on_error: str,
    options: Mapping[str, Any] | None = None,
) -> list[_Made | GenerationResult]:
    """What `make` makes of every item, in order; one that is refused already stays as it is. `options` may name its id."""
    made: list[_Made | GenerationResult] = []
    for index, item in enumerate(items):
        if isinstance(item, GenerationResult):
            made.append(item)
            continue
        try:
            made.append(make(item))
        except OpenEngineError as exc:
            request_id = request_id_of(item, options or {})
            made.append(failed_item(exc, request_id, index=index, total=len(items), on_error=on_error))
    return made
