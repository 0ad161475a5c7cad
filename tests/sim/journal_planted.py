"""Bugs planted into journals, copies and playback, so that their simulations prove themselves.

Each replaces one function of the product by what it did once, or could have done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from tests.sim.journal_home import HomeWorld
from tests.sim.journal_world import JournalWorld
from tests.sim.journal_worlds import AbsentWorld, AmendWorld, CopyWorld, LotsWorld, SweptWorld
from tests.sim.playback_world import PlaybackWorld
from tests.sim.recreate_world import RecreateWorld
from tests.sim.stale import check_kind
from tidelog.catalog.base import Put
from tidelog.connectors.kafka.sink import KafkaPlaybackSink
from tidelog.connectors.sink import Lot, SinkContext
from tidelog.connectors.topic.sink import TopicPlaybackSink
from tidelog.context import Context
from tidelog.coordination.audit import AuditRecord
from tidelog.coordination.ownership import write_repeatedly
from tidelog.errors import TidelogError
from tidelog.journal import amend, compile_steps, listing
from tidelog.journal.amend import Amender
from tidelog.journal.amendment_writer import AmendmentChange, AmendmentWriter
from tidelog.journal.compile import CompileReport, PartitionCompile, PlannedGroup
from tidelog.journal.compile_steps import BuiltJournals
from tidelog.journal.lookup import Lookup, Lookups
from tidelog.journal.scribe import Scribe
from tidelog.log.ledger import ErasedIds
from tidelog.log.maintenance import object_references, obsolete_rows, sweep
from tidelog.log.producer.append import Appender
from tidelog.log.producer.copier import Copier
from tidelog.log.topics import read_head
from tidelog.log.unused_objects import ObjectUses
from tidelog.model import layout
from tidelog.model.playback import Cursor
from tidelog.model.topic import Head, HeldRow, Topic, decode_row, encode_row
from tidelog.playback.run_queue import SwapGuard
from tidelog.playback.session import NamedPlayback

__all__ = ["BUGS", "Bug", "seeds_until_caught"]

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Bug:
    """What is planted, and the world that must notice."""

    world: type[HomeWorld]
    plant: Callable[[Patch], None]


def seeds_until_caught(bug: Bug, seeds: int) -> int | None:
    """How many seeds it takes until a world notices; None: more than these."""
    return next((seed + 1 for seed in range(seeds) if notices(bug, seed)), None)


def notices(bug: Bug, seed: int) -> bool:
    """Whether the bug's world notices it with this seed, which must find nothing without it."""
    with Patch.context() as patch:
        bug.plant(patch)
        try:
            bug.world(seed).run()
        except (AssertionError, TidelogError) as exc:
            check_kind(exc)
        else:
            return False
    bug.world(seed).run()
    return True


# Amendments.


def _seen_moves_for_all_lots(patch: Patch) -> None:
    """After a conflict, only the rows of the lot at hand are looked at for deletes."""

    def wrote(self: AmendmentWriter, marks: Sequence[AmendmentChange], head: Head) -> None:
        self._looked = head.amendments
        self._done(marks)

    patch.setattr(AmendmentWriter, "_wrote", wrote)


def _records_share_heads(patch: Patch) -> None:
    """A record of a call goes by the heads that the record before it has reached."""
    apply, found = Amender._apply, dict[int, Any]()

    def shared(self: Amender, op: Any, marks: Any, heads: dict[int, Any], *rest: Any) -> Any:
        known = found if found and found.get(-1) == id(self) else {}
        heads.update({each: seen for each, seen in known.items() if each >= 0})
        applied = apply(self, op, marks, heads, *rest)
        found.clear()
        found.update({-1: id(self), **heads})
        return applied

    patch.setattr(Amender, "_apply", shared)


def _lots_are_written_again(patch: Patch) -> None:
    """An update that meets a compile writes all its lots again."""
    put_here = Amender._put_here

    def again(self: Amender, record: Any, marks: Any, *rest: Any) -> Sequence[AmendmentChange]:
        return marks if put_here(self, record, marks, *rest) else ()

    patch.setattr(Amender, "_put_here", again)


def _deletes_are_not_looked_for(patch: Patch) -> None:
    """An update that meets another amendment is written whatever that was."""
    patch.setattr(AmendmentWriter, "_still_to_put", lambda self, marks, before: marks)


def _amended_is_not_widened(patch: Patch) -> None:
    """The head keeps the bounds of the first amendments."""
    plan = AmendmentWriter._plan

    def narrow(self: AmendmentWriter, marks: Any, head: Head) -> Any:
        new_head, rows = plan(self, marks, head)
        if head.amended is not None:
            new_head = msgspec.structs.replace(new_head, amended=head.amended)
        return new_head, rows

    patch.setattr(AmendmentWriter, "_plan", narrow)


def _audit_without_version(patch: Patch) -> None:
    """A record is put without an expectation, so a doubled packet brings its first state back."""

    def put(
        context: Context, topic: Topic, record: AuditRecord, version: str | None = None
    ) -> tuple[AuditRecord, str]:
        where = layout.audit_partition(topic.incarnation)
        change = Put(layout.audit_row(record.at_ms, record.id), encode_row(record))
        write_repeatedly(context, where, change)
        return record, ""

    patch.setattr(amend, "put_record", put)


