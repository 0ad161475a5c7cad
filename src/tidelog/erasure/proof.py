"""The proof of an erasure: what was searched, what was found, and the verdict.

A proof is about events of a topic, or of an archive without topic. It can be saved to a file for an
auditor. The file is JSON: everything a proof knows, with hashes of the ids and keys in place of the
erased names, and a SHA-256 over all of it. ``Home.erase`` writes that hash to the topic's audit and
``ArchiveHandle.erase`` to the archive's, so a file can be compared with the home that it is about.
The hash in the file detects damage; the one in the audit detects forgery.

:class:`ObjectSearch` counts and searches single objects for a proof, and notes what it finds.
An object whose events no row counts may contain none of the erased ones: what a driver or a Spark
writer staged, what was set aside, metadata of tables, and everything that nothing explains. It is
clean only if all of it was decoded.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa

from tidelog.clock import Clock, looks
from tidelog.connectors.by_url import store_at
from tidelog.context import Context
from tidelog.coordination.audit import (
    HASH_BYTES,
    RECORD_BYTES_MAX,
    AuditedProof,
    AuditRecord,
    Owner,
    Why,
    id_hash,
    key_hash,
    put_record,
    read_audit,
)
from tidelog.coordination.pipeline_rows import was_staged_before_restore
from tidelog.erasure import proof_remedies as remedies
from tidelog.erasure.delete import DeleteResult
from tidelog.erasure.matcher import (
    EventMatcher,
    has_columns,
    is_event_lines,
    is_plain_text,
    names_of,
    rows_of,
)
from tidelog.erasure.metadata_objects import event_values
from tidelog.erasure.proof_scope import (
    Generation,
    ProofScope,
    explained_places,
    places_of_files,
    stagings_of_others,
)
from tidelog.erasure.redaction import redacted
from tidelog.errors import AlreadyExistsError, CorruptError, InvalidError, NotFoundError
from tidelog.model.archive import Archive
from tidelog.model.decoding import decode_json
from tidelog.model.event import to_iso
from tidelog.store.base import ObjectInfo, Store, Upload

__all__ = [
    "UNREADABLE",
    "ObjectSearch",
    "Proof",
    "SearchedPlace",
    "Trace",
    "check_proof_path",
    "is_recorded",
    "lasting_uploads",
    "record_proof",
]

Verdict = Literal["erased", "not erased", "not all proved", "nothing to prove"]

_FORMAT = "tidelog proof 1"
_HASHES_MAX = RECORD_BYTES_MAX // HASH_BYTES


@dataclass(frozen=True, slots=True)
class Trace:
    """Where something is left."""

    object: str
    what: str
    do: str
    copy: str = ""  # the topic with copies of the events that it is in, and how they got there


@dataclass(slots=True)
class SearchedPlace:
    """Objects that were searched together, such as those of one archive."""

    name: str
    objects: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Proof:
    """What was searched, and what was found."""

    topic: str  # empty if it is about an archive
    incarnation: str = ""
    ids: tuple[str, ...] = ()  # hashes: the proof must not keep what was erased
    keys: tuple[str, ...] = ()
    searched_ms: int = 0
    known: bool = True  # whether each requested id and key was ever deleted here
    objects: int = 0
    bytes: int = 0
    places: list[SearchedPlace] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    out_of_reach: list[str] = field(default_factory=list)  # may hold them; not searched
    deleted: DeleteResult | None = None  # what an erasure deleted before the search
    archive: str = ""  # if it is about events that no topic had

    @property
    def subject(self) -> str:
        """Returns what it is about, as messages name it.

        >>> home.prove_erased("orders", ids=["order-1"]).subject
        'topic `orders`'
        """
        return f"archive `{self.archive}`" if self.archive else f"topic `{self.topic}`"

    @property
    def is_erased(self) -> bool:
        """Returns whether no byte is left in any of these objects.

        >>> home.prove_erased("orders", ids=["order-1"]).is_erased
        False
        """
        return not self.traces

    @property
    def is_clean(self) -> bool:
        """Returns whether nothing is left, and all that was given was once deleted here.

        >>> home.erase("orders", ids=["order-2"]).is_clean
        True
        """
        return self.is_erased and self.known

    @property
    def verdict(self) -> Verdict:
        """Returns the result in words.

        It is "nothing to prove" if an id or key was never deleted, and "not all proved" if the
        erasure deleted events of others.

        >>> home.prove_erased("orders", ids=["order-1"]).verdict
        'not erased'
        """
        if self.traces:
            return "not erased"
        if self.known:
            return "erased"
        return "not all proved" if self.deleted and self.deleted.found else "nothing to prove"

    @property
    def sha256(self) -> str:
        """Returns the hash of everything in the proof, as its file and the audit have it.

        >>> home.erase("orders", ids=["order-2"]).sha256[:7]
        'sha256:'
        """
        return "sha256:" + hashlib.sha256(_canonical(self._content())).hexdigest()

    def is_about(self, *, id: str | None = None, key: builtins.bytes | None = None) -> bool:
        """Returns whether the proof covers this id or key.

        >>> home.erase("orders", ids=["order-2"]).is_about(id="order-2")
        True
        """
        wanted_id = id is None or id_hash(id) in self.ids
        return wanted_id and (key is None or key_hash(key) in self.keys)

    def as_json(self) -> builtins.bytes:
        """Returns the text of the proof's file.

        >>> home.erase("orders", ids=["order-2"]).as_json()[:1]
        b'{'
        """
        content = {**self._content(), "sha256": self.sha256}
        return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the proof to a new file, for an auditor. ``Proof.load`` reads and checks it.

        Raises ``AlreadyExistsError`` if the file exists, so that no proof replaces another.

        >>> home.erase("orders", ids=["order-2"]).save("proof.json")
        """
        data = self.as_json()
        try:
            file = open(path, "xb")  # noqa: SIM115 - closed below
        except FileExistsError as exc:
            raise _existing_file(path) from exc
        try:
            with file:
                file.write(data)
        except OSError:
            Path(path).unlink(missing_ok=True)  # a part of a proof is none
            raise

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Proof:
        """Returns the proof in a file, after checking its hash.

        Raises ``CorruptError`` if the file was changed, and ``InvalidError`` if it is not a proof.

        >>> home.erase("orders", ids=["order-2"]).save("proof.json")
        >>> tidelog.Proof.load("proof.json").verdict
        'erased'
        """
        what = f"proof `{path}`"
        try:
            data = Path(path).read_bytes()
        except FileNotFoundError as exc:
            raise NotFoundError(f"{what}: no such file: check its path") from exc
        try:
            read = decode_json(data, dict[str, Any])
            if read.get("format") != _FORMAT:
                raise InvalidError(f"{what}: is not a proof: `tidelog delete --proof` writes one")
            stored = read.pop("sha256", None)
            found = "sha256:" + hashlib.sha256(_canonical(read)).hexdigest()
            if stored != found:
                raise CorruptError(
                    f"{what}: was changed after it was written: its hash is {stored}, its content "
                    f"has {found}: get the original, or prove again"
                )
            content = decode_json(data, _Content)
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise InvalidError(f"{what}: is not a proof ({exc}): give the file as written") from exc
        proof = content.proof()
        if proof.verdict != content.verdict:
            raise CorruptError(
                f"{what}: says `{content.verdict}`, but its evidence says `{proof.verdict}`: get "
                "the original, or prove again"
            )
        return proof

    def _content(self) -> dict[str, Any]:
        deleted = None
        if self.deleted is not None:
            deleted = asdict(self.deleted) | {"missing": [*map(_hash_once, self.deleted.missing)]}
        values = {name: getattr(self, name) for name in _PLAIN}
        about = {"archive": self.archive} if self.archive else {"topic": self.topic}
        return {
            "format": _FORMAT,
            "verdict": self.verdict,
            **about,
            **values,
            "searched_at": to_iso(self.searched_ms),
            "places": [asdict(each) for each in self.places],
            "traces": [asdict(each) for each in self.traces],
            "deleted": deleted,
        }


