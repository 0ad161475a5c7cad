"""Ends an archive, and deletes an ended archive with all its files.

An ended archive accepts no events, raises no alarm, and does not stop a trim of its source. Its
files stay readable. Erasures and proofs still cover them, because the registry's row stays.

1. the row says ``ended``, with an id; a running promote is
   withdrawn                                                   → crash: no driver begins a
                                                                 partition; the next delete or
                                                                 sweep finishes it
2. freeze: every head names that id, so no driver commits;
   unfinished ranges are settled (``freeze``)                  → crash: the same
3. change the fence of the drivers, so that idle ones stop
   too; delete the rows of failures, which may quote events    → crash: the same
4. the row says that this is settled

A copied home only does steps 1 and 4 for an archive outside: its files, and the drivers there,
belong to the original. An archive outside whose folder is gone can be deleted as lost, on request
(``delete_lost``): one write of its row does steps 1 to 5, followed by 6, 3 and 8.

Deleting the files as well:

5. refuse while a table, another archive or a pipeline needs
   the files; then the row says ``removing``                   → crash: the next delete, erasure
                                                                 or sweep finishes it
6. close every head                                            → crash: the same
7. delete files, dead letters, staged files, manifests, rows   → crash: the same; a proof still
                                                                 finds what is left
8. one write: delete the name's row, put
   ``removed/<incarnation>`` with the archive's folders        → the name is free

A stalled driver may copy files of a decided range after step 7. So ``_owner`` and the row of step 8
stay forever: every sweep deletes such copies, proofs search these folders, and no other archive may
use them, or a folder below or above (``archive``). A sweep deletes only names that the archive
could have written, and only if ``_owner`` is its own. A missing folder is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import msgspec

from tidelog.archive.archive import is_ours, is_own_name, open_sink, own_folders
from tidelog.archive.freeze import freeze_heads
from tidelog.catalog.base import Put, freeing
from tidelog.connectors.by_url import files_at, no_source, pipelines_of, store_at
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import (
    change_archive,
    check_ours,
    decode_archive,
    encode_archive,
    is_detached,
    is_outside,
    list_archives,
    list_pipelines,
    replay_pipeline,
)
from tidelog.coordination.registry import check_shown, remove_name
from tidelog.errors import InvalidError, NotFoundError
from tidelog.model import layout
from tidelog.model.address import parse_address
from tidelog.model.archive import Archive, ArchiveEnd
from tidelog.pipeline.failures import close_failures
from tidelog.pipeline.pipeline import Pipeline
from tidelog.pipeline.registry import close_heads, delete_below, remove_work
from tidelog.pipeline.share import stop_drivers
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.store.base import Store

__all__ = [
    "check_delete",
    "delete_archive",
    "delete_lost",
    "end_archive",
    "finish_ending",
    "finish_removal",
    "remove_late_copies",
]


def check_delete(
    context: Context, name: str, shown: str = "", *, files: bool = False, lost: bool = False
) -> None:
    """Raises what a delete of the archive would raise, and changes nothing.

    ``files`` is for :func:`delete_archive`, ``lost`` for :func:`delete_lost`.
    """
    archive = _present(context, name, shown)
    if lost:
        _check_lost(context, archive)
        _check_readers(context, archive, lost=True)
        return
    if files:
        _check_files(context, archive)
    _check_folder(context, archive)


def end_archive(context: Context, name: str, shown: str = "") -> Archive:
    """Ends an archive; its files stay. Raises ``NotFoundError``. Safe to repeat, also at once.

    Running drivers stop with ``FencedError``. ``shown``: see ``check_shown``.
    """
    with freeing(context.catalog):
        return _end(context, name, shown)


def _end(context: Context, name: str, shown: str) -> Archive:
    archive = _present(context, name, shown)
    _check_folder(context, archive)
    wanted = ArchiveEnd(context.ids.new(), context.clock.now_ms())

    def edit(found: Archive) -> Archive:
        check_shown(f"archive `{name}`", archive.incarnation, found.incarnation)
        if found.ended is not None:
            return found
        return msgspec.structs.replace(found, ended=wanted, promotion=None, kept=())

    return finish_ending(context, change_archive(context, name, edit))  # step 1


def finish_ending(context: Context, archive: Archive) -> Archive:
    """Does steps 2 to 4 of an archive that is being ended; nothing for another one."""
    ended = archive.ended
    if ended is None or ended.settled:
        return archive
    if not is_detached(context, archive):
        files_at(context, archive)  # raises unless the folder is ours
        for pipeline in _pipelines(context, archive):
            freeze_heads(context, pipeline, ended)  # step 2
        for each in pipelines_of(archive):
            stop_drivers(context, each)  # step 3
    for each in pipelines_of(archive):
        close_failures(context, each)

    def edit(found: Archive) -> Archive:
        if found.incarnation != archive.incarnation or found.ended is None:
            return found
        settled = msgspec.structs.replace(found.ended, settled=True)
        return msgspec.structs.replace(found, ended=settled)

    return change_archive(context, archive.name, edit)


def delete_archive(context: Context, name: str, shown: str = "") -> None:
    """Ends an archive and permanently deletes its files, dead letters and Delta tables.

    Raises ``NotFoundError``. Raises ``InvalidError`` while an Iceberg table lists its files, while
    another archive or a pipeline reads it, or if the files belong to another home. ``shown``: see
    ``check_shown``.
    """
    with freeing(context.catalog):
        _delete(context, name, shown)


def _delete(context: Context, name: str, shown: str) -> None:
    present = _present(context, name, shown)
    _check_files(context, present)
    archive = _end(context, name, present.incarnation)

    def edit(found: Archive) -> Archive:
        check_shown(f"archive `{name}`", archive.incarnation, found.incarnation)
        if found.ended is None:
            return found
        _check_unused(context, found)
        removing = msgspec.structs.replace(found.ended, removing=True)
        return msgspec.structs.replace(found, ended=removing)

    with contextlib.suppress(NotFoundError):  # another process finished it
        finish_removal(context, change_archive(context, name, edit))  # step 5


def delete_lost(context: Context, name: str, shown: str = "") -> None:
    """Ends an archive whose outside folder is gone, and frees its name.

    Raises ``NotFoundError`` for an unknown archive. Raises ``InvalidError`` unless the folder is
    empty, and while another archive or a pipeline reads the archive. Skips steps 2 to 4: unfinished
    ranges are lost with the folder.
    """
    archive = _present(context, name, shown)
    _check_lost(context, archive)
    wanted = ArchiveEnd(
        context.ids.new(), context.clock.now_ms(), settled=True, removing=True, lost=True
    )

    def edit(found: Archive) -> Archive:
        check_shown(f"archive `{name}`", archive.incarnation, found.incarnation)
        _check_readers(context, found, lost=True)
        return msgspec.structs.replace(found, ended=wanted, promotion=None, kept=())

    with (
        freeing(context.catalog),
        contextlib.suppress(NotFoundError),
    ):  # another process finished it
        finish_removal(context, change_archive(context, name, edit))


def _check_lost(context: Context, archive: Archive) -> None:
    """Raises if there are files, which a delete as lost would abandon."""
    what = f"archive `{archive.name}`"
    if not is_outside(context, archive):
        raise InvalidError(f"{what}: its folder is in the home: delete it with --delete-files")
    check_ours(context, archive)
    store = store_at(context, archive.store)
    for info in store.list(f"{archive.root}/"):
        do = "delete the archive without --lost-files"
        if not is_ours(store, archive):
            do = (
                f"put `{archive.owner}` back with `{archive.owner_content.decode()}` and delete "
                "the archive without --lost-files, or move that folder away first"
            )
        raise InvalidError(f"{what}: its folder `{archive.place}` still holds `{info.key}`: {do}")


def finish_removal(context: Context, archive: Archive) -> None:
    """Does steps 6 to 8 of an archive whose files are being deleted; nothing for another one."""
    if archive.ended is None or not archive.ended.removing:
        return
    for each in pipelines_of(archive):
        close_heads(context, each)
    if archive.ended.lost:
        for each in pipelines_of(archive):
            stop_drivers(context, each)  # as step 3, which was skipped
        remove_late_copies(context, archive)
    else:
        _remove_files(context, archive)  # step 7
    incarnation = archive.incarnation
    gone = Put(layout.removed_row(incarnation), encode_archive(context, archive))
    name = layout.archive_row(archive.name)
    remove_name(
        context, name, lambda row: decode_archive(context, row).incarnation == incarnation, gone
    )


def remove_late_copies(context: Context, archive: Archive) -> None:
    """Deletes what stalled drivers have added to a deleted archive since.

    Only names that it could have written, in a folder that still has its mark. Other files, and a
    folder that is missing or another's, are never touched.
    """
    files = store_at(context, archive.store)
    if is_ours(files, archive):
        for folder in own_folders(archive):
            delete_below(files, folder, partial(is_own_name, archive))
    _remove_other_work(context, archive, files)


def _remove_files(context: Context, archive: Archive) -> None:
    """Step 7: deletes all objects and rows of an archive; its mark and closed heads stay."""
    files = files_at(context, archive)
    for folder in own_folders(archive):
        delete_below(files, folder)
    _remove_other_work(context, archive, files)


def _remove_other_work(context: Context, archive: Archive, files: Store) -> None:
    """Deletes what is not below its root; the names of these folders have its incarnation."""
    delete_below(files, f"{archive.dead}/")
    for each in pipelines_of(archive):
        remove_work(context, each, files)


def _present(context: Context, name: str, shown: str) -> Archive:
    """Returns the archive with a name, also while it is deleted. Raises ``NotFoundError``."""
    found = next((each for each in list_archives(context) if each.name == name), None)
    if found is None:
        raise NotFoundError(f"archive `{name}`: not found: nothing to delete")
    check_shown(f"archive `{name}`", shown, found.incarnation)
    if found.state != "ready":
        raise InvalidError(
            f"archive `{name}`: its creation did not finish: create it again with the same "
            "settings, then delete it"
        )
    return found


def _check_folder(context: Context, archive: Archive) -> None:
    """Raises, before any change, if a folder outside is not there or is another home's."""
    if is_outside(context, archive):
        context.identity.check(f"archive `{archive.name}` in `{archive.place}`")
        if not is_detached(context, archive):
            files_at(context, archive)


