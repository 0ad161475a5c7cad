"""The code's own shape: sizes, names and habits that a linter does not know."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.plain_words import RETIRED, Retired, Source, retired_words
from tests.support.plain_words import SOURCES as SOURCES_OF_TEXT

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "tidelog").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MODULE_LINES_MAX = 600
TEST_MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 6
LONG_SIGNATURES = {"send": 8}  # an event's own fields, one by one, as its callers have them
PARTICIPLES = (  # a participle says what happened to a thing that it does not name
    *(
        "asked",
        "held",
        "holding",
        "sought",
        "standing",
        "written_as",
        "keeping",
        "leashed",
        "driving",
    ),
    *("proving", "asking", "choosing", "amended", "planned", "named", "keyed", "known", "mended"),
    *("written", "tracked", "taken", "told"),
)
IMPERATIVES = re.compile(
    "add|append|archive|ask|begin|bring|build|change|check|close|compare|compile|copy|count|create"
    "|decide|delete|do|drive|end|erase|find|forget|get|give|have|hide|let|list|make|move|notify"
    "|open|parse|play|publish|put|raise|reach|read|refuse|remove|replace|return|run|search|send"
    "|set|start|stop|store|take|try|update|wait|write|yield",
    re.IGNORECASE,
)
EMPTY_NAMES = re.compile(r"(^|_)(utils?|helpers?|common|misc|manager|impl|base_impl)($|_)")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text()


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


def of_each(paths: Sequence[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Makes one test of a check, which lists every file that fails it.

    A test for each file and check would be a third of all tests, and take longer than the checks.
    """

    def test_of(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            wrong = []
            for path in paths:
                try:
                    check(path)
                except AssertionError as exc:
                    wrong.append(f"{name_of(path)}: {exc}")
            assert not wrong, "\n".join(wrong)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return test_of


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@of_each(SOURCES)
def test_module_shape(path: Path) -> None:
    text, tree = text_of(path), parsed(path)
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


@of_each([path for path in SOURCES if "cli" not in path.parts])
def test_docstrings_say_what_a_function_does(path: Path) -> None:
    """``Returns …``, not ``Return …``: one manner everywhere, except in help texts of commands."""
    opened = {
        function.name: doc.split()[0]
        for function in functions(parsed(path))
        if (doc := ast.get_docstring(function))
    }
    wrong = {name: word for name, word in opened.items() if IMPERATIVES.fullmatch(word)}
    assert wrong == {}


@of_each(SOURCES + TESTS)
def test_module_names_are_nouns_or_verbs(path: Path) -> None:
    assert path.stem.removeprefix("test_") not in PARTICIPLES, "which noun is missing?"


@of_each(SOURCES + TESTS)
def test_class_names_are_nouns(path: Path) -> None:
    names = [node.name for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)]
    wrong = [each for each in names if each.strip("_").lower() in PARTICIPLES]
    assert wrong == [], "which noun is missing?"


