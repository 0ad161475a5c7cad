"""Registration: brings a table up to the commits of an archive, each range once.

A table is named by a text: ``delta`` for one whose log is in the folder of the generation, or
``iceberg:CATALOG#NAMESPACE.TABLE``. The table itself says how far it is in every lane (a source
partition of the archive, or of the replays of its dead letters):

0. record the table in the archive's row, unless it would
   refuse the files: every later erasure and promote
   reaches it                                              → crash: a name without a table
1. read how far the table is, and where its last addition began → crash: nothing has changed
2. read the manifests of that addition again, and correct
   entries of files that an erasure has changed since      → crash: the next one looks again
3. collect the files of the ranges after that              → crash: the same
4. add them and the new ends in one commit, which fails
   if another moved an end since step 1, and go to 1       → crash: whole ranges are in the table

So after a crash the next register resumes. Of two at once, one fails at step 4 and looks again.
Dead letters and sidecars are not part of a table. Folder names such as ``dt=2026-11-15`` become
partition columns.

Every recorded table follows every change of files, whether or not drivers keep it up to date:

- An erasure corrects the entries of files that it rewrote (``correct_entries``), in any
  generation. It reads the row after its own commit, so it sees every table whose files were
  collected before that. A table skips files that it does not list. Step 2 is for files collected
  before the erasure's commit and added after it.
- A promote moves every table to the files of the new generation (``replace_files``), even if that
  has none. So does a drop before it deletes files, in case a promote crashed. After that it deletes
  the versions of tables that name these files (``forget_files``), because folders may be named by
  fields of erased events. Step 1 reads the table, then the archive's row, so a register that
  stalled during a promote cannot bring the old files back.
- A register that crashes after step 4 next to an erasure may leave stale entries of its addition. A
  sweep does step 2 for every table (``settle_tables``) and corrects them. So do the next register
  and ``delete --prove``; a proof is not clean before that (``stale_entries``).
- After a restore of the catalog, a driver moves files of lost ranges away
  (``pipeline.forgotten_ranges``). A table that lists them is refused in step 1 forever: their range
  is done again, possibly with other events, and the table's ends do not show that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import msgspec

from tidelog.archive.archive import find_archive
from tidelog.archive.table_files import (
    RegisterResult,
    Table,
    TableAddition,
    TableFile,
    TablePlan,
    TableStatus,
)
from tidelog.catalog.update import attempts, pause, rounds
from tidelog.codec.formats import open_format, settings_of
from tidelog.codec.formats.parquet import ParquetFormat
from tidelog.connectors.by_url import files_at
from tidelog.context import Context
from tidelog.coordination.commits import read_manifests
from tidelog.coordination.pipeline_rows import (
    change_archive,
    read_archive,
    read_erased,
    read_partitions,
    read_progress,
    replay_pipeline,
)
from tidelog.errors import (
    ConflictError,
    CorruptError,
    InvalidError,
    TidelogError,
    UnavailableError,
    contained,
    raise_first,
)
from tidelog.model import layout
from tidelog.model.address import parse_address
from tidelog.model.archive import Archive
from tidelog.model.pipeline import FileEntry
from tidelog.model.times import Backoff
from tidelog.pipeline.forgotten_ranges import read_aside

__all__ = [
    "change_tables",
    "check_table",
    "check_tables",
    "correct_entries",
    "forget_files",
    "forget_table",
    "is_in_delta_table",
    "open_table",
    "register",
    "register_archive",
    "register_table",
    "repair_tables",
    "replace_files",
    "resolve_table",
    "settle_tables",
    "stale_entries",
]

_FILES_AT_ONCE = 1_000  # in one commit of a table
_COMMITS = Backoff(50, base_ms=50, max_ms=1_000)  # against others who commit
_REPEATS = 8  # of a commit whose store or catalog does not respond


def check_table(archive: Archive, name: str) -> None:
    """Raises ``InvalidError`` for what cannot be a table, without reaching any server."""
    _plan(archive)
    kind, _, rest = name.partition(":")
    catalog, _, table = rest.rpartition("#")
    namespace, _, last = table.rpartition(".")
    is_glue = kind == "glue" and not catalog and re.fullmatch(r"\w+\.\w+", rest) is not None
    is_iceberg = kind == "iceberg" and catalog and namespace and last
    if name != "delta" and not is_glue and not is_iceberg:
        raise InvalidError(
            f"archive `{archive.name}`: table `{name}`: give delta, "
            "iceberg:CATALOG#NAMESPACE.TABLE, or glue:DATABASE.TABLE"
        )
    if kind == "iceberg" and "kms_key" in parse_address(archive.store, "file").options:
        raise InvalidError(
            f"archive `{archive.name}`: the store of its files names a key of KMS, and Iceberg's "
            "library writes its metadata without the key: give delta or glue:DATABASE.TABLE, or "
            "make that key the default of the bucket and leave it out of the address"
        )


def resolve_table(archive: Archive, name: str) -> str:
    """Returns a table's name with the whole path of a SQLite catalog; a recorded name unchanged.

    Drivers and erasures open the catalog later, in other working directories.
    """
    prefix = "iceberg:sqlite:///"
    path = name.removeprefix(prefix)
    if name in archive.tables or path == name or path.startswith(("/", ":memory:", "#", "?")):
        return name
    return f"{prefix}{Path.cwd() / path}"


def check_tables(context: Context, archive: Archive, generation: int) -> None:
    """Raises ``InvalidError`` if a generation's files cannot replace those of the tables."""
    view = _with_generation(archive, generation)
    for name in archive.tables:
        try:
            open_table(context, view, name).check(_table_files(context, view))
        except InvalidError as exc:
            raise InvalidError(
                f"{exc}; or drop table `{name}`, then forget it: `tidelog archive register "
                f"{archive.name} --forget`"
            ) from exc


