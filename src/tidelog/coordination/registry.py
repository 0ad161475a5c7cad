"""The registry: adds and removes names, so that no delayed repeat can bring one back.

Every write that adds or removes a name expects the registry's ``changes`` row and raises it.
``ABSENT`` alone could become true twice: a delayed repeat of an old creation would find no row
again.
"""

from __future__ import annotations

from collections.abc import Callable

from tidelog.catalog.base import Change, Delete, Put, Row
from tidelog.catalog.update import Decision, Rows, update
from tidelog.context import Context
from tidelog.errors import (
    NotFoundError,
)
from tidelog.model import layout

__all__ = ["add_name", "check_shown", "remove_name"]


def add_name(
    context: Context,
    wanted: Put,
    check: Callable[[], None] = lambda: None,
    also: tuple[Put, ...] = (),
) -> None:
    """Adds a registry row that does not exist; also returns if another process has added it.

    ``check`` may read other rows of the registry and raise: no name is added or removed between its
    last read and the write. Rows in ``also`` are written with it.
    """

    def decide(found: Row | None) -> list[Change]:
        if found is not None:
            return []
        check()
        return [wanted, *also]

    _change(context, wanted.row, decide)


def remove_name(context: Context, name: str, is_same: Callable[[Row], bool], *also: Put) -> None:
    """Removes a registry row, unless it was removed or another thing has the name by now.

    ``is_same`` decides by the incarnation whether a row is the one to remove: a name may be reused
    at any time, even between a removal that landed and its lost reply. Rows in ``also`` are written
    with the removal.
    """

    def decide(found: Row | None) -> list[Change]:
        if found is None or not is_same(found):
            return []
        return [Delete(name, found.version), *also]

    _change(context, name, decide)


def check_shown(what: str, shown: str, found: str) -> None:
    """Raises ``NotFoundError`` if the name now belongs to something else than a person confirmed.

    A name may be freed and reused while a prompt waits. ``shown`` is the incarnation that the
    prompt was about; empty means any.
    """
    if shown not in ("", found):
        raise NotFoundError(
            f"{what}: was deleted and made again since you were asked: nothing was deleted: look "
            "at it, then delete again"
        )


def _change(context: Context, name: str, decide: Callable[[Row | None], list[Change]]) -> None:
    """Writes what ``decide`` returns for the current row, if it returns something.

    The count is read before the row, and before what ``decide`` looks at.
    """

    def counted(rows: Rows) -> Decision[None]:
        changes = decide(rows[name])
        before = rows[layout.REGISTRY_CHANGES]
        count = int(before.value) + 1 if before else 1
        counter = rows.put(layout.REGISTRY_CHANGES, str(count).encode())
        return Decision(None, [counter, *changes] if changes else [])

    rows = [layout.REGISTRY_CHANGES, name]
    update(context, layout.REGISTRY, rows, counted, f"registry row `{name}`")
