"""Every loop that retries is in ``catalog/update.py``; the others use its functions.

A new loop that retries by itself fails this test: use ``update``, ``attempts``, ``rounds`` or
``read_stable``. Loops that only look like retries are listed here with what they do.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "tidelog"
OTHER_ROOMS = ("catalog/", "codec/", "model/", "store/", "testing/")  # have no home's rows
RACES = {"ConflictError", "UnknownOutcomeError"}

LOOK_ALIKES = {  # loops with a count or a conflict that do not try one thing again
    ("erasure/matcher.py", "_unescaped"): "decodes escapes in escapes, one layer after another",
    ("journal/amend.py", "_delete_key"): "passes twice over what a key has, as copies may come in",
    ("log/notifier.py", "check"): "ends after some conflicts and says when to check again",
    ("server/http/request.py", "_gunzip"): "inflates the members of a body one after another",
    ("server/run.py", "_accept"): "accepts the connections that wait, a bounded number",
}


def is_attempt(loop: ast.AST) -> bool:
    """Whether a loop counts attempts, or waits between them."""
    if isinstance(loop, ast.While):
        return True
    if not isinstance(loop, ast.For):
        return False
    target, counted = ast.unparse(loop.target), ast.unparse(loop.iter)
    is_counted = target in ("_", "attempt") and counted.startswith("range(")
    return is_counted or "delays" in counted


def names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def goes_on(handler: ast.ExceptHandler) -> bool:
    """Whether the loop may go on after this handler, which does not end by leaving it."""
    return not isinstance(handler.body[-1], ast.Raise | ast.Return | ast.Break)


def races(loop: ast.AST) -> bool:
    """Whether a loop goes on after a conflict or a lost reply."""
    for node in ast.walk(loop):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            is_race = bool(names(node.type) & RACES)
            if is_race and goes_on(node):
                return True
        if isinstance(node, ast.With):
            for item in node.items:
                text = ast.unparse(item.context_expr)
                if "suppress(" in text and names(item.context_expr) & RACES:
                    return True
    return False


def ends_early(loop: ast.AST) -> bool:
    """Whether a loop can end before its last round: one that cannot retries nothing."""
    leaving = (ast.Return, ast.Break, ast.Raise)
    return any(isinstance(node, leaving) for node in ast.walk(loop))


def own_loops(function: ast.AST) -> Iterator[ast.AST]:
    """The loops of a function, without those of functions in it."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.For | ast.While):
            yield node
        yield from own_loops(node)


def retries(source: str) -> set[str]:
    """The functions of a source that retry by a loop of their own."""
    found = set()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for loop in own_loops(function):
                counts = isinstance(loop, ast.For) and is_attempt(loop) and ends_early(loop)
                if counts or (is_attempt(loop) and races(loop)):
                    found.add(function.name)
    return found


def test_loops_outside_of_the_update_module_do_not_retry() -> None:
    found = {
        (name, function)
        for path in sorted(ROOT.rglob("*.py"))
        if not (name := path.relative_to(ROOT).as_posix()).startswith(OTHER_ROOMS)
        for function in retries(path.read_text())
    }
    assert found - set(LOOK_ALIKES) == set(), "use a function of catalog/update.py"
    assert set(LOOK_ALIKES) - found == set(), "these are gone: remove them from the list"


def test_loop_around_a_conditional_write_is_found() -> None:
    by_hand = """
def change(context, where):
    while True:
        row = context.catalog.get(where, "head")
        with contextlib.suppress(ConflictError):
            context.catalog.write(where, Put("head", b"", row.version), write_id="a")
            return
"""
    counted = """
def change(context, where):
    for attempt in range(5):
        if attempt_once(context, where):
            return
"""
    once_for_each = """
def change(context, rows):
    for row in rows:
        with contextlib.suppress(ConflictError):
            context.catalog.write(where, Delete(row), write_id="a")
"""
    every_round = """
def numbers():
    found = []
    for _ in range(3):
        found.append(number())
    return found
"""
    assert retries(by_hand) == retries(counted) == {"change"}
    assert retries(every_round) == set()
    assert retries(once_for_each) == set()
