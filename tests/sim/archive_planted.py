"""Bugs planted into archives and pipelines, so that their simulation proves itself.

Each replaces one function of the product by what it did once, or could have done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import msgspec
import pytest

from tests.sim import (
    ahead_planted,
    chains_planted,
    copies_planted,
    cuts_planted,
    drivers_planted,
    dropped_planted,
    generations_planted,
    marks_planted,
    moves_planted,
    restored_planted,
    rotation_planted,
    tasks_planted,
)
from tests.sim.archive_home import ArchivesHome
from tests.sim.archive_world import ArchivesWorld
from tests.sim.archive_worlds import (
    CutsWorld,
    ErasureWorld,
    GenerationsWorld,
    HolesWorld,
    MarkersWorld,
    OrphansWorld,
    RemadeWorld,
)
from tests.sim.arrivals_world import ArrivalsWorld
from tests.sim.backups_world import BackupsWorld
from tests.sim.chains_world import ChainsWorld
from tests.sim.copies_world import CopiesWorld
from tests.sim.late_world import FoldersWorld, LateWorld
from tests.sim.moves_world import MovesWorld
from tests.sim.outside_world import OutsideWorld
from tests.sim.recorded_world import RecordedWorld
from tests.sim.restored_world import RestoredWorld
from tests.sim.returns_world import ReturnsWorld
from tests.sim.rotated_chains_world import RotatedChainsWorld
from tests.sim.rotation_world import RotationWorld
from tests.sim.staged_world import StagedWorld
from tests.sim.stale import check_kind
from tests.sim.tasks_world import TasksWorld
from tests.sim.transforms_world import TransformsWorld
from tidelog.catalog.base import Check, Delete, Put
from tidelog.codec import segment
from tidelog.connectors.source import Bounds, MissingOffsets
from tidelog.connectors.topic.source import TopicSource
from tidelog.erasure import delete_archived as archived
from tidelog.erasure import proof_search as proof
from tidelog.erasure import rewrite as erase
from tidelog.erasure.proof_scope import TopicScope
from tidelog.erasure.proof_search import _ProofSearch
from tidelog.errors import TidelogError
from tidelog.journal import compile_steps
from tidelog.maintenance import erase as whole_erasure
from tidelog.model import layout
from tidelog.model.pipeline import Totals
from tidelog.pipeline import cycle, gaps
from tidelog.pipeline.cycle import Cycle
from tidelog.pipeline.failures import PipelineFailures
from tidelog.pipeline.source_partitions import Beginnings

__all__ = ["BUGS", "Bug", "notices", "seeds_until_caught"]

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Bug:
    """What is planted, and which promise it breaks."""

    breaks: str
    plant: Callable[[Patch], None]
    world: type[ArchivesHome] = ArchivesWorld


def seeds_until_caught(bug: Bug, seeds: int) -> int | None:
    """How many seeds it takes until the world notices; None: more than these."""
    return next((seed + 1 for seed in range(seeds) if notices(bug, seed)), None)


def notices(bug: Bug, seed: int) -> bool:
    """Whether the world notices a bug with this seed, which must find nothing without it."""
    with Patch.context() as patch:
        bug.plant(patch)
        try:
            bug.world(seed).run()
        except (AssertionError, TidelogError) as exc:
            check_kind(exc)
        else:
            return False
    _run_without(bug.world, seed)
    return True


@lru_cache
def _run_without(world: type[ArchivesHome], seed: int) -> None:
    """A seed without a bug; many bugs are found by the same one."""
    world(seed).run()


# The cycle.


def _no_fence(patch: Patch) -> None:
    """Writes of a driver do not expect the head, so two work under one epoch."""
    write = Cycle._write

    def anyhow(self: Cycle, state: Any, *changes: Any) -> str:
        open_ = [
            replace(each, expect=None) if isinstance(each, Put | Delete) else each
            for each in changes
            if not isinstance(each, Check)
        ]
        return write(self, state, *open_)

    patch.setattr(Cycle, "_write", anyhow)


def _published_before_decided(patch: Patch) -> None:
    """Files are published before the intent names their manifest."""
    record = Cycle._record

    def first(self: Cycle, state: Any, produced: Any, *rest: Any) -> Any:
        intent = state.intent
        manifest = cycle.Manifest(
            self._pipeline.id,
            state.partition.text,
            intent.start,
            produced.end,
            0,
            0,
            0,
            files=produced.staged.files,
        )
        self._pipeline.sink.publish(manifest)
        return record(self, state, produced, *rest)

    patch.setattr(Cycle, "_record", first)


def _staged_files_go_too_early(patch: Patch) -> None:
    """What was staged is deleted once the manifest is recorded, before it is published."""
    record = Cycle._record

    def early(self: Cycle, state: Any, produced: Any, *rest: Any) -> Any:
        manifest = record(self, state, produced, *rest)
        self._pipeline.sink.discard(manifest)
        return manifest

    patch.setattr(Cycle, "_record", early)


def _commit_before_publish(patch: Patch) -> None:
    """The range is committed first, and published after that."""
    publish, finish = Cycle._publish, Cycle._finish

    def late(self: Cycle, state: Any, manifest: Any, report: Any, has_next: bool = False) -> None:
        patch.setattr(Cycle, "_publish", lambda *_: 0)
        discard = self._pipeline.sink.discard
        try:
            self._pipeline.sink.discard = lambda _: None  # type: ignore[method-assign]
            finish(self, state, manifest, report, has_next)
        finally:
            patch.setattr(Cycle, "_publish", publish)
        publish(self, state, manifest)
        discard(manifest)

    patch.setattr(Cycle, "_finish", late)


def _withdrawn_under_the_same_head(patch: Patch) -> None:
    """A range is withdrawn without a new version of the head, so its intent can come back."""

    def without(self: Cycle, state: Any) -> None:
        gone = Delete("intent", expect=state.intent_version)
        self._write(state, gone, Check("head", state.head_version))
        state.intent, state.intent_version = None, ""

    patch.setattr(Cycle, "_withdraw", without)


def _failures_are_not_guarded(patch: Patch) -> None:
    """Failures are put and deleted without an expectation, so that one can come back."""

    def anyhow(self: PipelineFailures, rows: Any) -> bool:
        where = layout.pipeline_members(self.pipeline)
        self.context.catalog.write(where, *rows, write_id=self.context.ids.new())
        return True

    patch.setattr(PipelineFailures, "_write_lot", anyhow)


def _gaps_are_not_recorded(patch: Patch) -> None:
    """A loss that was accepted leaves no gap in the head."""
    patch.setattr(gaps, "gaps_after", lambda head, _: head.gaps)


def _deleted_offsets_are_not_counted(patch: Patch) -> None:
    """A manifest does not say how many offsets of its range held no event any more."""
    patch.setattr(cycle, "missing_from", lambda *_: MissingOffsets())


def _totals_forget_the_dead(patch: Patch) -> None:
    """Totals of a head leave dead letters out."""
    plus = Totals.plus

    def without(self: Totals, manifest: Any, now_ms: int) -> Totals:
        return msgspec.structs.replace(plus(self, manifest, now_ms), dead=self.dead)

    patch.setattr(Totals, "plus", without)


def _range_without_incarnation(patch: Patch) -> None:
    """A range is read from the topic that has the name now."""
    patch.setattr(TopicSource, "_find", lambda self, context, _: topics_find(context, self.topic))
    patch.setattr(Cycle, "_end_if_recreated", lambda *_: False)


def _new_partitions_are_read(patch: Patch) -> None:
    """Each partition of a recreated topic is looked at by itself."""
    patch.setattr(cycle, "is_topic_remade", lambda *_: False)


def _only_commits_are_events(patch: Patch) -> None:
    """A range of an older topic that another driver has read does not count until it commits."""
    patch.setattr(gaps, "_has_older_range", lambda *_: False)


def topics_find(context: Any, name: str) -> Any:
    from tidelog.log.topics import find_topic

    return find_topic(context, name)


def _later_partitions_are_skipped(patch: Patch) -> None:
    """With ``--start latest`` a partition that appears later begins at the end that it has."""
    begin = Beginnings.find

    def at_end(self: Beginnings, partition: Any, held: Bounds) -> Any:
        found, note = begin(self, partition, held)
        if self.start != "latest" or found.reason == "latest":
            return found, note
        return msgspec.structs.replace(found, position=held.end, reason="latest"), note

    patch.setattr(Beginnings, "find", at_end)


def _latest_is_what_the_driver_sees(patch: Patch) -> None:
    """``latest`` means the end at the first run, and not at the archive's creation."""
    begin = Beginnings.find

    def now(self: Beginnings, partition: Any, held: Bounds) -> Any:
        found, note = begin(self, partition, held)
        if found.reason != "latest":
            return found, note
        return msgspec.structs.replace(found, position=held.end), note

    patch.setattr(Beginnings, "find", now)


