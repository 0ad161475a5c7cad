"""What to do about what a verify of an archive finds."""

from __future__ import annotations

from tidelog.archive.coverage import is_by_offset
from tidelog.context import Context
from tidelog.model.archive import Archive

__all__ = ["damage_remedy", "intent_remedy", "replay_command"]


def replay_command(archive: Archive, generation: int) -> str:
    """Returns the command that replays dead letters of a generation."""
    given = f"--generation {generation} " if generation == archive.building else ""
    return f"tidelog archive dead {archive.name} {given}--replay"


def intent_remedy(archive: Archive, generation: int, is_replay: bool) -> str:
    """Returns what finishes a range under way of a generation."""
    name = archive.name
    if archive.ended is not None:
        return "the archive has ended, so it stays"
    if archive.state_of(generation) == "kept":
        return f"a rollback finishes it, and `tidelog archive drop {name} {generation}` deletes it"
    command = "run" if generation == archive.generation else "backfill"
    command = f"tidelog archive {command} {name}"
    if is_replay:  # no other driver finishes it
        command = replay_command(archive, generation)
    return f"the next `{command}` finishes it"


def damage_remedy(context: Context, archive: Archive, generation: int) -> str:
    """Returns what repairs damaged files and manifests of a generation without a copy."""
    name = archive.name
    if generation != archive.generation:
        return f"remove this generation with `tidelog archive drop {name} {generation}`"
    if not is_by_offset(context, archive):  # another generation can only be made of its files
        return (
            "create another archive of the source, and end this one with "
            f"`tidelog archive delete {name}`"
        )
    return (
        f"make all files again with `tidelog archive backfill {name}`, and go over to them with "
        f"`tidelog archive promote {name}`; if the backfill fails as the damage is in its way, "
        f"`tidelog archive backfill {name} --accept-loss` does without these files, and `tidelog "
        f"archive promote {name} --force` accepts what the source no longer has"
    )