# Copies.


def _commit_does_not_expect_the_ledger(patch: Patch) -> None:
    """A copy is held against the ledger, and committed whatever was erased since."""
    patch.setattr(Copier, "check_head", Appender.check_head)


def _nothing_is_entered(patch: Patch) -> None:
    """A delete leaves no trace in the ledger."""
    patch.setattr(amend, "enter_erased", lambda *_, **__: None)


def _nothing_is_announced(patch: Patch) -> None:
    """A delete does not tell copies that the ledger has grown."""

    def look_only(context: Context, topic: Topic, partition: int) -> Head:
        return read_head(context, topic, partition)[0]

    patch.setattr(amend, "announce_erasure", look_only)


def _time_does_not_count(patch: Patch) -> None:
    """A copy leaves out new events too, where an older one had the same id."""
    kept = ErasedIds.kept

    def timeless(self: ErasedIds, events: Any, by: Any = "timestamp") -> Any:
        ever = ErasedIds(dict.fromkeys(self.ids, 1 << 60), dict.fromkeys(self.keys, 1 << 60))
        return kept(ever, events, by)

    patch.setattr(ErasedIds, "kept", timeless)


# Compile, sweep and trim.


def _epochs_are_not_raised(patch: Patch) -> None:
    """A sweep looks at the epoch of a compiler, and does not fence it."""

    def look_only(context: Context, topic: Topic, partition: int, above: int = 0) -> int:
        where = layout.topic_partition(topic.incarnation, partition)
        row = context.catalog.get(where, layout.COMPILE_ROW)
        return 0 if row is None else decode_row(row.value, HeldRow, "").epoch + 1

    patch.setattr(sweep, "raise_epoch", look_only)


def _amendments_go_too_early(patch: Patch) -> None:
    """A sweep removes amendments that no journal has."""
    patch.setattr(object_references, "_applied", lambda pending, _: iter(pending))


def _values_are_forgotten(patch: Patch) -> None:
    """A sweep does not count the objects that amendments name."""
    note = object_references._note_amendment

    def forget(row: Any, what: Any, head: Any, pending: Any, found: Any) -> None:
        before = set(found.objects)
        note(row, what, head, pending, found)
        found.objects = before

    patch.setattr(object_references, "_note_amendment", forget)
    patch.setattr(ObjectUses, "is_settled", lambda *_: True)  # as if no row had to list what goes


def _journal_claims_too_much(patch: Patch) -> None:
    """A journal says that it has all amendments up to the swap."""
    swap_journals = PartitionCompile.swap

    def claim(
        self: PartitionCompile, planned: PlannedGroup, made: BuiltJournals
    ) -> CompileReport | None:
        head, _ = read_head(self._context, self._topic, self._partition)
        journals = tuple(
            msgspec.structs.replace(
                run, journal=msgspec.structs.replace(run.journal, applied=head.amendments)
            )
            for run in made.journals
        )
        return swap_journals(self, planned, replace(made, journals=journals))

    patch.setattr(PartitionCompile, "swap", claim)


def _swap_expects_no_head(patch: Patch) -> None:
    """A swap puts the head that it has read, whatever was committed since."""
    changes = compile_steps._changes

    def blind(*args: Any) -> list[Any]:
        head, *others = changes(*args)
        assert head.row == "head"
        return [replace(head, expect=None), *others]

    patch.setattr(compile_steps, "_changes", blind)


def _trim_takes_the_run_at_the_start(patch: Patch) -> None:
    """A trim removes the run that holds the first offset."""
    remove = obsolete_rows._remove_runs

    def more(context: Context, topic: Topic, partition: int, end: int) -> Any:
        return remove(context, topic, partition, end + 3)

    patch.setattr(obsolete_rows, "_remove_runs", more)


def _sweep_dated_ahead_counts(patch: Patch) -> None:
    """A scribe waits until the date of the last sweep is over, also one that a wrong clock gave."""
    patch.setattr(Scribe, "_is_ahead", lambda self, swept_ms: False)


# Readers and lookups.


def _lookup_goes_by_an_old_head(patch: Patch) -> None:
    """A lookup reads each partition's head once, and goes by it later."""
    heads = Lookup._heads
    known: dict[tuple[int, int], Any] = {}

    def stale(self: Lookup, partitions: Sequence[int]) -> Iterator[Any]:
        for partition, seen in zip(partitions, heads(self, partitions), strict=True):
            yield known.setdefault((id(self), partition), seen)

    patch.setattr(Lookup, "_heads", stale)


def _listing_passes_over_trims(patch: Patch) -> None:
    """A listing of journals looks for compiles between its reads, and not for trims."""

    def is_same(before: Head, after: Head, at: int) -> bool:
        return after.compiled == before.compiled

    patch.setattr(listing, "_is_same", is_same)


