"""The code's own shape: sizes, names and habits that a linter does not know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "tidelog").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MODULE_LINES_MAX = 600
TEST_MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 6
LONG_SIGNATURES = {"send": 8}  # an event's own fields, one by one, as its callers have them
EMPTY_NAMES = re.compile(r"(^|_)(utils?|helpers?|common|misc|manager|impl|base_impl)($|_)")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_module_shape(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module says what it is for"
    assert len(text.splitlines()) <= MODULE_LINES_MAX, "a long module hides a second one"
    assert not EMPTY_NAMES.search(path.stem), "the name says nothing: which noun is missing?"
    for function in functions(tree):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        assert lines <= FUNCTION_LINES_MAX, f"{function.name} has {lines} lines"
        taken = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
        own = [argument for argument in taken if argument.arg not in ("self", "cls")]
        allowed = LONG_SIGNATURES.get(function.name, PARAMETERS_MAX)
        assert len(own) <= allowed, f"{function.name} takes {len(own)} parameters"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_bare_assert_outside_the_testing_kit(path: Path) -> None:
    if "testing" in path.parts:
        return
    asserts = [n.lineno for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Assert)]
    assert asserts == [], "an assert vanishes under -O: raise InternalError"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_public_names_are_listed_and_exist(path: Path) -> None:
    if path.name == "__main__.py":
        return
    tree = ast.parse(path.read_text())
    body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    if all(isinstance(node, ast.Expr) for node in body):
        return  # a docstring alone
    listed = [
        ast.literal_eval(node.value)
        for node in body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "__all__"
    ]
    assert listed, "a module lists what it offers in __all__"


@pytest.mark.parametrize(
    "path",
    [p for p in SOURCES if p.name == "__init__.py" and p.parent.name != "tidelog"],
    ids=name_of,
)
def test_a_room_says_what_it_is(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert 3 <= len(docstring.splitlines()) <= 15


@pytest.mark.parametrize("path", TESTS, ids=name_of)
def test_test_modules_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= TEST_MODULE_LINES_MAX


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=name_of)
def test_nothing_is_left_for_later(path: Path) -> None:
    marks = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    assert not marks.search(path.read_text())


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_code_takes_the_first_chunk_for_the_whole_table(path: Path) -> None:
    """A table of more than 2 GiB has several chunks even when combined: use `one_batch`."""
    first_chunk = re.compile(
        r"to_batches\([^)]*\)\[|(?<!in )(?<!\.)\b\w+ = .*combine_chunks\(\)\.to_"
    )
    if path.name == "events.py":
        return  # where `one_batch` is
    assert not first_chunk.search(path.read_text())
