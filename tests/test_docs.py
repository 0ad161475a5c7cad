"""Documents that fail the build when they lie."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest

from tests.support.cli_run import run_here
from tidelog.cli.main import cli
from tidelog.home import Home
from tidelog.model.schema import OBJECTS, ROWS, Kind
from tidelog.settings import Settings

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("[A-Z]*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
PROTOCOLS = sorted(ROOT.glob("docs/protocols/*.md"))
ANYTHING = "…"  # in a line: any text; as a line of its own: any lines


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text()
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, block in found]


def table_after(document: str, heading: str) -> list[tuple[str, ...]]:
    """The cells of the first table below a heading, without its two head rows."""
    text = (ROOT / document).read_text()
    assert heading in text, f"{document} has no {heading!r}"
    lines = text.split(heading, 1)[1].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append(tuple(cell.strip() for cell in line.strip("|").split(" | ")))
    return rows[2:]


def steps(document: str) -> Iterator[tuple[str, list[str]]]:
    """Lines that begin with ``$``, and what is shown below each, in order."""
    for block in blocks(document, "console"):
        for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *shown = step.splitlines()
            yield command, shown


def is_shown(printed: str, shown: list[str]) -> bool:
    """Whether a command printed what its example shows, apart from blanks at line ends."""
    lines = [r"(?:.*\n)*?" if line == ANYTHING else line_pattern(line) for line in shown]
    text = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
    return re.fullmatch("".join(lines), text) is not None


def line_pattern(line: str) -> str:
    return ".*".join(re.escape(part) for part in line.rstrip().split(ANYTHING)) + r"\n"


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/journals.md",
        "docs/python.md",
        "docs/from-safya.md",
        "docs/from-rscylla.md",
        "docs/from-flash-flood.md",
    ],
)
def test_python_examples_run(document: str, tmp_path: Path) -> None:
    found = blocks(document, "python")
    assert found
    for script in found:
        subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=60)


def test_output_differs_from_what_is_shown() -> None:
    assert is_shown("a  \nb 1\nc\n", ["a", "b …", "c"])
    assert is_shown("a\nb\nc\n", ["a", "…"])
    for shown in (["a", "c"], ["b", "…"], ["a", "b", "c", "d"], ["a", "b x…", "c"]):
        assert not is_shown("a\nb\nc\n", shown)


def test_the_quickstarts_commands_run_and_print_what_is_shown(tmp_path: Path) -> None:
    """By a shell, as people do it."""
    main = "from tidelog.cli.main import run; run()"
    tidelog = f"tidelog() {{ {sys.executable} -c '{main}' \"$@\"; }}"
    found = list(steps("README.md"))
    assert len(found) > 5
    for command, shown in found:
        script = f"set -eo pipefail; {tidelog}; {command}"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        if shown:
            assert is_shown(done.stdout, shown), f"{command}\n{done.stdout}"


GUIDES = ("journals", "recipes/laptop-log", "recipes/workers", "recipes/tables", "recipes/playback")
GUIDES += (
    "recipes/erase",
    "recipes/correct",
    "recipes/log-files",
    "recipes/retention",
    "recipes/sql",
)


@pytest.mark.parametrize("guide", GUIDES)
def test_the_commands_of_a_guide_run_and_print_what_is_shown(
    guide: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    """In this process, as they are many; a shell runs those that create files, as readers do."""
    tidelog = run_here(monkeypatch, capsysbinary, tmp_path)
    found = list(steps(f"docs/{guide}.md"))
    assert len(found) > (15 if guide == "journals" else 2)
    for command, shown in found:
        if not command.startswith("tidelog "):
            subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True)
            continue
        done = tidelog(*shlex.split(command)[1:])
        assert done.code == 0, f"{command}: {done.err}"
        if shown:
            assert is_shown(done.out.decode(), shown), f"{command}\n{done.out.decode()}"


def test_every_command_named_in_a_document_exists() -> None:
    for document in DOCUMENTS:
        for name in re.findall(r"`tidelog ([a-z][a-z-]*)", document.read_text()):
            assert name in cli.commands, f"{document.name} names `tidelog {name}`"


def test_commands_of_migration_pages_can_be_typed() -> None:
    """Each has the arguments and options that it needs; nothing is run."""
    for document in ROOT.glob("docs/from-*.md"):
        text = document.read_text()
        typed = re.findall(r"^(tidelog .*?)(?: \| .*)?$", text, re.MULTILINE)
        tables = re.findall(r"[|,] (?:or )?`(tidelog [^`]*)` \|$", text, re.MULTILINE)
        assert typed, document.name
        for line in typed + tables:
            _, *words = shlex.split(line)
            command: click.Command = cli
            while isinstance(command, click.Group):
                command = command.commands[words.pop(0)]
            try:
                command.make_context(command.name, words)
            except click.UsageError as error:
                pytest.fail(f"{document.name}: {line}: {error.format_message()}")


def test_the_overview_names_every_command() -> None:
    rows = table_after("docs/reference/commands.md", "# Commands")
    named = {word for row in rows for word in re.findall(r"[a-z][a-z-]*", row[0])}
    assert {name for name, command in cli.commands.items() if not command.hidden} <= named
    for name, command in cli.commands.items():
        if isinstance(command, click.Group):
            own = " ".join(row[0] for row in rows if f"`tidelog {name} " in row[0])
            assert set(command.commands) <= set(re.findall(r"[a-z][a-z-]*", own)), name


def test_the_readme_names_the_two_commands_and_make_knows_all_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for document in DOCUMENTS:
        for target in re.findall(r"`make ([a-z-]+)`", document.read_text()):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme


def test_the_settings_table_is_the_code() -> None:
    rows = table_after("docs/reference/settings.md", "# Settings")
    shown = {row[0].strip("`"): row for row in rows if row[0]}
    settable = {f.name: f for f in fields(Settings) if f.name not in ("found_in", "is_default")}
    assert set(shown) == set(settable)
    for name, row in shown.items():
        assert row[1] == f"`TIDELOG_{name.upper()}`"
        if name not in ("store", "catalog"):
            assert row[2] == str(settable[name].default)


@pytest.mark.parametrize(
    ("heading", "kinds"),
    [("## Objects", OBJECTS), ("## Rows", ROWS)],
    ids=["objects", "rows"],
)
def test_the_tables_of_what_is_stored_are_the_code(heading: str, kinds: tuple[Kind, ...]) -> None:
    shown = [
        (row[0].strip("`"), row[1]) for row in table_after("docs/reference/layout.md", heading)
    ]
    assert shown == [tuple(kind) for kind in kinds]


def test_the_table_of_rooms_has_the_order_of_imports() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = settings["tool"]["importlinter"]["contracts"]
    layers = [set(layer.replace("tidelog.", "").split(" | ")) for layer in contract["layers"]]
    rows = table_after("ARCHITECTURE.md", "## 4. Rooms")
    shown: list[set[str]] = []
    for row in rows:
        if not row[0].startswith("″"):  # which is level with the room above
            shown.append(set())
        shown[-1] |= set(re.findall(r"`([a-z_]+)(?:\.py)?`", row[0]))
    assert shown == layers


def test_tests_named_in_documents_exist() -> None:
    for document in DOCUMENTS:
        for path, _, name in re.findall(
            r"`(tests/[a-z_/]+\.py)(::([a-z0-9_]+))?`", document.read_text()
        ):
            file = ROOT / path
            assert file.exists(), f"{document.name} names {path}"
            found = not name or re.search(
                rf"^    def {name}\(|^def {name}\(", file.read_text(), re.M
            )
            assert found, f"{document.name} names {name} of {path}"


def test_every_row_of_the_five_systems_says_what_shows_it() -> None:
    lines = (ROOT / "docs" / "seeds.md").read_text().splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line[:1] == "|"
    ]
    rows = [row for row in rows if len(row) > 1 and row[1] != "Tidelog"]
    assert len(rows) > 170
    for row in rows:
        assert len(row) == 3, row
        assert re.match(r"(has|on purpose different|none)\b", row[1]), row
        assert re.match(r"`(tests/|tidelog )", row[2]), row


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} -> {target}"


def anchor(heading: str) -> str:
    """What a link to a heading ends with, on the site and where the repository is shown."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_the_architecture_links_to_every_protocol() -> None:
    """By its heading, so that no page and no protocol is found by chance alone."""
    linked = re.findall(r"\]\(docs/protocols/([a-z-]+\.md)#([^)]+)\)", ARCHITECTURE.read_text())
    headings = {
        (page.name, anchor(heading))
        for page in PROTOCOLS
        for heading in re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE)
    }
    assert len(headings) > 40
    assert set(linked) <= headings
    with_steps = {
        (page.name, anchor(part.partition("\n")[0]))
        for page in PROTOCOLS
        for part in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]
        if "| who repairs |" in part
    }
    assert with_steps <= set(linked)


