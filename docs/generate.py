"""Pages of the site that are made from the code: a hook of MkDocs, run by ``make docs``.

What can be told by the code is told by the code: commands, settings, the library, HTTP, what is
stored, and what a million events cost by the numbers that ``make bench`` has measured.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import tidelog
from tidelog.cli.main import cli
from tidelog.log.consumer.consumer import Consumer
from tidelog.log.producer.producer import Producer
from tidelog.model.schema import OBJECTS, ROWS
from tidelog.server.api.openapi import description
from tidelog.server.options import ServeOptions
from tidelog.settings import Settings

ROOT = Path(__file__).parent.parent
COST = "<!-- cost -->"

# Public list prices of Amazon for us-east-1, in dollars: an assumption that operating.md states.
PUT, GET, GB_MONTH = 0.005 / 1_000, 0.0004 / 1_000, 0.023
WRITE_UNIT, READ_UNIT = 0.625 / 1e6, 0.125 / 1e6
LINGER_S = 0.25  # of a producer on a remote store
MEASURED = {  # by a bench of ours, for where `make bench` has not been run
    "store PUTs per 1,000 events, bulk": 0.0267,
    "stored bytes per 1,000 events, bulk": 55_208.0,
}
UNITS_OF_A_COMMIT = 10  # five items of up to 1 KB, twice each, as transactions are counted


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    pages = {
        "commands": commands_page(),
        "settings": settings_page(),
        "library": library_page(),
        "http": http_page(),
        "layout": layout_page(),
    }
    for name, content in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the table of costs where its mark is."""
    return markdown.replace(COST, cost_table())


def commands_page() -> str:
    """Every command with its help, as it is printed."""
    first = (
        "`--home` stands before the command; `TIDELOG_HOME` does the same. `--json` prints one "
        "JSON object per line. Exit codes are 0 for success, 1 for a failed operation, 2 for wrong "
        "usage."
    )
    lines = ["# Commands", "", first, ""]
    for name, command in walk(cli, "tidelog"):
        with click.Context(command, info_name=name, max_content_width=90) as context:
            context.terminal_width = 90
            lines += [f"## {name}", "", "```text", command.get_help(context), "```", ""]
    return "\n".join(lines)


def walk(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    """Every command that is shown, with its whole name."""
    for part, command in sorted(group.commands.items()):
        if command.hidden:
            continue
        yield f"{name} {part}", command
        if isinstance(command, click.Group):
            yield from walk(command, f"{name} {part}")


def settings_page() -> str:
    """The table of the README, of which a test says that it is the code's."""
    readme = (ROOT / "README.md").read_text()
    section = readme.split("## Settings", 1)[1].split("\n## ", 1)[0].strip()
    known = {field.name for field in dataclasses.fields(Settings)}
    shown = set(re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE))
    if not shown <= known:
        raise ValueError(f"README.md shows settings that are not there: {shown - known}")
    return f"# Settings\n\n{section}\n"


def library_page() -> str:
    """What ``import tidelog`` offers."""
    lines = ["# Library", "", "```python", "import tidelog", "```", ""]
    for name in tidelog.__all__:
        found = getattr(tidelog, name)
        if inspect.isfunction(found):
            lines += [*function_lines(f"tidelog.{name}", found, "##"), ""]
    for kind in (tidelog.Home, Producer, Consumer, tidelog.Event, tidelog.Position):
        lines += class_lines(kind)
    lines += ["## Errors", "", "| error | what it means |", "|---|---|"]
    for name in tidelog.__all__:
        found = getattr(tidelog, name)
        if inspect.isclass(found) and issubclass(found, Exception):
            lines.append(f"| `{name}` | {first_line(found)} |")
    return "\n".join([*lines, ""])


def class_lines(kind: type) -> list[str]:
    """A class with its public methods and properties."""
    lines = [f"## {kind.__name__}", "", plain(inspect.getdoc(kind) or ""), ""]
    for name, member in vars(kind).items():
        if name.startswith("_") or not (inspect.getdoc(member) or "").strip():
            continue
        if isinstance(member, property):
            lines += [f"### {kind.__name__}.{name}", "", plain(inspect.getdoc(member) or ""), ""]
        elif inspect.isfunction(member):
            lines += [*function_lines(f"{kind.__name__}.{name}", member, "###"), ""]
    return lines


