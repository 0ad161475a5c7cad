"""``tidelog compile``: many runs become one journal, with amendments applied."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import click

from tidelog.cli.interruption import Interruption
from tidelog.cli.output import FAILED, Output, counted, json_option, progress_bar
from tidelog.cli.pipeline_options import spark_conf
from tidelog.errors import InvalidError
from tidelog.home import open_home
from tidelog.journal.compile_policy import CompilePolicy
from tidelog.model.times import duration_ms

__all__ = ["compile_", "policy_of", "policy_options"]

F = TypeVar("F", bound=Callable[..., Any])

_NEVER = 1 << 62  # events or bytes

_OPTIONS = (
    click.option(
        "--min-events",
        type=click.IntRange(min=1),
        metavar="N",
        help="Leave alone what waits in a partition while it is fewer events,",
    ),
    click.option(
        "--min-bytes", type=click.IntRange(min=1), metavar="B", help="and fewer bytes in the store,"
    ),
    click.option("--older-than", metavar="D", help="and younger, such as 1h."),
    click.option(
        "--amended",
        is_flag=True,
        help="Apply every update, delete and trim now, not only many together.",
    ),
)


def policy_options(command: F) -> F:
    """When something is compiled."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def policy_of(given: dict[str, Any], otherwise: CompilePolicy) -> CompilePolicy:
    """The policy that the options ask for; where none is given, another one's values."""
    amendments = 1 if given["amended"] else otherwise.min_amendments
    trimmed = 1 if given["amended"] else otherwise.min_trimmed
    wanted = [given["min_events"], given["min_bytes"], given["older_than"]]
    if all(each is None for each in wanted):
        return CompilePolicy(
            min_events=otherwise.min_events,
            min_bytes=otherwise.min_bytes,
            older_than_ms=otherwise.older_than_ms,
            min_amendments=amendments,
            min_trimmed=trimmed,
        )
    return CompilePolicy(
        min_events=given["min_events"] or _NEVER,
        min_bytes=given["min_bytes"] or _NEVER,
        older_than_ms=None if wanted[2] is None else duration_ms(wanted[2]),
        min_amendments=amendments,
        min_trimmed=trimmed,
    )


@click.command("compile")
@click.argument("topic", required=False)
@click.option("--all", "is_all", is_flag=True, help="Compile all topics.")
@policy_options
@click.option("--master", metavar="URL", help="Spark master. Default: work in this process.")
@click.option(
    "--conf", "confs", multiple=True, metavar="K=V", help="A Spark setting; may be repeated."
)
@json_option
@click.pass_obj
def compile_(
    home_text: str | None, output: Output, /, topic: str | None, is_all: bool, **given: Any
) -> None:
    """Compact a topic into journals, with updates and deletes applied.

    Journals are fewer and larger objects.

    Offsets stay as they were, and readers go on undisturbed. By default all runs that wait are
    compiled. Journals are compiled again when 1,000 amendments or several small neighbours have
    gathered, or one amendment has waited for a day; how many still wait is told. To finish an
    erasure: --amended, then `tidelog sweep`. Safe to kill and to repeat; ends with exit code 1
    when another process is compiling the same partition.

    \b
    Examples:
      tidelog compile orders
      tidelog compile --all --min-events 100000 --older-than 1h
      tidelog compile orders --amended
      tidelog compile --all --master spark://host:7077
    """
    if (topic is None) != is_all:
        only = "only one of them" if is_all else "one of them"
        raise InvalidError(f"compile: a topic or --all: give {only}")
    policy = policy_of(given, CompilePolicy(min_events=1))
    conf = spark_conf(given["confs"])
    with open_home(home_text) as home, Interruption(follows=False) as interruption:
        topics = None if topic is None else [topic]
        count = sum(each.state == "ready" for each in home.topics()) if topic is None else 1

        with progress_bar("compile", lambda: home.compile_bytes(topics, policy)) as advance:
            report = home.compile_all(
                topics,
                policy,
                spark=given["master"],
                spark_conf=conf,
                go_on=lambda: not interruption.is_set(),
                on_swap=lambda swapped: advance(swapped.bytes_before),
            )
        waiting = home.amendments_waiting(topics)
        output.record({"topics": count, **asdict(report), "amendments_waiting": waiting})
        if waiting:
            what = "--all" if topic is None else topic
            output.say(
                f"{counted(waiting, 'update or delete', 'updates and deletes')} not applied yet: "
                f"few wait for more, a day at most; `tidelog compile {what} --amended` applies all"
            )
    if report.busy:
        sys.exit(FAILED)