def test_pages_are_short_enough_to_be_read() -> None:
    assert len(ARCHITECTURE.read_text().splitlines()) <= 700
    for page in PROTOCOLS:
        assert len(page.read_text().splitlines()) <= 400, page.name


def test_names_of_files_in_documents_exist() -> None:
    """A path in backticks that ends as a module does is a file of ours, below src or the root."""
    places = (ROOT, ROOT / "src" / "tidelog")
    for document in DOCUMENTS:
        text = document.read_text()
        for path in re.findall(r"`([a-z_]+(?:/[a-z_/]+\.(?:py|md|toml)|/[a-z_/]*/|\.py))`", text):
            found = any((place / path).exists() for place in places)
            assert found, f"{document.name} names {path}"


def test_members_of_classes_in_the_architecture_and_the_protocols_exist() -> None:
    """`Class.member` in backticks is a class of ours, whose module has the member."""
    modules = {"Dataset": "scanner"}  # of pyarrow
    for path in (ROOT / "src" / "tidelog").rglob("*.py"):
        text = path.read_text()
        modules.update(dict.fromkeys(re.findall(r"^class (\w+)", text, re.MULTILINE), text))
    text = "".join(page.read_text() for page in [ARCHITECTURE, *PROTOCOLS])
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", text)
    assert len(named) > 10
    for name, member in named:
        has = re.search(rf"\b{member}\b", modules.get(name, ""))
        assert hasattr(Home, member) if name == "Home" else has, f"names {name}.{member}"


def test_the_glossary_is_sorted_and_defines_each_noun_once() -> None:
    nouns = [row[0] for row in table_after("docs/glossary.md", "# Glossary")]
    assert nouns == sorted(nouns)
    assert len(nouns) == len(set(nouns))


def test_the_version_is_one() -> None:
    import tidelog

    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{tidelog.__version__}"' in text
    assert f"## {tidelog.__version__}" in (ROOT / "CHANGELOG.md").read_text()
