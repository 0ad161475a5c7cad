"""``tidelog archive delete``: end an archive, and delete its files on request.

``tidelog archive erase``: events of an archive whose topic is gone, by id or by key.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from tidelog.cli.commands.amend import (
    say_unseen,
    show_records,
    who_option,
    why_option,
)
from tidelog.cli.confirm import ask_first, yes_option
from tidelog.cli.output import FAILED, Output, counted, json_option
from tidelog.cli.text import utf8
from tidelog.errors import InvalidError, NotFoundError
from tidelog.home import open_home
from tidelog.model.address import nearest

__all__ = [
    "audit",
    "delete",
    "erase",
]


@click.command()
@click.argument("name")
@click.option("--delete-files", is_flag=True, help="Delete its files too, and free its name.")
@click.option(
    "--lost-files", is_flag=True, help="Its folder outside is gone: free its name all the same."
)
@yes_option
@json_option
@click.pass_obj
def delete(home_text: str | None, output: Output, /, name: str, yes: bool, **given: bool) -> None:
    """End an archive: drivers stop, checks pass, and trims no longer wait for it.

    Its files stay, unless you give --delete-files. Files that stay can be read, and erasures and
    proofs still reach them. --lost-files is for an archive outside of the home whose folder is
    gone: if it comes back, sweeps delete the archive's files in it. Asks first on a terminal, and
    needs --yes elsewhere.

    \b
    Examples:
      tidelog archive delete daily --yes
      tidelog archive delete daily --delete-files --yes
    """
    delete_files, lost_files = given["delete_files"], given["lost_files"]
    if delete_files and lost_files:
        raise InvalidError("archive delete: give one of --delete-files and --lost-files")
    with open_home(home_text) as home:
        found = {each.name: each for each in home.archives.list()}
        if name not in found:
            like = nearest(name, found)
            raise NotFoundError(f"archive `{name}`: not found{like}: nothing to delete")
        archive = found[name]
        folder = f"{archive.info.store}/{archive.info.root}"
        question = f"End archive `{name}`, for good? Its files in `{folder}` stay."
        if delete_files:
            question = f"Delete archive `{name}` and all its files in `{folder}`, for good?"
        if lost_files:
            question = f"Delete archive `{name}`, whose files in `{folder}` are lost, for good?"
        ask_first(f"archive `{name}`", question, yes)
        archive.delete(files=delete_files, lost=lost_files)
        if delete_files:
            output.say(f"Deleted archive `{name}` and its files.")
        elif lost_files:
            output.say(f"Deleted archive `{name}`. Its files in `{folder}` are lost.")
        else:
            after = (
                "They belong to the home that this one was copied from."
                if archive.is_detached
                else "Erasures still reach them. Delete them with `tidelog archive delete "
                f"{name} --delete-files`."
            )
            output.say(f"Ended archive `{name}`. Its files stay in `{folder}`. {after}")
        if output.as_json:
            output.record({"name": name, "deleted": True, "files_deleted": delete_files})


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
        archive = home.archives.get(name)
        question = f"Erase {what} from archive `{name}`, for good?"
        ask_first(f"events of archive `{name}`", question, given["yes"])
        done = archive.erase(
            ids=ids,
            key=None if key is None else key.encode(),
            why=given["why"],
            who=given["who"],
        )
        covered = archive.copies()
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
        show_records(output, home.archives.get(name).audit(event_id))