def _check_files(context: Context, archive: Archive) -> None:
    """Raises, before any change, if the files are not ours, or something needs them."""
    if archive.ended is None or not archive.ended.removing:
        files_at(context, archive)
        _check_unused(context, archive)


def _pipelines(context: Context, archive: Archive) -> Iterator[Pipeline]:
    """Yields the pipeline of each generation, without a source, to finish decided ranges only."""
    for generation in archive.in_state("kept"):
        source, sink = no_source(context), open_sink(archive, generation)
        own = archive.pipeline(generation)
        for each in (own, replay_pipeline(own)):
            yield Pipeline(archive.name, each, source, sink, LocalWorkers())


def _check_unused(context: Context, archive: Archive) -> None:
    """Raises if a table lists the files, or another archive or pipeline reads them."""
    name = archive.name
    for table in archive.tables:
        if table.startswith("iceberg:"):
            catalog, _, of = table.removeprefix("iceberg:").rpartition("#")
            raise InvalidError(
                f"archive `{name}`: table `{of}` lists its files: drop that table in its catalog, "
                f"then run `tidelog archive register {name} --as iceberg --catalog {catalog} "
                f"--table {of} --forget`, and delete again"
            )
    _check_readers(context, archive)


def _check_readers(context: Context, archive: Archive, *, lost: bool = False) -> None:
    name = archive.name
    keep = "" if lost else f", or keep these files with `tidelog archive delete {name}`"
    for other in list_archives(context):
        sources = [other.source, *other.former.values()]
        sources += [written_as.source for written_as in other.formats.values()]
        if other.incarnation != archive.incarnation and _reads_any(sources, name):
            raise InvalidError(
                f"archive `{name}`: archive `{other.name}` is made from it, and erasures go that "
                f"way: delete that one first with `tidelog archive delete {other.name} "
                f"--delete-files`{keep}"
            )
    for named in list_pipelines(context):
        if _reads_any([named.source], name):
            raise InvalidError(
                f"archive `{name}`: pipeline `{named.name}` reads it: let it end, then run "
                f"`tidelog pipeline delete {named.name}`, and delete again"
            )


def _reads_any(sources: list[str], name: str) -> bool:
    places = [parse_address(each) for each in sources if each]
    return any(each.scheme == "archive" and each.path == name for each in places)
