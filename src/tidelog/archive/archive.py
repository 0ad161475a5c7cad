"""Creates archives and their folders, finds them, and opens their pipelines.

Creating one has four steps. The next create with the same settings finishes after a crash:

1. registry row ``archive/<name>`` as ``creating``, with an incarnation → a name, not usable yet
2. put ``_owner`` into its folder, which must be empty                  → a folder in use
3. list the current source partitions, with their ends                  → names without heads
4. registry row as ``ready``                                            → an archive

A source partition that is not in this list appeared later, and begins at its own first event.

A folder that another archive has marked, or that holds anything, is refused, and can never be
reused. So is a folder that contains another archive's folder, or is in one. If step 2
finds that out, or may not write there, the row of step 1 is deleted.

This module also checks the settings that callers pass as keyword arguments.

**Folders.** No two archives of a home contain one another, and each has its own names. Sweeps
delete from an archive's folder long after the archive, because a stalled driver may copy files
there (``delete``). So the folder of an archive that was deleted with its files stays in use
forever. Folders are compared by location: ``file:/x``, ``file:///x`` and a link to it are one.

Folders of other homes are known only by their ``_owner``, so the folders above are checked for one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, TypedDict, cast

import msgspec

from tidelog.archive.erased_events import ErasedBefore
from tidelog.archive.fill_files import fill_source
from tidelog.archive.freeze import HeadGate
from tidelog.archive.redo import redo_source
from tidelog.catalog.base import ABSENT, Put
from tidelog.codec.formats import settings_of
from tidelog.codec.parsers import folder_settings
from tidelog.codec.parsers.base import used_folder_settings
from tidelog.connectors.archive.sink import ArchiveSink, ArchiveSinkSettings
from tidelog.connectors.by_url import files_at, refuse_archive_folder, source_at, store_at
from tidelog.connectors.files.listing import parse_file_address
from tidelog.connectors.source import Source, bounds_apart
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import (
    change_archive,
    counting_files,
    decode_archive,
    encode_archive,
    is_detached,
    is_outside,
    list_archives,
    read_archive,
    read_partitions,
    read_progress,
)
from tidelog.coordination.registry import add_name, remove_name
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidError,
    NotFoundError,
    TidelogError,
    UnavailableError,
)
from tidelog.model import defaults, layout
from tidelog.model.address import address_below, format_address, parse_address
from tidelog.model.archive import Archive, ArchiveFormat, Start, check_archive_name, numbered
from tidelog.model.event import to_iso
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.model.schema import OBJECTS
from tidelog.model.times import duration_ms
from tidelog.pipeline.pipeline import Pipeline
from tidelog.pipeline.ranges import FilePolicy
from tidelog.pipeline.source_partitions import list_seen
from tidelog.pipeline.tasks import Workers
from tidelog.store.base import Store

__all__ = [
    "ArchiveKind",
    "ArchiveOptions",
    "FormatOptions",
    "archive_format",
    "archive_record",
    "check_active",
    "choose_start",
    "committed_files",
    "create_archive",
    "find_archive",
    "is_ours",
    "is_own_name",
    "open_pipeline",
    "own_folders",
    "place_of_root",
    "refuse_nested",
    "removed_archives",
    "with_place",
]

_Place = tuple[str, ...]
_ARCHIVES = "archives"  # the folder of a home's store with archives that have no location
_RESERVED = {kind.name.partition("/")[0] for kind in OBJECTS} - {_ARCHIVES} | {".tidelog"}


def place_of_root(store: str, root: str = "") -> _Place:
    """Returns the location of a folder; the same folder has the same parts."""
    address = parse_address(store, plain_scheme="file")
    if address.scheme == "file":
        return ("file", *Path(address.path, root).resolve().parts)
    host = address.host if address.port is None else f"{address.host}:{address.port}"
    return (address.scheme, host, *filter(None, f"{address.path}/{root}".split("/")))


def with_place(context: Context, archive: Archive) -> Archive:
    """Returns the archive with its folder's store and root.

    Sets ``home`` if the folder is outside the home's store. Raises ``InvalidError`` for a reserved
    folder.
    """
    own, mine = place_of_root(context.store.url), place_of_root(archive.store, archive.root)
    options = [parse_address(url, "file").options for url in (context.store.url, archive.store)]
    if _contains(own, mine) and options[0] == options[1]:
        root = "/".join(mine[len(own) :])
        if root in ("", _ARCHIVES) or root.partition("/")[0] in _RESERVED:
            raise InvalidError(
                f"archive `{archive.name}`: its folder `{root}` is one in which this home keeps "
                "other objects: leave --to out, or choose another folder"
            )
        return msgspec.structs.replace(archive, store=context.store.url, root=root)
    if archive.root in ("dead", "staging"):
        raise InvalidError(
            f"archive `{archive.name}`: `{archive.place}` is where archives beside "
            "it put other objects: choose another folder"
        )
    context.identity.check(f"archive `{archive.name}` in `{archive.place}`")
    store = store_at(context, archive.store).url
    return msgspec.structs.replace(archive, store=store, home=context.home_id)


def removed_archives(context: Context) -> Iterator[Archive]:
    """Yields the archives that were deleted with their files, which have no name any more."""
    for row in context.catalog.scan(layout.REGISTRY, layout.removed_row(""), "removed0"):
        yield decode_archive(context, row)


def refuse_nested(context: Context, archive: Archive) -> None:
    """Raises ``InvalidError`` if its folder contains another archive's, or is in one."""
    mine = place_of_root(archive.store, archive.root)
    what = f"archive `{archive.name}`: its folder `{archive.root}` of `{archive.store}`"
    for gone, others in ((False, list_archives(context)), (True, removed_archives(context))):
        for other in others:
            if other.name == archive.name and not gone:
                continue  # its name decides about that
            theirs = place_of_root(other.store, other.root)
            if not _contains(mine, theirs) and not _contains(theirs, mine):
                continue
            relation = "contains" if len(mine) < len(theirs) else "is in"
            state = ", which was deleted: late copies of it are deleted there" if gone else ""
            raise InvalidError(
                f"{what} {relation} folder `{other.root}` of archive `{other.name}`{state}: "
                "choose another folder"
            )
    if is_outside(context, archive):
        own = place_of_root(context.store.url)
        if _contains(mine, own) or _contains(own, mine):
            raise InvalidError(f"{what} contains this home, or is in it: choose another folder")
        _refuse_marked_above(context, archive, what)


