"""``tidelog consumer``: removing a consumer that is not used any more."""

from __future__ import annotations

import click

from tidelog.cli.confirm import ask_first, yes_option
from tidelog.cli.output import Output, json_option
from tidelog.cli.text import CommandGroup, utf8
from tidelog.home import open_home

__all__ = ["consumer"]


@click.group(cls=CommandGroup)
def consumer() -> None:
    """Delete consumers.

    `tidelog lag` lists them.

    \b
    Examples:
      tidelog lag orders
      tidelog consumer delete orders billing
    """


@consumer.command()
@click.argument("topic")
@click.argument("name", type=utf8)
@click.option(
    "--force",
    is_flag=True,
    help="Delete it although a member is alive; that one begins again, as a new consumer does.",
)
@yes_option
@json_option
@click.pass_obj
def delete(
    home_text: str | None, output: Output, /, topic: str, name: str, force: bool, yes: bool
) -> None:
    """Delete a consumer with its cursors. Events stay.

    Trims and deletes of the topic wait for every consumer, also for one that never comes back: this
    removes it. Asks first on a terminal, and needs --yes elsewhere.

    Refuses while a member is alive. Where one may be alive on another machine, it watches for a
    sign of life for 15 seconds (1.5 times lease_ttl_ms).

    \b
    Examples:
      tidelog consumer delete orders billing
      tidelog consumer delete orders billing --yes --force
    """
    with open_home(home_text) as home:
        found = home.consumers(topic).get(name, deleting=True)
        lag = found.behind()
        told = f"{lag} events of `{topic}`" if lag else f"all events of `{topic}`"
        has = "has not read" if lag else "has read"
        question = f"Delete consumer `{name}`, which {has} {told}?"
        ask_first(f"consumer `{name}` of `{topic}`", question, yes)
        found.delete(force=force)
        output.say(f"Deleted consumer `{name}` of `{topic}`.")
        if output.as_json:
            output.record({"topic": topic, "name": name, "deleted": True})
