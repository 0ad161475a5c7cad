"""A progress bar on standard error, where that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(what: str, total: Callable[[], int | None]) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the bytes that are done; ``total`` is asked only for a bar."""
    size = total() if sys.stderr.isatty() else None
    if size is None:
        yield lambda _: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=size)
        yield lambda done: progress.advance(task, done)