def own_folders(archive: Archive) -> list[str]:
    """Returns the prefixes of keys that an archive writes below its root, except ``_owner``."""
    generations = [f"{archive.folder(number)}/" for number in range(1, archive.newest + 1)]
    return [layout.aside_folder(archive.root), f"{archive.root}/_iceberg/", *generations]


def is_own_name(archive: Archive, key: str) -> bool:
    """Returns whether an archive could have written an object with this name."""
    folder, _, below = key.removeprefix(f"{archive.root}/").partition("/")
    if folder in ("_aside", "_iceberg"):
        return True
    name = below.rpartition("/")[2]
    of_generation = name.removeprefix("_").startswith(f"{folder.removeprefix('g')}_")
    return of_generation or name == "_SUCCESS" or below.startswith("_delta_log/")


def is_ours(store: Store, archive: Archive) -> bool:
    """Returns whether a folder still has this archive's mark."""
    try:
        return store.get(archive.owner) == archive.owner_content
    except NotFoundError:
        return False


def _refuse_marked_above(context: Context, archive: Archive, what: str) -> None:
    """Raises for a folder below one that an archive of any home has marked."""
    address = parse_address(f"{archive.store.partition('?')[0]}/{archive.root}", "file")
    parts = [part for part in address.path.split("/") if part]
    host = address.host if address.port is None else f"{address.host}:{address.port}"
    options = parse_address(archive.store, "file").options
    for depth in range(len(parts)):
        above = format_address(address.scheme, host, f"/{'/'.join(parts[:depth])}", options)
        is_owned = False
        with contextlib.suppress(TidelogError):  # skip one that we may not read
            store_at(context, above).head("_owner")
            is_owned = True
        if is_owned:
            raise InvalidError(
                f"{what} is in the folder of another archive, as `{above.rstrip('/')}/_owner` "
                "says: choose another folder"
            )


def _contains(outer: _Place, inner: _Place) -> bool:
    return inner[: len(outer)] == outer


