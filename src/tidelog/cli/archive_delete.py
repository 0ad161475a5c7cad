"""``tidelog archive delete``: end an archive, and delete its files on request."""

from __future__ import annotations

import click

from tidelog.cli.asking import ask_first, yes_option
from tidelog.cli.output import Output, json_option
from tidelog.errors import InvalidError, NotFoundError
from tidelog.home import open_home
from tidelog.log.archives import is_detached
from tidelog.model.address import nearest
from tidelog.pipeline.archive import list_archives
from tidelog.pipeline.ending import delete_archive, delete_lost, end_archive

__all__ = ["delete"]


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
        found = {each.name: each for each in list_archives(home)}
        if name not in found:
            like = nearest(name, found)
            raise NotFoundError(f"archive `{name}`: not found{like}: nothing to delete")
        folder = f"{found[name].store}/{found[name].root}"
        question = f"End archive `{name}`, for good? Its files in `{folder}` stay."
        if delete_files:
            question = f"Delete archive `{name}` and all its files in `{folder}`, for good?"
        if lost_files:
            question = f"Delete archive `{name}`, whose files in `{folder}` are lost, for good?"
        ask_first(f"archive `{name}`", question, yes)
        if delete_files:
            delete_archive(home, name, found[name].incarnation)
            output.say(f"Deleted archive `{name}` and its files.")
        elif lost_files:
            delete_lost(home, name, found[name].incarnation)
            output.say(f"Deleted archive `{name}`. Its files in `{folder}` are lost.")
        else:
            ended = end_archive(home, name, found[name].incarnation)
            after = (
                "They belong to the home that this one was copied from."
                if is_detached(home.log, ended)
                else "Erasures still reach them. Delete them with `tidelog archive delete "
                f"{name} --delete-files`."
            )
            output.say(f"Ended archive `{name}`. Its files stay in `{folder}`. {after}")
        if output.as_json:
            output.record({"name": name, "deleted": True, "files_deleted": delete_files})
