"""The home of a command: one that only looks creates none.

The default home is created on first use. A command that cannot create anything in it, such as
``tidelog topic list``, gets an empty home in memory as long as there is none: it finds nothing, and
leaves nothing behind.
"""

from __future__ import annotations

import click

from tidelog.home import Home, World
from tidelog.home import open_home as open_any
from tidelog.opening import real_world
from tidelog.settings import DEFAULT_FOLDER, load_settings

__all__ = ["CREATING", "open_home"]

CREATING = frozenset(
    {
        "archive create",
        "follow",
        "home",
        "pump",
        "sample-traffic",
        "scribe",
        "serve",
        "token create",
        "topic create",
        "up",
    }
)
"""Commands that need no topic, archive or pump that was created before."""


def open_home(home_text: str | None, *, world: World | None = None) -> Home:
    """Open the home that a command works on."""
    world = world or real_world()
    command = click.get_current_context().command_path.partition(" ")[2]
    if command not in CREATING:
        settings = load_settings(home_text, world.environ, world.folder)
        if settings.is_default and not (world.folder / DEFAULT_FOLDER).exists():
            home_text = "memory:"
    return open_any(home_text, world=world)
