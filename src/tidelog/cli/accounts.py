"""How commands show the account of source partitions: as a table with its gaps, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidelog.cli.output import Output, counted
from tidelog.model.archive import Account
from tidelog.model.event import to_iso
from tidelog.model.pipeline import Gap, offsets_between

__all__ = ["account_values", "show_accounts"]

_COLUMNS = (
    "partition",
    "begin",
    "why",
    "position",
    "offsets",
    "archived",
    "dead",
    "dropped",
    "erased",
    "never there",
    "in gaps",
    "adds up",
)


def account_values(account: Account) -> dict[str, Any]:
    """Returns an account as JSON has it."""
    begin = account.begin
    return {
        "begin": None if begin is None else begin.position,
        "begin_reason": None if begin is None else begin.reason,
        "begin_at": None if begin is None or not begin.at_ms else to_iso(begin.at_ms),
        "end": account.end,
        "offsets": account.span,
        "numbered": account.is_numbered,
        "archived": account.archived,
        "dead": account.dead,
        "dropped": account.dropped,
        "erased": account.erased,
        "never_there": account.absent,
        "in_gaps": account.skipped,
        "gaps": [
            {"start": gap.start, "end": gap.end, "reason": gap.reason, "offsets": gap.offsets}
            for gap in account.gaps
        ],
        "adds_up": account.adds_up,
    }


def show_accounts(output: Output, name: str, accounts: Sequence[Account]) -> None:
    """Print what became of every offset, for people."""
    if output.as_json or not accounts:
        return
    output.title("every offset from the begin on")
    output.records(_COLUMNS, [_row(each) for each in accounts])
    for each in accounts:
        for gap in each.gaps:
            output.say(
                f"{name}: {each.partition}: gap from {gap.start} to {gap.end}, {_size(gap)}: "
                f"{gap.reason}"
            )
        if each.problem:
            output.say(f"{name}: {each.partition}: does not add up: {each.problem}")
    if any(each.is_numbered for each in accounts):
        output.say(f"{name}: its source has no offsets: the archive numbers the events it reads")


def _size(gap: Gap) -> str:
    """How much is in a gap; one behind the position is not among the offsets that add up."""
    offsets = gap.offsets or offsets_between(gap.start, gap.end)
    return counted(offsets, "offset") if offsets else "an unknown number of events"


def _row(account: Account) -> dict[str, Any]:
    begin = account.begin
    return {
        "partition": account.partition,
        "begin": None if begin is None else begin.position,
        "why": None if begin is None else begin.reason,
        "position": account.end,
        "offsets": account.span,
        "archived": account.archived,
        "dead": account.dead,
        "dropped": account.dropped,
        "erased": account.erased,
        "never there": account.absent,
        "in gaps": account.skipped,
        "adds up": "yes" if account.adds_up else "NO",
    }