def create_archive(
    context: Context, wanted: Archive, record: Callable[[], None] = lambda: None
) -> Archive:
    """Creates an archive. Raises ``AlreadyExistsError``, or ``InvalidError`` for a used folder.

    ``record`` is called once, before the name is added.
    """
    check_archive_name(wanted.name)
    open_sink(wanted)  # raises for an unknown parser, format or setting before anything is created
    FilePolicy(wanted.max_bytes, wanted.max_age_ms)
    source = source_at(context, wanted.source)
    wanted = msgspec.structs.replace(wanted, source=source.url)  # turns `newest` into a time
    wanted = with_place(context, _with_unused_folders(context, wanted))
    _refuse_own_files(context, wanted)
    refuse_archive_folder(context, wanted.source, f"archive `{wanted.name}`")
    # Check that it exists, and how far it goes. If it cannot be reached, the driver sees it later.
    bounds = bounds_apart(source, source.partitions(), {})
    name = layout.archive_row(wanted.name)
    row = context.catalog.get(layout.REGISTRY, name)
    if row is None:
        refuse_nested(context, wanted)
        _refuse_used_folder(context, wanted)
        record()
        add_name(
            context,
            Put(name, encode_archive(context, wanted), ABSENT),
            check=partial(_check_folder, context, wanted),
        )
        row = context.catalog.get(layout.REGISTRY, name)
    archive = decode_archive(context, row) if row else wanted
    if archive.ended is not None:
        do = f", or delete them with `tidelog archive delete {wanted.name} --delete-files`"
        raise AlreadyExistsError(
            f"archive `{wanted.name}`: was ended, and its files stay in `{archive.place}`: choose "
            f"another name{'' if is_detached(context, archive) else do}"
        )
    if row is None or archive.state == "ready":
        raise AlreadyExistsError(f"archive `{wanted.name}`: exists already: choose another name")
    if not _same(archive, wanted):
        raise AlreadyExistsError(
            f"archive `{wanted.name}`: its creation with other settings did not finish: "
            "create it with the same ones"
        )
    try:
        _put_owner(context, archive)
    except InvalidError:  # the folder is not ours: keep the name usable
        with contextlib.suppress(TidelogError):
            begun = archive.incarnation
            remove_name(
                context, name, lambda each: decode_archive(context, each).incarnation == begun
            )
        raise
    list_seen(context, archive.pipeline(), bounds)
    ready = msgspec.structs.replace(archive, state="ready")
    try:
        change = Put(name, encode_archive(context, ready), row.version)
        context.catalog.write(layout.REGISTRY, change, write_id=context.ids.new())
    except ConflictError:  # another process finished or withdrew it
        return find_archive(context, wanted.name)
    return ready


def find_archive(context: Context, name: str) -> Archive:
    """Returns the archive with a name. Raises ``NotFoundError``, also while it is deleted."""
    found = read_archive(context, name)
    if found.ended is not None and found.ended.removing:
        raise NotFoundError(
            f"archive `{name}`: its files are being deleted: run `tidelog archive delete {name} "
            "--delete-files` again to finish that"
        )
    return found


def check_active(archive: Archive) -> None:
    """Raises ``InvalidError`` for an archive that was ended: it accepts no events."""
    if archive.ended is not None:
        raise InvalidError(
            f"archive `{archive.name}`: was ended at {to_iso(archive.ended.at_ms)}: create another "
            "archive to continue"
        )


def open_pipeline(
    context: Context,
    archive: Archive,
    workers: Workers,
    generation: int | None = None,
    rate: float | None = None,
    accept_loss: bool = False,
) -> Pipeline:
    """Opens the pipeline that fills a generation of an archive; by default the live one.

    With ``accept_loss``, a generation that is being built skips what is damaged in the live one.
    """
    written_as = archive.format_of(generation)
    check_active(archive)
    files_at(context, archive)  # raises unless the folder is ours
    number = archive.generation if generation is None else generation
    if archive.state_of(number) == "building":
        given = source_at(context, written_as.source or archive.source)
        filled = fill_source(context, archive, number, given)
        if accept_loss:
            filled.pass_damage()
        source: Source = filled
        if written_as.redo is not None:
            source = redo_source(context, archive, number, filled)
    else:
        source = source_at(context, archive.source)
    return Pipeline(
        archive.name,
        archive.pipeline(generation),
        source,
        open_sink(archive, generation),
        workers,
        written_as.transform,
        rate,
        HeadGate(context, archive, number),
        archive.start if archive.state_of(number) != "building" else "earliest",
        lists=archive.state_of(number) != "building",  # that one begins where the live one does
        erased=ErasedBefore(context, archive, number),
        title=f"archive {archive.name}, generation {number}",
    )


