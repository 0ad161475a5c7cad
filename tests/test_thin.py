"""Commands and routes parse, call ``Home`` or another library class, and format the result."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "tidelog"
COMMANDS = sorted((ROOT / "cli" / "commands").glob("*.py"))
ROUTES = [*sorted((ROOT / "server" / "api").glob("*.py"))]
ROUTES += sorted((ROOT / "server" / "console").glob("*.py"))
ABOVE = [*sorted((ROOT / "cli").rglob("*.py")), *sorted((ROOT / "server").rglob("*.py"))]
WORKING = (  # rooms and modules that do work; values that calls return may come from others
    "tidelog.catalog",
    "tidelog.connectors.by_url",
    "tidelog.store",
    "tidelog.pipeline",
    "tidelog.spark",
    "tidelog.coordination.commits",
    "tidelog.coordination.ownership",
    "tidelog.coordination.pipeline_rows",
    "tidelog.coordination.registry",
    "tidelog.coordination.tokens",
    "tidelog.journal.amend",
    "tidelog.journal.compile",
    "tidelog.journal.listing.list_journals",
    "tidelog.log.consumer.leases",
    "tidelog.log.maintenance.sweep",
    "tidelog.log.partition_reader",
    "tidelog.log.run_reader",
    "tidelog.log.topics",
    "tidelog.maintenance.follower",
    "tidelog.maintenance.pipeline_sweep",
    "tidelog.maintenance.erase",
    "tidelog.maintenance.turn",
    "tidelog.model.times.Backoff",
    "tidelog.model.layout",
)
DRIVING = re.compile(r"\bDriver\(|\bcatalog\.write\(|\bcreate_archive\(|\bopen_pipeline\(")
ROWS = re.compile(
    r"\bcatalog\.(get|scan|write)\(|\bdecode_row\(|\bencode_row\("
    r"|\bstore\.(get|put|head|list|delete|copy|replace)\("
)
RETRIES = ("ConflictError", "UnknownOutcomeError", "UnavailableError")


def imports(path: Path) -> set[str]:
    """The modules of which a file imports something, and modules that it imports whole."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{each.name}" for each in node.names)}
    return found


def caught(path: Path) -> set[str]:
    """The errors that a loop catches and goes on after."""
    loops = (ast.For, ast.While)
    return {
        name.id
        for loop in ast.walk(ast.parse(path.read_text()))
        if isinstance(loop, loops)
        for handler in ast.walk(loop)
        if isinstance(handler, ast.ExceptHandler) and handler.type is not None
        for name in ast.walk(handler.type)
        if isinstance(name, ast.Name)
    }


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", COMMANDS + ROUTES, ids=named)
def test_commands_and_routes_import_nothing_that_works(path: Path) -> None:
    used = {
        each
        for each in imports(path)
        if any(each == room or each.startswith(f"{room}.") for room in WORKING)
    }
    assert used == set(), "call Home, and move what is missing there into the library"


@pytest.mark.parametrize("path", COMMANDS + ROUTES, ids=named)
def test_commands_and_routes_read_no_rows_or_objects(path: Path) -> None:
    assert ROWS.findall(path.read_text()) == [], "the library reads rows and objects"


@pytest.mark.parametrize("path", COMMANDS + ROUTES, ids=named)
def test_commands_and_routes_retry_nothing(path: Path) -> None:
    assert caught(path) & set(RETRIES) == set(), "the library retries, and knows for how long"


def test_neither_commands_nor_routes_drive_pipelines_or_write_rows() -> None:
    found = [str(path.relative_to(ROOT)) for path in ABOVE if DRIVING.search(path.read_text())]
    assert found == []
