"""Files whose names begin with `_` or `.`: read if the address names them, else left out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.archive_look import a_home, an_archive, drive
from tidelog.connectors.by_url import open_source
from tidelog.connectors.files.source import FilesSource
from tidelog.connectors.source import SourceRange


def opened(address: str) -> FilesSource:
    source = open_source(address, environ={})
    assert isinstance(source, FilesSource)
    return source


def write(path: Path, text: bytes = b"a\nb\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    os.utime(path, (1_700_000_000, 1_700_000_000))


@pytest.mark.parametrize("name", ["_app.log", ".app.log", "_1_0_00000000000000000000.jsonl"])
def test_file_that_the_address_names_is_read(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)
    source = opened(f"file:{tmp_path}/{name}")
    [partition] = source.partitions()
    bounds = source.bounds([partition])[partition]
    chunks = source.read(SourceRange(partition, bounds.first, bounds.end))
    assert [value for each in chunks for value in each.batch["value"].to_pylist()] == [b"a", b"b"]
    assert source.left_out() == {}


def test_rotated_file_that_the_address_names_is_read_to_its_end(tmp_path: Path) -> None:
    context = tmp_path / "in" / "_app.log"
    write(context)
    with a_home(tmp_path / "home") as home:
        archive = an_archive(home, "a", f"file:{context}")
        assert drive(home, archive) == 2
        rotated = context.rename(context.with_name("_app.log.1"))
        write(rotated, b"a\nb\nc\n")
        write(context, b"d\ne\n")
        assert drive(home, archive) == 3


def test_folder_lists_what_it_leaves_out(tmp_path: Path) -> None:
    for name in ("app.log", "_app.log", ".git/a", ".git/b", "x/.y/z", "_SUCCESS", "x/_SUCCESS"):
        write(tmp_path / "in" / name, name.encode() + b"\n")
    source = opened(f"file:{tmp_path}/in")
    assert [each.name for each in source.partitions()] == ["app.log"]
    left_out = source.left_out()
    assert sorted(left_out) == ["in/.git", "in/_app.log", "in/x/.y"]
    assert all("begins with `_` or `.`" in why for why in left_out.values())


def test_folder_with_a_hidden_name_is_read(tmp_path: Path) -> None:
    write(tmp_path / "_in" / "app.log")
    source = opened(f"file:{tmp_path}/_in")
    assert [each.name for each in source.partitions()] == ["app.log"]
    assert source.left_out() == {}


def test_files_of_another_generation_are_listed(tmp_path: Path) -> None:
    for generation in (1, 2):
        write(tmp_path / f"in/g{generation}/t/{generation}_0_00000000000000000000.jsonl")
    source = opened(f"file:{tmp_path}/in?generation=2&mode=events")
    source.partitions()
    [(name, why)] = source.left_out().items()
    assert name == "in/g1/"
    assert "generation 1" in why
