"""``tidelog proof``: checks files of proofs; and how ``--prove`` and ``--erased`` show one."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

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
from tidelog.erasure.delete import DeleteResult
from tidelog.erasure.proof import IdHash, Proof, Trace, check_proof_path
from tidelog.errors import FailedError, NotFoundError
from tidelog.home import Home
from tidelog.model import defaults
from tidelog.model.event import to_iso

__all__ = [
    "GivenEvents",
    "proof",
    "proof_option",
    "removal_bars",
    "report_proof",
    "scan_bar",
    "search_with_bar",
    "unseen_file",
    "wait_option",
]

_Bar = AbstractContextManager[Callable[[int], None]]
_BACKFILL = "make the archive's files again with `tidelog archive backfill`"
_NAMED_MAX = 5  # of ids that were not found, and of ids in a command
_OBJECTS_MAX = 3  # that are named of those with the same remedy
_HEADLINES = {
    "erased": "ERASED: no object that was searched holds any of it.",
    "not erased": "NOT ERASED: something is left.",
    "not all proved": "NOT ALL PROVED: no object that was searched holds any of it, but an id that "
    "you gave was never deleted here. Check it; to prove the others, leave it out.",
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
    callback=lambda _context, _option, path: _new_file(path),
    help="Write the proof to a new file: JSON with a hash, and hashes in place of ids and keys.",
)


def _new_file(path: str | None) -> str | None:
    """Refuses a file that cannot be written, before the command erases anything."""
    if path is not None:
        check_proof_path(path)
    return path


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
        raise FailedError(
            f"proof `{file}`: does not cover this id or key: check what you typed, or give the "
            "file of another proof"
        )
    if given["recorded"]:
        with open_home(home_text) as home:
            if not _is_recorded(home, found):
                raise FailedError(
                    f"proof `{file}`: the audit of {found.subject} does not have its hash: "
                    "it was written elsewhere, or was not recorded"
                )
    report_proof(output, found, note=_checks(given))


def _is_recorded(home: Home, found: Proof) -> bool:
    try:
        return home.has_proof(found)
    except NotFoundError as exc:
        raise NotFoundError(
            f"{found.subject}: is not in this home: name the home of the proof, with "
            "`tidelog --home HOME proof check`"
        ) from exc


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


def scan_bar(home: Home, topic: str) -> _Bar:
    """Returns a progress bar for reading the keys of a topic."""
    return progress_bar(f"scan {topic}", _topic_bytes(home, topic))


class RemovalWatch(ErasureWatch):
    """Shows a bar for each search of an erasure."""

    def __init__(self, bars: ExitStack, scan: _Bar | None, search: _Bar) -> None:
        self._bars = bars
        self._search: _Bar | None = search
        self._advance = _ignore if scan is None else bars.enter_context(scan)

    def deleted(self, result: DeleteResult) -> None:
        self._bars.close()  # a terminal shows one bar at once
        self._advance = _ignore

    def purging(self) -> None:
        if self._search is not None:
            self._advance = self._bars.enter_context(self._search)
        self._search = None

    def searched(self, size: int) -> None:
        """Advances the bar, also while keys are read before the delete."""
        self._advance(size)


@contextmanager
def removal_bars(
    home: Home, topic: str = "", archive: str = "", *, scans: bool = False
) -> Iterator[RemovalWatch]:
    """Gives what follows an erasure from a topic or archive, with a bar for each of its searches.

    With ``scans``, the first is for reading the keys of the topic.
    """
    total = home.archives.get(archive).stored_bytes if archive else _topic_bytes(home, topic)
    search = progress_bar(f"search {topic or archive}", total)
    with ExitStack() as bars:
        yield RemovalWatch(bars, scan_bar(home, topic) if scans else None, search)


def _ignore(_: int) -> None:
    """Advances no bar."""


def _topic_bytes(home: Home, topic: str) -> Callable[[], int]:
    return lambda: sum(state.bytes or 0 for state in home.partitions(topic))


class GivenEvents(NamedTuple):
    """What the person gave: a proof has only hashes of it."""

    ids: Collection[str] = ()
    key: str | None = None


def report_proof(
    output: Output,
    proof: Proof,
    file: str | None = None,
    removed: Erasure | None = None,
    given: GivenEvents | None = None,
    note: str = "",
) -> None:
    """Writes the proof to a file if there is one, prints it, and exits with 1 unless it is clean.

    The file comes first: if printing fails, a repeat would no longer prove what was deleted now.
    """
    failure: OSError | None = None
    if file is not None:
        try:
            proof.save(file)
        except OSError as exc:  # such as a full disk: what was proved is still printed
            failure = exc
    _show_proof(output, proof, removed, given or GivenEvents())
    unseen = () if proof.deleted is None else proof.deleted.unseen
    for each in () if output.as_json else unseen:
        output.say(unseen_file(each))
    if failure is not None:
        raise FailedError(
            f"file `{file}`: {failure.strerror}: the proof is above, and its hash is in the audit: "
            "fix this, then prove again with `tidelog verify --erased … --proof`"
        ) from failure
    if file is not None:
        note = f"Wrote the proof to {file}. Check it with `tidelog proof check {file}`."
    if note:
        output.say(f"\n{note}")
    if not proof.is_clean:
        sys.exit(FAILED)


def unseen_file(file: str) -> str:
    """Returns what to say of a file of an archive in which nothing could be searched for."""
    return f"archive file `{file}`: has no ids or keys to be searched for: {_BACKFILL}"


def _show_proof(output: Output, proof: Proof, removed: Erasure | None, given: GivenEvents) -> None:
    """Print the verdict and its evidence; with what was removed before, where that is known."""
    if output.as_json:
        output.record(_values(proof, removed))
        return
    output.say(_HEADLINES[proof.verdict])
    output.say("")
    output.record(_evidence(proof, removed))
    for (where, do), findings in _grouped(proof.traces).items():
        output.say(f"\nleft: {where}" if where else "\nleft:")
        for each in findings[:_OBJECTS_MAX]:
            output.say(f"  {each}")
        if len(findings) > _OBJECTS_MAX:
            output.say(f"  and {len(findings) - _OBJECTS_MAX:,} more (--json lists all)")
        output.say(f"  to do: {_with_names(do, given)}")
    for each in proof.out_of_reach:
        output.say(f"out of reach: {each}")


def _evidence(proof: Proof, removed: Erasure | None) -> dict[str, str]:
    shown = _subject(proof)
    found = _found(proof)
    if proof.deleted is not None:
        shown["deleted"] = _deleted_text(proof) if found else "nothing new"
        if proof.deleted.missing:
            # What is known was deleted once, so what is missing of it was deleted before.
            missing = "deleted before" if proof.known else "not found"
            shown[missing] = _named_ids(proof.deleted.missing)
    if removed is not None:
        made = counted(removed.compiled.journals, "journal")
        journals = "" if proof.archive else f"{made} and "
        is_earlier = not found and any(_removed_values(removed).values())
        shown["removed"] = (
            f"{counted(removed.objects_deleted, 'object')} deleted, {journals}"
            f"{counted(removed.files, 'archive file')} rewritten"
            f"{', for earlier deletes' if is_earlier else ''}"
            if any(_removed_values(removed).values())
            else "nothing"
        )
        if removed.waiting:
            shown["waiting for"] = counted(removed.waiting, "archive range")
    shown["searched"] = f"{counted(proof.objects, 'object')}, {size_text(proof.bytes)}"
    for place in proof.places:
        name, _, how = place.name.partition(" (")  # how events got there is too long for a column
        size = f"{counted(place.objects, 'object')}, {size_text(place.bytes)}"
        shown[f"  {name}"] = f"{size} ({how}" if how else size
    shown["at"] = to_seconds(to_iso(proof.searched_ms))
    shown["proof"] = proof.sha256
    return shown


def _found(proof: Proof) -> int:
    """Returns how many events the erasure deleted."""
    return 0 if proof.deleted is None else proof.deleted.found


def _deleted_text(proof: Proof) -> str:
    """Returns how many events were deleted, and the parts of the sum as JSON has them."""
    deleted = proof.deleted
    text = counted(_found(proof), "event")
    if deleted is None or proof.archive or not (deleted.archived or deleted.strays):
        return text
    parts = [f"{deleted.events:,} in the topic"]
    if deleted.archived:
        parts.append(f"{deleted.archived:,} only in archives")
    if deleted.strays:
        parts.append(f"{deleted.strays:,} in objects that no row names")
    return f"{text}: {', '.join(parts)}"


def _grouped(traces: Iterable[Trace]) -> dict[tuple[str, str], list[str]]:
    """Returns findings by place and remedy: a copy of a topic may have one in each object."""
    groups: dict[tuple[str, str], list[str]] = {}
    for each in traces:
        groups.setdefault((each.copy, each.do), []).append(f"{each.object}: {each.what}")
    return groups


def _with_names(do: str, given: GivenEvents) -> str:
    """Returns a remedy with the ids or the key in its command, which a proof does not keep."""
    ids = [each for each in given.ids if not each.startswith("-")]
    if given.key is not None:
        key = shlex.quote(given.key)
        return do.replace("--key KEY", f"--key={key}" if key.startswith("-") else f"--key {key}")
    if not ids or len(ids) > _NAMED_MAX or len(ids) < len(given.ids):
        return do
    repeated, listed = (
        " ".join(f"{option}{shlex.quote(each)}" for each in ids) for option in ("--id ", "")
    )
    do = do.replace("--id ID", repeated)
    return re.sub(r"(tidelog delete \S+) ID\b", lambda found: f"{found[1]} {listed}", do)


def _named_ids(ids: Collection[str]) -> str:
    """Returns the first of some ids and how many others there are; a file has hashes of them."""
    named = [each for each in ids if not isinstance(each, IdHash)][:_NAMED_MAX]
    if not named:
        return counted(len(ids), "id")
    others = len(ids) - len(named)
    return ", ".join(map(visible, named)) + (f" and {others} more" if others else "")


def _subject(proof: Proof) -> dict[str, str]:
    return {"archive": proof.archive} if proof.archive else {"topic": proof.topic}


def _values(proof: Proof, removed: Erasure | None) -> dict[str, Any]:
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
        **({} if removed is None else _removed_values(removed)),
        "objects_searched": proof.objects,
        "bytes_searched": proof.bytes,
        "places": [asdict(each) for each in proof.places],
        "traces": [asdict(each) for each in proof.traces],
        "out_of_reach": proof.out_of_reach,
        "searched_at": to_iso(proof.searched_ms),
        "sha256": proof.sha256,
    }


def _removed_values(done: Erasure) -> dict[str, int]:
    return {
        "journals_made": done.compiled.journals,
        "archive_files_rewritten": done.files,
        "archive_ranges_under_way": done.waiting,
        "objects_deleted": done.objects_deleted,
    }
