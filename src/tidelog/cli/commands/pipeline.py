"""``tidelog pipeline``: pumps and restores by their names, how far they are, and their removal."""

from __future__ import annotations

import click

from tidelog.archive.metrics import pipelines_text
from tidelog.cli.confirm import ask_first, yes_option
from tidelog.cli.output import Output, json_option, write_out
from tidelog.coordination.pipeline_rows import read_partitions, read_progress
from tidelog.errors import NotFoundError
from tidelog.home import Home, open_home
from tidelog.model.address import nearest
from tidelog.model.event import to_iso
from tidelog.model.pipeline import NamedPipeline
from tidelog.pipeline.registry import delete_pipeline, find_pipeline, list_pipelines

__all__ = ["pipeline"]


@click.group()
def pipeline() -> None:
    """Pumps and restores: list them, see how far they are, remove them.

    \b
    Examples:
      tidelog pipeline list
      tidelog pipeline show pump.orders.0a1b2c3d4e5f6071
    """


@pipeline.command("list")
@click.option("--prometheus", is_flag=True, help="Print metrics of all of them.")
@json_option
@click.pass_obj
def list_all(home_text: str | None, output: Output, /, prometheus: bool) -> None:
    """List pipelines that have names of their own.

    left_out counts events that were erased from the target before they came there.

    \b
    Examples:
      tidelog pipeline list --json
      tidelog pipeline list --prometheus
    """
    with open_home(home_text) as home:
        if prometheus:
            write_out(pipelines_text(home.context).encode())
            return
        rows = [_described(home, each) for each in list_pipelines(home.context)]
    names = ("name", "source", "sink", "events", "left_out", "last_commit", "state")
    output.records(names, rows)


@pipeline.command()
@click.argument("name")
@json_option
@click.pass_obj
def show(home_text: str | None, output: Output, /, name: str) -> None:
    """Show how far a pipeline has come, partition by partition.

    \b
    Examples:
      tidelog pipeline show pump.orders.0a1b2c3d4e5f6071
    """
    with open_home(home_text) as home:
        found = find_pipeline(home.context, name)
        rows = []
        for partition in read_partitions(home.context, found.incarnation):
            head = read_progress(home.context, found.incarnation, partition)
            if head is not None:
                row: dict[str, object] = {"partition": partition, "position": head.position}
                row["events"] = head.ordinal
                totals = head.totals
                row |= {"left_out": totals.left_out, "last_commit": _time(totals.committed_ms)}
                rows.append(row)
        output.records(("partition", "position", "events", "left_out", "last_commit"), rows)


@pipeline.command()
@click.argument("name")
@yes_option
@json_option
@click.pass_obj
def delete(home_text: str | None, output: Output, /, name: str, yes: bool) -> None:
    """Remove a pipeline, not what it has written.

    Asks first on a terminal, and needs --yes elsewhere.

    \b
    Examples:
      tidelog pipeline delete pump.orders.0a1b2c3d4e5f6071 --yes
    """
    with open_home(home_text) as home:
        found = {each.name: each for each in list_pipelines(home.context)}
        if name not in found:
            like = nearest(name, found)
            raise NotFoundError(f"pipeline `{name}`: not found{like}: nothing to delete")
        ask_first(f"pipeline `{name}`", f"Delete `{name}`? What it has written stays.", yes)
        delete_pipeline(home.context, name, found[name].incarnation)
        output.record({"deleted": name})


def _described(home: Home, found: NamedPipeline) -> dict[str, object]:
    heads = [
        head
        for partition in read_partitions(home.context, found.incarnation)
        if (head := read_progress(home.context, found.incarnation, partition)) is not None
    ]
    return {
        "name": found.name,
        "source": found.source,
        "sink": found.sink,
        "events": sum(head.ordinal for head in heads),
        "left_out": sum(head.totals.left_out for head in heads),
        "last_commit": _time(max((head.totals.committed_ms for head in heads), default=0)),
        "state": found.state,
    }


def _time(committed_ms: int) -> str | None:
    return to_iso(committed_ms) if committed_ms else None
