"""Loading what a playback has found: runs, journals and their row groups, as amendments leave them.

It needs the store alone, so tasks use it too. The footers of journals are kept while their row
groups are played.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial

from tidelog.codec.journal import Group, JournalFile
from tidelog.log.amended import Amendments, apply
from tidelog.log.contents import Cut, describe_run, read_run
from tidelog.log.rows import Rows as Stored
from tidelog.playback.ahead import Found
from tidelog.playback.held import Rows, Wanted, kept_rows
from tidelog.store.base import Store

__all__ = ["Loader"]

_FOOTERS = 64  # of journals that are played at once


class Loader:
    """Gets events of one topic from the store. Safe to share between threads.

    ``NotFoundError`` when an object is gone.
    """

    def __init__(self, store: Store, topic: str) -> None:
        self._store = store
        self._topic = topic
        self._files: OrderedDict[str, JournalFile] = OrderedDict()
        self._lock = threading.Lock()

    def groups(self, found: Found) -> Sequence[Group]:
        """The row groups of a journal."""
        return self._file(found).groups

    def load(self, found: Found, wanted: Wanted, amendments: Amendments) -> Rows:
        """The events that are wanted of what was found."""
        return kept_rows(list(self._parts(found, wanted, amendments)), wanted)

    def _parts(self, found: Found, wanted: Wanted, amendments: Amendments) -> Iterator[Stored]:
        if found.group is None:
            what = describe_run(self._topic, found.partition, found.run)
            cut = Cut(wanted.start, wanted.end)
            yield from read_run(self._store, found.run, what, cut, amendments)
            return
        batch = self._file(found).read(found.group)
        places = batch.column("offset").to_numpy()
        rows = Stored(found.base, found.end, batch.drop_columns(["offset"]), places)
        yield from apply(rows, amendments.of_run(found.run), self._store)

    def _file(self, found: Found) -> JournalFile:
        key = found.run.object
        with self._lock:
            file = self._files.get(key)
            if file is not None:
                self._files.move_to_end(key)
                return file
        what = describe_run(self._topic, found.partition, found.run)
        file = JournalFile(partial(self._store.get, key), found.run, what)
        with self._lock:
            self._files[key] = file
            if len(self._files) > _FOOTERS:
                self._files.popitem(last=False)
        return file
