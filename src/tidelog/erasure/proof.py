"""The proof of an erasure: what was searched, what was found, and the verdict.

A proof is about events of a topic, or of an archive without topic. It can be saved to a file for an
auditor. The file is JSON: everything a proof knows, with hashes of the ids and keys in place of the
erased names, and a SHA-256 over all of it. ``Home.erase`` writes that hash to the topic's audit and
``ArchiveHandle.erase`` to the archive's, so a file can be compared with the home that it is about.
The hash in the file detects damage; the one in the audit detects forgery.

``object_search`` and ``proof_search`` fill in what was searched and found.
"""

from __future__ import annotations

import builtins
import hashlib
import os
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import msgspec

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
from tidelog.erasure.delete import DeleteResult
from tidelog.erasure.redaction import redacted
from tidelog.errors import AlreadyExistsError, CorruptError, InvalidError, NotFoundError
from tidelog.model.decoding import decode_json
from tidelog.model.event import to_iso

__all__ = [
    "IdHash",
    "Proof",
    "SearchedPlace",
    "Trace",
    "check_proof_path",
    "is_recorded",
    "record_proof",
]

Verdict = Literal["erased", "not erased", "not all proved", "nothing to prove"]

_FORMAT = "tidelog proof 1"
_HASHES_MAX = RECORD_BYTES_MAX // HASH_BYTES


class IdHash(str):
    """The hash of an id, in a proof that was loaded. An id may look like one."""

    __slots__ = ()


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

        It is not clean if the erasure met files of archives in which nothing could be searched for.

        >>> home.erase("orders", ids=["order-2"]).is_clean
        True
        """
        unseen = () if self.deleted is None else self.deleted.unseen
        return self.is_erased and self.known and not unseen

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
        deleted = self.deleted
        if deleted is not None:
            deleted = replace(deleted, missing=tuple(map(IdHash, deleted.missing)))
        return Proof(**values, places=self.places, traces=self.traces, deleted=deleted)


def _hash_once(event_id: str) -> str:
    return str(event_id) if isinstance(event_id, IdHash) else id_hash(event_id)


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