_PLAIN = (
    "incarnation",
    "ids",
    "keys",
    "searched_ms",
    "known",
    "objects",
    "bytes",
    "out_of_reach",
)


def check_proof_path(path: str | PathLike[str]) -> None:
    """Raises unless ``Proof.save`` can write to a path; call it before anything is erased.

    Raises ``AlreadyExistsError`` for a file that exists, and ``InvalidError`` for a folder that
    does not exist or cannot be written to.
    """
    file = Path(path)
    if file.is_symlink() or file.exists():
        raise _existing_file(path)
    if not file.parent.is_dir():
        raise InvalidError(f"file `{path}`: there is no folder `{file.parent}`: create it first")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise InvalidError(f"file `{path}`: its folder cannot be written to: fix its rights")


def _existing_file(path: str | PathLike[str]) -> AlreadyExistsError:
    return AlreadyExistsError(
        f"file `{path}`: exists already, and a proof replaces no file: choose another, or remove it"
    )


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a file."""

    format: str
    verdict: Verdict
    incarnation: str
    ids: tuple[str, ...]
    keys: tuple[str, ...]
    searched_ms: int
    searched_at: str
    known: bool
    objects: int
    bytes: int
    out_of_reach: list[str]
    places: list[SearchedPlace]
    traces: list[Trace]
    deleted: DeleteResult | None
    sha256: str
    topic: str = ""  # or else an archive
    archive: str = ""

    def proof(self) -> Proof:
        """Returns the proof; the ids that a delete did not find stay hashes."""
        values = {name: getattr(self, name) for name in ("topic", "archive", *_PLAIN)}
        return Proof(**values, places=self.places, traces=self.traces, deleted=self.deleted)


def _hash_once(event_id: str) -> str:
    """Returns the hash of an id; the ids of a proof that was loaded are hashes already."""
    is_hash = event_id.startswith("sha256:") and len(event_id) == HASH_BYTES
    return event_id if is_hash else id_hash(event_id)


def _canonical(content: dict[str, Any]) -> bytes:
    return msgspec.json.encode(content, order="sorted")


def record_proof(context: Context, owner: Owner, proof: Proof, why: Why) -> None:
    """Writes who proved what, with the proof's hash, to the audit of its topic or archive."""
    if owner.incarnation != proof.incarnation:
        raise InvalidError(f"proof: is about another {proof.subject}, which was deleted")
    # A proof must not bring a name back.
    reason, who = (redacted(each, proof.ids, proof.keys) for each in (why.why, why.who))
    by_id = [
        ("", proof.ids[first : first + _HASHES_MAX])
        for first in range(0, len(proof.ids), _HASHES_MAX)
    ]
    by_key: list[tuple[str, tuple[str, ...]]] = [(key, ()) for key in proof.keys]
    for key, ids in (*by_id, *by_key):
        record = AuditRecord(
            id=context.ids.new(),
            op="prove",
            who=who,
            at_ms=context.clock.now_ms(),
            why=reason,
            events=(),
            state="done",
            key=key,
            proof=AuditedProof(proof.verdict, proof.sha256, ids),
        )
        put_record(context, owner, record)


def is_recorded(context: Context, owner: Owner, proof: Proof) -> bool:
    """Returns whether the audit of the topic or archive has the hash of this proof."""
    found = (each.proof for each in read_audit(context, owner))
    return any(each is not None and each.sha256 == proof.sha256 for each in found)


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
            return sum(self.in_rows(batch) for batch in rows_of(data))
        if not is_plain_text(data):
            return None
        if self._sought.is_word_in(data):
            return 1
        # A file of only values has no ids, so it shows neither whose they are nor which.
        return None if key.startswith(self._files) and not is_event_lines(data) else 0

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

    def count_mark(self, store: Store, archive: Archive) -> None:
        """Counts an archive's mark if it is as written: it contains no event.

        Otherwise its empty or short texts would match an equal id or key.
        """
        key = (store.url, archive.owner)
        with contextlib.suppress(NotFoundError):
            if key not in self._seen and store.get(archive.owner) == archive.owner_content:
                self.count(key, len(archive.owner_content))

    def add(self, key: str, what: str, do: str, archive: str = "", copy: str = "") -> None:
        """Notes that something is left; ``archive`` is the one whose file it is, if known."""
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
    protocols (``rewrite.is_under_way``) cover what it may write.
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
