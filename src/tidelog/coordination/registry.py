"""Making and removing names, so that no delayed repeat can bring a removed one back.

The registry's ``changes`` row is expected and raised whenever a name is made or removed. ``ABSENT``
alone could come true twice: a repeated packet of an old creation would then find no row again.
"""

from __future__ import annotations

from collections.abc import Callable

from tidelog.catalog.base import ABSENT, Change, Delete, Put, Row
from tidelog.context import Context
from tidelog.errors import ConflictError, NotFoundError, UnavailableError, UnknownOutcomeError
from tidelog.model import layout

__all__ = ["add_name", "check_shown", "remove_name"]


def add_name(
    context: Context,
    wanted: Put,
    check: Callable[[], None] = lambda: None,
    also: tuple[Put, ...] = (),
) -> None:
    """Add a registry row that does not exist; done too when another process has added it.

    ``check`` may look at other rows of the registry, and refuse by an error: no name is made or
    removed between its last look and the write. Rows that ``also`` puts are written with it.
    """

    def decide(found: Row | None) -> list[Change]:
        if found is not None:
            return []
        check()
        return [wanted, *also]

    _change(context, wanted.row, decide)


def remove_name(context: Context, name: str, is_same: Callable[[Row], bool], *also: Put) -> None:
    """Remove a registry row, unless it was removed or another thing has the name by now.

    ``is_same`` decides by the incarnation whether a row is the one to remove: a name may be made
    again at any time, also between a removal that landed and its lost reply. Rows that ``also``
    puts are written with the removal.
    """

    def decide(found: Row | None) -> list[Change]:
        if found is None or not is_same(found):
            return []
        return [Delete(name, found.version), *also]

    _change(context, name, decide)


def check_shown(what: str, shown: str, found: str) -> None:
    """Raise ``NotFoundError`` if what has a name now is not what a person was asked about.

    A name may be free and taken again while a question waits for its answer. ``shown`` is the
    incarnation that the question was about; empty: whatever has the name.
    """
    if shown not in ("", found):
        raise NotFoundError(
            f"{what}: was deleted and made again since you were asked: nothing was deleted: look "
            "at it, then delete again"
        )


def _change(context: Context, name: str, decide: Callable[[Row | None], list[Change]]) -> None:
    """Write what ``decide`` wants for the row as it is, until it wants nothing more."""
    delays = context.backoff.delays_s(context.random)
    while True:
        counted = context.catalog.get(layout.REGISTRY, layout.REGISTRY_CHANGES)
        changes = decide(context.catalog.get(layout.REGISTRY, name))
        if not changes:
            return
        count = int(counted.value) + 1 if counted else 1
        version = counted.version if counted else ABSENT
        counter = Put(layout.REGISTRY_CHANGES, str(count).encode(), expect=version)
        try:
            context.catalog.write(layout.REGISTRY, counter, *changes, write_id=context.ids.new())
            return
        except (ConflictError, UnknownOutcomeError):
            delay_s = next(delays, None)
        if delay_s is None:
            raise UnavailableError(f"registry row `{name}`: too many writers: try again")
        context.clock.sleep(delay_s)
