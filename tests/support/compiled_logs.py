"""Journals and amendments made by hand, one step at a time, so that readers can be put in between.

Rows are those that ``journal.amend`` and ``journal.compile`` write; nothing of their care is here.
"""

from __future__ import annotations

import crc32c
import msgspec
import pyarrow as pa

from tidelog.catalog.base import Change, Delete, Put
from tidelog.codec.journal_file import JOURNAL_SCHEMA, encode_journal
from tidelog.context import Context
from tidelog.log.partition_reader import Reader
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.topic import Amendment, Head, Run, Topic, decode_row, encode_row


class Bench:
    """One partition, and what is done to it."""

    def __init__(self, context: Context, topic: Topic, partition: int = 0) -> None:
        self.context = context
        self.topic = topic
        self.partition = partition
        self.where = layout.topic_partition(topic.incarnation, partition)

    @property
    def head(self) -> Head:
        return read_head(self.context, self.topic, self.partition)[0]

    def delete(self, *offsets: int) -> None:
        for offset in offsets:
            self._amend(offset, Amendment(0, "delete", 0))

    def update(self, offset: int, value: bytes | None, is_large: bool = False) -> None:
        row = Amendment(0, "update", 0, value)
        if is_large:
            key = layout.amendment(
                self.topic.incarnation,
                0,
                self.partition,
                self.head.amendments,
                self.context.ids.new(),
            )
            stored = value or b""
            self.context.store.put(key, stored)
            row = Amendment(0, "update", 0, object=key, crc=crc32c.crc32c(stored))
        self._amend(offset, row)

    def rows(self, kind: str) -> list[Run]:
        """Those of journals or of runs."""
        rows = self.context.catalog.scan(self.where, f"{kind}/", f"{kind}0")
        return [decode_row(row.value, Run, row.row) for row in rows]

    def compile(self, start: int, end: int) -> Run:
        """A journal of ``[start, end)``, which lies at borders of what is there."""
        applied = self.head.amendments
        schema = JOURNAL_SCHEMA
        tables = []
        for stretch in Reader(self.context, self.topic, self.partition).read(start, end):
            columns = [pa.array(stretch.offsets), *stretch.batch.columns]
            tables.append(pa.table(columns, schema=schema))
        encoded = encode_journal(tables, applied)
        journal_id = self.context.ids.new()
        key = layout.journal(self.topic.incarnation, self.partition, 1, start, journal_id)
        self.context.store.put(key, encoded.data)
        run = encoded.run(start, end - start, key, 1)
        head, version = read_head(self.context, self.topic, self.partition)
        new = msgspec.structs.replace(
            head, journaled=max(head.journaled, end), compiled=head.compiled + 1
        )
        old = [row for row in self.rows("journal") if start < row.base < end]
        self._write(
            Put("head", encode_row(new), expect=version),
            Put(layout.journal_row(start), encode_row(run)),
            *(Delete(layout.journal_row(row.base)) for row in old),
        )
        return run

    def remove_shadowed(self) -> None:
        """Rows of runs whose journals are there."""
        for run in self.rows("run"):
            if run.base < self.head.journaled:
                self._write(Delete(layout.run_row(run.base)))

    def remove_amended(self) -> None:
        """Rows of amendments that a journal has."""
        journals = self.rows("journal")
        left = []
        for row in list(self.context.catalog.scan(self.where, "amend/", "amend0")):
            offset = layout.amend_offset(row.row)
            found = decode_row(row.value, Amendment, row.row)
            held = [each.journal for each in journals if each.base <= offset < each.end]
            if held and held[0] is not None and held[0].applied >= found.sequence:
                self._write(Delete(row.row))
            else:
                left.append(offset)
        head, version = read_head(self.context, self.topic, self.partition)
        amended = (min(left), max(left)) if left else None
        new = msgspec.structs.replace(head, amended=amended)
        self._write(Put("head", encode_row(new), expect=version))

    def sweep(self) -> None:
        """Rows that nobody needs, and then all objects that no row names."""
        self.remove_shadowed()
        self.remove_amended()
        named = {run.object for kind in ("run", "journal") for run in self.rows(kind)}
        for row in self.context.catalog.scan(self.where, "amend/", "amend0"):
            named.add(decode_row(row.value, Amendment, row.row).object or "")
        found = [info.key for info in self.context.store.list("topics/")]
        self.context.store.delete([key for key in found if key not in named])

    def _amend(self, offset: int, row: Amendment) -> None:
        """Writes the row of an amendment, with the next sequence of its partition."""
        head, version = read_head(self.context, self.topic, self.partition)
        first, last = head.amended or (offset, offset)
        new = msgspec.structs.replace(
            head,
            amendments=head.amendments + 1,
            amended=(min(first, offset), max(last, offset)),
        )
        row = msgspec.structs.replace(row, sequence=new.amendments)
        self._write(
            Put("head", encode_row(new), expect=version),
            Put(layout.amend_row(offset), encode_row(row)),
        )
        self.context.wakeups.amended(self.topic.incarnation)

    def _write(self, *changes: Change) -> None:
        self.context.catalog.write(self.where, *changes, write_id=self.context.ids.new())
