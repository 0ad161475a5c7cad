"""``tidelog get``, ``update``, ``delete`` and ``audit``: events by their ids.

``delete --prove`` also removes the bytes and prints the proof.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import click

from tidelog.api.erasure import DeleteOptions
from tidelog.cli.commands.proof import (
    GivenEvents,
    proof_option,
    removal_bars,
    report_proof,
    scan_bar,
    unseen_file,
    wait_option,
)
from tidelog.cli.output import (
    FAILED,
    Output,
    counted,
    json_option,
    to_seconds,
    utf8,
    visible,
    write_out,
)
from tidelog.cli.pipeline_options import task_options, tasks_of
from tidelog.cli.terminal import ask_first, open_home, yes_option
from tidelog.codec.event_json import event_lines, ids_of_lines
from tidelog.coordination.audit import Action, AuditRecord
from tidelog.erasure.delete import DeleteResult, ErasurePlan
from tidelog.errors import InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.model.event import to_iso
from tidelog.model.topic import Topic

__all__ = [
    "audit",
    "confirm_erasure",
    "delete",
    "get",
    "say_unseen",
    "show_records",
    "update",
    "who_option",
    "why_option",
]


_SHOWN = 3  # ids that a question names
_MARK_CHARS = 19  # of a hash: enough to distinguish ids

why_option = click.option(
    "--why", type=utf8, default="", metavar="TEXT", help="The reason, for the audit."
)
who_option = click.option(
    "--who",
    type=utf8,
    metavar="NAME",
    help="The person or job, for the audit. [default: user@host]",
)


@click.command()
@click.argument("topic")
@click.argument("id", type=utf8)
@json_option
@click.pass_obj
def get(home_text: str | None, output: Output, topic: str, id: str) -> None:
    """Print the event that has an id.

    Prints its value, or with --json the whole event. If several events have the id, it is the
    newest.

    \b
    Examples:
      tidelog get orders order-17
      tidelog get orders order-17 --json
    """
    with open_home(home_text) as home:
        event = home.get(topic, id)
    write_out(event_lines([event]) if output.as_json else (event.value or b"") + b"\n")


@click.command()
@click.argument("topic")
@click.argument("id", type=utf8)
@click.argument("file", metavar="FILE|-")
@click.option("--empty", is_flag=True, help="Accept an empty file or input as the new value.")
@click.option(
    "--archives",
    is_flag=True,
    help="Also rewrite the files of the topic's archives that hold the event, and correct their "
    "tables.",
)
@why_option
@who_option
@json_option
@click.pass_obj
def update(home_text: str | None, output: Output, /, topic: str, id: str, **given: Any) -> None:
    """Replace the value of an event.

    Reads the new value from a file or from standard input. The event keeps its position, time, key,
    type and headers. Reads that start after this return the new value. Archived files keep the old
    one, unless you pass --archives. If that is killed, run the same command again.

    \b
    Examples:
      tidelog update orders order-17 corrected.json --why "wrong price"
      echo -n fixed | tidelog update orders order-17 -
      tidelog update orders order-17 corrected.json --archives
    """
    value = _read(given["file"])
    if not value and not given["empty"]:
        raise InvalidError(
            f"update: the new value of `{id}` is empty: give --empty if it shall be, "
            "or `tidelog delete` the event"
        )
    with open_home(home_text) as home:
        home.update(topic, id, value, why=given["why"], who=given["who"])
        found = home.update_archives(topic, [id]) if given["archives"] else []
    record = {"topic": topic, "id": id, "bytes": len(value)}
    if given["archives"]:
        record["archived"] = sum(each.events for each in found)
    output.record(record)
    old = [each for each in found if each.unchanged]
    for each in old:
        output.say(f"archive `{each.archive}`, generation {each.generation}: {each.unchanged}")
    if old:
        sys.exit(FAILED)


@click.command()
@click.argument("topic")
@click.argument("ids", type=utf8, nargs=-1, metavar="[ID]...")
@click.option("--key", type=utf8, metavar="K", help="Delete all events with this key.")
@click.option(
    "--ids-file",
    metavar="F",
    help="Delete the ids in a file, one per line; - reads standard input.",
)
@why_option
@who_option
@yes_option
@click.option(
    "--prove",
    is_flag=True,
    help="Erase the bytes now, from archives too, then search all objects for what is left.",
)
@proof_option
@wait_option
@task_options
@json_option
@click.pass_obj
def delete(home_text: str | None, output: Output, /, topic: str, **given: Any) -> None:
    """Delete events by id or by key.

    Reads that start after this skip the events. Their bytes are erased by the next compile and
    sweep. With --prove they are erased now, from the topic and from its archives, and
    then every object that could hold them is searched. Events that the topic has trimmed are erased
    from its archives too: the scribe, or --prove, writes their files again.

    --prove prints one verdict with its evidence, and the audit records its hash. --proof FILE also
    writes it to a file, which `tidelog proof check` checks.

    On a terminal it counts the events and asks first. In scripts, pass --yes unless you list the
    ids as arguments. A line of the file is an id as it is, with its blanks; a line that begins with
    a double quote is a JSON string. Ids that are not there are listed, with exit code 1; all others
    are deleted. A key that no event has is exit code 1 too. With --prove they may have been deleted
    before.

    \b
    Examples:
      tidelog delete orders order-17 --why "entered twice"
      tidelog delete orders --ids-file ids.txt --yes
      tidelog delete customers --key customer-7 --why "request 2026-118" --prove --yes
      tidelog delete customers --key customer-7 --proof request-118.json --yes
      tidelog delete customers --key customer-7 --prove --yes --master 'local[*]'
    """
    key, file = given["key"], given["ids_file"]
    selectors = sum((bool(given["ids"]), key is not None, file is not None))
    if selectors != 1:
        only = "only " if selectors else ""
        raise InvalidError(f"delete: give {only}one of ids, --key and --ids-file")
    ids = _lines(file) if file is not None else list(given["ids"])
    # Ids in the command itself are as clear as a --yes to a script; a key or a file may be many.
    is_clear = bool(given["ids"]) and not sys.stdin.isatty()
    with open_home(home_text) as home:
        shown = _topic_of(home, topic).incarnation
        bare, why = None if key is None else key.encode(), given["why"]
        what = f"all events with key `{key}`" if key is not None else counted(len(ids), "id")
        confirm_erasure(
            f"`{topic}`",
            f"Delete {what} from `{topic}`, for good?",
            given,
            lambda: _plan(home, topic, ids, bare),
            f"nothing was deleted: {_no_event(topic, key)}",
            is_sure=given["yes"] or is_clear,
        )
        tasks = tasks_of(given)
        with removal_bars(home, topic, scans=key is not None) as watch:
            progress = watch.searched
            how = DeleteOptions(who=given["who"], incarnation=shown, progress=progress, **tasks)
            if not (given["prove"] or given["proof_file"]):
                deleted = home.delete(topic, ids or None, key=bare, why=why, **how)
                proof = None
            else:
                wait = given["wait"]
                proof = home.erase(topic, ids, key=bare, why=why, wait=wait, watch=watch, **how)
        if proof is not None:
            report_proof(output, proof, given["proof_file"], watch.total, GivenEvents(ids, key))
        else:
            _report_deleted(output, topic, key, deleted)


@click.command()
@click.argument("topic", required=False)
@click.option("--since", metavar="T", help="The first time: ISO 8601, or -7d.")
@click.option("--id", "event_id", metavar="ID", help="Only records of events with this id.")
@click.option("--key", type=utf8, metavar="K", help="Only deletes and proofs by this key.")
@json_option
@click.pass_obj
def audit(
    home_text: str | None,
    output: Output,
    topic: str | None,
    since: str | None,
    event_id: str | None,
    key: str | None,
) -> None:
    """Show who updated or deleted events of a topic, when and why.

    It never shows the contents of events.

    Without a topic, show what was done to the home: topics that were created, trimmed or deleted,
    archives, pumps, cursors, tokens, logins, playbacks, and reads where the server runs with
    --audit-reads. Trims of a topic are only there.

    One delete may have two records: one of the events that the topic had, and one of those that
    only its archives had (`events` says so).

    Ids and keys are shown as hashes (sha256), so that the audit does not keep what was erased. Use
    --id or --key to find the records of one.

    A record with op `prove` is the result of `delete --prove`, with the hash of its proof.

    A record with `begun` belongs to a command that is still running or has died: run it again.

    \b
    Examples:
      tidelog audit orders
      tidelog audit orders --since -7d --json
      tidelog audit orders --id order-17
      tidelog audit orders --key customer-7
      tidelog audit --since -1d
    """
    if topic is None and (event_id is not None or key is not None):
        raise InvalidError("audit: --id and --key are about a topic: name the topic too")
    with open_home(home_text) as home:
        if topic is None:
            output.records(("at", "op", "who", "what", "note"), map(_action, home.actions(since)))
            return
        show_records(
            output, home.audit(topic, since, event_id, key=None if key is None else key.encode())
        )


def say_unseen(output: Output, files: Collection[str]) -> None:
    """Name files of archives in which nothing could be looked for."""
    for file in files:
        if output.as_json:
            output.record({"unseen": file, "error": unseen_file(file)})
        else:
            output.say(unseen_file(file))


def show_records(output: Output, records: Iterable[AuditRecord]) -> None:
    """Print audit records."""
    if output.as_json:
        output.records((), map(_record, records))
        return
    columns = ("at", "op", "who", "events", "of", "state", "proof", "why")
    rows = list(map(_row, records))
    output.records(columns, rows, "The audit has no such records.", rare=("of", "proof"))


def _topic_of(home: Home, name: str) -> Topic:
    """Returns a topic; the error for the name of an archive names the command for archives."""
    try:
        return home.topic(name)
    except NotFoundError as exc:
        if name not in {each.name for each in home.archives.list()}:
            raise
        raise NotFoundError(
            f"topic `{name}`: not found, but there is an archive of this name: run `tidelog "
            f"archive erase {name}` to erase events from its files",
            topic=name,
        ) from exc


def _show_plan(plan: ErasurePlan) -> None:
    """Say how many events an erasure would delete, and where they are, before the question."""
    where = ", ".join(f"{name}: {count:,}" for name, count in plan.partitions.items())
    lines = [f"Found {counted(plan.events, 'event')}{f' ({where})' if where else ''}."]
    if plan.trimmed:
        lines.append(f"The topic has trimmed {plan.trimmed:,} of them; archives still hold these.")
    if plan.archives:
        copies = ", ".join(f"{name}: {count:,}" for name, count in plan.archives.items())
        lines.append(f"Events in files of archives, which are deleted there too: {copies}.")
    if plan.missing and plan.events:
        named = ", ".join(f"`{each}`" for each in list(plan.missing)[:_SHOWN])
        more = f" and {len(plan.missing) - _SHOWN:,} more" if len(plan.missing) > _SHOWN else ""
        lines.append(f"No event has the id{'' if len(plan.missing) == 1 else 's'} {named}{more}.")
    for line in lines:
        click.echo(visible(line), err=True)


def confirm_erasure(
    where: str,
    question: str,
    given: Mapping[str, Any],
    plan: Callable[[], ErasurePlan],
    nothing: str,
    *,
    is_sure: bool,
) -> None:
    """Ask before events are deleted from a place, and show on a terminal what would go.

    Raises if they may not be, and, with the text ``nothing``, if there are none to delete.
    """
    if not is_sure and sys.stdin.isatty():
        found = plan()
        _show_plan(found)
        is_there = found.events or found.archives
        if not (is_there or given["prove"] or given["proof_file"]):
            raise NotFoundError(nothing)
    ask_first(f"events of {where}", question, is_sure)


def _no_event(topic: str, key: str | None) -> str:
    """Returns why a delete found nothing, and what to check."""
    what = "has the key" if key is not None else "has one of the ids"
    given = f" `{visible(key)}`" if key is not None else ""
    return (
        f"no event of `{topic}` or of its archives {what}{given}: check it; "
        f"`tidelog audit {topic}` shows what was deleted before"
    )


def _plan(home: Home, topic: str, ids: list[str], key: bytes | None) -> ErasurePlan:
    """Returns what a delete would delete, with a bar while it looks."""
    with scan_bar(home, topic) as advance:
        return home.plan_erase(topic, ids=ids, key=key, progress=advance)


def _report_deleted(output: Output, topic: str, key: str | None, deleted: DeleteResult) -> None:
    """Prints what a delete found; exits with 1 unless everything was found."""
    told = {"deleted": deleted.events, "archived": deleted.archived}
    record = {"topic": topic, **told, "missing": _shown(output, deleted)}
    output.record(record, always=("topic", "deleted"))
    say_unseen(output, deleted.unseen)
    if not (deleted.events or deleted.archived):
        output.say(f"Nothing was deleted: {_no_event(topic, key)}.")
    if not deleted.is_clean:
        sys.exit(FAILED)


def _shown(output: Output, deleted: DeleteResult) -> Any:
    if output.as_json:
        return list(deleted.missing)
    return ", ".join(deleted.missing) or None


def _action(action: Action) -> dict[str, Any]:
    at = to_iso(action.at_ms)
    return {
        "at": at,
        "op": action.op,
        "who": action.who,
        "what": action.what,
        "note": action.note or None,
    }


def _record(record: AuditRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "at": to_iso(record.at_ms),
        "op": record.op,
        "who": record.who,
        "why": record.why,
        "state": record.state,
        "key": record.key or None,
        "proof": record.proof and {"verdict": record.proof.verdict, "sha256": record.proof.sha256},
        "archived": record.archived,
        "events": [
            {
                "id": each.id,
                "partition": (
                    record.sources[each.partition].partition if record.sources else each.partition
                ),
                "offset": each.offset,
            }
            for each in record.events
        ],
    }


def _row(record: AuditRecord) -> dict[str, Any]:
    ids, proof = record.ids, record.proof
    named = f"key {record.key[:_MARK_CHARS]}" if record.key else ids[0][:_MARK_CHARS] if ids else ""
    more = f" and {len(ids) - 1} more" if len(ids) > 1 and not record.key else ""
    return {
        "at": to_seconds(to_iso(record.at_ms)),
        "op": record.op,
        "who": record.who,
        "events": _events_text(record) if proof is None else None,
        "of": named + more or None,
        "state": record.state,
        "proof": f"{proof.verdict}, {proof.sha256[:_MARK_CHARS]}" if proof else None,
        "why": record.why or None,
    }


def _events_text(record: AuditRecord) -> str:
    return f"{len(record.events)} only in archives" if record.archived else str(len(record.events))


def _read(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        with open(file, "rb") as source:
            return source.read()
    except OSError as exc:
        raise InvalidError(f"file `{file}`: cannot be read: {exc.strerror}: fix its path") from exc


def _lines(file: str) -> list[str]:
    """The ids in the lines of a file. ``InvalidError`` where there are none."""
    try:
        text = _read(file).decode()
    except UnicodeDecodeError as exc:
        raise InvalidError(f"file `{file}`: is not UTF-8: give one id in each line") from exc
    ids = ids_of_lines(text, f"file `{file}`")
    if not ids:
        raise InvalidError(f"file `{file}`: holds no id: give one in each line")
    return ids
