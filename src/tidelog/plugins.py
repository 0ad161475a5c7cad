"""Plugins: what other packages offer under the entry points of Tidelog."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

__all__ = ["find_plugins"]


def find_plugins(group: str, name: str) -> EntryPoints:
    """Returns the entry points of a group, such as ``tidelog.sources``, that have a name."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - slow, and rarely needed

    return entry_points(group=group, name=name)
