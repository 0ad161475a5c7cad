"""``tidelog archive erase``: events of an archive whose topic is gone, by id or by key."""

from __future__ import annotations

import sys
from typing import Any

import click

from tidelog.cli.amend import say_unseen, show_records, who_option, why_option
from tidelog.cli.asking import ask_first, yes_option
from tidelog.cli.exit_codes import FAILED
from tidelog.cli.output import Output, counted, json_option
from tidelog.cli.text import utf8
from tidelog.errors import InvalidError
from tidelog.home import open_home
from tidelog.journal.audit import read_audit
from tidelog.pipeline.archive import find_archive
from tidelog.pipeline.archived import erase_archived
from tidelog.pipeline.descent import copies_of

__all__ = ["audit", "erase"]

_NAMED = (
    "is empty, and its folder was named by a field of the events it had: make the files again with "
    "`tidelog archive backfill` and `tidelog archive promote`, then `tidelog archive drop` the old "
    "ones"
)


@click.command()
@click.argument("name")
@click.option("--id", "ids", type=utf8, multiple=True, metavar="ID", help="May be repeated.")
@click.option("--key", type=utf8, metavar="K", help="Erase all events that have this key.")
@why_option
@who_option
@yes_option
@json_option
@click.pass_obj
def erase(home_text: str | None, output: Output, /, name: str, **given: Any) -> None:
    """Erase events from the files of an archive and of its copies, by id or by key.

    For an archive whose topic was deleted, or whose source is another system. While the topic is
    there, `tidelog delete` erases from its archives too. A command that dies is finished by the
    same command or by the scribe. Archives that this one was made of are not changed: the command
    names those that still hold the events, and sources and copies that it did not search. Exit
    code 1 if an id or the key is not there, if such an archive still holds one of the events, or
    if a folder still has a name that came from them.

    \b
    Examples:
      tidelog archive erase daily --id order-17 --why "request 2026-118" --yes
      tidelog archive erase daily --key customer-7 --yes
    """
    ids, key = list(given["ids"]), given["key"]
    if bool(ids) == (key is not None):
        raise InvalidError("archive erase: give --id or --key")
    what = f"all events with key `{key}`" if key is not None else counted(len(ids), "id")
    with open_home(home_text) as home:
        archive = find_archive(home, name)
        question = f"Erase {what} from archive `{name}`, for good?"
        ask_first(f"events of archive `{name}`", question, given["yes"])
        why = home.reason(given["why"], given["who"])
        done = erase_archived(home, archive, why, ids, None if key is None else key.encode())
        covered = [copy.archive.name for copy in copies_of(home, archive)]
    missing = [each for each in ids if each not in done.ids]
    messages = {
        "left": [*done.left, *(f"file `{each}`: {_NAMED}" for each in done.named)],
        "out_of_reach": done.out_of_reach,
    }
    output.record(
        {
            "archive": name,
            "erased": done.events,
            "files": sum(each.files for each in done.archives),
            "waiting": sum(each.waiting for each in done.archives),
            "covered": covered if output.as_json else ", ".join(covered),
            "missing": missing if output.as_json else ", ".join(missing) or None,
            **(messages if output.as_json else {}),
        }
    )
    for what, lines in messages.items():
        for each in () if output.as_json else lines:
            output.say(f"{what.replace('_', ' ')}: {each}")
    say_unseen(output, done.unseen)
    if missing or done.unseen or messages["left"] or not done.found:
        sys.exit(FAILED)


@click.command()
@click.argument("name")
@click.option("--id", "event_id", metavar="ID", help="Only records of events with this id.")
@json_option
@click.pass_obj
def audit(home_text: str | None, output: Output, name: str, event_id: str | None) -> None:
    """Show what `tidelog archive erase` has erased from an archive, when and why.

    Ids are shown as hashes (sha256). Use --id to find the records of an id.

    \b
    Examples:
      tidelog archive audit daily --json
      tidelog archive audit daily --id order-17
    """
    with open_home(home_text) as home:
        archive = find_archive(home, name)
        show_records(output, read_audit(home.log, archive, event_id=event_id))
