"""``tidelog topic``: create, list, show, notify, delete and recover."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import click

from tidelog.cli.output import FAILED, CommandGroup, Output, counted, echo_aside, json_option
from tidelog.cli.terminal import ask_first, open_home, past_of, past_options, yes_option
from tidelog.errors import InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.journal.recover import RecoverReport
from tidelog.log.notify_targets import shown_target
from tidelog.model import defaults
from tidelog.model.address import nearest
from tidelog.model.event import to_iso
from tidelog.model.topic import Topic

__all__ = ["topic"]


@click.group(cls=CommandGroup)
def topic() -> None:
    """Create, list, show, notify and delete topics.

    \b
    Examples:
      tidelog topic create orders --partitions 4
      tidelog topic list
    """


@topic.command()
@click.argument("name")
@click.option(
    "--partitions",
    type=int,
    default=1,
    show_default=True,
    metavar="N",
    help="The number of partitions, which is how many members can share the topic. It cannot "
    "change later.",
)
@click.option(
    "--slot",
    default=defaults.TOPIC_SLOT,
    show_default=True,
    help="The resolution of the time index.",
)
@click.option(
    "--notify", multiple=True, metavar="URL", help="A URL to notify of new events. Repeatable."
)
@click.option(
    "--max-latency-ms",
    type=int,
    default=defaults.NOTIFY_LATENCY_MS,
    show_default=True,
    metavar="N",
    help="The shortest time between two notifications of a busy partition.",
)
@json_option
@click.pass_obj
def create(home_text: str | None, output: Output, /, name: str, **settings: Any) -> None:
    """Create a topic.

    \b
    Examples:
      tidelog topic create orders --partitions 4
      tidelog topic create clicks --partitions 8 --slot 1m --notify https://example.com/woken
    """
    with open_home(home_text) as home:
        made = home.create_topic(name, **settings)
        output.say(f"Created topic `{made.name}`.")
        if output.as_json:
            output.record(_settings(made))


@topic.command(name="list")
@json_option
@click.pass_obj
def list_(home_text: str | None, output: Output) -> None:
    """List all topics.

    \b
    Examples:
      tidelog topic list
      tidelog topic list --json
    """
    with open_home(home_text) as home:
        rows = [_row(home, each) for each in home.topics()]
        none = "There are no topics yet: create one with `tidelog topic create NAME`."
        output.records(("name", "partitions", "events", "created", "state"), rows, none)


@topic.command()
@click.argument("name")
@json_option
@click.pass_obj
def show(home_text: str | None, output: Output, name: str) -> None:
    """Show a topic's settings, and what each partition holds.

    Bytes are those in the store, after compression.

    \b
    Examples:
      tidelog topic show orders
      tidelog topic show orders --json
    """
    with open_home(home_text) as home:
        found = home.topic(name)
        states = home.partitions(name)
        rows = [
            {
                "partition": state.partition,
                "start": state.start,
                "next": state.next,
                "events": state.events,
                "runs": state.runs,
                "bytes": state.bytes,
                "last_event": None if state.last_ms is None else to_iso(state.last_ms),
            }
            for state in states
        ]
        values: dict[str, Any] = _settings(found)
        values |= {"events": sum(state.events for state in states)}
        values |= {"bytes": sum(state.bytes or 0 for state in states)}
        if output.as_json:
            output.record({**values, "per_partition": rows})
            return
        output.record({**values, "notify": ", ".join(map(shown_target, found.notify)) or None})
        output.say("")
        output.records(rows[0], rows)


@topic.command()
@click.argument("name")
@click.option(
    "--notify",
    multiple=True,
    metavar="URL",
    help="A URL to notify of new events, instead of those that the topic has. Repeatable.",
)
@click.option("--no-notify", is_flag=True, help="Send no notifications from now on.")
@click.option(
    "--max-latency-ms",
    type=int,
    metavar="N",
    help="The shortest time between two notifications of a busy partition.",
)
@json_option
@click.pass_obj
def change(
    home_text: str | None,
    output: Output,
    name: str,
    notify: tuple[str, ...],
    no_notify: bool,
    max_latency_ms: int | None,
) -> None:
    """Change where the notifications of a topic go, or how often they come.

    Processes that continue to append notice within ten seconds. Partitions and the resolution of
    the time index stay as they are.

    \b
    Examples:
      tidelog topic change orders --notify https://example.com/woken
      tidelog topic change orders --no-notify
    """
    if bool(notify) + no_notify + (max_latency_ms is not None) == 0:
        raise InvalidError("topic change: say what: give --notify, --no-notify or --max-latency-ms")
    if notify and no_notify:
        raise InvalidError("topic change: --notify and --no-notify contradict: give one")
    with open_home(home_text) as home:
        targets = notify if notify or no_notify else None
        changed = home.change_topic(name, notify=targets, max_latency_ms=max_latency_ms)
        output.say(f"Changed topic `{name}`.")
        if output.as_json:
            output.record(_settings(changed))


@topic.command()
@click.argument("name")
@click.option(
    "--partition",
    "partitions",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="N",
    help="The partition to notify of. Repeatable. [default: all]",
)
@json_option
@click.pass_obj
def notify(home_text: str | None, output: Output, name: str, partitions: tuple[int, ...]) -> None:
    """Notify a topic's targets of the newest events now, whether they know them or not.

    For consumers that a notification calls and that stopped before the end.

    \b
    Examples:
      tidelog topic notify orders
      tidelog topic notify orders --partition 3
    """
    with open_home(home_text) as home:
        wanted = partitions or range(home.topic(name).partitions)
        sent = [{"partition": each, "offset": home.notify(name, each)} for each in wanted]
        output.records(("partition", "offset"), sent)


@topic.command()
@click.argument("name")
@past_options
@yes_option
@json_option
@click.pass_obj
def delete(home_text: str | None, output: Output, /, name: str, yes: bool, **past: Any) -> None:
    """Delete a topic with all its events and consumers, for good.

    Asks first on a terminal, and needs --yes elsewhere.

    Refuses while a consumer, an archive, a pump or an unfinished playback has not read all events,
    and names it with its position. Pass one with --past-reader, or all with --past-readers. Delete
    an unused consumer with `tidelog consumer delete`.

    \b
    Examples:
      tidelog topic delete orders
      tidelog topic delete orders --yes --past-reader billing
      tidelog topic delete orders --yes --past-readers
    """
    with open_home(home_text) as home:
        found = {each.name: each for each in home.topics()}
        if name not in found:
            like = nearest(name, found)
            raise NotFoundError(f"topic `{name}`: not found{like}: nothing to delete", topic=name)
        shown, readers = found[name].incarnation, past_of(**past)
        home.delete_topic(name, past_readers=readers, incarnation=shown, dry_run=True)
        ask_first(f"topic `{name}`", _question(home, found[name]), yes)
        home.delete_topic(name, past_readers=readers, incarnation=shown)
        output.say(f"Deleted topic `{name}`.")
        if output.as_json:
            output.record({"name": name, "deleted": True})


@topic.command()
@click.argument("name")
@click.option("--dry-run", is_flag=True, help="Count what would be appended; change nothing.")
@click.option(
    "--incarnation",
    metavar="ID",
    help="First create topic NAME from objects whose registry row was lost. `tidelog verify` "
    "shows ID.",
)
@click.option(
    "--partitions",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --incarnation, the number of partitions the topic had. [default: as its objects "
    "show]",
)
@click.option(
    "--slot",
    default=defaults.TOPIC_SLOT,
    show_default=True,
    help="With --incarnation, the resolution of the time index.",
)
@click.option(
    "--writers-resumed",
    is_flag=True,
    help="Also append events that named writers have not sent again.",
)
@click.option(
    "--include-trimmed",
    is_flag=True,
    help="Also append trimmed events that a compiler's journal still has.",
)
@json_option
@click.pass_obj
def recover(
    home_text: str | None,
    output: Output,
    /,
    name: str,
    writers_resumed: bool,
    include_trimmed: bool,
    **given: Any,
) -> None:
    """Append the events of objects that the catalog has forgotten.

    For a catalog that was restored from an older copy: `tidelog verify` names these objects. Stop
    producers before. Events that the topic has (same id and contents) are left out, also in a
    second call, and a sweep deletes each object when all its events are in the topic. Events that a
    producer uploaded before it died, without acknowledging them, are appended too. Events whose id
    the topic has with an updated value stay in their objects, and are counted as doubted. Events
    that were trimmed stay away, as far as the restored catalog knows of the trim: trim again after
    a restore that has forgotten one. Some may be left in a journal of a compiler that died: these
    are counted as trimmed, and appended only with --include-trimmed. So are events of pumps,
    restores and Spark sinks that the topic had, by a row that outlived them, and has no more.

    Events of producers with a name, pumps, restores, named playbacks and Spark sinks wait in their
    objects: the restored catalog makes these writers send them again. Start the writers, then run
    this command again. Give --writers-resumed when they have sent what they can.

    With --incarnation it brings a topic back that the registry does not know any more, under a name
    that no topic has. What rows the catalog has of it count as before.

    Each event of these objects is counted as appended, present, erased, doubted, waiting, trimmed,
    earlier (appended by an earlier call) or missing: a row names another object that has it, which
    is missing. An object with others is kept.

    Ends with exit code 1 when an object does not decode, when events wait for their writers, when
    trimmed or missing events were left in their objects, or when one is not accounted for.

    \b
    Examples:
      tidelog topic recover orders --dry-run
      tidelog topic recover orders
      tidelog topic recover orders --incarnation 0c1f6a2be4974d3c8a5d0e7b91f2c3d4 --partitions 4
    """
    with open_home(home_text) as home:
        asked = {"writers": writers_resumed, "trimmed": include_trimmed}
        report = home.recover_topic(name, include=[each for each in asked if asked[each]], **given)
    values = asdict(report)
    if not output.as_json:
        values["unreadable"] = ", ".join(report.unreadable) or None
        values["writers"] = ", ".join(report.writers) or None
    output.record(values)
    _say_what_is_left(name, report)
    if not report.is_clean:
        sys.exit(FAILED)


def _say_what_is_left(name: str, report: RecoverReport) -> None:
    """Print what a recovery has left in its objects, and what to do about it."""
    if report.waiting:
        echo_aside(
            f"topic `{name}`: {counted(report.waiting, 'lost event')} of "
            f"{', '.join(report.writers)}: run these writers, since they send the events again, "
            f"then `tidelog topic recover {name}`; add --writers-resumed for what they do not send",
        )
    if report.trimmed:
        echo_aside(
            f"topic `{name}`: {counted(report.trimmed, 'event')} of lost objects were trimmed, "
            "and stay in these, which sweeps delete: if you trimmed them only because their own "
            "objects were lost, add --include-trimmed",
        )
    if report.missing:
        echo_aside(
            f"topic `{name}`: {counted(report.missing, 'event')} of journals stay in them, since "
            "rows name the objects that held these events, and those are missing: restore the "
            f"objects that `tidelog verify {name}` names, or trim the topic past them and then run "
            f"`tidelog topic recover {name} --include-trimmed`",
        )
    if report.unaccounted:
        echo_aside(
            f"topic `{name}`: {counted(report.unaccounted, 'event')} of lost objects could not be "
            "accounted for: their objects are kept: back up the home, and report this",
        )


def _question(home: Home, found: Topic) -> str:
    events = _row(home, found)["events"]
    told = "" if events is None else f" and its {counted(events, 'event')}"
    return f"Delete topic `{found.name}`{told}, for good?"


def _settings(found: Topic) -> dict[str, Any]:
    return {
        "name": found.name,
        "partitions": found.partitions,
        "slot_ms": found.slot_ms,
        "notify": list(map(shown_target, found.notify)),
        "max_latency_ms": found.max_latency_ms,
        "created": to_iso(found.created_ms),
        "incarnation": found.incarnation,
    }


def _row(home: Home, found: Topic) -> dict[str, Any]:
    """A topic in a list; one that was not finished, or is just deleted, has no events to count."""
    events: int | None = None
    if found.state == "ready":
        try:
            events = sum(state.events for state in home.partitions(found.name))
        except NotFoundError:
            events = None  # deleted since it was listed
    return {
        "name": found.name,
        "partitions": found.partitions,
        "events": events,
        "created": to_iso(found.created_ms),
        "state": found.state,
    }