def choose_start(context: Context, name: str, start: Start) -> Archive:
    """Changes where an archive begins. Raises ``InvalidError`` if anything of it has begun."""
    found = find_archive(context, name)
    check_active(found)
    pipeline = found.pipeline()
    begun = found.newest > 1 or any(
        read_progress(context, pipeline, each) for each in read_partitions(context, pipeline)
    )
    if start == found.start:
        return found
    if begun:
        raise InvalidError(
            f"archive `{name}`: began at {found.start}, and --start {start} no longer counts: run "
            "it without --start, or create another archive"
        )
    return change_archive(context, name, lambda each: msgspec.structs.replace(each, start=start))


def open_sink(archive: Archive, generation: int | None = None) -> ArchiveSink:
    """Returns the sink that writes the files of a generation."""
    return ArchiveSink(sink_settings(archive, generation))


def sink_settings(archive: Archive, generation: int | None = None) -> ArchiveSinkSettings:
    """Returns how to write the files of a generation."""
    written_as = archive.format_of(generation)
    return ArchiveSinkSettings(
        store=archive.store,
        root=archive.root,
        dead=archive.dead,
        generation=archive.generation if generation is None else generation,
        parser=written_as.parser or None,
        layout=folder_settings(written_as.parser, written_as.layout),
        format=written_as.format,
        codec=written_as.codec or None,
        format_settings=settings_of(written_as.format_settings),
        file_bytes_max=archive.max_bytes,
        dead_share_max=archive.dead_share_max,
        name=archive.name,
        is_building=generation is not None and generation == archive.building,
        owner=archive.owner_content.decode() if archive.home else "",
    )


def committed_files(context: Context, archive: Archive) -> Iterator[tuple[Manifest, FileEntry]]:
    """Yields the files that count, range by range: the output of the manifest command."""
    for partition in read_partitions(context, archive.pipeline()):
        yield from counting_files(context, archive.pipeline(), partition)


def _with_unused_folders(context: Context, archive: Archive) -> Archive:
    """Returns the archive with folders that no deleted archive of its name had: late copies."""
    number = 1 + _deleted_before(context, archive.name)
    root = archive.root
    if root == f"archives/{archive.name}" and archive.store == context.store.url:
        root = f"archives/{numbered(archive.name, number)}"
    return msgspec.structs.replace(archive, root=root, number=number)


def _check_folder(context: Context, archive: Archive) -> None:
    """Raises if a delete has used the number since, or another archive has the folder."""
    refuse_nested(context, archive)
    if archive.number != 1 + _deleted_before(context, archive.name):
        raise UnavailableError(f"archive `{archive.name}`: was deleted just now: create it again")


def _deleted_before(context: Context, name: str) -> int:
    return sum(each.name == name for each in removed_archives(context))


def _refuse_own_files(context: Context, archive: Archive) -> None:
    """Raises if a source of files includes the home's own files, or the archive's."""
    address = parse_address(archive.source)
    if address.scheme != "file":
        return
    place = parse_file_address(address)
    source = address_below(place.store, place.folder)
    within = address_below(context.store.url, "")
    folder = address_below(archive.store, f"{archive.root}/")
    problem = ""
    if within.startswith(source):
        problem = "holds this home"
    elif folder.startswith(source) or source.startswith(folder):
        problem = "holds the archive's own files"
    elif source.startswith(within) and not source.startswith(f"{within}archives/"):
        problem = "is a part of this home"
    if problem:
        raise InvalidError(
            f"archive `{archive.name}`: source `{archive.source}` {problem}, so the home would "
            "be archived into itself: give a folder beside it"
        )


def _refuse_used_folder(context: Context, archive: Archive) -> None:
    store = store_at(context, archive.store)
    for info in store.list(f"{archive.root}/"):
        do = "choose another folder"
        with contextlib.suppress(NotFoundError):
            store.head(archive.owner)
            do = (
                "it belongs to an archive that the catalog does not know, as after a restore from "
                "a copy of before it was made: move that folder away if you need its files, else "
                "delete it, or choose another folder"
            )
        raise InvalidError(
            f"archive `{archive.name}`: its folder `{archive.root}` of `{archive.store}` is not "
            f"empty, it holds `{info.key}`: {do}"
        )


def _put_owner(context: Context, archive: Archive) -> None:
    """Step 2."""
    store = store_at(context, archive.store)
    try:
        store.put(archive.owner, archive.owner_content)
    except AlreadyExistsError:
        if store.get(archive.owner) != archive.owner_content:
            raise InvalidError(
                f"archive `{archive.name}`: its folder `{archive.root}` of `{archive.store}` "
                "belongs to another archive: choose another folder"
            ) from None


