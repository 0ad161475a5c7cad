"""``tidelog proof``: checks files of proofs; and how ``--prove`` and ``--erased`` show one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click

from tidelog import Erasure, ErasureWatch
from tidelog.cli.output import (
    FAILED,
    CommandGroup,
    Output,
    counted,
    json_option,
    progress_bar,
    size_text,
    to_seconds,
    utf8,
    visible,
)
from tidelog.cli.pipeline_options import SparkFields
from tidelog.cli.terminal import open_home
from tidelog.erasure.proof import Proof
from tidelog.errors import FailedError
from tidelog.home import Home
from tidelog.model import defaults
from tidelog.model.event import to_iso

__all__ = [
    "end_with",
    "proof",
    "proof_option",
    "removal_bar",
    "search_with_bar",
    "show_proof",
    "wait_option",
]

_UNDER_WAY = "archive_ranges_under_way"
_NAMED_MAX = 5  # of ids that were not found
_HEADLINES = {
    "erased": "ERASED: no object that was searched holds any of it.",
    "not erased": "NOT ERASED: something is left.",
    "nothing to prove": "NOTHING TO PROVE: an id or key that you gave was never deleted here. "
    "Check it; to prove others, leave it out.",
}

wait_option = click.option(
    "--wait",
    default=defaults.ERASE_WAIT,
    show_default=True,
    metavar="D",
    help="With --prove, how long to wait for archive ranges that may still write the events.",
)
proof_option = click.option(
    "--proof",
    "proof_file",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write the proof to a file: JSON with a hash, and hashes in place of ids and keys.",
)


@click.group(cls=CommandGroup)
def proof() -> None:
    """Check the file of a proof of erasure.

    \b
    Examples:
      tidelog proof check request-118.json
    """


@proof.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--id", "event_id", type=utf8, metavar="ID", help="Check that it covers this id.")
@click.option("--key", type=utf8, metavar="K", help="Check that it covers this key.")
@click.option(
    "--recorded", is_flag=True, help="Check that the audit of the home has the proof's hash."
)
@json_option
@click.pass_obj
def check(home_text: str | None, output: Output, /, file: str, **given: Any) -> None:
    """Check that a proof is as it was written, and show it.

    The hash in the file shows that nothing in it has changed. It cannot show who wrote it: use
    --recorded, which compares it with the audit of the home. Without --recorded, no home is needed.
    Ends with exit code 1 unless the verdict is "erased" and everything matches.

    \b
    Examples:
      tidelog proof check request-118.json
      tidelog proof check request-118.json --key customer-7
      tidelog proof check request-118.json --recorded
    """
    found = Proof.load(file)
    key = None if given["key"] is None else given["key"].encode()
    if not found.is_about(id=given["event_id"], key=key):
        raise FailedError(f"proof `{file}`: is about other ids or keys: give the file of this one")
    if given["recorded"]:
        with open_home(home_text) as home:
            if not home.has_proof(found):
                raise FailedError(
                    f"proof `{file}`: the audit of {found.subject} does not have its hash: "
                    "it was written elsewhere, or was not recorded"
                )
    show_proof(output, found)
    output.say(f"\n{_checks(given)}")
    end_with(output, found)


def _checks(given: Mapping[str, Any]) -> str:
    """Returns what a check has found to be true, and what it has not looked at."""
    covered = [name for name in ("id", "key") if given["event_id" if name == "id" else name]]
    about = f" It is about the {' and the '.join(covered)} that you gave." if covered else ""
    recorded = (
        "The audit of the home has its hash."
        if given["recorded"]
        else "Use --recorded to compare its hash with the audit of the home."
    )
    return f"Checked: the file is as it was written.{about} {recorded}"


def search_with_bar(
    home: Home, topic: str, ids: Collection[str], keys: Collection[bytes], how: SparkFields
) -> Proof:
    """Search all objects, with a progress bar."""
    with progress_bar(f"search {topic}", _topic_bytes(home, topic)) as advance:
        return home.prove_erased(topic, ids=ids, keys=keys, progress=advance, **how)


class RemovalWatch(ErasureWatch):
    """Collects what an erasure removes, and advances a bar while it searches."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._advance = advance
        self.values: dict[str, int] = {}

    def purged(self, done: Erasure) -> None:
        now = _purge_values(done)
        before = {**self.values, _UNDER_WAY: 0}  # what was under way before has ended, or is again
        self.values = {name: count + before.get(name, 0) for name, count in now.items()}

    def searched(self, size: int) -> None:
        self._advance(size)