def change_tables(context: Context, archive: Archive, name: str, *, keep: bool) -> Archive:
    """Records a table, and sets whether drivers keep it up to date from now on."""
    _check_new(context, archive, open_table(context, archive, name), name)

    def edit(found: Archive) -> Archive:
        kept = tuple(each for each in found.kept if each != name)
        return msgspec.structs.replace(
            _with_table(found, name), kept=(*kept, name) if keep else kept
        )

    return change_archive(context, archive.name, edit)


def forget_table(context: Context, archive: Archive, name: str) -> Archive:
    """Removes a table from the record: nothing changes it any more. Raises ``InvalidError``."""

    def edit(found: Archive) -> Archive:
        if name not in found.tables:
            known = ", ".join(f"`{each}`" for each in found.tables) or "none"
            raise InvalidError(
                f"archive `{archive.name}`: has no table `{name}`: its tables are {known}"
            )
        return msgspec.structs.replace(
            found,
            tables=tuple(each for each in found.tables if each != name),
            kept=tuple(each for each in found.kept if each != name),
        )

    return change_archive(context, archive.name, edit)


def register(context: Context, archive: Archive) -> list[RegisterResult]:
    """Brings the tables that drivers keep up to date to the archive's commits."""
    return [register_table(context, archive, name) for name in archive.kept]


def register_archive(context: Context, name: str) -> None:
    """Does the same for an archive as it is now, after a cycle of its driver."""
    register(context, find_archive(context, name))


def replace_files(context: Context, archive: Archive) -> None:
    """Brings every recorded table to the live generation, before older files are deleted.

    A table with an error does not stop the others; the first error is raised at the end.
    """
    errors: list[TidelogError] = []
    for name in archive.tables:
        with contained(f"table `{name}`", errors.append):
            register_table(context, archive, name)
    raise_first(errors)


def forget_files(context: Context, archive: Archive, generation: int) -> None:
    """Deletes the versions of every recorded table that name files of a dropped generation."""
    for name in archive.tables:
        _forget(context, open_table(context, archive, name), generation)


def _forget(context: Context, table: Table, generation: int) -> None:
    _retry_until_done(context, table, lambda: not table.forget(generation))


def register_table(
    context: Context, archive: Archive, name: str, *, count: bool = False
) -> RegisterResult:
    """Brings one table up to the commits of the live generation; creates it if needed.

    With ``count`` it also counts the files that the table lists then, which takes a while for many.
    Safe to kill, to repeat, and to run twice at once. Raises ``InvalidError`` for an archive that
    is not Parquet, and for a table that holds something else.
    """
    table = open_table(context, archive, name)
    if name not in archive.tables:
        _check_new(context, archive, table, name)
        change_archive(context, archive.name, lambda found: _with_table(found, name))
    files = events = 0
    while True:
        archive, table, added = _add_next(context, archive, table, name)
        if added is None:
            now = table.count() if count else None
            return RegisterResult(name, table.where, files, events, now)
        files += len(added.files)
        events += sum(file.entry.events for file in added.files)


