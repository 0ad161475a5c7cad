"""Pages of the site that come from the code: a hook of MkDocs, run by ``make docs``.

It adds the routes of the server, and what a million events cost by the numbers that ``make bench``
measured. mkdocs-click prints the commands and mkdocstrings the library.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from tidelog.cli.main import cli
from tidelog.server.api.openapi import description
from tidelog.server.api.openapi_parts import COMMON_ERRORS, limits_text
from tidelog.server.options import ServeOptions

ROOT = Path(__file__).parent.parent
EXAMPLES = re.compile(r"\x08\n(?P<title>\w[^\n]*:)\n(?P<lines>(?:[ ]+[^\n]*\n?)+)")

# Public list prices of Amazon for us-east-1, in dollars: an assumption that operating.md states.
PUT, GET, GB_MONTH = 0.005 / 1_000, 0.0004 / 1_000, 0.023
WRITE_UNIT, READ_UNIT = 0.625 / 1e6, 0.125 / 1e6
LINGER_S = 0.25  # of a producer on a remote store
MEASURED = {  # by a bench of ours, for where `make bench` has not been run
    "store PUTs per 1,000 events, bulk": 0.0267,
    "stored bytes per 1,000 events, bulk": 55_208.0,
}
UNITS_OF_A_COMMIT = 10  # five items of up to 1 KB, twice each, as transactions are counted


def on_startup(command: str, dirty: bool) -> None:
    """Prepare the command line for the extension that prints it."""
    fence_examples(cli)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put what is made here where its mark is."""
    for mark, text in MADE.items():
        if mark in markdown:
            markdown = markdown.replace(mark, text())
    return markdown


def fence_examples(command: click.Command) -> None:
    """Turn the examples in a command's help, and in those below it, into blocks of code."""
    command.help = EXAMPLES.sub(fenced, inspect.cleandoc(command.help or ""))
    for each in getattr(command, "commands", {}).values():
        fence_examples(each)


def fenced(found: re.Match[str]) -> str:
    lines = "\n".join(line.strip() for line in found["lines"].splitlines())
    return f"{found['title']}\n\n```text\n{lines}\n```\n"


def http_routes() -> str:
    """What a server accepts and returns, from its own description."""
    api = description(ServeOptions())
    lines = [api["info"]["description"], ""]
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            lines += [f"## {method.upper()} {path}", "", operation.get("summary", ""), ""]
            if "x-scope" in operation:
                lines += [f"Scope: `--{operation['x-scope']}`.", ""]
            lines += parameter_lines(operation.get("parameters", []))
            body = operation.get("requestBody")
            if body:
                kinds = ", ".join(f"`{kind}`" for kind in body["content"])
                lines += [f"Body: {kinds}. {body['description']}", ""]
                lines += example_lines(body["content"])
            shown = {
                status: api["components"]["responses"][status] if "$ref" in answer else answer
                for status, answer in operation["responses"].items()
                if status not in COMMON_ERRORS
            }
            lines += status_lines(shown)
            for answer in shown.values():
                lines += example_lines(answer["content"])
    errors = {status: api["components"]["responses"][status] for status in COMMON_ERRORS}
    lines += ["## Errors", "", "Every operation can return these:", "", *status_lines(errors)]
    return "\n".join(lines)


def status_lines(answers: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| status | meaning |", "|---|---|"]
    return [
        *lines,
        *(f"| {status} | {each['description']} |" for status, each in answers.items()),
        "",
    ]


def example_lines(content: dict[str, dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for each in content.values():
        if "example" in each:
            value = each["example"]
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines += ["```json", text, "```", ""]
    return lines


def parameter_lines(parameters: list[dict[str, Any]]) -> list[str]:
    if not parameters:
        return []
    lines = ["| parameter | in | meaning |", "|---|---|---|"]
    for each in parameters:
        said = each.get("description") or each.get("schema", {}).get("description", "")
        more = limits_text(each["schema"])
        said += f" ({more})" if more else ""
        lines.append(f"| `{each['name']}` | {each['in']} | {said} |")
    return [*lines, ""]


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


MADE = {
    "<!-- cost -->": cost_table,
    "<!-- routes -->": http_routes,
}
