"""What commands that drive a pipeline share: options, workers, progress and signals.

The options that say how an archive's files are made are shared by ``create`` and ``backfill``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from tidelog.api.pipelines import RunOptions
from tidelog.api.spark_workers import missing_for_spark
from tidelog.archive.archive import FormatOptions
from tidelog.backends import real_world
from tidelog.cli.output import Output, counted, echo_aside, visible
from tidelog.cli.terminal import Interruption
from tidelog.errors import InvalidError, TidelogError
from tidelog.model.pipeline import FileCounts, Manifest, by_cause, joined_names, same_in
from tidelog.pipeline.pipeline import CycleReport

__all__ = [
    "DriverWatch",
    "format_of",
    "format_options",
    "run_options",
    "spark_conf",
    "spark_of",
    "spark_options",
    "task_options",
    "tasks_of",
    "worker_options",
]

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--master",
        metavar="URL",
        help="The Spark master, such as spark://host:7077. [default: local[*], if Java is there]",
    ),
    click.option(
        "--conf",
        "confs",
        multiple=True,
        metavar="K=V",
        help="A Spark setting, NAME=VALUE. Repeatable.",
    ),
    click.option(
        "--no-spark",
        is_flag=True,
        help="Run in this process instead of on Spark: uses less memory, and starts faster.",
    ),
    click.option(
        "--rate",
        type=click.FloatRange(min=0, min_open=True),
        metavar="N",
        help="Limit on events per second.",
    ),
)


_TASK_OPTIONS = (
    click.option(
        "--master",
        metavar="URL",
        help="Do the heavy work in tasks of this Spark master, such as local[*] or "
        "spark://host:7077. [default: in this process]",
    ),
    _OPTIONS[1],
)


def task_options(command: F) -> F:
    """Adds the options for where maintenance does its heavy work; see :func:`tasks_of`."""
    for option in reversed(_TASK_OPTIONS):
        command = option(command)
    return command


class SparkFields(TypedDict):
    """Where to run tasks, as arguments of the API."""

    spark: str | None
    spark_conf: dict[str, str]


def tasks_of(given: dict[str, Any]) -> SparkFields:
    """Returns the options of :func:`task_options`, as the API takes them."""
    return SparkFields(spark=given["master"], spark_conf=spark_conf(given["confs"]))


def worker_options(command: F) -> F:
    """Adds the options for where tasks run, and how fast."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def spark_options(command: F) -> F:
    """Adds the options for where the tasks of pipelines run; see :func:`spark_of`."""
    for option in reversed(_OPTIONS[:3]):
        command = option(command)
    return command


def spark_of(given: dict[str, Any]) -> str | None:
    """Returns the Spark master that the options ask for; None: work in this process.

    Without --master, a machine that cannot run Spark works without it, with a notice.
    """
    if given["no_spark"]:
        if given["master"]:
            raise InvalidError("--master and --no-spark: give one of them")
        return None
    if given["master"]:
        return str(given["master"])
    missing = missing_for_spark(real_world().environ)
    if missing:
        echo_aside(f"Running without Spark: {missing}. --no-spark hides this line.")
        return None
    return "local[*]"


def run_options(given: dict[str, Any], watch: DriverWatch) -> RunOptions:
    """Returns how a pipeline runs, as the API takes it, with ``watch`` for its reports."""
    return RunOptions(
        rate=given.get("rate"),
        spark_conf=spark_conf(given.get("confs", ())),
        accept_loss=given.get("accept_loss", False),
        take_over=given.get("take_over", False),
        flush_on_stop=given.get("flush_on_stop", False),
        stop=watch.stop,
        on_look=watch.look,
        on_share=watch.share,
        on_left=watch.left,
        on_cycle=watch.cycle,
        on_outage=watch.outage,
    )


def spark_conf(texts: Iterable[str]) -> dict[str, str]:
    """Settings of Spark, from ``K=V``."""
    conf: dict[str, str] = {}
    for text in texts:
        key, found, value = text.partition("=")
        if not found or not key.startswith("spark."):
            raise InvalidError(f"--conf {text}: give spark.NAME=VALUE")
        conf[key] = value
    return conf


