"""``tidelog archive delete``: end an archive, and delete its files on request."""

from __future__ import annotations

import click

from tidelog.cli.asking import ask_first, yes_option
from tidelog.cli.output import Output, json_option
from tidelog.errors import NotFoundError
from tidelog.home import open_home
from tidelog.model.address import nearest
from tidelog.pipeline.archive import list_archives
from tidelog.pipeline.ending import delete_archive, end_archive

__all__ = ["delete"]


@click.command()
@click.argument("name")
@click.option("--delete-files", is_flag=True, help="Delete its files too, and free its name.")
@yes_option
@json_option
@click.pass_obj
def delete(
    home_text: str | None, output: Output, /, name: str, delete_files: bool, yes: bool
) -> None:
    """End an archive: drivers stop, checks pass, and trims no longer wait for it.

    Its files stay, unless you give --delete-files. Files that stay can be read, and erasures and
    proofs still reach them. Asks first on a terminal, and needs --yes elsewhere.

    \b
    Examples:
      tidelog archive delete daily --yes
      tidelog archive delete daily --delete-files --yes
    """
    with open_home(home_text) as home:
        found = {each.name: each for each in list_archives(home)}
        if name not in found:
            like = nearest(name, found)
            raise NotFoundError(f"archive `{name}`: not found{like}: nothing to delete")
        folder = f"{found[name].store}/{found[name].root}"
        question = f"End archive `{name}`, for good? Its files in `{folder}` stay."
        if delete_files:
            question = f"Delete archive `{name}` and all its files in `{folder}`, for good?"
        ask_first(f"archive `{name}`", question, yes)
        if delete_files:
            delete_archive(home, name, found[name].incarnation)
            output.say(f"Deleted archive `{name}` and its files.")
        else:
            end_archive(home, name, found[name].incarnation)
            output.say(
                f"Ended archive `{name}`. Its files stay in `{folder}`, and erasures still reach "
                f"them. Delete them with `tidelog archive delete {name} --delete-files`."
            )
        if output.as_json:
            output.record({"name": name, "deleted": True, "files_deleted": delete_files})
