"""Whether an archive is well: what is wrong, and what to do about it, in a line each. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tidelog.model.archive import Archive
from tidelog.pipeline.status import ArchiveStatus, PartitionStatus
from tidelog.store.mark import lost_remedy

__all__ = ["Limits", "lag_limit_ms", "troubles"]

_SLACK_MS = 300_000  # what a cycle may take beside the wait that the policy allows


@dataclass(frozen=True, slots=True)
class Limits:
    """What is still well."""

    max_lag: int | None = None  # events; None: as many as come within the time below
    max_lag_ms: int | None = None  # None: twice the archive's max_age, and five minutes
    max_intent_ms: int = 900_000  # a range of one cycle takes seconds to minutes
    max_dead: int = 0
    since_ms: int = 86_400_000  # dead letters and losses that are older are known by now
    driver: bool = True  # whether one must run while events wait


def lag_limit_ms(archive: Archive) -> int:
    """How long an event may wait before something must be wrong."""
    return 2 * archive.max_age_ms + _SLACK_MS


def troubles(status: ArchiveStatus, limits: Limits) -> list[str]:
    """What is wrong; nothing for an archive that is well."""
    if status.lost:
        archive = status.archive
        what = f"archive `{archive.name}` in `{archive.store}/{archive.root}`"
        return [f"{what}: {lost_remedy(archive.owner, archive.name)}"]
    if status.archive.ended is not None:
        return list(_of_ended(status.archive))
    if status.detached or status.copy_of:
        return [_of_copied(status)]
    return [*_of_archive(status, limits), *_of_partitions(status, limits)]


def _of_ended(archive: Archive) -> Iterator[str]:
    ended, name = archive.ended, archive.name
    if ended is not None and ended.removing:
        yield (
            f"archive `{name}`: its files are not all deleted: run `tidelog archive delete {name} "
            "--delete-files`"
        )
    elif ended is not None and not ended.settled:
        yield f"archive `{name}`: its end is not complete: run `tidelog archive delete {name}`"


def _of_copied(status: ArchiveStatus) -> str:
    archive = status.archive
    what = f"archive `{archive.name}` in `{archive.store}/{archive.root}`"
    if status.copy_of:
        return (
            f"{what}: takes no events in this home, which is a copy of `{status.copy_of}`: run "
            "`tidelog home adopt`, or `tidelog home adopt --moved` if the original is gone"
        )
    return (
        f"{what}: takes no events here, its folder belongs to home `{archive.home}`, which this "
        f"one was copied from: end it here with `tidelog archive delete {archive.name}`, and "
        "create another archive, in a folder of its own, to go on"
    )


def _of_archive(status: ArchiveStatus, limits: Limits) -> Iterator[str]:
    name = f"archive `{status.archive.name}`"
    if status.deleted:
        yield (
            f"{name}: its topic `{status.deleted}` was deleted: end the archive with `tidelog "
            f"archive delete {status.archive.name}`, its files stay; or create the topic again"
        )
    elif status.source_error:
        yield f"{name}: its source cannot be reached: {status.source_error}"
    failure = status.failure
    if failure is not None and status.drivers:
        since_s = (status.read_ms - failure.since_ms) / 1000
        yield f"{name}: its driver cannot reach the source since {since_s:.0f} s: {failure.message}"
    if status.silent:
        yield (
            f"{name}: {status.silent} of its drivers died or cannot reach the catalog: "
            f"look at its process, and start it again with `tidelog archive run "
            f"{status.archive.name} --follow`"
        )
    waiting = sum(each.waits for each in status.partitions)
    if limits.driver and waiting and not status.drivers:
        yield (
            f"{name}: events wait in {waiting} source partitions, and nobody drives it: "
            f"start `tidelog archive run {status.archive.name} --follow`"
        )


def _of_partitions(status: ArchiveStatus, limits: Limits) -> Iterator[str]:
    name = status.archive.name
    for each in status.partitions:
        what = f"archive `{name}`, source partition `{each.partition}`"
        for problem in _of_partition(each, status, limits):
            yield f"{what}: {problem}"


def _of_partition(each: PartitionStatus, status: ArchiveStatus, limits: Limits) -> Iterator[str]:
    now_ms, archive = status.read_ms, status.archive
    if each.failure is not None:
        since_s = (now_ms - each.failure.since_ms) / 1000
        yield (
            f"fails since {since_s:.0f} s, {each.failure.attempts} attempts: {each.failure.message}"
        )
    if each.lost_to:
        yield (
            f"the source holds nothing before {each.lost_to}, archived is up to {each.position}: "
            f"run `tidelog archive run {archive.name} --accept-loss` to record that and go on"
        )
    if each.remade:
        yield (
            f"{each.remade.partition(': ')[2]} (`tidelog archive run {archive.name} "
            f"--accept-loss`); or end it with `tidelog archive delete {archive.name}`"
        )
    if each.unread:
        yield (
            f"its topic was deleted, and up to {each.unread} of its events were not archived: they "
            "are lost, unless a copy of the home has them: end the archive with `tidelog archive "
            f"delete {archive.name}`, or create the topic again and run `tidelog archive run "
            f"{archive.name} --accept-loss` to record that"
        )
    if each.account is not None and not each.account.adds_up:
        yield (
            f"does not add up: {each.account.problem}: run `tidelog archive verify {archive.name}`"
        )
    if limits.max_lag is not None and (each.lag or 0) > limits.max_lag:
        yield (
            f"{each.lag} events wait, at most {limits.max_lag} may: run `tidelog archive run "
            f"{archive.name}`, with more workers or shards if a driver runs"
        )
    given_ms = limits.max_lag_ms
    lag_max_s = (lag_limit_ms(archive) if given_ms is None else given_ms) / 1000
    if (each.lag_s or 0) > lag_max_s:
        yield (
            f"an event waits for {each.lag_s:.0f} s, at most {lag_max_s:.0f} s may one: "
            f"run `tidelog archive run {archive.name}`; if a driver runs, look at its output, and "
            "add workers or shards"
        )
    if each.intent_ms is not None and now_ms - each.intent_ms > limits.max_intent_ms:
        yield (
            f"a range is under way for {(now_ms - each.intent_ms) / 1000:.0f} s: "
            "look at the driver's output; the next driver finishes it: run `tidelog archive run "
            f"{archive.name}`"
        )
    if each.dead > limits.max_dead and now_ms - each.totals.dead_ms <= limits.since_ms:
        yield (
            f"{each.dead} dead letters, at most {limits.max_dead} may be: look at them with "
            f"`tidelog archive dead {archive.name}`, and try them again with `tidelog archive dead "
            f"{archive.name} --replay`, with --parser for another parser; `--max-dead {each.dead}` "
            "accepts them"
        )
    if each.totals.lost and now_ms - each.totals.lost_ms <= limits.since_ms:
        yield (
            f"{each.totals.lost} ranges were lost by the source, which was accepted: lengthen its "
            f"retention; `tidelog archive status {archive.name} --check --since 0s` leaves out "
            "what is known"
        )