def _add_next(
    context: Context, archive: Archive, table: Table, name: str
) -> tuple[Archive, Table, TableAddition | None]:
    """Adds the next files to a table; returns them, None if it has all, and where they are."""
    refused = 0
    busy = UnavailableError(f"table `{name}`: others keep changing it: try again")
    for _ in attempts(context, busy, _COMMITS):
        addition = _next_addition(context, archive, table)
        present = read_archive(context, archive.name)  # after the table, on purpose
        if present.generation != archive.generation:
            archive, table = present, open_table(context, present, name)
            continue
        if not addition.files and not table.holds_another:
            return archive, table, None
        try:
            table.add(addition)
        except ConflictError:
            continue
        except (UnavailableError, CorruptError):
            # Whether the commit landed or not, the table itself says how far it is. Files that
            # differ from their manifests may do so because an erasure is replacing them.
            refused += 1
            if refused >= _REPEATS:
                raise
            continue
        return archive, table, addition
    raise busy


def _check_new(context: Context, archive: Archive, table: Table, name: str) -> None:
    """Raises before a table is recorded that is not ours, cannot be reached, or refuses the files.

    Every promote, drop and erasure would fail at the name of such a table.
    """
    if name not in archive.tables:
        table.through([])
        table.check(_table_files(context, archive))


def table_status(context: Context, archive: Archive, name: str) -> TableStatus:
    """Returns how many files wait to be added to a table, up to some hundreds. Changes nothing."""
    is_kept = name in archive.kept
    try:
        table = open_table(context, archive, name)
        lanes = dict(_lanes(context, archive))
        through = table.through([*lanes])
        files = events = 0
        for lane, (pipeline, partition) in lanes.items():
            first = 0 if through is None else through.get(lane, 0)
            for manifest in read_manifests(context, pipeline, partition, first):
                data = [file for file in manifest.files if file.kind == "data" and file.events]
                files += len(data)
                events += sum(file.events for file in data)
                if files >= _FILES_AT_ONCE:
                    break
        return TableStatus(name, table.where, is_kept, files, events, through is None)
    except TidelogError as exc:
        return TableStatus(name, "", is_kept, 0, 0, True, exc.message)


def correct_entries(
    context: Context,
    archive: Archive,
    generation: int,
    files: Sequence[FileEntry],
    failed: dict[str, TidelogError],
) -> None:
    """Corrects the entries of rewritten files of a generation in every recorded table.

    Idempotent. A table that cannot be reached goes into ``failed`` and does not stop the others.
    Tables already in it are not tried, because each may take as long as a timeout.
    """
    changed = _rewritten_files(archive, generation, files)
    for name in read_archive(context, archive.name).tables if changed else ():
        if name in failed:
            continue
        with contained(f"table `{name}`", partial(failed.__setitem__, name)):
            _update_entries(
                context,
                open_table(context, _with_generation(archive, generation), name),
                lambda: changed,
            )


def repair_tables(context: Context, archive: Archive) -> list[TidelogError]:
    """Compares the entries of all rewritten files with every recorded table, and corrects them."""
    failed: dict[str, TidelogError] = {}
    for generation in archive.formats if archive.tables else ():
        files = _erased_files(context, archive, generation)
        correct_entries(context, archive, generation, files, failed)
    return list(failed.values())


def settle_tables(context: Context, archive: Archive) -> list[TidelogError]:
    """Does step 2 for every recorded table: a register may have crashed after its step 4.

    Only entries of the last addition can be stale then. Returns the errors of tables that could not
    be reached. Costs a read of each table of an archive with erased events.
    """
    failed: dict[str, TidelogError] = {}
    for generation in archive.in_state("live", "kept") if archive.tables else ():
        view = _with_generation(archive, generation)
        lanes = dict(_lanes(context, view))
        counts = [read_erased(context, *where) for where in lanes.values()]
        if not any(each.data or each.updated for each in counts):
            continue
        for name in archive.tables:
            with contained(f"table `{name}`", partial(failed.setdefault, name)):
                table = open_table(context, view, name)
                _settle_last_lot(context, view, table, lanes)
    return list(failed.values())


def stale_entries(context: Context, archive: Archive, generation: int) -> Iterator[tuple[str, str]]:
    """Yields each table with what is wrong in it: a stale entry, or an error."""
    names = read_archive(context, archive.name).tables
    files = _erased_files(context, archive, generation) if names else []
    changed = _rewritten_files(archive, generation, files)
    for name in names if changed else ():
        stale: Collection[str] = ()
        errors: list[TidelogError] = []
        with contained(f"table `{name}`", errors.append):
            stale = open_table(context, _with_generation(archive, generation), name).stale(changed)
        yield from ((name, f"cannot be read: {error}") for error in errors)
        yield from ((name, f"lists `{path}` as it was before the erasure") for path in stale)


