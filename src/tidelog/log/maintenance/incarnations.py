"""The topics that the objects of a home belong to, and whether the registry explains each of them.

A topic is registered before it has objects, and its deletion leaves a ``deleted`` row. So if an
incarnation has objects and neither row, the registry has lost one: these objects are never garbage.
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
    """Yields the incarnations that have objects, with one listing for each."""
    after = ""
    while (info := next(iter(context.store.list(TOPICS, after)), None)) is not None:
        incarnation = info.key.split("/")[1]
        if _INCARNATION.fullmatch(incarnation):
            yield incarnation
        after = f"{TOPICS}{incarnation}0"  # the character after the slash


def unexplained(context: Context, stored: Iterable[str]) -> list[CorruptError]:
    """Returns an error for each listed incarnation that the registry does not know."""
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
    """Marks an incarnation that the registry does not know as deleted; False for other names.

    A person decides that, after restoring a catalog that is older than the topic.
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
    """Returns whether the topic of an incarnation was deleted."""
    return context.catalog.get(layout.REGISTRY, layout.deleted_row(incarnation)) is not None


def inspect_home(context: Context) -> Iterator[str]:
    """Yields what is wrong with the whole catalog, in words; ``verify`` of a topic cannot see it.

    These are findings of the backend's own check, rows with a wrong checksum, and objects or rows
    of topics that the registry does not explain.
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
    """Yields findings of the backend's own check, and rows with a wrong checksum."""
    if isinstance(context.catalog, CheckedCatalog):
        yield from context.catalog.inspect()


def _row_incarnations(catalog: CheckedCatalog) -> Iterator[str]:
    """Yields the incarnations that have heads, if the catalog can list them."""
    for partition, row in catalog.every_row():
        parts = partition.split("/")
        if row == "head" and parts[0] == "topic" and len(parts) == 3:
            yield parts[1]
