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
from tidelog.errors import InvalidError, NotFoundError
from tidelog.home import Home, open_home
from tidelog.journal.compile.compile import CompileReport, waiting_bytes
from tidelog.journal.compile.policy import CompilePolicy
from tidelog.log.topics import read_head
from tidelog.model.times import duration_ms
from tidelog.model.topic import Topic

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
    """Make journals of a topic's runs: fewer, larger objects, with updates and deletes applied.

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
        topics = _topics(home, topic)

        def total() -> int:
            return sum(waiting_bytes(home.context, each, policy) for each in topics)

        with progress_bar("compile", total) as advance:

            def on_swap(report: CompileReport) -> None:
                advance(report.bytes_before)

            def go_on() -> bool:
                return not interruption.is_set()

            if given["master"] is None:
                report = _here(home, topics, policy, go_on, on_swap)
            else:
                from tidelog.spark.compile import compile_by_spark
                from tidelog.spark.workers import open_spark

                session = open_spark(given["master"], "compile", conf)
                report = compile_by_spark(home.context, session, topics, policy, go_on, on_swap)
        waiting = sum(_amendments_waiting(home, each) for each in topics)
        output.record({"topics": len(topics), **asdict(report), "amendments_waiting": waiting})
        if waiting:
            what = "--all" if topic is None else topic
            output.say(
                f"{counted(waiting, 'update or delete', 'updates and deletes')} not applied yet: "
                f"few wait for more, a day at most; `tidelog compile {what} --amended` applies all"
            )
    if report.busy:
        sys.exit(FAILED)


def _topics(home: Home, name: str | None) -> list[Topic]:
    if name is not None:
        return [home.topic(name)]
    return [each for each in home.topics() if each.state == "ready"]


def _amendments_waiting(home: Home, topic: Topic) -> int:
    """Updates and deletes that no journal has; none of a topic that was deleted meanwhile."""
    try:
        heads = [
            read_head(home.context, topic, partition)[0] for partition in range(topic.partitions)
        ]
        if all(head.amended is None for head in heads):
            return 0
        found = home.journals(topic.name)
        return sum(len(each.deleted) + len(each.updated) for each in found)
    except NotFoundError:
        return 0


def _here(
    home: Home,
    topics: list[Topic],
    policy: CompilePolicy,
    go_on: Callable[[], bool],
    on_swap: Callable[[CompileReport], None],
) -> CompileReport:
    report = CompileReport()
    for topic in topics:
        try:
            report += home.compile(topic.name, policy, go_on=go_on, on_swap=on_swap)
        except NotFoundError:
            if len(topics) == 1:
                raise
            continue  # deleted meanwhile
    return report
