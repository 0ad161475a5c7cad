"""The accountant of archives: knows every event of the source, and finds it again in the store.

P4: in the live generation each event is in one data file or among the dead letters, once, for a
reader of manifests and for a reader who lists the folder. What was committed to a live generation
stays there through every operation on the archive, until its event is deleted. P4a: from the
recorded begin to the position every offset is archived, dead, deleted, in a gap with a reason, or
one that the source never had, and what the product claims is what is counted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.sim.archive_many import is_hole
from tests.sim.archive_store import Folders, Generation, Row, SourceRows, Stored
from tests.sim.journal_raw import DELETED, TRIMMED, Gone, Place, Truth
from tidelog.model.archive import Account

__all__ = ["Accountant"]


_Counted = tuple[SourceRows, SourceRows | None, list[str]]  # rows as they were, and their files


@dataclass
class Accountant:
    """Compares archives with the truth about their source."""

    folders: Folders
    truth: Truth
    committed: dict[str, dict[str, Place]] = field(default_factory=dict)  # by archive and id
    asked: set[str] = field(default_factory=set)  # ids that a process began to delete
    latest: dict[str, int] = field(default_factory=dict)  # ends that an archive's creation saw
    skipped_loss: int = 0  # offsets in gaps, for tests that the world is not idle
    _files: dict[tuple[str, str], dict[str, Stored]] = field(default_factory=dict)  # by version
    _counted: dict[tuple[Generation, str], _Counted] = field(default_factory=dict)
    _looked: dict[Generation, tuple[int, ...]] = field(default_factory=dict)  # at what

    # While the world runs.

    def check_live(self) -> None:
        """What must hold at every moment."""
        for live in self.folders.live():
            changes = self.folders.changes(live)
            if self._looked.get(live) != changes:
                self._check_listed(live)
                self._check_committed(live)
                self._looked[live] = changes

    def _check_listed(self, live: Generation) -> None:
        seen: dict[tuple[str, str, int], Stored] = {}
        count = 0
        for key in self.folders.data_keys(live):
            found = self._checked(key).values()
            seen.update((each.place, each) for each in found)
            count += len(found)
        if len(seen) == count:
            return
        for stored in self.folders.events(live):
            other = seen[stored.place]
            assert other is stored, f"{stored.place} is in `{stored.key}` and in `{other.key}`"

    def _checked(self, key: str) -> dict[str, Stored]:
        """The events of a file by id; each has its source. Histories only grow: once is enough."""
        version = self.folders.version(key)
        if version not in self._files:
            found: dict[str, Stored] = {}
            for stored in self.folders.contents(key):
                self.source_of(stored)
                mark = self.mark(stored)
                assert mark not in found, f"{mark} is in `{key}` twice"
                found[mark] = stored
            self._files[version] = found
        return self._files[version]

    def mark(self, stored: Stored) -> str:
        """What an event is known by."""
        return stored.id or ""

    def may_lack(self, live: Generation, place: Place) -> bool:
        """Whether a live generation may lack an event that one before it had."""
        return self.was_deleted(place)

    def _check_committed(self, live: Generation) -> None:
        """Every event that a live generation had is still there, unless it was deleted."""
        found = self.counting(live)
        known = self.committed.setdefault(live.archive, {})
        for event_id in known.keys() - found.keys():
            place = known.pop(event_id)
            assert self.may_lack(live, place), (
                f"archive `{live.archive}` lost {event_id} of {place[1:]}: generation "
                f"{live.number} does not have it"
            )
        for event_id in found.keys() - known.keys():
            known[event_id] = self.source_of(found[event_id])

    def counting(self, of: Generation) -> dict[str, Stored]:
        """The events that a reader of manifests finds, data and dead letters, by id."""
        found: dict[str, Stored] = {}
        for partition in self.folders.partitions(of):
            for key in self._counting_in(of, partition):
                assert self.folders.find(key) is not None, f"no file `{key}`"
                more = self._checked(key)
                twice = found.keys() & more.keys()
                assert not twice, f"{twice} are in `{key}` and in another file of {of.folder}"
                found |= more
        return found

    def _counting_in(self, of: Generation, partition: str) -> list[str]:
        """Files of data, and those of dead letters that no replay has replaced."""
        rows = self.folders.source_rows(of, partition)
        replays = self.folders.source_rows(of, partition, ".dead")
        if rows is None:
            return []
        known = self._counted.get((of, partition))
        if known is None or known[0] is not rows or known[1] is not replays:
            known = self._counted[of, partition] = (rows, replays, _files(rows, replays))
        return known[2]

    def source_of(self, stored: Stored) -> Place:
        """The event of the source that this is; there must be one, at this place."""
        assert stored.id is not None
        _, partition, offset = stored.place
        places = self.truth.by_id.get(stored.id, [])
        found = [place for place in places if place[1:] == (int(partition), offset)]
        assert found, f"`{stored.key}` has {stored.id} at {stored.place}, its source at {places}"
        values = [state for _, state in self.truth.history[found[0]]]
        assert stored.value in values, f"{stored.id} is {stored.value!r} in `{stored.key}`"
        return found[0]

    def was_deleted(self, place: Place) -> bool:
        """Whether it was deleted, or a delete of it began: a trim may have come before its end."""
        if place not in self.truth.events:
            return False  # the source never had it
        if self.truth.events[place].id in self.asked:
            return True
        return any(state is DELETED for _, state in self.truth.history[place])

    def is_wanted(self, of: Generation, place: Place) -> bool:
        """Whether an event is one that the generation must have: not deleted, not in a gap."""
        incarnation, number, offset = place
        for partition in self.folders.partitions(of):
            rows = self.folders.source_rows(of, partition)
            if rows is None or not partition.endswith(f"/{number}"):
                continue
            if self._incarnation(of, partition, rows.head) != incarnation:
                return False
            if not self._read(of, partition.rpartition("/")[0]) <= {incarnation}:
                return False
            gaps = [(int(gap["start"]), int(gap["end"])) for gap in _whole(rows.head["gaps"])]
            in_gap = any(start <= offset < end for start, end in gaps)
            begins = int(rows.head["begin"]["position"]) <= offset
            return begins and not in_gap and not self._is_gone(place)
        return not self._is_gone(place)

    def _is_gone(self, place: Place) -> bool:
        return any(isinstance(state, Gone) for _, state in self.truth.history[place])

    def _read(self, of: Generation, topic: str) -> set[str]:
        """The incarnations of a topic from which a generation has committed ranges."""
        found: set[str] = set()
        for partition in self.folders.partitions(of):
            rows = self.folders.source_rows(of, partition)
            if rows and partition.rpartition("/")[0] == topic and rows.head["totals"]["commits"]:
                found.add(self._incarnation(of, partition, rows.head))
        return found

    def _incarnation(self, of: Generation, partition: str, head: Row) -> str:
        """Of the topic that a source partition comes from; by way of another archive, perhaps."""
        found = str(head["incarnation"])
        if any(place[0] == found for place in self.truth.events):
            return found
        kind, _, source = self._source(of).partition(":")
        if kind != "archive":
            return found
        above = next(each for each in self.folders.live() if each.archive == source)
        rows = self.folders.source_rows(above, partition)
        return self._incarnation(above, partition, rows.head) if rows else found

    def erased_in(self, of: Generation, key: str) -> int:
        """How many events were erased from a file, as its manifest says."""
        found = 0
        for partition in self.folders.partitions(of):
            for suffix in ("", ".dead"):
                rows = self.folders.source_rows(of, partition, suffix)
                for manifest in rows.manifests if rows else ():
                    files = [file for file in manifest["files"] if file["target"] == key]
                    found += sum(file["erased"] for file in files)
        return found

    # In the end.

    def check_account(self, of: Generation, partition: str, claim: Account | None) -> None:
        """P4a of one source partition, and what the product says about it."""
        rows = self.folders.source_rows(of, partition)
        if rows is None:
            return
        data = _offsets(self.folders.events(of), partition)
        dead = _offsets(self.folders.dead(of), partition)
        if rows.head["begin"] is None:  # a promote that died froze it before any driver began it
            left = rows.commits or data or dead or rows.head["position"] or claim
            assert rows.head["frozen"], f"{of.folder}: {partition} begins nowhere"
            assert not left, f"{of.folder}: {partition} begins nowhere, and has {left}"
            return
        begin, end = int(rows.head["begin"]["position"]), int(rows.head["position"])
        gaps = [(int(gap["start"]), int(gap["end"])) for gap in _whole(rows.head["gaps"])]
        head = rows.head | {"incarnation": self._incarnation(of, partition, rows.head)}
        tally: Counter[str] = Counter()
        for offset in range(begin, end):
            tally[self._kind(of, partition, offset, data, dead, gaps, head)] += 1
        decided = self._decided(of, partition, end)
        beyond = [offset for offset in data | dead if not begin <= offset < decided]
        assert not beyond, f"{of.folder}: {partition} holds {beyond}, outside [{begin}, {end})"
        self._check_begin(of, partition, head)
        self._check_claims(of, partition, rows, tally, claim)

    def _decided(self, of: Generation, partition: str, end: int) -> int:
        """Up to where files may be: a range that is decided, and whose source is gone, has some."""
        intent = self.folders.value(f"pipeline/{of.pipeline}/{partition}", "intent")
        return int(intent["limit"]) if intent is not None and intent["manifest"] else end

    def _kind(
        self,
        of: Generation,
        partition: str,
        offset: int,
        data: Counter[int],
        dead: Counter[int],
        gaps: list[tuple[int, int]],
        head: Row,
    ) -> str:
        where = f"{of.folder} {partition} {offset}"
        count = data[offset] + dead[offset]
        assert count <= 1, f"{where}: is there {count} times"
        in_gap = any(start <= offset < end for start, end in gaps)
        if count:
            assert not in_gap, f"{where}: is in a gap, and in a file"
            return "archived" if data[offset] else "dead"
        if in_gap:
            return "gap"
        place = (head["incarnation"], int(partition.rpartition("/")[2]), offset)
        kind = self.why_nowhere(of, place, head)
        assert kind, f"{where}: is nowhere, and no gap is recorded"
        return kind

    def why_nowhere(self, of: Generation, place: Place, head: Row) -> str:
        """Why a generation does not have an event, if not for a gap; empty if nothing explains it.

        ``head`` is that of the source partition.
        """
        if is_hole(place[2]) and self._source(of).startswith("holed:"):
            return "absent"
        return "erased" if self.was_deleted(place) else ""

    def _source(self, of: Generation) -> str:
        """The URL of the source that an archive was created with."""
        return str(self.folders.archives()[of.archive]["source"])

    def _check_begin(self, of: Generation, partition: str, head: Row) -> None:
        """Nothing before the begin was passed over without a reason."""
        begin = head["begin"]
        number = int(partition.rpartition("/")[2])
        for offset in range(int(begin["position"])):
            assert begin["reason"] != "earliest", f"{of.folder} {partition}: begins at {begin}"
            seen = self.latest.get(partition)
            if begin["reason"] == "latest":
                assert seen == int(begin["position"]), f"{partition} begins at {begin}, not {seen}"
            elif begin["reason"] == "retention":
                place = (head["incarnation"], number, offset)
                states = [state for _, state in self.truth.history[place]]
                assert TRIMMED in states, f"{place} was not trimmed, and {partition} begins later"
        for gap in head["gaps"]:
            assert gap["reason"], f"{partition}: a gap without a reason"
            if gap["reason"] == "files":
                assert self.reads_folder(of), f"{partition}: no folder was read"
            if gap["reason"] == "retention":
                self._check_trimmed(head, number, int(gap["start"]), int(gap["end"]))

    def reads_folder(self, of: Generation) -> bool:
        """Whether a generation was made of a folder of files."""
        return self._source(of).startswith("folder:")

    def check_others(self, live: Generation) -> None:
        """Kept generations have their files, and removed ones have none."""
        row = self.folders.archives()[live.archive]
        for number in range(1, row["newest"] + 1):
            other = Generation(live.archive, live.incarnation, number)
            if number not in row["formats"]:
                left = [*self.folders.data_keys(other), *(e.key for e in self.folders.dead(other))]
                assert not left, f"generation {number} was removed, and left {left}"
            elif row["states"].get(number) == "kept":
                self.counting(other)

    def check_one_topic(self, live: Generation) -> None:
        """A generation has events of one topic, not also of another one with its name."""
        topics: dict[str, str] = {}
        for stored in self.counting(live).values():
            incarnation, *_ = self.source_of(stored)
            known = topics.setdefault(stored.place[0], incarnation)
            assert known == incarnation, f"{live.folder} mixes {known} and {incarnation}"

    def _check_trimmed(self, head: Row, number: int, start: int, end: int) -> None:
        for offset in range(start, end):
            place = (head["incarnation"], number, offset)
            states = [state for _, state in self.truth.history[place]]
            assert TRIMMED in states, f"{place} is in a gap for retention, and was not trimmed"
            self.skipped_loss += 1

    def _check_claims(
        self,
        of: Generation,
        partition: str,
        rows: SourceRows,
        tally: Counter[str],
        claim: Account | None,
    ) -> None:
        where = f"{of.folder} {partition}"
        assert claim is not None, f"{where}: has no account"
        self.check_counts(where, rows, tally, claim)
        assert claim.adds_up, f"{where}: {claim.problem}"
        at = rows.head["begin"]["position"]
        for manifest in rows.manifests:
            assert manifest["start"] == at, f"{where}: a range begins at {manifest['start']}"
            at = manifest["end"]
            _check_range(where, manifest)
        assert at == rows.head["position"], f"{where}: ranges end at {at}"

    def check_counts(
        self, where: str, rows: SourceRows, tally: Counter[str], claim: Account
    ) -> None:
        """The product counts what is counted here."""
        claimed = {
            "archived": claim.archived,
            "dead": claim.dead,
            "erased": claim.erased,
            "gap": claim.skipped,
            "absent": claim.absent,
        }
        counted = {name: tally[name] for name in claimed}
        for each in (gap for gap in rows.head["gaps"] if not _whole([gap])):  # erased meanwhile
            counted |= {"gap": counted["gap"] + each["offsets"]}
            counted |= {"erased": counted["erased"] - each["offsets"]}
        assert claimed == counted, f"{where}: {claim}, not {tally}"
        assert not claim.dropped, f"{where}: {claim}"


def _whole(gaps: Iterable[Row]) -> list[Row]:
    """Gaps that are not only some of the offsets between their positions."""
    return [gap for gap in gaps if int(gap["end"]) - int(gap["start"]) == gap["offsets"]]


def _check_range(where: str, manifest: Row) -> None:
    """What one range says of itself adds up."""
    span = int(manifest["end"]) - int(manifest["start"])
    lost = sum(gap["offsets"] for gap in manifest["lost"])
    parts = manifest["read"] + manifest["deleted"] + manifest["absent"] + lost
    assert parts == span, f"{where}: a range of {span} offsets accounts for {parts}: {manifest}"
    kept = manifest["written"] + manifest["dead"] + manifest["dropped"] + manifest["left_out"]
    assert kept == manifest["read"], f"{where}: {manifest['read']} were read, {kept} are kept"
    for kind in ("written", "dead"):
        named = "data" if kind == "written" else kind
        files = [file for file in manifest["files"] if file["kind"] == named]
        count = sum(file["events"] + file["erased"] for file in files)
        assert count == manifest[kind], f"{where}: {manifest[kind]} {kind}, files say {count}"


def _files(rows: SourceRows, replays: SourceRows | None) -> list[str]:
    stretches = [_stretch(each) for each in replays.manifests] if replays else []
    files = [(file, stretches) for each in rows.manifests for file in each["files"]]
    for number, each in enumerate(replays.manifests if replays else ()):
        files += [(file, stretches[number + 1 :]) for file in each["files"]]
    found = []
    for file, later in files:
        first = file["first_offset"]
        replaced = any(start <= first < end for start, end in later)
        if file["kind"] == "data" or (file["kind"] == "dead" and not replaced):
            found.append(file["target"])
    return found


def _stretch(manifest: Row) -> tuple[int, int]:
    """The offsets that a replay has tried: positions are ``<pass>:<offset>``."""
    first, last = (manifest[name].split(":") for name in ("start", "end"))
    return int(first[1]) if first[0] == last[0] else 0, int(last[1])


def _offsets(events: Iterable[Stored], partition: str) -> Counter[int]:
    return Counter(
        each.place[2] for each in events if f"{each.place[0]}/{each.place[1]}" == partition
    )