# Erasure.


def _erasure_counts_nothing(patch: Patch) -> None:
    """An erasure does not count what it took out of files."""
    patch.setattr(erase, "read_erased_row", lambda _: erase.ErasedEvents(-1, 0))


def _erasure_leaves_kept_generations_out(patch: Patch) -> None:
    """Erasure and proof look at live generations alone."""
    for module in (archived, erase, whole_erasure):
        of = module.reachable_archives_of

        def live(home: Any, topic: Any, of: Any = of) -> Any:
            return [each for each in of(home, topic) if each[1] == each[0].generation]

        patch.setattr(module, "reachable_archives_of", live)
    every = TopicScope.reachable
    patch.setattr(
        TopicScope,
        "reachable",
        lambda scope: [each for each in every(scope) if each[1] == each[0].generation],
    )


def _proof_does_not_look_at_staging(patch: Patch) -> None:
    """A proof does not search what is staged."""
    explained = proof.explained_places
    patch.setattr(_ProofSearch, "staged", lambda *_, **__: None)
    patch.setattr(proof, "explained_places", lambda *of: (*explained(*of), "staging/"))


# Copies and trims.


def _segment_keeps_neighbors(patch: Patch) -> None:
    """Arrow pads what it writes of a slice with the bytes of the events behind it."""
    patch.setattr(segment, "_without_neighbors", lambda batch: batch)


