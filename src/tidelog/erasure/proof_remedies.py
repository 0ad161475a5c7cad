"""What to do about each finding of a proof."""

from __future__ import annotations

from collections.abc import Iterable

from tidelog.connectors.by_url import pipelines_of
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import generation_pipeline
from tidelog.erasure.metadata_objects import DELTA, ICEBERG
from tidelog.erasure.unfinished_ranges import finish_remedy
from tidelog.log.maintenance.unfinished_writes import is_decided
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.model.topic import Topic

__all__ = [
    "ARCHIVE",
    "ASIDE",
    "CHANGED",
    "COMPILE",
    "COPYING",
    "DELETE",
    "FAILURE",
    "JOB",
    "KEEPER",
    "LOG",
    "MOVING",
    "NAMED_ARCHIVE",
    "NAMED_PIPELINE",
    "NOT_SWEPT",
    "REASON",
    "REBUILD",
    "RIGHTS",
    "SEEK",
    "STAGED",
    "STAGED_BEFORE",
    "STAGED_REPLAY",
    "STRAY",
    "SWEEP",
    "TABLE",
    "UNREAD",
    "UNSEEN",
    "UPLOAD",
    "VALUE",
    "again",
    "in_delta_table",
    "of_batch",
    "rebuild",
    "remedy_of",
    "why_loose",
]

COMPILE = "run `tidelog compile {topic} --amended`, then `tidelog sweep`"
STRAY = (
    "run `tidelog sweep`; if it keeps the object as a possible loss: `tidelog topic recover "
    "{topic}` appends what was not deleted of it, then sweep again; only if you can do without "
    "these events, `tidelog sweep --accept-loss {topic}` deletes them; what is younger "
    "than its grace waits for the next one"
)
VALUE = (
    "an update died before it took effect, or the catalog has lost it, and the value does not name "
    "its event: repeat the update if you miss it, run `tidelog topic recover {topic}` for other "
    "objects that no row names, then `tidelog sweep --accept-loss {topic}`, which deletes what is "
    "older than its grace; other sweeps delete it after a week"
)
ARCHIVE = "run `{delete} --prove`, which writes the file without it"
UNSEEN = "make the archive's files again with `tidelog archive backfill`, which keeps ids and keys"
TABLE = (
    "run `tidelog archive register {archive}`; if you have dropped the table, forget it: "
    "`tidelog archive register {archive} --forget`"
)
_AGAIN = (
    "if no driver works on it, {finish}; then prove again; if that fails, `tidelog archive status "
    "{archive}` shows why; `tidelog archive delete {archive}` ends the archive, and `tidelog "
    "archive drop {archive} N` a generation N that is being built"
)
COPYING = (
    "prove again when it has ended; `tidelog pipeline list` and `tidelog playback --list` show it; "
    "resume one that died, or forget it"
)
DELETE = "run `{delete} --prove`"
REASON = "run `{delete}` again, which takes it out of the audit"
SEEK = "run `{delete} --prove`, which takes it out of the home's audit"
LOG = "prove again; if it stays, end the process that reads the catalog's file all the time"
UPLOAD = (
    "prove again when its writer has ended; if that died, run `tidelog sweep`, which removes what "
    "is older than its grace"
)
RIGHTS = "give these credentials the right to list uploads (`docs/operating.md`), then prove again"
CHANGED = "run `tidelog sweep`, which finishes what has died, and prove again"
MOVING = "prove again when no process compiles or trims the topic all the time"
UNREAD = "prove again when its pipeline has published it, or run `tidelog sweep`"

_BATCH = (
    "let the write end; `tidelog sweep` deletes what a killed one has left, a day after it was "
    "staged"
)
_DECIDED = (
    "let its query run again, which stores the batch, then run `{{delete}} --prove`; if the query "
    "is gone, a Spark write with the options sink `{sink}` and batch {batch} stores it first; do "
    "not delete the object: its batch would be lost"
)

FAILURE = (
    "fix what fails and let its driver run until it commits there, which removes the row, or end "
    "its archive with `tidelog archive delete`; of a generation that is kept: `tidelog archive "
    "drop`"
)
JOB = "forget the job on the console's page of jobs, or by `home.jobs.forget('{job}')`"
KEEPER = "fix what fails; stop `tidelog up`, or wait a day if it was killed"

