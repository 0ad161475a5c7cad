"""``tidelog consumer``: removing a consumer that is not used any more."""

from __future__ import annotations

import click

from tidelog.cli.confirm import ask_first, yes_option
from tidelog.cli.output import Output, json_option
from tidelog.cli.text import utf8
from tidelog.errors import NotFoundError
from tidelog.home import Home, open_home
from tidelog.log.consumer.delete import consumer_version, delete_consumer
from tidelog.model.address import nearest

__all__ = ["consumer"]


@click.group()
def consumer() -> None:
    """Delete consumers; `tidelog lag` lists them.

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
        lag, found = _lag(home, topic, name), home.topic(topic)
        shown = consumer_version(home.context, found, name)
        told = f"{lag} events of `{topic}`" if lag else f"all events of `{topic}`"
        has = "has not read" if lag else "has read"
        question = f"Delete consumer `{name}`, which {has} {told}?"
        ask_first(f"consumer `{name}` of `{topic}`", question, yes)
        delete_consumer(home.context, found, name, force=force, shown=shown)
        output.say(f"Deleted consumer `{name}` of `{topic}`.")
        if output.as_json:
            output.record({"topic": topic, "name": name, "deleted": True})


def _lag(home: Home, topic: str, name: str) -> int:
    """How many events it has not read. ``NotFoundError`` if the topic has no such consumer."""
    lags = home.lag(topic)
    found = [each.events for each in lags if each.consumer == name]
    if not found:
        like = nearest(name, {each.consumer for each in lags})
        raise NotFoundError(
            f"consumer `{name}` of `{topic}`: not found{like}: see `tidelog lag {topic}`"
        )
    return sum(found)
