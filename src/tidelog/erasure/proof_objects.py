"""Counts and searches single objects for a proof, and notes what it finds.

An object whose events no row counts may contain none of the erased ones: what a driver or a Spark
writer staged, what was set aside, metadata of tables, and everything that nothing explains. It is
clean only if all of it was decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import pyarrow as pa

from tidelog.erasure import proof_remedies as remedies
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
from tidelog.erasure.proof_places import places_of_files, stagings_of_others
from tidelog.erasure.proof_scope import ProofScope
from tidelog.errors import CorruptError, InvalidError, NotFoundError
from tidelog.store.base import ObjectInfo, Store

__all__ = ["UNREADABLE", "ObjectSearch"]

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

    def staged(self, store: Store, only: Iterable[str] = ("staging/",)) -> None:
        """Searches files that are not published yet, or never will be."""
        for prefix in only:
            for info in store.list(prefix):
                data = self.get(store, info)
                if data is not None:
                    self.loose(info.key, data, remedies.why_loose(info.key))

    def unexplained(self, store: Store, info: ObjectInfo, why: str, do: str) -> None:
        data = self.get(store, info)
        if data is None:
            return
        if any(map(self._sought.is_in, names_of(info.key))):
            self.add(info.key, f"has one of them in its name: {why}", do)
        self.loose(info.key, data, why, do)

    def loose(self, key: str, data: bytes, why: str, do: str = "") -> None:
        """Searches an object whose events no row counts: it may contain none.

        It is clean only if all of it was decoded. What another archive stages may be anything.
        """
        try:
            found = self._found_in(key, data)
        except UNREADABLE:
            found = None
        if found:
            self.add(key, f"holds {found} of them: {why}", do or remedies.remedy_of(key))
        elif found is None and not key.startswith(self._foreign):
            is_staged = key.startswith("staging/")
            what = f"cannot be searched, as not all of it can be decoded: {why}"
            self.add(key, what, do or (remedies.UNREAD if is_staged else remedies.remedy_of(key)))

    def _found_in(self, key: str, data: bytes) -> int | None:
        """Returns how many of them an object holds; None or an error if it cannot be searched."""
        values = event_values(key, data, self._living, self._folders)
        if values is not None:
            return sum(map(self._sought.is_in, values))
        if has_columns(data):
            return sum(self.in_rows(batch) for batch in rows_of(data))
        if not is_plain_text(data):
            return None
        if self._sought.in_any_text(data):
            return 1
        # A file of only values has no ids, so it shows neither whose they are nor which.
        return None if key.startswith(self._files) and not is_event_lines(data) else 0

    def in_rows(self, batch: pa.RecordBatch, *, later: bool = True) -> int:
        """Counts rows with one of the ids or keys; without our columns, in any column."""
        if self._sought.hidden(batch):
            return self._sought.in_values(batch)
        return len(self._sought.rows(batch, later=later))

    def get(self, store: Store, info: ObjectInfo, clean: Collection[str] = ()) -> bytes | None:
        """Returns the bytes of an object; None if it was searched or was deleted in between.

        Tasks have searched those in ``clean``.
        """
        key = (store.url, info.key)
        if self.is_done(key):
            return None
        self.count(key, info.size, is_told=info.key in clean)
        if info.key in clean:
            return None
        try:
            return store.get(info.key)
        except NotFoundError:
            return None

    def is_done(self, key: tuple[str, str]) -> bool:
        """Returns whether an object was searched, or is a file of another topic."""
        return key in self._seen or key in self._others

    def count(self, key: tuple[str, str], size: int, *, is_told: bool = False) -> None:
        self._seen.add(key)
        self.proof.objects += 1
        self.proof.bytes += size
        self._place.objects += 1
        self._place.bytes += size
        if not is_told:
            self._progress(size)

    def add(self, key: str, what: str, do: str, archive: str = "") -> None:
        """Notes that something is left; ``archive`` is the one whose file it is, if known."""
        trace = Trace(key, what, self._scope.remedy(do, archive))
        if trace not in self.proof.traces:
            self.proof.traces.append(trace)