def _same(one: Archive, other: Archive) -> bool:
    apart = ("incarnation", "created_ms", "state")
    names = [name for name in one.__struct_fields__ if name not in apart]
    return all(getattr(one, name) == getattr(other, name) for name in names)


ArchiveKind = Literal["backup", "partition"]
"""Every event unchanged, or in folders named by a parser."""

_LAYOUT = ("granularity", "time_zone", "date_format", "hour_format", "minute_format")
_FORMAT = ("mode", "delimiter", "key", "compression", "schema", "keep_value", "strict")


class FormatOptions(TypedDict, total=False):
    """How to write the files of a generation. None, or a missing key, means the default.

    For a backfill the default is the setting of the live generation.
    """

    parser: str | None  # names folders: json:meta.at, iso8601:created, timestamp, …
    transform: str | None  # module:function, from DataFrame to DataFrame; needs Spark
    format: str | None  # parquet (default), orc, avro, jsonlines, delimited or sequence
    codec: str | None  # default: the format's own
    granularity: str | None  # day (default), hour or minute
    time_zone: str | None  # time zone of the folders' days; default UTC
    date_format: str | None  # name of a day's folder: dt=%Y-%m-%d
    hour_format: str | None  # name of an hour's folder: hr=%H
    minute_format: str | None  # name of a minute's folder: min=%M
    schema: str | None  # typed columns, as DDL or JSON Schema
    keep_value: bool | None  # with a schema: keep the raw value next to the columns (default)
    strict: bool | None  # with a schema: whether unknown fields are errors
    mode: str | None  # of jsonlines: value or events
    delimiter: str | None  # of delimited: what follows each value
    key: str | None  # of sequence: offset or msgpack
    compression: str | None  # of sequence: block or record


class ArchiveOptions(FormatOptions, total=False):
    """How to create an archive."""

    to: str | None  # URL of its folder; default: archives/NAME of the home
    max_bytes: int  # close a file at this size; default 200 MB
    max_age: str | int  # or when its first event has waited this long; default 1h
    dead_share: float  # a larger share of dead letters stops a range; default 0.1
    start: Start  # earliest (default), or latest: the current ends of the source
    who: str  # for the audit; default: user@host


def archive_format(
    options: FormatOptions, before: ArchiveFormat | None = None, source: str = ""
) -> ArchiveFormat:
    """Returns how to write files; a missing setting stays as ``before``."""
    was = before or ArchiveFormat()
    given = {name: value for name, value in options.items() if value is not None}
    layout = {name: cast(str, given[name]) for name in _LAYOUT if name in given}
    formats = {name: given[name] for name in _FORMAT if name in given}
    parser = _or_before(options.get("parser"), was.parser)
    inherited = {**was.layout, **layout}
    layout = {**used_folder_settings(parser, inherited), **layout}  # never ignore a given setting
    same_format = options.get("format") in (None, was.format)
    return ArchiveFormat(
        parser=parser,
        transform=_or_before(options.get("transform"), was.transform),
        format=_or_before(options.get("format"), was.format),
        codec=_or_before(options.get("codec"), was.codec if same_format else ""),
        layout=layout,
        format_settings={**(was.format_settings if same_format else {}), **formats},
        source=source,
    )


def archive_record(
    context: Context, name: str, source: str, kind: ArchiveKind | None, options: ArchiveOptions
) -> Archive:
    """Returns the record of an archive to create. Raises ``InvalidError``."""
    store, root = context.store.url, f"archives/{name}"
    to = options.get("to")
    if to is not None:
        where, mark, given = to.partition("?")
        store, _, root = where.rstrip("/").rpartition("/")
        if not root or not store or store.endswith(":/") or (mark and "://" not in store):
            raise InvalidError(
                f"archive `{name}`: --to `{to}`: give a folder below a store, such as "
                "s3://bucket/folder or ./folder"
            )
        store = f"{store}{mark}{given}"
    made = archive_format(options)
    return Archive(
        name=name,
        incarnation=context.ids.new(),
        source=source,
        kind=kind or ("partition" if made.parser else "backup"),
        store=store,
        root=root,
        created_ms=context.clock.now_ms(),
        formats={1: made},
        max_bytes=options.get("max_bytes", defaults.ARCHIVE_FILE_BYTES),
        max_age_ms=duration_ms(options.get("max_age", defaults.ARCHIVE_FILE_AGE)),
        dead_share_max=options.get("dead_share", defaults.DEAD_SHARE),
        start=options.get("start", "earliest"),
    )


def _or_before(given: str | None, before: str) -> str:
    return before if given is None else given