def is_in_delta_table(context: Context, archive: Archive, generation: int, key: str) -> bool:
    """Returns whether a registered Delta table lists a file; False if it cannot be read.

    Another program may have written to the table: it lists what that has made of our files.
    """
    if "delta" not in read_archive(context, archive.name).tables:
        return False
    view, listed = _with_generation(archive, generation), list[str]()
    path = key.removeprefix(f"{archive.folder(generation)}/")
    with contained("table `delta`", lambda _: None):
        listed = open_table(context, view, "delta").paths()
    return path in listed


def _table_files(context: Context, archive: Archive) -> Iterator[TableFile]:
    """Yields the data files of the live generation."""
    for pipeline, partition in dict(_lanes(context, archive)).values():
        for manifest in read_manifests(context, pipeline, partition):
            files = (file for file in manifest.files if file.kind == "data")
            yield from (_table_file(archive, file) for file in files)


def _rewritten_files(
    archive: Archive, generation: int, files: Sequence[FileEntry]
) -> list[TableFile]:
    """Returns the files of a generation that were rewritten, as a table lists them."""
    if archive.format_of(generation).format != "parquet":
        return []
    view = _with_generation(archive, generation)
    return [_table_file(view, file) for file in files if _is_rewritten(file)]


def _erased_files(context: Context, archive: Archive, generation: int) -> list[FileEntry]:
    """Returns the data files of a generation that erasures or updates have rewritten."""
    return [
        file
        for pipeline, partition in dict(
            _lanes(context, _with_generation(archive, generation))
        ).values()
        for manifest in read_manifests(context, pipeline, partition)
        for file in manifest.files
        if _is_rewritten(file)
    ]


def _is_rewritten(file: FileEntry) -> bool:
    return file.kind == "data" and bool(file.erased or file.updated)


def _with_generation(archive: Archive, generation: int) -> Archive:
    """Returns the archive as if that generation were live."""
    return msgspec.structs.replace(archive, generation=generation)


def _with_table(archive: Archive, name: str) -> Archive:
    others = tuple(each for each in archive.tables if each != name)
    return msgspec.structs.replace(archive, tables=(*others, name))


def open_table(context: Context, archive: Archive, name: str) -> Table:
    """Returns the table with a name, without reaching any server."""
    check_table(archive, name)
    if name != "delta":
        context.identity.check(f"archive `{archive.name}`: table `{name}`")
    store = files_at(context, archive)  # raises unless the folder is ours
    plan, environ = _plan(archive, context.home_id), context.environ
    if name == "delta":
        from tidelog.archive.delta import DeltaLog  # noqa: PLC0415 - an extra

        return DeltaLog(plan, environ, context.clock)
    if name.startswith("glue:"):
        from tidelog.archive.glue import GlueTable  # noqa: PLC0415 - an extra

        return GlueTable(plan, name.removeprefix("glue:"), store, environ)
    from tidelog.archive.iceberg import IcebergTable  # noqa: PLC0415 - an extra

    return IcebergTable(plan, name.removeprefix("iceberg:"), environ)


def _plan(archive: Archive, context: str = "") -> TablePlan:
    written_as = archive.format_of()
    opened = open_format(
        written_as.format, written_as.codec or None, settings_of(written_as.format_settings)
    )
    if not isinstance(opened, ParquetFormat):
        raise InvalidError(
            f"archive `{archive.name}`: its files are {written_as.format}, and tables are made of "
            "parquet: make a generation in that format"
        )
    columns = opened.columns.schema
    kept = {event: name for event, name in opened.columns.names.items() if name in columns.names}
    return TablePlan(archive, context, columns, kept)


def _next_addition(context: Context, archive: Archive, table: Table) -> TableAddition:
    """Steps 1 to 3."""
    lanes = dict(_lanes(context, archive))
    through = _settle_last_lot(context, archive, table, lanes)
    _check_not_aside(context, archive, table)
    addition = TableAddition()
    for lane, (pipeline, partition) in lanes.items():
        first = 0 if through is None else through.get(lane, 0)
        _check_not_ahead(context, archive, table, (lane, first))
        for manifest in read_manifests(context, pipeline, partition, first):
            files = [_table_file(archive, file) for file in manifest.files if file.kind == "data"]
            if files:
                addition.files.extend(files)
                addition.through[lane] = manifest.ordinal + manifest.read
                addition.through[_begin_key(lane)] = first + 1
            if through is not None and len(addition.files) >= _FILES_AT_ONCE:
                return addition
    return addition


