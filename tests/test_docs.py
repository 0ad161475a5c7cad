"""Documents that fail the build when they lie."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from tidelog.cli.main import cli
from tidelog.model.kinds import OBJECTS, ROWS, Kind
from tidelog.settings import Settings

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("[A-Z]*.md")), *sorted(ROOT.glob("docs/*.md"))]


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


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


def test_the_quickstart_runs(tmp_path: Path) -> None:
    for script in blocks("README.md", "python"):
        subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=60)


def test_the_quickstarts_commands_run_and_print_what_is_shown(tmp_path: Path) -> None:
    """Lines that begin with ``$`` are run by a shell; those below are what it prints, in order."""
    main = "from tidelog.cli.main import run; run()"
    tidelog = f"tidelog() {{ {sys.executable} -c '{main}' \"$@\"; }}"
    commands = 0
    for block in blocks("README.md", "console"):
        for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *shown = step.splitlines()
            script = f"set -eo pipefail; {tidelog}; {command}"
            done = subprocess.run(
                ["bash", "-c", script], cwd=tmp_path, check=True, stdout=subprocess.PIPE, text=True
            )
            commands += 1
            if shown:
                assert done.stdout.splitlines() == shown, command
    assert commands > 5


def test_every_command_named_in_a_document_exists() -> None:
    for document in DOCUMENTS:
        for name in re.findall(r"`tidelog ([a-z]+)", document.read_text()):
            assert name in cli.commands, f"{document.name} names `tidelog {name}`"


def test_the_readme_names_the_two_commands_and_make_knows_all_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for document in DOCUMENTS:
        for target in re.findall(r"`make ([a-z-]+)`", document.read_text()):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme


def test_the_settings_table_is_the_code() -> None:
    rows = table_after("README.md", "## Settings")
    shown = {row[0].strip("`"): row for row in rows if row[0]}
    settable = {f.name: f for f in fields(Settings) if f.name not in ("found_in", "is_default")}
    assert set(shown) == set(settable)
    for name, row in shown.items():
        assert row[1] == f"`TIDELOG_{name.upper()}`"
        if name not in ("store", "catalog"):
            assert row[2] == str(settable[name].default)


@pytest.mark.parametrize(
    ("heading", "kinds"),
    [("### Objects", OBJECTS), ("### Rows", ROWS)],
    ids=["objects", "rows"],
)
def test_the_layout_tables_are_the_code(heading: str, kinds: tuple[Kind, ...]) -> None:
    shown = [(row[0].strip("`"), row[1]) for row in table_after("ARCHITECTURE.md", heading)]
    assert shown == [tuple(kind) for kind in kinds]


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} -> {target}"


def test_names_of_files_in_documents_exist() -> None:
    """A path in backticks with a slash and an ending is a file of ours, below src or the root."""
    places = (ROOT, ROOT / "src" / "tidelog")
    for document in DOCUMENTS:
        for path in re.findall(r"`([a-z_]+/[a-z_/]+\.(?:py|md|toml))`", document.read_text()):
            found = any((place / path).exists() for place in places)
            assert found, f"{document.name} names {path}"


def test_the_glossary_is_sorted_and_defines_each_noun_once() -> None:
    nouns = [row[0] for row in table_after("docs/glossary.md", "# Glossary")]
    assert nouns == sorted(nouns)
    assert len(nouns) == len(set(nouns))


def test_the_version_is_one() -> None:
    import tidelog

    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{tidelog.__version__}"' in text
    assert f"## {tidelog.__version__}" in (ROOT / "CHANGELOG.md").read_text()