class DriverWatch:
    """Tells a person, or a program, how a driver gets on; a signal stops it after its cycle."""

    def __init__(
        self, output: Output, what: str, *, follows: bool = False, omits: str = ""
    ) -> None:
        """``omits`` is what lines for people leave out: ``range`` or ``files``."""
        self.stop = threading.Event()
        self._output = output
        self._what = what
        self._omits = omits
        self._interruption = Interruption(self.stop, follows=follows)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            console=Console(stderr=True),
            transient=True,
            disable=output.as_json or not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task(what, total=None, speed="")
        self._has_bar = False  # on the screen
        output.hide_bar = self._hide_bar
        self._done = 0
        self._follows = follows
        self._share = -1  # source partitions that it has; -1: not known yet
        self._is_away = False  # the source, as far as is known
        self._errors: list[tuple[str, str]] = []  # of the last cycle, until the run goes on or ends
        self.dead = 0  # events that no topic or archive accepts
        self.left_out = 0  # events that were erased from the target before they arrived

    def __enter__(self) -> DriverWatch:
        self._interruption.__enter__()
        self._bar.start()
        self._has_bar = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tell_errors(str(error or ""))
        self._hide_bar()
        if error is None and self._interruption.is_unfinished:
            self.tell(f"{self._what}: interrupted: run the command again to resume")
        self._interruption.__exit__(kind, error, trace)

    def _hide_bar(self) -> None:
        """Removes the bar, which would share its line with the result."""
        if self._has_bar:
            self._has_bar = False
            self._bar.stop()

    def look(self, waiting: int) -> None:
        """Moves the end of the bar to where all waiting events are done."""
        if self._is_away:
            self._is_away = False
            self.tell(f"{self._what}: everything answers again")
        task = self._bar.tasks[0]
        speed = f"{task.speed:,.0f} events/s, " if task.speed else ""
        self._bar.update(self._task, total=self._done + waiting, speed=f"{speed}{waiting:,} behind")

    def share(self, partitions: int, total: int) -> None:
        """Report how many partitions this driver has, once others have some."""
        if self._follows and partitions != self._share and (partitions, self._share) != (total, -1):
            self.tell(f"{self._what}: has {partitions} of {total} source partitions now")
        self._share = partitions

    def left(self, partitions: int, total: int) -> None:
        """Report partitions that this run did not read, since other drivers have them."""
        self.tell(
            f"{self._what}: other drivers have {partitions} of {total} source partitions: this run "
            "left those to them"
        )

    def outage(self, error: TidelogError, wait_s: float) -> None:
        """Report that the source cannot be reached, and when it is tried again."""
        self._is_away = True
        soon = "now" if wait_s < 0.05 else f"in {wait_s:.1f} s"  # 0.0 s looks like a mistake
        self.tell(f"{self._what}: {error}: retrying {soon}")

    def tell(self, text: str) -> None:
        """Prints a line for a person, beside the bar."""
        shown = visible(text, "\n\t")
        self._bar.console.print(shown, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def count(self, report: CycleReport) -> None:
        """Moves the bar by a cycle that has ended, without a line about it."""
        self._done += report.events
        self.dead += sum(each.dead for each in report.committed.values())
        self.left_out += sum(each.left_out for each in report.committed.values())
        self._bar.update(self._task, completed=self._done)

    def _tell_errors(self, raised: str = "") -> None:
        """Prints the errors of the last cycle, each cause once, except that which ends the run."""
        errors = sorted(self._errors, key=lambda each: each[1] != raised)
        causes = by_cause(errors)
        if errors and errors[0][1] == raised:
            partition, _, others = causes.pop(0)
            if others:
                self.tell(f"{joined_names([partition, *others])} fail for the same reason:")
        for partition, message, others in causes:
            self.tell(f"{partition}: {message}{same_in(others)}")
        self._errors = []

    def cycle(self, report: CycleReport) -> None:
        """Shows a cycle that has ended."""
        self.count(report)
        for each in report.aside:
            self.tell(
                f"{each.partition}: {each.start} to {each.end} was archived, and the catalog does "
                f"not know it: {counted(len(each.files), 'file')} set aside: "
                f"{', '.join(each.files[:3])}"
            )
        for partition, manifest in sorted(report.committed.items()):
            counts = FileCounts.of(manifest.files)
            if self._output.as_json:
                self._output.record(
                    {
                        "pipeline": self._what,
                        "partition": partition.text,
                        "start": manifest.start,
                        "end": manifest.end,
                        "events": manifest.read,
                        "data_files": counts.data,
                        "dead_files": counts.dead,
                        "dead": manifest.dead,
                        "dropped": manifest.dropped,
                        "left_out": manifest.left_out,
                    }
                )
            else:
                self.tell(f"{partition.text}: {', '.join(self._parts(manifest))}")
        self._tell_errors()
        self._errors = sorted((each.text, str(error)) for each, error in report.errors.items())
        if self._follows:
            self._tell_errors()

    def _parts(self, manifest: Manifest) -> Iterator[str]:
        """Yields what a person reads about a range."""
        if self._omits != "range":
            yield f"{manifest.start} to {manifest.end}"
        yield counted(manifest.read, "event")
        yield counted(manifest.dead, "dead letter")
        if self._omits != "files":
            yield str(FileCounts.of(manifest.files))
        if manifest.left_out:
            yield f"{counted(manifest.left_out, 'event')} left out as erased"


_FORMAT_OPTIONS = (
    click.option(
        "--parser",
        metavar="P",
        help="The parser that names partitions, such as json:meta.at, iso8601:created or "
        "timestamp. first:json:at||iso8601:at tries several.",
    ),
    click.option(
        "--transform",
        metavar="M:F",
        help="A Python function, MODULE:NAME, that takes a DataFrame and returns one.",
    ),
    click.option(
        "--format",
        "file_format",
        metavar="F",
        help="The file format: parquet, orc, avro, jsonlines, delimited or sequence. [default: "
        "parquet]",
    ),
    click.option("--codec", metavar="C", help="The compression codec. [default: the format's own]"),
    click.option(
        "--granularity",
        metavar="G",
        help="The time span of a folder: day, hour or minute. [default: day]",
    ),
    click.option("--time-zone", metavar="Z", help="The time zone of folder names. [default: UTC]"),
    click.option(
        "--date-format", metavar="T", help="The name of a day's folder. [default: dt=%Y-%m-%d]"
    ),
    click.option(
        "--hour-format", metavar="T", help="The name of an hour's folder. [default: hr=%H]"
    ),
    click.option(
        "--minute-format", metavar="T", help="The name of a minute's folder. [default: min=%M]"
    ),
    click.option(
        "--schema",
        metavar="S",
        help="Write typed columns by this DDL or JSON Schema; @FILE reads it from a file.",
    ),
    click.option(
        "--keep-value/--drop-value",
        default=None,
        help="With --schema, keep the raw value beside the columns, or drop it. Without the "
        "value, the archive cannot be restored and loses fields that the schema does not "
        "name. [default: keep]",
    ),
    click.option(
        "--strict/--lenient",
        default=None,
        help="With --schema, treat events with other fields as dead letters.",
    ),
    click.option(
        "--mode",
        metavar="M",
        help="For jsonlines, write the value alone or the whole event: value or events.",
    ),
    click.option("--delimiter", metavar="D", help="For delimited, the bytes after each value."),
    click.option("--key", metavar="K", help="For sequence, the record key: offset or msgpack."),
    click.option(
        "--compression", metavar="C", help="For sequence, compress by block or by record."
    ),
)


def format_options(command: F) -> F:
    """Add them to a command, which passes what it gets to :func:`format_of`."""
    for option in reversed(_FORMAT_OPTIONS):
        command = option(command)
    return command


def new_format_options(command: F) -> F:
    """Adds the same options without defaults: what is not given stays as the archive has it."""
    command = format_options(command)
    options: list[click.Option] = vars(command)["__click_params__"][-len(_FORMAT_OPTIONS) :]
    for option in options:
        option.help = (option.help or "").partition(" [default: ")[0]
    return command


def format_of(given: dict[str, Any]) -> FormatOptions:
    """Returns what was given of the options, as ``create`` and ``backfill`` of the API take it."""
    return FormatOptions(
        parser=given["parser"],
        transform=given["transform"],
        format=given["file_format"],
        codec=given["codec"],
        granularity=given["granularity"],
        time_zone=given["time_zone"],
        date_format=given["date_format"],
        hour_format=given["hour_format"],
        minute_format=given["minute_format"],
        schema=_text(given["schema"]),
        keep_value=given["keep_value"],
        strict=given["strict"],
        mode=given["mode"],
        delimiter=given["delimiter"],
        key=given["key"],
        compression=given["compression"],
    )


def _text(given: str | None) -> str | None:
    """Returns the text of a file, for ``@FILE``."""
    if given is None or not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidError(f"--schema {given}: cannot be read ({exc}): give a text file") from exc
