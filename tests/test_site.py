"""The site of docs/: it builds without a warning, leads nowhere wrong, and says what is so."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click
import pytest
import yaml

import tidelog
from tidelog.cli.main import cli
from tidelog.cli.output import TimeLastCommand
from tidelog.model.schema import OBJECTS, ROWS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
SAMPLES = [*PAGES, ROOT / "README.md"]
LOADS = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}


class Page(HTMLParser):
    """What a page links to, what it loads, and where one can be led to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            if tag == "a" and name == "href" and value:
                self.links.append(value)
            is_canonical = ("rel", "canonical") in attrs
            if (tag, name) in LOADS and value and not is_canonical:
                self.loads.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Built as `make docs` does, from scratch."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {path: Page(path.read_text()) for path in folder.rglob("*.html")}


def test_every_document_has_its_page(site: dict[Path, Page]) -> None:
    folder = min((path.parent for path in site), key=lambda path: len(path.parts))
    built = {path.relative_to(folder).with_suffix("") for path in site}
    assert {path.relative_to(DOCS).with_suffix("") for path in PAGES} <= built


def test_links_lead_to_pages_and_places_that_are_there(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or path.name == "404.html":
                assert parts.scheme in ("https", ""), link
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), f"{path.name} -> {link}"
            if parts.fragment and target in site:
                assert unquote(parts.fragment) in site[target].ids, f"{path.name} -> {link}"


def test_pages_load_nothing_from_elsewhere(site: dict[Path, Page]) -> None:
    folder = min((path.parent for path in site), key=lambda path: len(path.parts))
    for path, page in site.items():
        text = path.read_text()
        for loader in ('class="mermaid"', 'data-md-component="source"', "fonts.googleapis"):
            assert loader not in text, f"{path.name}: the theme would load what {loader} needs"
        for load in page.loads:
            parts = urlsplit(load)
            assert not parts.netloc, f"{path.name} loads {load}"
            if path.name != "404.html":
                assert (path.parent / parts.path).resolve().is_relative_to(folder)
    for sheet in [*folder.rglob("*.css"), *folder.rglob("*.svg")]:
        text = re.sub(r"/\*.*?\*/", "", sheet.read_text(), flags=re.DOTALL)
        for found in re.findall(r"url\(\s*['\"]?([^'\")]+)", text):
            assert not urlsplit(found).netloc, f"{sheet.name} loads {found}"
        assert "@import" not in text


@pytest.mark.parametrize("path", sorted(DOCS.glob("pictures/*.svg")), ids=lambda path: path.name)
def test_a_picture_tells_what_it_shows_and_is_readable_in_the_dark(path: Path) -> None:
    root = ET.fromstring(path.read_text())
    assert root.findtext("{*}title")
    assert root.findtext("{*}desc")
    assert "prefers-color-scheme:dark" in path.read_text()
    assert any(f"pictures/{path.name}" in page.read_text() for page in PAGES), "nobody shows it"


def test_every_command_has_its_help_in_the_reference(site: dict[Path, Page]) -> None:
    [commands] = [page for path, page in site.items() if path.name == "commands.html"]
    for words, command in walk(cli):
        if not command.hidden:
            assert f"tidelog-{'-'.join(words)}" in commands.ids


def test_examples_of_commands_are_blocks_of_code(site: dict[Path, Page]) -> None:
    [commands] = [path for path in site if path.name == "commands.html"]
    text = commands.read_text()
    blocks = re.findall(r"<p>Examples:</p>\s*<div class=\"[^\"]*highlight", text)
    assert len(blocks) == text.count("Examples:") > 50


def test_the_reference_shows_the_library(site: dict[Path, Page]) -> None:
    [library] = [page for path, page in site.items() if path.name == "library.html"]
    names = {name.rpartition(".")[2] for name in library.ids}
    for kind in (tidelog.Home, tidelog.Producer, tidelog.Consumer, tidelog.ArchiveHandle):
        methods = {name for name in dir(kind) if not name.startswith("_")}
        assert methods <= names, kind.__name__


def test_the_reference_shows_all_that_is_stored(site: dict[Path, Page]) -> None:
    [layout] = [path for path in site if path.name == "layout.html"]
    text = layout.read_text().replace("&lt;", "<").replace("&gt;", ">")
    for kind in (*OBJECTS, *ROWS):
        assert f"<code>{kind.name}</code>" in text


def test_every_mark_is_replaced(site: dict[Path, Page]) -> None:
    for path in site:
        assert not re.search(r"<!-- [a-z]+ -->", path.read_text()), path.name


def test_costs_are_computed(site: dict[Path, Page]) -> None:
    [operating] = [path for path in site if path.name == "operating.html"]
    text = operating.read_text()
    assert "in bulk, as measured" in text
    for price in ("$0.005", "$0.0004", "$0.023", "$0.625", "$0.125"):
        assert price in text, "the page states what the table assumes"


def test_each_alert_has_a_section_and_each_section_an_alert() -> None:
    rules = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]
    alerts = [rule["alert"] for group in rules for rule in group["rules"]]
    text = (DOCS / "alerts.md").read_text()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert [section.split("\n", 1)[0] for section in sections] == alerts
    severities = {rule["alert"]: rule["labels"]["severity"] for g in rules for rule in g["rules"]}
    for section in sections:
        assert f"**{severities[section.split(chr(10), 1)[0]].capitalize()}.**" in section
        assert "**What to do.**" in section