def _settle_last_lot(
    context: Context, archive: Archive, table: Table, lanes: Mapping[str, tuple[str, str]]
) -> Mapping[str, int] | None:
    """Steps 1 and 2. Returns how far the table is in each lane."""
    names = [*lanes, *map(_begin_key, lanes)]
    through = table.through(names)
    if through:
        last = through
        if _update_entries(context, table, lambda: _changed_files(context, archive, lanes, last)):
            through = table.through(names)
    return through


def _check_not_aside(context: Context, archive: Archive, table: Table) -> None:
    """Raises if a table lists files that were set aside after a restore."""
    own, root = archive.pipeline(), layout.aside_folder(archive.root)
    moved = {
        _without_folders(file.removeprefix(root).split("/", 2)[2])
        for pipeline in (own, replay_pipeline(own))
        for record in read_aside(context, pipeline)
        for file in record.files
    }
    found = table.paths() if moved else []
    listed = [path for path in found if _without_folders(path) in moved]
    if listed:
        raise InvalidError(
            f"archive `{archive.name}`: table `{table.where}` lists {len(listed)} files that were "
            f"set aside after a restore of the catalog, `{listed[0]}` first: drop the table, and "
            "register it again"
        )


def _without_folders(path: str) -> tuple[str, str]:
    """Returns the topic and the name of a file; a file set aside lacks some of its folders."""
    return path.partition("/")[0], path.rpartition("/")[2]


def _check_not_ahead(
    context: Context, archive: Archive, table: Table, reached: tuple[str, int]
) -> None:
    """Raises if a table has files of ranges that a restored catalog lost."""
    lane, first = reached
    pipeline, _, partition = lane.partition("/")
    head = read_progress(context, pipeline, partition) if first else None
    if first and (head is None or head.ordinal < first):
        raise InvalidError(
            f"archive `{archive.name}`: table `{table.where}` has come to event {first} of "
            f"`{partition}`, the archive to {head.ordinal if head else 0}: the catalog was "
            "restored from an older copy: drop the table, and register it again"
        )


def _update_entries(context: Context, table: Table, changed: Callable[[], list[TableFile]]) -> bool:
    """Updates a table until its entries match the files. Returns whether that was needed."""
    told = False

    def is_done() -> bool:
        nonlocal told
        done = not table.change(changed())
        told = told or not done
        return done

    _retry_until_done(context, table, is_done)
    return told


def _retry_until_done(context: Context, table: Table, is_done: Callable[[], bool]) -> None:
    """Calls ``is_done`` until it returns True, also after commits of others."""
    busy = UnavailableError(f"table `{table.where}`: others keep changing it: try again")
    for number in rounds(_COMMITS.attempts, busy):
        try:
            if is_done():
                return
        except ConflictError:
            pause(context, number, _COMMITS)


def _changed_files(
    context: Context,
    archive: Archive,
    lanes: Mapping[str, tuple[str, str]],
    through: Mapping[str, int],
) -> list[TableFile]:
    """Returns the files of the table's last addition that were rewritten."""
    found: list[TableFile] = []
    for lane, (pipeline, partition) in lanes.items():
        began = through.get(_begin_key(lane), 0)
        for manifest in read_manifests(context, pipeline, partition, began - 1) if began else ():
            if manifest.ordinal >= through.get(lane, 0):
                break
            files = [file for file in manifest.files if _is_rewritten(file)]
            found += [_table_file(archive, file) for file in files]
    return found


def _begin_key(lane: str) -> str:
    """Returns the key of where a lane's last addition began, plus 1; its value 0: unknown."""
    return f"{lane} began"


def _lanes(context: Context, archive: Archive) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields each lane's name, and where its commits are."""
    own = archive.pipeline()
    for pipeline in (own, replay_pipeline(own)):
        for partition in read_partitions(context, pipeline):
            yield f"{pipeline}/{partition}", (pipeline, partition)


def _table_file(archive: Archive, entry: FileEntry) -> TableFile:
    path = entry.target.removeprefix(f"{archive.folder()}/")
    named = [part.partition("=") for part in path.split("/")[:-1]]
    values = {name: unquote(value) for name, equals, value in named if name and equals}
    return TableFile(path, entry, values)
