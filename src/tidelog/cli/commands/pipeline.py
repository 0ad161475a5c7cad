"""``tidelog pipeline``: pumps and restores by their names, how far they are, and their removal."""

from __future__ import annotations

import click

from tidelog.api.pipelines import PumpHandle
from tidelog.cli.confirm import ask_first, yes_option
from tidelog.cli.output import Output, json_option, write_out
from tidelog.cli.text import CommandGroup
from tidelog.errors import NotFoundError
from tidelog.home import open_home
from tidelog.model.address import nearest
from tidelog.model.event import to_iso

__all__ = ["pipeline"]


@click.group(cls=CommandGroup)
def pipeline() -> None:
    """List, show and delete pumps and restores.

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
            write_out(home.pumps.metrics().encode())
            return
        rows = [_described(each) for each in home.pumps.list(restores=True)]
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
        rows = [
            {
                "partition": each.partition,
                "position": each.position,
                "events": each.events,
                "left_out": each.totals.left_out,
                "last_commit": _time(each.totals.committed_ms),
            }
            for each in home.pumps.get(name).status(source=False).partitions
            if each.has_begun
        ]
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
        found = {each.name: each for each in home.pumps.list(restores=True)}
        if name not in found:
            like = nearest(name, found)
            raise NotFoundError(f"pipeline `{name}`: not found{like}: nothing to delete")
        ask_first(f"pipeline `{name}`", f"Delete `{name}`? What it has written stays.", yes)
        found[name].delete()
        output.record({"deleted": name})


def _described(pump: PumpHandle) -> dict[str, object]:
    status = pump.status(source=False)
    return {
        "name": pump.name,
        "source": pump.info.source,
        "sink": pump.info.sink,
        "events": status.events,
        "left_out": status.left_out,
        "last_commit": _time(status.last_commit_ms),
        "state": pump.info.state,
    }


def _time(committed_ms: int | None) -> str | None:
    return to_iso(committed_ms) if committed_ms else None
