"""Commands parse, call ``Home`` and format: the work is the library's."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent / "src" / "tidelog"
COMMANDS = sorted((ROOT / "cli" / "commands").glob("*.py"))
ABOVE = [*sorted((ROOT / "cli").rglob("*.py")), *sorted((ROOT / "server").rglob("*.py"))]
WORKING = (  # rooms and modules that do work; values that calls return may come from others
    "tidelog.catalog",
    "tidelog.store",
    "tidelog.pipeline",
    "tidelog.maintenance",
    "tidelog.spark",
    "tidelog.coordination.ownership",
    "tidelog.coordination.pipeline_rows",
    "tidelog.coordination.registry",
    "tidelog.coordination.tokens",
    "tidelog.journal.amend",
    "tidelog.journal.compile",
    "tidelog.log.maintenance.sweep",
    "tidelog.log.topics",
)
DRIVING = re.compile(r"\bDriver\(|\bcatalog\.write\(|\bcreate_archive\(|\bopen_pipeline\(")


def imports(path: Path) -> set[str]:
    found = ast.walk(ast.parse(path.read_text()))
    return {node.module or "" for node in found if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_command_imports_nothing_that_works(path: Path) -> None:
    used = {
        each
        for each in imports(path)
        if any(each == room or each.startswith(f"{room}.") for room in WORKING)
    }
    assert used == set(), "call Home, and move what is missing there into the library"


def test_neither_commands_nor_routes_drive_pipelines_or_write_rows() -> None:
    found = [str(path.relative_to(ROOT)) for path in ABOVE if DRIVING.search(path.read_text())]
    assert found == []