def _cache_by_name(patch: Patch) -> None:
    """A home keeps the lookup of a topic's name, also when the topic was made again."""
    of = Lookups.of
    first: dict[tuple[int, str], Topic] = {}

    def by_name(self: Lookups, topic: Topic) -> Lookup:
        return of(self, first.setdefault((id(self), topic.name), topic))

    patch.setattr(Lookups, "of", by_name)


def _absent_without_offset(patch: Patch) -> None:
    """An append of absent ids does not expect the end at which they were looked for."""
    commit = Appender.commit

    def anywhere(
        self: Appender, stored: Any, piece: Any, sequences: Any = None, _: Any = None, **__: Any
    ) -> Any:
        return commit(self, stored, piece, sequences)

    patch.setattr(Appender, "commit", anywhere)


# Playback.


def _lot_without_numbers(patch: Patch) -> None:
    """A lot is put again by the next driver, though it is out."""

    def put(self: TopicPlaybackSink, lot: Any, piece: Any, stored: Any) -> None:
        self._appender.commit(stored, piece)

    patch.setattr(TopicPlaybackSink, "_commit", put)
    patch.setattr(TopicPlaybackSink, "_has", lambda self, partition, lot: False)


def _cursor_before_lot(patch: Patch) -> None:
    """The cursor moves when a lot is intended, and not when it is out."""

    def intend(self: NamedPlayback, until: Cursor, number: int, reached: int = 0) -> None:
        with self._lock:
            self._change(self._after_lot(), cursor=until, number=number, reached=reached)

    patch.setattr(NamedPlayback, "intend", intend)


def _playback_passes_over_swaps(patch: Patch) -> None:
    """A playback does not notice that journals took the place of runs."""
    patch.setattr(SwapGuard, "_check_compiled", lambda self, partition, head: head)


def _events_counted_inside_a_lot(patch: Patch) -> None:
    """Transactions end anywhere in a lot, and say how many events came before."""

    def put(self: KafkaPlaybackSink, lot: Lot) -> None:
        end = lot.number + lot.batch.num_rows
        if self._reached < end:
            known = max(0, self._reached - lot.number)
            for partition, part in self._parts(lot.batch.slice(known)):
                self._transactions.send(part, partition, lot.number + known)
            self._transactions.finish(end)
            self._reached = end

    patch.setattr(KafkaPlaybackSink, "put", put)


def _playback_in_another_topic(patch: Patch) -> None:
    """A playback opens whichever topic has the name of its target when its turn comes."""
    of_named = SinkContext.of_named

    def anywhere(*given: Any) -> SinkContext:
        return replace(of_named(*given), target="")

    patch.setattr(SinkContext, "of_named", anywhere)


BUGS: Mapping[str, Bug] = {
    "the seen mark moves for all lots": Bug(LotsWorld, _seen_moves_for_all_lots),
    "the records of one call share heads": Bug(LotsWorld, _records_share_heads),
    "lots are written again": Bug(LotsWorld, _lots_are_written_again),
    "deletes are not looked for": Bug(AmendWorld, _deletes_are_not_looked_for),
    "the amended range is not widened": Bug(AmendWorld, _amended_is_not_widened),
    "audit put without a version": Bug(AmendWorld, _audit_without_version),
    "a copy does not expect the ledger": Bug(CopyWorld, _commit_does_not_expect_the_ledger),
    "a delete enters nothing": Bug(CopyWorld, _nothing_is_entered),
    "a delete announces nothing": Bug(CopyWorld, _nothing_is_announced),
    "a new event counts as erased": Bug(CopyWorld, _time_does_not_count),
    "epochs are not raised": Bug(SweptWorld, _epochs_are_not_raised),
    "amendments are removed before compile": Bug(AmendWorld, _amendments_go_too_early),
    "values of updates are swept": Bug(AmendWorld, _values_are_forgotten),
    "a journal claims too much": Bug(AmendWorld, _journal_claims_too_much),
    "a swap does not expect the head": Bug(AmendWorld, _swap_expects_no_head),
    "a trim removes the run at the start": Bug(AbsentWorld, _trim_takes_the_run_at_the_start),
    "a sweep dated ahead stops the scribe": Bug(JournalWorld, _sweep_dated_ahead_counts),
    "a lookup goes by an old head": Bug(AmendWorld, _lookup_goes_by_an_old_head),
    "a listing passes over trims": Bug(AbsentWorld, _listing_passes_over_trims),
    "a lookup cache by name": Bug(RecreateWorld, _cache_by_name),
    "if absent without an offset": Bug(AbsentWorld, _absent_without_offset),
    "a lot has no numbers": Bug(PlaybackWorld, _lot_without_numbers),
    "events counted inside of a lot": Bug(PlaybackWorld, _events_counted_inside_a_lot),
    "the cursor moves before the lot": Bug(PlaybackWorld, _cursor_before_lot),
    "a playback passes over swaps": Bug(PlaybackWorld, _playback_passes_over_swaps),
    "a playback continues in another topic": Bug(PlaybackWorld, _playback_in_another_topic),
}