def _trim_passes_over_archives(patch: Patch) -> None:
    """A trim does not ask whether archives have read the events."""
    from tidelog.api import maintenance

    patch.setattr(maintenance, "check_readers", lambda *_: None)


def _journal_keeps_trimmed_events(patch: Patch) -> None:
    """A journal that holds the start is not made again, as nothing in it waits to be compiled."""
    patch.setattr(compile_steps, "_is_cut", lambda *_: False)


BUGS: Mapping[str, Bug] = {
    "drivers are not fenced": Bug("P4", _no_fence),
    "a driver commits under an old epoch": Bug("P4", drivers_planted.commit_under_an_old_epoch),
    "a head has two owners": Bug("P4", drivers_planted.living_drivers_lose_partitions),
    "a take-over keeps the epoch": Bug("P4", drivers_planted.take_keeps_the_epoch),
    "files are published before they are decided": Bug("P4", _published_before_decided),
    "staged files are removed too early": Bug("P4", _staged_files_go_too_early),
    "commit comes before publish": Bug("P4", _commit_before_publish),
    "deleted offsets are not counted": Bug("P4a", _deleted_offsets_are_not_counted),
    "dead letters are not in the totals": Bug("P4a", _totals_forget_the_dead),
    "a range does not name its incarnation": Bug("P4", _range_without_incarnation),
    "later partitions begin at their end": Bug("P4a", _later_partitions_are_skipped),
    "latest means the first run": Bug("P4a", _latest_is_what_the_driver_sees),
    "promote compares ends only": Bug("P4a", generations_planted.promote_compares_ends),
    "a backfill leaves dead letters out": Bug(
        "P4a", generations_planted.fill_leaves_dead_letters_out
    ),
    "a sweep removes kept generations": Bug(
        "P4a", generations_planted.sweep_removes_kept_generations
    ),
    "replayed dead letters count twice": Bug(
        "P4", generations_planted.replayed_letters_count_twice
    ),
    "a replay removes before it commits": Bug("P4", generations_planted.replay_removes_first),
    "a sweep removes a range under way": Bug(
        "P4", generations_planted.sweep_removes_what_is_under_way
    ),
    "a sweep spares the present epoch": Bug(
        "P5a", generations_planted.sweep_spares_the_present_epoch, GenerationsWorld
    ),
    "a merged manifest lacks files": Bug("P4", generations_planted.compaction_forgets_a_range),
    "erased events are not counted": Bug("P4a", _erasure_counts_nothing),
    "a marker bounded by nothing": Bug("P4a", marks_planted.without_bound),
    "a marker by one clock": Bug("P4a", marks_planted.by_one_clock, MarkersWorld),
    "an event from the future marks a folder": Bug(
        "P4a", marks_planted.future_moves_the_watermark, MarkersWorld
    ),
    "a chain's marker ignores the first source": Bug(
        "P4a", marks_planted.chain_is_bounded_by_its_source, MarkersWorld
    ),
    "copies have no numbers": Bug("P4", copies_planted.copies_have_no_numbers),
    "a segment keeps bytes of its neighbors": Bug("P5a", _segment_keeps_neighbors, StagedWorld),
    "a trim passes over archives": Bug("P4a", _trim_passes_over_archives),
    "gaps are not recorded": Bug("P4a", _gaps_are_not_recorded),
    "a withdrawn range can come back": Bug("P4a", _withdrawn_under_the_same_head),
    "a removed failure can come back": Bug("P5a", _failures_are_not_guarded),
    "a removed generation keeps late files": Bug(
        "P5a", generations_planted.drop_leaves_files, GenerationsWorld
    ),
    "a journal keeps trimmed events": Bug("P5a", _journal_keeps_trimmed_events, ErasureWorld),
    "what a backup lacks was never there": Bug(
        "P4a", chains_planted.holes_count_as_never_there, HolesWorld
    ),
    "a driver keeps the source of a backfill": Bug(
        "P4a", drivers_planted.driver_keeps_its_source, HolesWorld
    ),
    "a backup is read to its end": Bug(
        "P4a", generations_planted.backup_is_read_to_its_end, HolesWorld
    ),
    "promote does not freeze heads": Bug(
        "P4a", generations_planted.promote_does_not_freeze, GenerationsWorld
    ),
    "erasure leaves kept generations out": Bug(
        "P5a", _erasure_leaves_kept_generations_out, GenerationsWorld
    ),
    "the proof does not search staging": Bug("P5a", _proof_does_not_look_at_staging, ErasureWorld),
    "a folder is not reopened": Bug("P4a", marks_planted.folder_is_not_reopened, MarkersWorld),
    "a replay with other folders reopens none": Bug(
        "P4a", marks_planted.replays_reopen_only_folders_of_their_own, MarkersWorld
    ),
    "batches of Spark have no numbers": Bug(
        "P4", tasks_planted.batches_have_no_numbers, StagedWorld
    ),
    "segments of killed writes stay": Bug("P5a", tasks_planted.killed_writes_stay, StagedWorld),
    "the proof passes over Spark's segments": Bug(
        "P5a", tasks_planted.proof_passes_over_spark, StagedWorld
    ),
    "the proof passes over copies": Bug("P5a", copies_planted.proof_passes_over_copies),
    "the proof passes over archives of the same topic": Bug(
        "P5a", copies_planted.proof_passes_over_others, OrphansWorld
    ),
    "the proof stops at deleted copies": Bug(
        "P5a", copies_planted.proof_stops_at_deleted_copies, CopiesWorld
    ),
    "the proof does not list what a topic was restored from": Bug(
        "P5a", copies_planted.restored_archives_are_not_listed, CopiesWorld
    ),
    "the audit forgets where copies are": Bug(
        "P5a", copies_planted.audit_forgets_copies, RecordedWorld
    ),
    "deletes of a copy hide its events": Bug(
        "P5a", copies_planted.deletes_of_a_copy_hide_its_events, RecordedWorld
    ),
    "what was staged for a deleted topic stays": Bug(
        "P5a", copies_planted.staged_for_deleted_topics_stays, CopiesWorld
    ),
    "the reason of a delete that died stays": Bug(
        "P5a", copies_planted.reasons_of_dead_deletes_stay, RecordedWorld
    ),
    "the delete of an original dates copies with other times": Bug(
        "P5a", copies_planted.original_dates_retimed_copies, CopiesWorld
    ),
    "erased offsets were never there": Bug(
        "P4a", copies_planted.erased_offsets_were_never_there, BackupsWorld
    ),
    "a manifest misses a part of a range": Bug(
        "P4a", cuts_planted.manifest_misses_a_part, CutsWorld
    ),
    "a part after a short one is published": Bug(
        "P4a", cuts_planted.cut_after_a_short_one_counts, CutsWorld
    ),
    "a part that failed is passed over": Bug(
        "P4a", cuts_planted.failed_cut_is_passed_over, CutsWorld
    ),
    "what is read ahead begins at the limit": Bug(
        "P4a", ahead_planted.begins_at_the_limit, CutsWorld
    ),
    "a sweep removes what is read ahead": Bug("P4", ahead_planted.sweeps_pass_it_over),
    "drivers begin files by what they knew": Bug(
        "P4", rotation_planted.list_has_no_version, RotationWorld
    ),
    "a file is known when it is read": Bug(
        "P4", rotation_planted.file_is_known_when_it_is_read, RotationWorld
    ),
    "files have the same names in all archives": Bug(
        "P4", rotation_planted.names_mean_the_same_everywhere, RotatedChainsWorld
    ),
    "a chain that is built of files goes by their paths": Bug(
        "P4", rotation_planted.chain_names_files_itself, RotatedChainsWorld
    ),
    "a redo leaves dead letters out": Bug(
        "P4", moves_planted.redo_leaves_dead_letters_out, MovesWorld
    ),
    "copies are not looked at again": Bug(
        "P4", moves_planted.copies_are_not_looked_at_again, MovesWorld
    ),
    "a seek records no gap": Bug("P4a", moves_planted.seek_records_no_gap, MovesWorld),
    "an update passes over ranges under way": Bug(
        "P4", moves_planted.update_passes_over_ranges_under_way, MovesWorld
    ),
    "a task's files of older contents are decided": Bug(
        "P5a", tasks_planted.files_of_older_contents, TasksWorld
    ),
    "tasks compile by a plan that is overtaken": Bug(
        "P5", tasks_planted.overtaken_plan, TasksWorld
    ),
    "an update looks at archives once": Bug("P4", moves_planted.update_looks_once, MovesWorld),
    "a stream passes a failed event": Bug(
        "P3", moves_planted.stream_passes_a_failed_event, MovesWorld
    ),
    "a pump passes late events": Bug("P4a", moves_planted.pump_passes_late_events, LateWorld),
    "a folder claims what never was": Bug(
        "P4a", moves_planted.folder_claims_what_never_was, FoldersWorld
    ),
    "a promote hides gaps": Bug("P4a", moves_planted.promote_hides_gaps, FoldersWorld),
    "a late range moves the position": Bug(
        "P4", moves_planted.late_range_moves_the_position, LateWorld
    ),
    "new partitions of a recreated topic are read": Bug("P4", _new_partitions_are_read),
    "ranges under way of a recreated topic do not count": Bug(
        "P4", _only_commits_are_events, RemadeWorld
    ),
    "dropped events excuse lost ones": Bug(
        "P4a", dropped_planted.dropped_events_excuse_lost_ones, TransformsWorld
    ),
    "deletes count up to a time": Bug(
        "P4a", dropped_planted.deletes_count_up_to_a_time, ReturnsWorld
    ),
    "a delete names starts only where it found events": Bug(
        "P5a", dropped_planted.delete_names_starts_where_it_found_events, OutsideWorld
    ),
    "a delete lists generations once": Bug(
        "P5a", dropped_planted.delete_lists_generations_once, OutsideWorld
    ),
    **{name: Bug(*bug, RestoredWorld) for name, bug in restored_planted.BUGS.items()},
    "an erasure searches once": Bug("P5a", dropped_planted.erasure_searches_once, ArrivalsWorld),
    "an erased key counts where it was found": Bug(
        "P5a", dropped_planted.erased_keys_count_where_they_were_found, ArrivalsWorld
    ),
    "a source that is behind has ended": Bug("P4a", chains_planted.behind_is_remade, ChainsWorld),
    "a backfill goes back": Bug("P4a", chains_planted.backfill_goes_back, ChainsWorld),
}
