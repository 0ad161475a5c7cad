"""Requests that arrive twice, the second time late: no row goes back to an older state."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import tidelog
from tests.faults.test_amend_faults import amender, filled
from tests.support.compiled_journals import Press
from tidelog.coordination.audit import read_audit
from tidelog.log.ledger import enter_erased, read_erased
from tidelog.testing.faults import Fault, Faults, FaultyCatalog

# Puts that expect nothing, by module and function, and why a late repeat does no harm.
ALLOWED = {
    ("log/producer/append_plan.py", "plan_append"): "in a write that expects the head",
    ("journal/compile_steps.py", "_changes"): "in a write that expects the head",
    ("journal/amendment_writer.py", "_plan"): "in a write that expects the head",
    (
        "log/unused_objects.py",
        "list_unused",
    ): "in a write that expects the rows that named the objects",
    ("log/maintenance/strays.py", "_note"): "in a write that expects the head",
    ("pipeline/cycle.py", "_finish"): "in a write that expects the head",
    ("pipeline/date_folders.py", "_write"): "in a write that expects the counted row",
    ("pipeline/date_folders.py", "reopen"): "in a write that expects the folder's row",
    ("archive/finalize.py", "_settle"): "in a write that expects the folder's row",
    ("log/topics.py", "delete_topic"): "in a write that expects the registry row",
    ("archive/delete.py", "finish_removal"): "in a write that expects the registry row",
    ("pipeline/failures.py", "_note"): "in a write that expects the row `failures`",
    (
        "coordination/jobs.py",
        "put_keeper",
    ): "a heartbeat that is shown; an old one counts as silent",
    (
        "coordination/ownership.py",
        "_beat",
    ): "a heartbeat, in a write that expects the fence of its members",
    ("playback/session.py", "start_playback"): "a name for lists; the pin says whether it is there",
    (
        "coordination/tokens.py",
        "create_token",
    ): "the guard is never deleted; no reader compares it",
    ("coordination/tokens.py", "note_uses"): "a time that is shown, to the minute or older",
    ("log/topics.py", "_remove_consumers"): "closes an incarnation's list, which never reopens",
}


def unconditional() -> Iterator[tuple[str, str]]:
    root = Path(tidelog.__file__).parent
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith("testing/"):
            continue
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    is_put = isinstance(node, ast.Call) and ast.unparse(node.func) == "Put"
                    if is_put and len(node.args) + len(node.keywords) < 3:  # type: ignore[attr-defined]
                        yield name, function.name


def test_every_put_without_an_expectation_is_known_to_do_no_harm() -> None:
    assert set(unconditional()) == set(ALLOWED)


@pytest.mark.parametrize("seed", range(20))
def test_doubled_put_does_not_bring_an_older_audit_record_back(seed: int) -> None:
    press = Press(seed)
    topic = filled(press, 4, partitions=1)
    faults = Faults(press.context.random)
    faulty = replace(press.context, catalog=FaultyCatalog(press.catalog, faults, press.clock))
    faults.on_next("write", *[Fault.DUPLICATE] * 6)
    amender(faulty, topic).delete(["0-1"])
    amender(faulty, topic).update({"0-2": b"new"})
    while faults.late:
        faults.late.pop()()
    assert [record.state for record in read_audit(press.context, topic)] == ["done", "done"]


def test_doubled_put_does_not_bring_an_older_time_of_the_ledger_back() -> None:
    press = Press()
    topic = filled(press, 4, partitions=1)
    amender(press.context, topic).delete(["0-1"])
    faults = Faults()
    faulty = replace(press.context, catalog=FaultyCatalog(press.catalog, faults, press.clock))
    faults.on_next("write", Fault.DUPLICATE)
    enter_erased(faulty, topic, {"x": 5})
    late = list(faults.late)
    faults.late.clear()
    enter_erased(press.context, topic, {"x": 9})
    enter_erased(press.context, topic, {"x": 7})
    for each in late:
        each()
    assert 9 in read_erased(press.context, topic).ids.values()
    assert not {5, 7} & set(read_erased(press.context, topic).ids.values())
