"""A catalog that goes back to a copy: archives account for every offset after that, too.

Drivers, replays, backfills, erasures and sweeps are at work, and the catalog and the store are
copied at a random moment. Later all processes are killed at once, and the rows are put back to that
copy; the store stays as it is. A person follows "Backups and restores" of ``docs/operating.md``:
what ``verify`` names as missing is put back from the copy of the store, strays are moved out of the
folder, and deletes since the copy are repeated. Then fresh processes start. This happens once or
twice, to the same copy or to another one. In the end events that only strays have are recovered.

In every second world the source is another system, which does not go back with the catalog: the
archive must have every offset again. In the others the topic goes back as well, and other events
get the offsets of those that it lost. In half of the worlds the parser is fixed between the copy
and the restore, so that ranges which are archived again have events that were dead letters. In
every fifth world dead letters are replayed more often, and the processes are killed when a replay
has decided its files and published none of them, if an earlier one has read since the copy: after
the restore a replay writes the same files again, with a smaller number. The store is a replica
there, without the last files of dead letters that replays wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from tests.sim import archive_worlds
from tests.sim.archive_accounts import Accountant
from tests.sim.archive_home import ANY_KIND, ByKind
from tests.sim.archive_store import Generation, Stored, decoded
from tests.sim.archive_world import ArchivesWorld, Done
from tests.sim.bare import fields
from tests.sim.base import ACCEPTED
from tests.sim.journal_raw import Place, Raw, State, WatchedStore
from tidelog.archive.archive import find_archive
from tidelog.archive.dead_letters import ReplayOptions, replay
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.catalog.base import Row
from tidelog.erasure.delete_archived import erase_archived, finish_archive
from tidelog.erasure.proof import Proof
from tidelog.erasure.proof_search import prove_erased
from tidelog.errors import ConflictError, CorruptError, InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.journal.lookup import Lookup
from tidelog.journal.recover import recover_topic
from tidelog.log.maintenance.verify import verify_topic
from tidelog.log.topics import find_topic
from tidelog.model.topic import Topic
from tidelog.pipeline.tasks import LocalWorkers

__all__ = ["RestoredAccountant", "RestoredWorld"]

NEVER = 1 << 40  # writes
WRITES_UNTIL_REPLAY = 1_500
OUTSIDE = "many:t"  # topic `t` as an archive of another system sees it
WHY = archive_worlds.WHY


@dataclass
class RestoredDone(Done):
    """What has happened here too."""

    restores: int = 0
    put_back: int = 0  # objects that were missing, or rewritten by an erasure
    repeated: int = 0  # deletes
    aside: int = 0  # files that were set aside
    replays_aside: int = 0
    recovered: int = 0


@dataclass
class _Request:
    """A request to erase events."""

    ids: list[str]
    is_done: bool = False


@dataclass(frozen=True)
class _Copy:
    """The catalog and the store at one moment, and what was true then."""

    rows: dict[str, dict[str, Row]]
    objects: dict[str, bytes]
    events: dict[Place, Raw]
    history: dict[Place, list[tuple[int, State]]]
    by_id: dict[str, list[Place]]
    audit: dict[str, dict[str, object]]
    heads: dict[str, dict[str, object]]
    needed: dict[str, set[str]]
    committed: dict[str, dict[str, Place]]
    proven: list[bytes]
    requests: list[_Request]  # that were done


@dataclass
class RestoredAccountant(Accountant):
    """Knows also the events that the source lost with its catalog."""

    forgotten: dict[tuple[str, Place], list[State]] = field(default_factory=dict)

    def source_of(self, stored: Stored) -> Place:
        _, partition, offset = stored.place
        for (event_id, place), values in self.forgotten.items():
            if event_id == stored.id and place[1:] == (int(partition), offset):
                assert stored.value in values, f"{event_id} is {stored.value!r} in `{stored.key}`"
                return place
        return super().source_of(stored)

    def is_wanted(self, of: Generation, place: Place) -> bool:
        is_erased = self.truth.events[place].id in self.asked  # from the archives alone, perhaps
        return not is_erased and super().is_wanted(of, place)

    def go_back(self, committed: dict[str, dict[str, Place]]) -> None:
        """The catalog names what it named at a time before."""
        self.committed = {name: dict(known) for name, known in committed.items()}
        self._counted.clear()
        self._looked.clear()
        self.folders.forget_rows()


class RestoredWorld(ArchivesWorld):
    """One seed's world."""

    rates = archive_worlds.RATES
    attempts = (3,)
    # A process that the catalog's past refuses stops; a person has to look at it.
    accepted = (*ACCEPTED, CorruptError)
    accountants = RestoredAccountant
    accountant: RestoredAccountant

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.done: RestoredDone = RestoredDone()
        others = ("build", "erase", "trim", "finalize", "chain")
        self.kinds = {"replay", *self.random.sample(others, 2)}
        self.is_outside = seed % 2 == 1
        if self.is_outside:
            self.source = OUTSIDE
        self.is_parser_fixed = seed % 4 < 2
        # Leaves files as erasures have rewritten them: a repeat of all deletes at once accepts it,
        # unless the topic has trimmed such events and cannot say what the files lack.
        is_able = not self.is_outside and "trim" not in self.kinds
        self.are_rewrites_left = is_able and seed % 3 > 0
        self.restores = self.random.choice([1, 1, 2])
        self.ends_in_replay = seed % 5 == 4
        self.copies: list[_Copy] = []
        self.requests: list[_Request] = []
        self.had: dict[str, set[str]] = {}  # ids that archives had when a catalog went back
        self.aside_before: set[str] = set()  # files whose rows a restore may have forgotten
        self.repeated: set[str] = set()  # ids whose delete was repeated after the last restore
        self.moved: dict[str, bytes] = {}  # files that a person moved out of the home
        self.is_incomplete = False  # the store lacks objects that rows name
        self._replays_seen = 0
        self._plan_restore()

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        super()._patch(patch)
        patch.setattr(ByKind, "fixed", "")

    def _plan_restore(self) -> None:
        self.copy_at = self.rows.writes + self.random.randrange(60, 500)  # writes
        self.stop_at = self.copy_at + self.random.randrange(20, 600)
        if self.ends_in_replay:
            self.stop_at += WRITES_UNTIL_REPLAY
        self.is_stopped = False

    # The restore.

    def run_processes(self) -> None:
        for _ in range(self.restores):
            self._plan_restore()
            super().run_processes()
            self.go_back()
            rates, self.faults.rates = self.faults.rates, {}
            self.scheduler.spawn("person", self.follow_procedure)
            self.scheduler.run(self.steps_max, self.check)
            self.faults.rates = rates
        self.copy_at = self.stop_at = NEVER
        self.is_stopped = False
        super().run_processes()

    def check(self) -> None:
        if self.is_incomplete:
            return
        super().check()
        if self.rows.writes >= self.copy_at:
            self.copy_at = NEVER
            self._keep_copy()
        is_over = self.rows.writes >= self.stop_at or self._is_in_replay()
        if is_over and not self.is_stopped:
            self.is_stopped = True
            for _, process in self._running:
                process.kill()

    def _is_in_replay(self) -> bool:
        """Whether a replay has just decided what another one will write again after a restore."""
        if not self.ends_in_replay or self.copy_at < NEVER or not self.copies:
            return False
        found = sum(1 for _ in self._new_replays())
        is_more, self._replays_seen = found > self._replays_seen, found
        return is_more and any(map(self._would_be_repeated, self._new_replays()))

    def _new_replays(self) -> Iterator[str]:
        """The manifests of replays that were put since the last copy."""
        known = self.copies[-1].objects
        for key in self.bare_objects.keys_below("pipelines/"):
            if ".dead/manifests/" in key and key not in known:
                yield key

    def _would_be_repeated(self, key: str) -> bool:
        manifest = self.folders.manifest(key)
        where = f"pipeline/{key.split('/')[1]}/{manifest['partition']}"
        head = self.copies[-1].rows.get(where, {}).get("head")
        targets = [file["target"] for file in manifest["files"] if file["kind"] == "data"]
        is_later = head is not None and manifest["ordinal"] > fields(head.value)["ordinal"]
        return is_later and bool(targets) and not any(map(self.bare_objects.holds, targets))

    def _restart_the_dead(self) -> None:
        if self.is_stopped:
            self._kills = self.scheduler.kills
            self._running.clear()
        super()._restart_the_dead()

    def _keep_copy(self) -> None:
        self.copies.append(
            _Copy(
                {name: dict(rows) for name, rows in self.rows._partitions.items()},
                self.bare_objects.bare(),
                dict(self.truth.events),
                {place: list(states) for place, states in self.truth.history.items()},
                {event_id: list(places) for event_id, places in self.truth.by_id.items()},
                dict(self.truth.audit),
                dict(self.truth._heads),
                {name: set(keys) for name, keys in self.truth._needed.items()},
                {name: dict(known) for name, known in self.accountant.committed.items()},
                list(self.erasures.proven),
                [each for each in self.requests if each.is_done],
            )
        )

    def go_back(self) -> None:
        """Put rows back to a copy; nothing that was sent before arrives any more."""
        self.faults.late.clear()
        self.repeated.clear()
        if not self.copies:
            self._keep_copy()
        self.copy = self.random.choice(self.copies[-2:])
        for live in self.folders.live():
            found = {each.id or "" for each in self.accountant.counting(live).values()}
            self.had.setdefault(live.archive, set()).update(found)
        self.aside_before = set(self._aside_files())
        self.files_before = self.bare_objects.bare().keys()
        self.rows._partitions = dict(self._partitions_back())
        self.rows._had.clear()
        self.rows._done.clear()
        self.erasures.proven = list(self.copy.proven)
        if self.is_outside:
            self.truth.audit |= self.copy.audit  # archives' own records go back
        else:
            self._go_back_in_truth()
        self.accountant.go_back(self.copy.committed)
        if self.is_parser_fixed:
            ByKind.fixed = "b"
        self.scheduler.time.advance(self.random.choice([60, 3_600, 9 * 86_400]))
        self.done.restores += 1
        self.is_incomplete = True
        if self.ends_in_replay:
            self._lose_letters()

    def _lose_letters(self) -> None:
        """The store is a replica now, without the last files of dead letters that replays wrote."""
        lost = [
            file["target"]
            for key in self._new_replays()
            for file in self.folders.manifest(key)["files"]
            if file["kind"] == "dead" and self.bare_objects.holds(file["target"])
        ]
        self.bare_objects.delete(lost)

    def _partitions_back(self) -> Iterator[tuple[str, dict[str, Row]]]:
        """The rows after the restore; those of a source outside stay as they are."""
        now, then = self.rows._partitions, self.copy.rows
        if not self.is_outside:
            yield from ((name, dict(rows)) for name, rows in then.items())
            return
        own = ("pipeline/", *(f"audit/{each}" for each in self._incarnations()))
        for name in now.keys() | then.keys():
            if name == "registry":
                archives = {row: each for row, each in then[name].items() if _is_of_archive(row)}
                others = {row: each for row, each in now[name].items() if not _is_of_archive(row)}
                yield name, archives | others
            else:
                yield name, dict((then if name.startswith(own) else now).get(name, {}))

    def _incarnations(self) -> list[str]:
        return [row["incarnation"] for row in self.folders.archives().values()]

    def _go_back_in_truth(self) -> None:
        truth, copy = self.truth, self.copy
        for place in truth.events.keys() - copy.events.keys():
            values = [state for _, state in truth.history[place]]
            self.accountant.forgotten[truth.events[place].id or "", place] = values
        truth.events = dict(copy.events)
        truth.history = {place: list(states) for place, states in copy.history.items()}
        truth.by_id = {event_id: list(places) for event_id, places in copy.by_id.items()}
        truth.audit = dict(copy.audit)
        truth._heads = dict(copy.heads)
        truth._needed = {name: set(keys) for name, keys in copy.needed.items()}
        known = self.markers.acknowledged_ms
        self.markers.acknowledged_ms = {
            place: at_ms for place, at_ms in known.items() if place in truth.events
        }

    def follow_procedure(self) -> None:
        """Steps 2 and 3 of the procedure after a restore."""
        with self.home(self.quiet) as home:
            for _ in range(30):
                if not self.put_missing_back(home):
                    break
            self.is_incomplete = self.are_rewrites_left
            lost = [each for each in self.requests if each not in self.copy.requests]
            if self.are_rewrites_left and self.requests:
                # Also those before the copy: their events may have left the files after it.
                self.repeat(home, *self.requests)
            else:
                for request in lost:
                    self.repeat(home, request)
            self.is_incomplete = False
            for _ in range(2 * self.ends_in_replay):
                how = ReplayOptions(parser=ANY_KIND)
                replay(home.context, find_archive(home.context, "day"), how, LocalWorkers(1))
                self.done.replays += 1

    def put_missing_back(self, home: Home) -> int:
        """Put back from the copy what ``verify`` names as missing; how many objects."""
        held = self.bare_objects.bare()
        missing = {key for key in self.copy.objects if key not in held}
        texts = [repr(each) for each in verify_topic(home.context, self.topic).findings]
        for name in self.names():
            archive = find_archive(home.context, name)
            for generation in archive.in_state("building", "live", "kept"):
                how = ArchiveVerifyOptions(deep=True, generation=generation)
                found = verify_archive(home.context, archive, how).problems
                texts += [repr(each) for each in found]
                rewritten = [each.where for each in found if each.kind in ("size", "contents")]
                if not self.are_rewrites_left:
                    missing |= {key for key in rewritten if key in self.copy.objects}
                for each in found:
                    if each.kind in ("decided", "stray"):
                        self.move_out(each.where)
        named = [key for key in sorted(missing) if any(key in text for text in texts)]
        for key in named:
            WatchedStore._store(self.bare_objects, key, self.copy.objects[key])
        self.done.put_back += len(named)
        return len(named)

    def move_out(self, key: str) -> None:
        """Move a file to where no reader looks for it."""
        self.moved[key] = self.bare_objects.data(key)
        self.bare_objects.delete([key])

    def repeat(self, home: Home, *requests: _Request) -> None:
        """Step 3: repeat deletes, in one call."""
        ids = sorted({each for request in requests for each in request.ids})
        if self.is_outside:
            self.erase_from_all(home, ids)
        else:
            home.erase("t", ids=ids, why="request")
        self.repeated.update(ids)
        for request in requests:
            request.is_done = True
        self.done.repeated += len(requests)

    # Actors.

    def erase(self) -> None:
        home = self.home()
        for _ in range(3):
            home.context.clock.sleep(self.random.uniform(0, 15))
            request = _Request(self.some_ids(self.random.choice([1, 3])))
            self.requests.append(request)
            self.accountant.asked.update(request.ids)
            with self.tolerating(NotFoundError, InvalidError, ConflictError):
                if self.is_outside:
                    self.erase_from_all(home, request.ids)
                else:
                    home.delete("t", request.ids, why="request")
                request.is_done = True
                self.done.erased += 1
            for _ in range(3 * (not self.is_outside)):
                with self.tolerating(NotFoundError, InvalidError, ConflictError):
                    self.prove(home, request.ids)
                    break

    def erase_from_all(self, home: Home, ids: list[str]) -> None:
        for name in self.names():
            erase_archived(home.context, find_archive(home.context, name), WHY, ids)

    def trim(self) -> None:
        """Trim nothing between a restore of the topic and its recovery, as in ``rollback``."""
        if self.is_outside or not self.done.restores:
            self.past_readers |= self.is_outside  # a restored archive is behind its source
            super().trim()

    # In the end.

    def check_rest(self) -> None:
        if not self.is_outside:
            with self.home(self.quiet) as home:
                self.recover(home)
        super().check_rest()
        self.check_strictly()
        self.check_nothing_vanished()

    def check_staged(self) -> None:
        """What was staged under an epoch that the catalog has lost stays until heads reach it."""

    def recover(self, home: Home) -> None:
        """Step 6."""
        topic = find_topic(home.context, "t")
        report = recover_topic(home.context, Lookup(home.context, topic))
        self.done.recovered += report.appended
        # What was trimmed after a compile that died had read it stays in that one's journal.
        assert replace(report, trimmed=0).is_clean, report
        for event_id in self.repeated:
            alive = self.truth.alive_with(event_id)
            assert not alive, f"{event_id} was deleted after the restore, and is at {alive}"

    def check_erased(self, home: Home) -> None:
        if not self.is_outside:
            super().check_erased(home)
            return
        for name in self.names():
            finish_archive(home.context, find_archive(home.context, name))
        for live in self.folders.live():
            self.check_archive(home, live)

    def last_proof(self, home: Home, topic: Topic, gone: list[str]) -> Proof:
        """A person deletes forgotten files that the proof names, if it says so; then it is clean.

        So is one of events that were appended and deleted after the copy was made, once they are
        deleted again.
        """
        self._delete_forgotten(prove_erased(home.context, topic, gone))
        lost = sorted(self.repeated - self.truth.by_id.keys())
        if lost:
            with self.home(self.quiet) as own:
                self._delete_forgotten(own.erase("t", ids=lost, why="request"))
                traces = own.erase("t", ids=lost, why="request").traces
            assert not traces, f"the proof finds {traces[:3]} of events that were never recovered"
        return prove_erased(home.context, topic, gone)

    def _delete_forgotten(self, proof: Proof) -> None:
        """Delete files that a proof names and tells a person to delete."""
        for trace in proof.traces:
            if trace.do.endswith("then delete it"):
                is_aside = "/_aside/" in trace.object and not self._has_generation(trace.object)
                assert is_aside or trace.object in self.files_before, f"after a restore: {trace}"
                self.move_out(trace.object)

    def check_strictly(self) -> None:
        """Live generations have no event that the source lost with its catalog."""
        for live in self.folders.live():
            for stored in self.accountant.counting(live).values():
                Accountant.source_of(self.accountant, stored)

    def check_nothing_vanished(self) -> None:
        """What an archive had before a restore is in it, or set aside with a record, or erased."""
        named = set(self._named_aside())
        found = set(self._aside_files())
        unnamed = {key for key in found - named - self.aside_before if self._has_generation(key)}
        assert not unnamed, f"no row names {unnamed}, which were set aside"
        lost = named - found
        assert not lost, f"{lost} were set aside, and are not there"
        self.done.aside += len(found)
        for archive, ids in self.had.items():
            below = (f"archives/{archive}/", f"dead/{archive}/")
            keys = [key for prefix in below for key in self.bare_objects.keys_below(prefix)]
            files = [key for key in keys if _is_data(key)]
            held = {each.id for key in files for each in self.folders.contents(key)}
            moved = filter(_is_data, self.moved)  # not what was only staged
            held |= {each.id for key in moved for each in decoded(key, self.moved[key])}
            gone = ids - held - self.accountant.asked
            assert not gone, f"archive `{archive}` had {sorted(gone)} before a restore"

    def _has_generation(self, key: str) -> bool:
        """Whether the generation of a file that was set aside was not dropped, with its rows."""
        number = key.rpartition("/")[2].partition("_")[0]
        return int(number) in self.folders.archives()[key.split("/")[1]]["formats"]

    def _aside_files(self) -> list[str]:
        folders = [f"archives/{name}/_aside/" for name in self.names()]
        return [key for each in folders for key in self.bare_objects.keys_below(each)]

    def _named_aside(self) -> Iterator[str]:
        for partition, name, value in self.bare_rows.everything():
            if partition.startswith("pipeline/") and name.startswith("aside/"):
                files = fields(value)["files"]
                self.done.replays_aside += partition.split("/")[1].endswith(".dead")
                yield from files


def _is_of_archive(row: str) -> bool:
    return row.startswith("archive/")


def _is_data(key: str) -> bool:
    return key.endswith((".jsonl", ".json", ".parquet"))