def test_class_names_are_defined_once() -> None:
    """One noun has one meaning: a class name leads to one file."""
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name_of(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@of_each(SOURCES)
def test_spark_is_imported_only_in_its_room(path: Path) -> None:
    """Everything else works where pyspark is slow to start or is not wanted."""
    if path.is_relative_to(ROOT / "src" / "tidelog" / "spark"):
        return
    names = [
        name
        for node in ast.walk(parsed(path))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    ]
    assert [name for name in names if name.split(".")[0] == "pyspark"] == []


REASON = r"noqa: (?:[A-Z0-9]+, )*PLC0415 - [`\w].*"


def hidden_imports(path: Path) -> Iterator[ast.Import | ast.ImportFrom]:
    for function in functions(parsed(path)):
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield node


@of_each(SOURCES)
def test_imports_in_functions_say_why(path: Path) -> None:
    """On their line, or on the first line where the reason holds for the whole file."""
    lines = text_of(path).splitlines()
    if lines and re.match(rf"# ruff: {REASON}", lines[0]):
        assert any(hidden_imports(path)), "there is none any more: remove the first line"
        return
    for node in hidden_imports(path):
        assert re.search(rf"# {REASON}", lines[node.lineno - 1]), f"line {node.lineno}"


@of_each(SOURCES)
def test_no_bare_assert_outside_the_testing_kit(path: Path) -> None:
    if "testing" in path.parts:
        return
    asserts = [n.lineno for n in ast.walk(parsed(path)) if isinstance(n, ast.Assert)]
    assert asserts == [], "an assert vanishes under -O: raise InternalError"


@of_each(SOURCES)
def test_public_names_are_listed_and_exist(path: Path) -> None:
    if path.name == "__main__.py":
        return
    tree = parsed(path)
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


@of_each([p for p in SOURCES if p.name == "__init__.py" and p.parent.name != "tidelog"])
def test_a_room_says_what_it_is(path: Path) -> None:
    docstring = ast.get_docstring(parsed(path)) or ""
    assert 3 <= len(docstring.splitlines()) <= 15
    for name in re.findall(r"``([a-z_]+)``", docstring):
        place = path.parent / name
        assert place.is_dir() or place.with_suffix(".py").exists(), f"names `{name}`, which is gone"


@of_each(SOURCES)
def test_docstrings_refer_to_modules_that_exist(path: Path) -> None:
    docstring = ast.get_docstring(parsed(path)) or ""
    for name in re.findall(r"``([a-z_]+(?:\.[a-z_]+)+)``", docstring):
        room, *rest = name.split(".")
        place = ROOT / "src" / "tidelog" / room
        if not place.is_dir() or name == "spark.archives":  # a setting of Spark
            continue
        while rest and (place / rest[0]).is_dir():
            place /= rest.pop(0)
        found = not rest or (place / f"{rest[0]}.py").exists()
        assert found, f"refers to `{name}`, which is gone"


IMPORTS = re.compile(
    r"^[\s\"']*from (tidelog[\w.]*) import (\w+(?: as \w+)?(?:, \w+(?: as \w+)?)*)", re.M
)


@of_each(TESTS)
def test_scripts_in_tests_import_what_exists(path: Path) -> None:
    """A script in a string is read by no linter, and fails in a child process, if at all."""
    for module, names in IMPORTS.findall(text_of(path)):
        place = ROOT / "src" / Path(*module.split("."))
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        assert file.exists(), f"imports from {module}, which is gone"
        for name in (each.split(" as ")[0] for each in names.split(", ") if each):
            is_module = (place / name).is_dir() or (place / f"{name}.py").exists()
            found = is_module or re.search(rf"\b{name}\b", text_of(file))
            assert found, f"{module} has no {name}"


@of_each(TESTS)
def test_test_modules_stay_short(path: Path) -> None:
    assert len(text_of(path).splitlines()) <= TEST_MODULE_LINES_MAX


@of_each(SOURCES + TESTS)
def test_nothing_is_left_for_later(path: Path) -> None:
    marks = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    assert not marks.search(text_of(path))


@of_each(SOURCES)
def test_no_code_takes_the_first_chunk_for_the_whole_table(path: Path) -> None:
    """A table of more than 2 GiB has several chunks even when combined: use `one_batch`."""
    first_chunk = re.compile(
        r"to_batches\([^)]*\)\[|(?<!in )(?<!\.)\b\w+ = .*combine_chunks\(\)\.to_"
    )
    if path.name == "event_batch.py":
        return  # where `one_batch` is
    assert not first_chunk.search(text_of(path))


def goes_on(handler: ast.ExceptHandler) -> bool:
    """Whether a loop goes on after this handler: it neither raises nor leaves the loop."""
    leaving = (ast.Raise, ast.Return, ast.Break)
    return not any(isinstance(node, leaving) for node in ast.walk(handler))


SINGLE_ERRORS = {  # loops that try one thing again, and hold no others
    "log/producer/producer.py",
    "journal/scribe.py",  # a turn, which contains its parts itself
    "maintenance/follower.py",  # contains all others too
    "server/console/archives.py",  # likewise
}


@of_each(SOURCES)
def test_loop_that_goes_on_after_an_error_contains_every_exception(path: Path) -> None:
    """One topic, archive or table must not stop the others, whatever it raises."""
    if str(path.relative_to(ROOT / "src" / "tidelog")) in SINGLE_ERRORS:
        return
    loops = [n for n in ast.walk(parsed(path)) if isinstance(n, ast.For | ast.While)]
    found = [
        handler.lineno
        for loop in loops
        for handler in ast.walk(loop)
        if isinstance(handler, ast.ExceptHandler)
        and isinstance(handler.type, ast.Name)
        and handler.type.id == "TidelogError"
        and goes_on(handler)
    ]
    assert found == [], "an exception of a library would stop the others: use errors.contained"


PLAIN_POOLS = (
    "concurrency.py",
    "server/",  # ends before its process does, and then drops what waits
    "backends.py",  # races two requests, so it needs two threads
    "testing/",
)


@of_each(SOURCES)
def test_pools_complete_their_work_without_new_threads(path: Path) -> None:
    """A plain pool raises once the main thread has ended, and where no thread can be started."""
    if not str(path.relative_to(ROOT / "src" / "tidelog")).startswith(PLAIN_POOLS):
        assert "ThreadPoolExecutor" not in text_of(path), "use tidelog.concurrency.Pool"


TYPED_READERS = {  # files whose `to_pylist` is on columns of ours, or on whole numbers and text
    "codec/formats/typed.py": 1,  # the event's value
    "codec/formats/avro.py": 1,  # decimals
    "codec/formats/text_lines.py": 1,
    "codec/formats/sequence.py": 4,
    "erasure/proof_search.py": 1,
    "erasure/matcher.py": 1,
    "erasure/metadata_objects.py": 1,  # checkpoints of Delta have no times
    "spark/workers.py": 2,
    "archive/delta.py": 3,
    "cli/commands/archive_look.py": 3,
    "codec/event_json.py": 9,
}
TYPED_PLACES = (
    "codec/formats/",
    "pipeline/",
    "codec/event_json.py",
    "cli/commands/archive_look.py",
)


@of_each(SOURCES)
def test_columns_of_a_schema_are_not_read_with_to_pylist(path: Path) -> None:
    """It fails on times that Python cannot hold: plain_rows reads them all."""
    name = str(path.relative_to(ROOT / "src" / "tidelog"))
    if name.startswith(TYPED_PLACES):
        calls = re.findall(r"\.to_pylist\(", text_of(path))
        assert len(calls) <= TYPED_READERS.get(name, 0), "use codec.event_json.plain_rows"


@pytest.mark.parametrize("source", SOURCES_OF_TEXT, ids=lambda source: source.__name__)
def test_texts_use_plain_words(source: Source) -> None:
    wrong = [f"{name}: {found}" for name, text in source() for found in retired_words(text)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("rule", RETIRED, ids=lambda rule: rule.instead)
def test_each_rule_for_words_hits_what_it_means_and_nothing_else(rule: Retired) -> None:
    for text in rule.wrong:
        assert re.search(rule.pattern, text, re.MULTILINE), text
    for text in rule.right:
        assert not re.search(rule.pattern, text, re.MULTILINE), text


def test_no_document_has_marks_of_a_merge() -> None:
    marks = re.compile(r"^(<{7} |>{7} |={7}$)", re.MULTILINE)
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        assert not marks.search(text_of(path)), name_of(path)


def test_benchmarks_can_be_imported() -> None:
    for path in (ROOT / "bench").glob("*.py"):
        importlib.import_module("bench" if path.stem == "__init__" else f"bench.{path.stem}")
