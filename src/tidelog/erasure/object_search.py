"""Searches single objects for erased events, counts them for a proof, and notes what it finds.

An object whose events no row counts may contain none of the erased ones: what a driver or a Spark
writer staged, what was set aside, metadata of tables, and everything that nothing explains. It is
clean only if all of it was decoded. So are unfinished uploads: one may become an object.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator

import pyarrow as pa

from tidelog.clock import Clock, looks
from tidelog.codec.formats.schema import PREFIX
from tidelog.connectors.by_url import store_at
from tidelog.coordination.pipeline_rows import was_staged_before_restore
from tidelog.erasure import proof_remedies as remedies
from tidelog.erasure.file_metadata import gzip_names, open_beside_rows
from tidelog.erasure.matcher import (
    EventMatcher,
    has_columns,
    is_event_lines,
    is_plain_text,
    names_of,
    rows_of,
)
from tidelog.erasure.metadata_objects import event_values
from tidelog.erasure.proof import Proof, SearchedPlace, Trace
from tidelog.erasure.proof_scope import (
    Generation,
    ProofScope,
    explained_places,
    places_of_files,
    stagings_of_others,
)
from tidelog.errors import CorruptError, InvalidError, NotFoundError
from tidelog.model.archive import Archive
from tidelog.store.base import ObjectInfo, Store, Upload

__all__ = ["UNREADABLE", "ObjectSearch", "lasting_uploads"]

_IDENTIFYING = frozenset({"id", "key", f"{PREFIX}id", f"{PREFIX}key"})  # columns
UNREADABLE = (CorruptError, InvalidError, pa.ArrowException, OSError)


class ObjectSearch:
    """A proof under way: what was searched, and what was found."""

    def __init__(
        self, scope: ProofScope, sought: EventMatcher, progress: Callable[[int], None]
    ) -> None:
        self._scope = scope
        self._context = scope.context
        self._sought = sought
        self._progress = progress
        self._seen: set[tuple[str, str]] = set()  # what was searched: store and key
        # Files of other topics, which this search passes over. A search of copies may want them.
        self._others: set[tuple[str, str]] = set()
        self._foreign = tuple(stagings_of_others(scope))
        self._files = tuple(places_of_files(scope))
        self._living: set[str] = set()  # folders of a generation with files that hold events
        self._folders: set[str] = set()  # the same for all generations, from the archive's root
        self._archives = list(scope.archives().values())
        name = scope.owner.name
        topic, archive = ("", name) if scope.topic is None else (name, "")
        self.proof = Proof(topic, scope.owner.incarnation, archive=archive)
        self._place = SearchedPlace("")

    def enter(self, name: str) -> None:
        """Counts what follows as a part of this place."""
        found = next((each for each in self.proof.places if each.name == name), None)
        self._place = found or SearchedPlace(name)
        if found is None:
            self.proof.places.append(self._place)

    def all_uploads(self, store: Store, generations: Collection[Generation]) -> None:
        """Searches unfinished uploads, before objects are listed, because they may become some.

        Looks into the home's store and those of the generations.
        """
        self.enter("unfinished uploads")
        others = (store_at(self._context, archive.store) for archive, _ in generations)
        for where in {each.url: each for each in (*others, store)}.values():
            self._uploads(where)

    def _uploads(self, store: Store) -> None:
        explained = explained_places(self._scope, store)
        try:
            for upload in lasting_uploads(store, self._context.clock):
                if upload.read is None:
                    if not upload.name.startswith(explained):
                        what = "is an upload that has not ended, and cannot be searched"
                        self.add(upload.name, what, remedies.UPLOAD)
                    continue
                if self.is_done((store.url, upload.name)):
                    continue
                with contextlib.suppress(NotFoundError):  # it ended or was deleted in between
                    data = upload.read()
                    self.count((store.url, upload.name), upload.size)
                    self.loose(upload.name, data, "its upload has not ended", remedies.UPLOAD)
        except InvalidError as exc:
            self.add(store.url, f"its uploads cannot be listed ({exc})", remedies.RIGHTS)

    def staged(self, store: Store, only: Iterable[str] = ("staging/",)) -> None:
        """Searches files that are not published yet, or never will be."""
        for prefix in only:
            for info in store.list(prefix):
                data = self.get(store, info)
                if data is not None and not self.loose(
                    info.key, data, remedies.why_loose(info.key)
                ):
                    self._seen.discard((store.url, info.key))  # it may be of a copy's archive

    def unexplained(self, store: Store, info: ObjectInfo, why: str, do: str) -> None:
        data = self.get(store, info)
        if data is None:
            return
        if any(map(self._sought.is_quoted_in, names_of(info.key))):
            self.add(info.key, f"has one of them in its name: {why}", do)
        self.loose(info.key, data, why, do)

    def loose(self, key: str, data: bytes, why: str, do: str = "") -> bool:
        """Searches an object whose events no row counts: it may contain none.

        It is clean only if all of it was decoded. What another archive stages may be anything:
        returns False if that cannot be searched.
        """
        try:
            found = self._found_in(key, data)
        except UNREADABLE:
            found = None
        if found:
            self.add(key, f"holds {found} of them: {why}", do or self._remedy(key))
        elif found is None:
            if key.startswith(self._foreign):
                return False
            is_staged = key.startswith("staging/")
            what = f"cannot be searched, as not all of it can be decoded: {why}"
            self.add(key, what, do or (remedies.UNREAD if is_staged else remedies.remedy_of(key)))
        return True

    def _remedy(self, key: str) -> str:
        is_lost = key.startswith("staging/") and was_staged_before_restore(self._context, key)
        return remedies.STAGED_BEFORE if is_lost else remedies.remedy_of(key)

    def _found_in(self, key: str, data: bytes) -> int | None:
        """Returns how many of them an object holds; None or an error if it cannot be searched."""
        values = event_values(key, data, self._living, self._folders)
        if values is not None:
            return sum(map(self._sought.is_value_in, values))
        if has_columns(data):
            found = sum(self.in_rows(batch) for batch in rows_of(data))
            return found or int(self._is_beside_rows(data))
        if not is_plain_text(data):
            return None
        names = (each for name in gzip_names(data) for each in names_of(name))
        if self._sought.is_word_in(data) or any(map(self._sought.is_quoted_in, names)):
            return 1
        # A file of only values has no ids, so it shows neither whose they are nor which.
        return None if key.startswith(self._files) and not is_event_lines(data) else 0

    def _is_beside_rows(self, data: bytes) -> bool:
        """Returns whether a file has one in its metadata, or in a dictionary where no row has it.

        Of a file with our columns, their names and the values of other columns are not compared.
        """
        file = open_beside_rows(data)
        is_other = bool(self._sought.hidden(pa.RecordBatch.from_pylist([], file.schema)))
        if any(map(self._sought.is_quoted_in, file.metadata(names=is_other))):
            return True
        if is_other:
            return any(map(self._sought.is_quoted_in, file.dictionaries()))
        return any(map(self._sought.is_value_in, file.dictionaries(_IDENTIFYING)))

    def in_rows(self, batch: pa.RecordBatch, *, later: bool = True) -> int:
        """Counts rows with one of the ids or keys; without our columns, in any column."""
        if self._sought.hidden(batch):
            return self._sought.count_quoting_rows(batch)
        return len(self._sought.rows(batch, later=later))

    def get(self, store: Store, info: ObjectInfo, clean: Collection[str] = ()) -> bytes | None:
        """Returns the bytes of an object; None if it was searched or was deleted in between.

        Tasks have searched those in ``clean``.
        """
        key = (store.url, info.key)
        if self.is_done(key):
            return None
        self.count(key, info.size, is_reported=info.key in clean)
        if info.key in clean:
            return None
        try:
            return store.get(info.key)
        except NotFoundError:
            return None

    def is_done(self, key: tuple[str, str]) -> bool:
        """Returns whether an object was searched, or is a file of another topic."""
        return key in self._seen or key in self._others

    def count(self, key: tuple[str, str], size: int, *, is_reported: bool = False) -> None:
        self._seen.add(key)
        self.proof.objects += 1
        self.proof.bytes += size
        self._place.objects += 1
        self._place.bytes += size
        if not is_reported:
            self._progress(size)

    def count_owner(self, store: Store, archive: Archive) -> None:
        """Counts an archive's owner object if it is as written: it contains no event.

        Otherwise its empty or short texts would match an equal id or key.
        """
        key = (store.url, archive.owner)
        with contextlib.suppress(NotFoundError):
            if key not in self._seen and store.get(archive.owner) == archive.owner_content:
                self.count(key, len(archive.owner_content))

    def add(self, key: str, what: str, do: str, archive: str = "", copy: str = "") -> None:
        """Notes that something is left; ``archive`` is the one whose file it is, if known."""
        if do == remedies.REBUILD:
            do = remedies.rebuild(self._archives, key)
        trace = Trace(key, what, self._scope.remedy(do, archive), copy)
        if trace not in self.proof.traces:
            self.proof.traces.append(trace)


WAIT_S = 10.0  # for running uploads
_LOOK_S = 0.1


def lasting_uploads(store: Store, clock: Clock) -> Iterator[Upload]:
    """Yields uploads of dead processes, and those that do not end within ``WAIT_S``.

    A running upload becomes an object, or its writer deletes it. So a proof lists uploads before
    objects, and waits a little for those that may end: a finished one is then in a listing. A
    process that has not begun its upload has the bytes only in memory, which no proof can see. The
    protocols (``unfinished_ranges.is_under_way``) cover what it may write.
    """
    under_way: dict[tuple[str, int], Upload] = {}
    for upload in store.uploads():
        if upload.may_end:
            under_way[upload.name, upload.began_ms] = upload
        else:
            yield upload
    for _ in looks(clock, WAIT_S, _LOOK_S) if under_way else ():
        names = {upload.name for upload in store.uploads()}
        under_way = {key: each for key, each in under_way.items() if each.name in names}
        if not under_way:
            break
    yield from under_way.values()
