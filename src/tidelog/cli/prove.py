"""What ``delete --prove`` and ``verify --erased`` do: let erased bytes go, and show it."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import asdict

from tidelog.cli.output import FAILED, Output, progress_bar
from tidelog.erasure.proof import Proof
from tidelog.home import Home
from tidelog.maintenance.turn import Erasure

__all__ = ["carry_out_and_tell", "prove_and_tell"]


def carry_out_and_tell(home: Home, output: Output, topic: str) -> None:
    """Remove the bytes of deleted events now, and print what was done."""
    output.record(_shown(home.purge(topic)))


def prove_and_tell(
    home: Home,
    output: Output,
    topic: str,
    ids: Collection[str] = (),
    keys: Collection[bytes] = (),
) -> None:
    """Search all objects, print what was found; exit code 1 where something is left.

    So too where an id or a key was never deleted here: there is nothing that could be proved.
    """

    def total() -> int:
        return sum(state.bytes or 0 for state in home.partitions(topic))

    with progress_bar(f"search {topic}", total) as advance:
        proof = home.prove_erased(topic, ids=ids, keys=keys, progress=advance)
    _tell(output, proof)
    if not proof.is_erased or not proof.known:
        sys.exit(FAILED)


def _tell(output: Output, proof: Proof) -> None:
    values = {
        "topic": proof.topic,
        "erased": proof.is_erased,
        "known": proof.known,
        "objects_searched": proof.objects,
        "bytes_searched": proof.bytes,
    }
    if output.as_json:
        traces = [asdict(trace) for trace in proof.traces]
        output.record({**values, "traces": traces, "out_of_reach": proof.out_of_reach})
        return
    known = "yes" if proof.known else "no: nothing of this id or key was ever deleted here"
    output.record({**values, "erased": "yes" if proof.is_erased else "NO", "known": known})
    for trace in proof.traces:
        output.say(f"left: {trace.object}: {trace.what}: {trace.do}")
    for each in proof.out_of_reach:
        output.say(f"out of reach: {each}")


def _shown(done: Erasure) -> dict[str, int]:
    return {
        "journals_made": done.compiled.journals,
        "archive_files_rewritten": sum(each.files for each in done.archives),
        "archive_ranges_under_way": sum(each.waiting for each in done.archives),
        "objects_deleted": done.swept.objects_deleted + done.staging.objects_deleted,
    }
