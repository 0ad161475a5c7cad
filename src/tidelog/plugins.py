"""Other packages: plugins under the entry points of Tidelog, and extras that may be missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tidelog.errors import InvalidError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

__all__ = ["find_plugins", "needs_extra"]


def find_plugins(group: str, name: str) -> EntryPoints:
    """Returns the entry points of a group, such as ``tidelog.sources``, that have a name."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - slow, and rarely needed

    return entry_points(group=group, name=name)


@contextmanager
def needs_extra(what: str, package: str, extra: str) -> Iterator[None]:
    """Raises ``InvalidError`` if an import inside fails because a package is not installed."""
    try:
        yield
    except ModuleNotFoundError as exc:
        if exc.name and exc.name.startswith(package):
            message = f"{what} is not installed: pip install 'tidelog[{extra}]'"
            raise InvalidError(message) from exc
        raise