@contextmanager
def removal_bar(home: Home, topic: str = "", archive: str = "") -> Iterator[RemovalWatch]:
    """Gives what follows an erasure from a topic or archive, with a bar for its search."""
    total = home.archives.get(archive).stored_bytes if archive else _topic_bytes(home, topic)
    with progress_bar(f"search {topic or archive}", total) as advance:
        yield RemovalWatch(advance)


def _topic_bytes(home: Home, topic: str) -> Callable[[], int]:
    return lambda: sum(state.bytes or 0 for state in home.partitions(topic))


def show_proof(output: Output, proof: Proof, purged: Mapping[str, int] | None = None) -> None:
    """Print the verdict and its evidence; with what was removed before, where that is known."""
    if output.as_json:
        output.record(_values(proof, purged))
        return
    output.say(_HEADLINES[proof.verdict])
    output.say("")
    output.record(_evidence(proof, purged))
    for number, trace in enumerate(proof.traces, 1):
        output.say(f"\nleft {number}: {trace.object}\n  {trace.what}\n  to do: {trace.do}")
    for each in proof.out_of_reach:
        output.say(f"out of reach: {each}")


def end_with(output: Output, proof: Proof, file: str | None = None) -> None:
    """Write the proof to a file if there is one; exit with 1 unless the proof is clean."""
    if file is not None:
        proof.save(file)
        output.say(f"\nWrote the proof to {file}. Check it with `tidelog proof check {file}`.")
    unseen = () if proof.deleted is None else proof.deleted.unseen
    if unseen or not proof.is_clean:
        sys.exit(FAILED)


def _evidence(proof: Proof, done: Mapping[str, int] | None) -> dict[str, str]:
    shown = _subject(proof)
    deleted = proof.deleted
    if deleted is not None:
        found = deleted.events + deleted.archived + deleted.strays
        archived = 0 if proof.archive else deleted.archived
        only = f", {archived:,} of them only in archives" if archived else ""
        if deleted.strays:
            only += f", {deleted.strays:,} of them in objects that no row names"
        shown["deleted"] = (counted(found, "event") if found else "nothing new") + only
        if deleted.missing:
            shown["not found"] = _named_ids(deleted.missing)
    if done is not None:
        journals = "" if proof.archive else f"{counted(done['journals_made'], 'journal')} and "
        shown["removed"] = (
            f"{counted(done['objects_deleted'], 'object')} deleted, {journals}"
            f"{counted(done['archive_files_rewritten'], 'archive file')} rewritten"
        )
        if done[_UNDER_WAY]:
            shown["waiting for"] = counted(done[_UNDER_WAY], "archive range")
    shown["searched"] = f"{counted(proof.objects, 'object')}, {size_text(proof.bytes)}"
    for place in proof.places:
        name, _, how = place.name.partition(" (")  # how events got there is too long for a column
        size = f"{counted(place.objects, 'object')}, {size_text(place.bytes)}"
        shown[f"  {name}"] = f"{size} ({how}" if how else size
    shown["at"] = to_seconds(to_iso(proof.searched_ms))
    shown["proof"] = proof.sha256
    return shown


def _named_ids(ids: Collection[str]) -> str:
    """Returns the first of some ids and how many others there are; a file has hashes of them."""
    named = [each for each in ids if not each.startswith("sha256:")][:_NAMED_MAX]
    if not named:
        return counted(len(ids), "id")
    others = len(ids) - len(named)
    return ", ".join(map(visible, named)) + (f" and {others} more" if others else "")


def _subject(proof: Proof) -> dict[str, str]:
    return {"archive": proof.archive} if proof.archive else {"topic": proof.topic}


def _values(proof: Proof, purged: Mapping[str, int] | None) -> dict[str, Any]:
    deleted = proof.deleted
    return {
        **_subject(proof),
        "verdict": proof.verdict,
        "erased": proof.is_erased,
        "known": proof.known,
        "deleted": None if deleted is None else deleted.events,
        "archived": None if deleted is None else deleted.archived,
        "strays": None if deleted is None else deleted.strays,
        "missing": [] if deleted is None else list(deleted.missing),
        "unseen": [] if deleted is None else list(deleted.unseen),
        **(purged or {}),
        "objects_searched": proof.objects,
        "bytes_searched": proof.bytes,
        "places": [asdict(each) for each in proof.places],
        "traces": [asdict(each) for each in proof.traces],
        "out_of_reach": proof.out_of_reach,
        "searched_at": to_iso(proof.searched_ms),
        "sha256": proof.sha256,
    }


def _purge_values(done: Erasure) -> dict[str, int]:
    return {
        "journals_made": done.compiled.journals,
        "archive_files_rewritten": sum(each.files for each in done.archives),
        _UNDER_WAY: sum(each.waiting for each in done.archives),
        "objects_deleted": done.swept.objects_deleted + done.staging.objects_deleted,
    }