def walk(group: click.Group, *words: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        yield (*words, name), command
        if isinstance(command, click.Group):
            yield from walk(command, *words, name)


def shown_commands() -> Iterator[tuple[str, str]]:
    """Every command line of every document: in blocks, and in backticks."""
    for path in SAMPLES:
        text = path.read_text()
        for block in re.findall(r"^ *```[a-z]*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
            joined = re.sub(r"\\\n\s*", " ", block)
            for line in joined.splitlines():
                for part in re.split(r"\||&&|\$\(|<<<", line):
                    words = part.strip().removeprefix("$ ").removeprefix("/opt/tidelog/bin/")
                    if words.startswith("tidelog "):
                        yield path.name, words
        outside = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
        for found in re.findall(r"`(tidelog [^`]+)`", outside):
            yield path.name, " ".join(found.split())


@pytest.mark.parametrize(("page", "line"), sorted(set(shown_commands())))
def test_a_command_that_is_shown_exists_with_its_options(page: str, line: str) -> None:
    words = shlex.split(line.replace("…", "x").rstrip("&) "), comments=True)[1:]
    command: click.Command = cli
    known = {option for parameter in cli.params for option in parameter.opts}
    while words:
        word = words.pop(0)
        if isinstance(command, click.Group) and word in command.commands:
            command = command.commands[word]
            known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        elif word.startswith("-") and word != "-" and not re.fullmatch(r"-\d.*", word):
            assert word.split("=")[0] in known | {"--help", "--json"}, f"{page}: {line}"
            option = next((p for p in command.params if word.split("=")[0] in p.opts), None)
            takes = option is not None and not getattr(option, "is_flag", False) and "=" not in word
            if takes and words and not isinstance(option, click.Argument):
                words.pop(0)
        elif isinstance(command, click.Group) and word.isalpha() and word.islower():
            raise AssertionError(f"{page}: `{line}`: {command.name} has no `{word}`")
    assert command is not cli or line in ("tidelog --help", "tidelog --version"), f"{page}: {line}"


def typed_commands() -> Iterator[tuple[str, str]]:
    """Command lines that a reader types as they are: in blocks, `try` columns, and help texts."""
    for path in SAMPLES:
        text = path.read_text()
        lines = re.findall(r"^ *```[a-z]*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
        tables = re.findall(r"^\|[^\n]*\| (?:try|shown by) \|\n(.*?)\n\n", text + "\n\n", re.DOTALL)
        lines += [
            "\n".join(re.findall(r"`(tidelog [^`]+)`[^|]*\|$", each, re.M)) for each in tables
        ]
        yield from ((path.name, each) for each in lines)
    for words, command in [((), cli), *walk(cli)]:
        shown = (command.help or "").partition("Examples:\n")[2].partition("\n\n")[0]
        yield " ".join(words), re.sub(r"(?<=\S) {2,}\S.*", "", shown)


def parse_command(words: list[str]) -> None:
    """Raises ``UsageError`` for a command line that is not complete."""
    command: click.Command = cli
    context = click.Context(cli, info_name="tidelog")
    while isinstance(command, click.Group):
        known, words, _ = command.make_parser(context).parse_args(words)
        if not words:
            return
        if words[0] not in command.commands:
            raise click.UsageError(f"there is no {words[0]}")
        command = command.commands[words.pop(0)]
        context = click.Context(command, info_name=command.name, parent=context)
    if isinstance(command, TimeLastCommand):
        words = command.with_time_last(words)
    known, rest, _ = command.make_parser(context).parse_args(words)
    missing = [
        each.name
        for each in command.params
        if isinstance(each, click.Argument)
        and each.required
        and not isinstance(known[each.name], (str, tuple))
    ]
    if (missing or rest) and not known.get("help"):
        raise click.UsageError(f"missing {missing}, left over {rest}")


def test_commands_can_be_typed_as_they_are_shown() -> None:
    wrong = []
    for place, block in typed_commands():
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            shown = line.strip().removeprefix("$ ").removeprefix("/opt/tidelog/bin/")
            if not shown.startswith("tidelog "):
                continue
            words = shlex.split(shown.replace("…", "x").rstrip("&) "), comments=True)[1:]
            ends = [
                n for n, word in enumerate(words) if re.fullmatch(r"\||&&|;|[12]?[<>]+.*", word)
            ]
            try:
                parse_command(words[: min(ends, default=len(words))])
            except click.UsageError as exc:
                wrong.append(f"{place}: {shown}: {exc.format_message()}")
    assert wrong == []


def test_the_start_runs(tmp_path: Path) -> None:
    """What a newcomer types first: the topic of one's own, and the library."""
    text = (DOCS / "start.md").read_text()
    main = "from tidelog.cli.main import run; run()"
    tidelog = f"tidelog() {{ {sys.executable} -c '{main}' \"$@\"; }}"
    [block] = re.findall(r"## A topic of your own\n\n```\n(.*?)```", text, re.DOTALL)
    done = subprocess.run(
        ["bash", "-c", f"set -eo pipefail; {tidelog}; {block}"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[-2:] == ["first order", "second order"]
    [script] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=60)