def function_lines(name: str, function: Any, heading: str) -> list[str]:
    """A function with its signature."""
    signature = str(inspect.signature(function)).replace("(self, ", "(").replace("(self)", "()")
    signature = re.sub(r"'([^']*)'", r"\1", signature) if "->" in signature else signature
    text = plain(inspect.getdoc(function) or "")
    return [f"{heading} {name}", "", "```python", f"{name}{signature}", "```", "", text]


def first_line(found: Any) -> str:
    return plain(inspect.getdoc(found) or "").split("\n\n")[0].replace("\n", " ")


def plain(text: str) -> str:
    """A docstring as Markdown."""
    text = re.sub(r":[a-z]+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


def http_page() -> str:
    """What a server takes and answers, from its own description."""
    told = description(ServeOptions())
    first = (
        f"{told['info']['description']} A running server gives the whole of it, with schemas, at "
        "`/openapi.json`. Where there are tokens, send one as `Authorization: Bearer …`."
    )
    lines = ["# HTTP", "", first, ""]
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            lines += [f"## {method.upper()} {path}", "", operation.get("summary", ""), ""]
            if operation.get("description"):
                lines += [operation["description"], ""]
            lines += parameter_lines(operation.get("parameters", []))
            lines += ["| answer | what |", "|---|---|"]
            for status, answer in operation["responses"].items():
                named = answer.get("$ref", "").rpartition("/")[2]
                whole = told["components"]["responses"][named] if named else answer
                lines.append(f"| {status} | {whole.get('description', '')} |")
            lines.append("")
    return "\n".join(lines)


def parameter_lines(parameters: list[dict[str, Any]]) -> list[str]:
    if not parameters:
        return []
    lines = ["| parameter | in | what |", "|---|---|---|"]
    for each in parameters:
        said = each.get("description") or each.get("schema", {}).get("description", "")
        lines.append(f"| `{each['name']}` | {each['in']} | {said} |")
    return [*lines, ""]


def layout_page() -> str:
    """Everything that is persisted."""
    lines = ["# What is stored", "", "`<t>` is a topic's incarnation, `<p>` a partition.", ""]
    for title, first, kinds in (("Objects", "path", OBJECTS), ("Rows", "partition · row", ROWS)):
        lines += [f"## {title}", "", f"| {first} | what |", "|---|---|"]
        lines += [f"| `{kind.name}` | {kind.what} |" for kind in kinds]
        lines.append("")
    return "\n".join(lines)


def measured() -> dict[str, float]:
    """The medians of the last bench of the log that was run here, or else of ours."""
    path = ROOT / "bench" / "results" / "log.json"
    results = json.loads(path.read_text()) if path.exists() else []
    return MEASURED | {each["what"]: each["median"] for each in results}


def cost_table() -> str:
    """Dollars for a million events, in bulk and as they trickle in."""
    found = measured()
    bulk_puts = found["store PUTs per 1,000 events, bulk"] * 1_000
    gigabytes = found["stored bytes per 1,000 events, bulk"] * 1_000 / 1e9
    lines = [
        "| a million events, 4 partitions | objects put | S3 | DynamoDB | together |",
        "|---|---|---|---|---|",
    ]
    for name, puts in (
        ("in bulk, as measured", bulk_puts),
        ("at 10,000 events/s, one producer", 1e6 / 10_000 / LINGER_S),
        ("at 1,000 events/s, one producer", 1e6 / 1_000 / LINGER_S),
        ("at 100 events/s, one producer", 1e6 / 100 / LINGER_S),
    ):
        store, rows = puts * PUT, puts * 4 * UNITS_OF_A_COMMIT * WRITE_UNIT
        shown = (store, rows, store + rows)
        lines.append(f"| {name} | {puts:,.0f} | " + " | ".join(f"${x:.4f}" for x in shown) + " |")
    month = gigabytes * GB_MONTH
    last = (
        f"Keeping them costs ${month:.4f} a month ({gigabytes * 1_000:.0f} MB, as measured with "
        f"small events); reading them once in bulk ${bulk_puts * GET:.6f}."
    )
    return "\n".join([*lines, "", last])
