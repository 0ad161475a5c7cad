"""Which topics the objects of a home belong to, and whether the registry explains each of them.

A topic is registered before it has objects, and its deletion leaves a ``deleted`` row. So objects
of an incarnation that has neither row show that the registry has lost one: they are never garbage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tidelog.catalog.base import ABSENT, Put
from tidelog.catalog.checksums import CheckedCatalog
from tidelog.context import Context
from tidelog.coordination.registry import add_name
from tidelog.errors import CorruptError, InvalidError
from tidelog.log.topics import list_topics
from tidelog.model import layout

__all__ = [
    "TOPICS",
    "accept_unexplained",
    "inspect_catalog",
    "inspect_home",
    "is_deleted",
    "stored_incarnations",
    "unexplained",
]

TOPICS = "topics/"
_INCARNATION = re.compile(r"[0-9a-f]{32}")


def stored_incarnations(context: Context) -> Iterator[str]:
    """The incarnations that have objects: one listing for each, from its end to the next one."""
    after = ""
    while (info := next(iter(context.store.list(TOPICS, after)), None)) is not None:
        incarnation = info.key.split("/")[1]
        if _INCARNATION.fullmatch(incarnation):
            yield incarnation
        after = f"{TOPICS}{incarnation}0"  # what comes after the slash


def unexplained(context: Context, stored: Iterable[str]) -> list[CorruptError]:
    """An error for each incarnation, listed before, of which the registry knows nothing."""
    known = {topic.incarnation for topic in list_topics(context)}
    return [
        CorruptError(
            f"topic of incarnation `{incarnation}`: has objects or rows, but no registry row, and "
            "was never deleted: restore a catalog that knows it, or get its events back by "
            f"`tidelog topic recover NAME --incarnation {incarnation}`; to do without them, run "
            f"`tidelog sweep --accept-loss {incarnation}`",
            incarnation=incarnation,
        )
        for incarnation in stored
        if incarnation not in known and not is_deleted(context, incarnation)
    ]


def accept_unexplained(context: Context, name: str) -> bool:
    """Count an incarnation that the registry does not explain as deleted; False for other names.

    A person decides that: after the restore of a catalog that is older than the topic.
    """
    if not _INCARNATION.fullmatch(name):
        return False
    stored = [each for each in stored_incarnations(context) if each == name]

    def check() -> None:
        if not unexplained(context, stored):
            raise InvalidError(
                f"topic of incarnation `{name}`: was brought back meanwhile: nothing was accepted"
            )

    if unexplained(context, stored):
        add_name(context, Put(layout.deleted_row(name), b"", ABSENT), check)
    return is_deleted(context, name)


def is_deleted(context: Context, incarnation: str) -> bool:
    """Whether the topic of an incarnation was deleted."""
    return context.catalog.get(layout.REGISTRY, layout.deleted_row(incarnation)) is not None


def inspect_home(context: Context) -> Iterator[str]:
    """What is wrong with the catalog as a whole, in words; ``verify`` of a topic does not see it.

    The backend's own check of its file, where it has one, rows whose checksums do not match, and
    objects or rows of topics that the registry does not explain.
    """
    stored = set(stored_incarnations(context))
    yield from inspect_catalog(context)
    if isinstance(context.catalog, CheckedCatalog):
        stored |= set(_row_incarnations(context.catalog))
    try:
        yield from (error.message for error in unexplained(context, sorted(stored)))
    except CorruptError as exc:
        yield exc.message


def inspect_catalog(context: Context) -> Iterator[str]:
    """What the backend finds in its own file, and rows whose checksums do not match."""
    if isinstance(context.catalog, CheckedCatalog):
        yield from context.catalog.inspect()


def _row_incarnations(catalog: CheckedCatalog) -> Iterator[str]:
    """The incarnations that have heads, where the catalog can list them."""
    for partition, row in catalog.every_row():
        parts = partition.split("/")
        if row == "head" and parts[0] == "topic" and len(parts) == 3:
            yield parts[1]