# Of loose objects, by their keys (``remedy_of``).
SWEEP = (
    "run `tidelog sweep`; what is younger than its grace waits for the next one; what no sweep "
    "deletes is not Tidelog's: look at it, then delete it"
)
STAGED = (
    "run `tidelog sweep`; what a driver that was killed has staged goes after its archive or pump "
    "has run again, or after `tidelog pipeline delete` where the source was deleted; what is "
    "younger than the sweep's grace waits for the next one"
)
STAGED_REPLAY = STAGED.replace("its archive or pump", "`tidelog archive dead NAME --replay`")
STAGED_BEFORE = (
    "no row knows what it was staged for, as after a restore of the catalog, and no sweep deletes "
    "it now: look at it, then delete it"
)
NOT_SWEPT = "no sweep removes it: look at it, then delete it"
ASIDE = (
    "run `{delete} --prove`; a file of a generation that the archive no longer has: copy what you "
    "still need of it, then delete it"
)
REBUILD = (
    "make the archive's files again with `tidelog archive backfill` and `tidelog archive promote`, "
    "then `tidelog archive drop` the old ones: the new ones are named without erased events"
)
_ENDED = (
    "the archive has ended: to keep the other events, run `tidelog archive restore {archive} --to "
    "topic:NAME`, archive that topic, and delete the restore's pipeline; then run `tidelog archive "
    "delete {archive} --delete-files`"
)
_FORGOTTEN = (
    "archive `{archive}` has no such table any more, so nothing changes the metadata of this one: "
    "drop the table in its catalog if it is still there, then delete the folder `{folder}`"
)
_ICEBERG_FILE = (
    "make the archive's files again with `tidelog archive backfill` and `tidelog archive promote`, "
    "then `tidelog archive drop` the old ones: the table lists the new ones alone; then delete "
    "this file; what that program has added to the table is lost with it"
)
NAMED_ARCHIVE = (
    "to keep the other events, run `tidelog archive restore {archive} --to topic:NAME`, archive "
    "that topic, and delete the restore's pipeline; then run `tidelog archive delete {archive} "
    "--delete-files`; only rows of the catalog keep the name then"
)
NAMED_PIPELINE = "run `tidelog pipeline delete {pipeline}`; only rows keep the name then"


def again(archive: Archive, pipeline: str) -> str:
    """Returns what to do about a range under way of an archive."""
    return _AGAIN.format(finish=finish_remedy(archive, pipeline), archive=archive.name)


def of_batch(context: Context, topic: Topic, key: str) -> tuple[str, str]:
    """Returns why a Spark write has staged an object, and what to do about it."""
    if not is_decided(context, topic, key):
        return "a Spark write has staged it", _BATCH
    sink, batch = layout.sink_batch(key)
    why = f"batch {batch} of Spark sink `{sink}` is decided, and not yet in the topic"
    return why, _DECIDED.format(sink=sink, batch=batch)


def why_loose(key: str) -> str:
    """Returns why an object that no commit names may be there."""
    if key.startswith("staging/"):
        return "it is staged"
    if _is_in_iceberg_table(key):
        return "another program has written it to the Iceberg table"
    return "it was set aside after a restore" if "/_aside/" in key else "no commit names it"


def in_delta_table(archive: str, folder: str) -> str:
    """Returns what to do about a file that another program has written to an archive's table."""
    return (
        f"delete the folder `{folder}{DELTA.strip('/')}`, then run `tidelog archive register "
        f"{archive} --as delta`, which makes the table again of the archive's own files, then "
        "delete this file; what that program has added to the table is lost with it"
    )


def rebuild(archives: Iterable[Archive], key: str) -> str:
    """Returns what to do about a name in an object of an archive: ``REBUILD``, if that helps."""
    for archive in archives:
        own = (f"{archive.root}/", *map(layout.manifests, pipelines_of(archive)))
        tables = f"{archive.root}{ICEBERG}"
        if archive.ended is not None and key.startswith(own):
            return _ENDED.replace("{archive}", archive.name)
        if key.startswith(tables):
            table = key.removeprefix(tables).partition("/")[0]
            if table not in {each.rpartition("#")[2] for each in archive.tables}:
                return _FORGOTTEN.format(archive=archive.name, folder=f"{tables}{table}")
    return REBUILD


def remedy_of(key: str) -> str:
    """Returns what deletes a loose object; a sweep deletes only those of topics and staging."""
    if key.startswith("staging/"):
        pipeline = layout.staging_pipeline(key)
        return STAGED if generation_pipeline(pipeline) == pipeline else STAGED_REPLAY
    if key.startswith("topics/"):
        return SWEEP
    if _is_in_iceberg_table(key):
        return _ICEBERG_FILE
    if ICEBERG in key or DELTA in key:  # it names files; a drop deletes it with them
        return REBUILD
    return ASIDE if "/_aside/" in key else NOT_SWEPT


def _is_in_iceberg_table(key: str) -> bool:
    """Returns whether an object is where only others put data files: we list the archive's own."""
    _, folder, below = key.partition(ICEBERG)
    return bool(folder) and "/data/" in below
