"""What ``tidelog up`` shows: a live table on a terminal, lines elsewhere, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import TracebackType

import click
import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tidelog.cli.output import Output
from tidelog.log.keepers import Part
from tidelog.model.event import to_iso

__all__ = ["View"]

_STYLES = {"running": "green", "failed": "red", "standing by": "yellow", "stopped": "dim"}
_ERROR_MAX = 100  # characters of an error in the table; its line stands above it whole


class View:
    """Shows the parts of one keeper."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._shown: dict[str, tuple[str, str]] = {}  # state and error by part
        self._live: Live | None = None
        if not output.as_json and sys.stdout.isatty():
            self._live = Live(console=Console(highlight=False), refresh_per_second=4)

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line for people."""
        if self._live is not None:
            self._live.console.print(text, markup=False)
        else:
            self._output.say(text)

    def listening(self, url: str, is_open: bool) -> None:
        """The server has begun to listen."""
        if self._output.as_json:
            self._output.record({"console": f"{url}/", "open": is_open})
        who = "open to all on this machine" if is_open else "asks for tokens"
        self.say(f"Console: {url}/ ({who})")

    def complain(self, name: str, text: str) -> None:
        """What a part said on its standard error."""
        if self._live is not None:
            self._live.console.print(f"{name}: {text}", markup=False)
        else:
            click.echo(f"{name}: {text}", err=True)

    def changed(self, part: Part, parts: Iterable[Part]) -> None:
        """A part has changed; ``parts`` are all of them."""
        told = (part.state, part.error)
        is_news = self._shown.get(part.name) != told
        self._shown[part.name] = told
        if self._output.as_json:
            fields = msgspec.to_builtins(part)
            since = to_iso(fields.pop("since_ms"))
            self._output.record({"part": fields.pop("name"), "since": since, **fields})
        elif self._live is not None:
            self._live.update(_table(parts))
        elif is_news and part.state != "starting":
            self._output.say("  ".join(filter(None, (part.name, part.state, part.error))))


def _table(parts: Iterable[Part]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("part", "state", "since", "restarts", "events", "waiting", "trouble"):
        table.add_column(name, justify="right" if name in ("events", "waiting") else "left")
    for part in parts:
        table.add_row(
            part.name,
            Text(part.state, style=_STYLES.get(part.state, "")),
            to_iso(part.since_ms)[11:19],
            str(part.restarts),
            "" if part.events is None else f"{part.events:,}",
            "" if part.waiting is None else f"{part.waiting:,}",
            Text(part.error[:_ERROR_MAX], style="red"),
        )
    return table
