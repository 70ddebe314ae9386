"""Progress bars: on in notebooks and terminals, off elsewhere, switchable."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from openengine.errors import InvalidArgument

__all__ = ["check_progress", "progress_bar"]


def check_progress(progress: object) -> None:
    """Raises InvalidArgument unless it is True, False or None."""
    if progress is not None and not isinstance(progress, bool):
        raise InvalidArgument(f"progress must be True, False or None, not {progress!r:.80}")


@contextmanager
def progress_bar(
    progress: bool | None, *, desc: str, unit: str, total: int | None = None
) -> Iterator[Callable[[int, int], None]]:
    """A function `(done, total)` that moves a bar. `progress=None` shows it in notebooks and terminals only."""
    check_progress(progress)
    if progress is None:
        progress = "ipykernel" in sys.modules or sys.stderr.isatty()
    if not progress:
        yield lambda done, total: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, desc=desc, unit=unit, unit_scale=unit == "B", leave=unit != "B") as bar:

        def move(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if done >= total:
                bar.refresh()  # the last update may come too soon after the one before to be drawn

        yield move
