"""A home of another format is refused, and no stored type changes without the format's number.

What changes ``layout.FORMAT`` (raise it by one, in the same commit):

- a field of a stored type that is added, removed, renamed, or has another type or default
- a stored type that is added or removed
- another encoding of rows or objects, or another checksum
- another name of a row or an object (``model/schema.py``)

Then write the new shapes by ``python -m tests.home.test_formats``, and keep a home that the old
code made as ``tests/homes/format-<number>.tar.gz``.

That command refuses other shapes under a number that is recorded: code of that number opens such a
home, and calls what it does not know damage. Only where no home of the number is in use anywhere,
``python -m tests.home.test_formats --again "why"`` records them under the same number, with the
reason.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
import tarfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tidelog
from tidelog.catalog import sqlite
from tidelog.errors import CorruptError, InvalidError
from tidelog.home import create_home, open_home
from tidelog.model import decoding as sealed
from tidelog.model import layout
from tidelog.model.decoding import Persisted, open_json
from tidelog.model.schema import OBJECTS, ROWS
from tidelog.model.topic import Head, decode_row, encode_row
from tidelog.settings import load_settings

HOMES = Path(__file__).parents[1] / "homes"
SHAPES = HOMES / "shapes.json"


def load_stored_types() -> None:
    """Import every module that defines one."""
    root = Path(tidelog.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if "(Persisted" in path.read_text():
            name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
            importlib.import_module(name)


def stored_types() -> Iterator[type[Persisted]]:
    """Every stored type, by name."""
    load_stored_types()
    found = list(Persisted.__subclasses__())
    for each in found:
        found += each.__subclasses__()
    yield from sorted(set(found), key=lambda kind: f"{kind.__module__}.{kind.__qualname__}")


def shapes() -> dict[str, Any]:
    """What is stored, as this code has it; where a type is defined does not matter."""
    types: dict[str, Any] = {}
    for kind in stored_types():
        name = kind.__name__ if kind.__name__ not in types else f"{kind.__name__} of a sink"
        types[name] = {
            field.encode_name: f"{_type(field.type)}{_default(field)}"
            for field in msgspec.structs.fields(kind)
        }
        if kind.__struct_config__.array_like:
            types[name][""] = "array"
    names = {kind.name for kind in (*OBJECTS, *ROWS)}
    return {"format": layout.FORMAT, "types": types, "names": sorted(names)}


def _type(kind: Any) -> str:
    if isinstance(kind, type) and not typing.get_args(kind):
        return kind.__name__
    return re.sub(r"\btidelog\.(?:[a-z_]+\.)+", "", str(kind))


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.name in ("reader", "writer"):
        return " = the format"
    return "" if field.default is msgspec.NODEFAULT else f" = {field.default!r}"


def nested(kind: Any) -> Iterator[Any]:
    """The types that a field's type consists of."""
    yield kind
    for part in typing.get_args(kind):
        yield from nested(part)


def test_stored_types_change_only_with_the_format() -> None:
    recorded = json.loads(SHAPES.read_text())
    found = shapes()
    if found["format"] == recorded["format"]:
        assert found["types"] == recorded["types"], "raise layout.FORMAT; see this file's docstring"
        assert found["names"] == recorded["names"], "raise layout.FORMAT; see this file's docstring"
    recorded.pop("again")
    assert found == recorded, "write the new shapes by `python -m tests.home.test_formats`"


def record(recorded: dict[str, Any], found: dict[str, Any], why: str) -> dict[str, Any]:
    """What to store as the recorded shapes. ``InvalidError`` for a change under the same number."""
    changes: list[str] = []
    if found["format"] < recorded["format"]:
        raise InvalidError(f"format {recorded['format']}: is recorded: never lower the number")
    if found["format"] == recorded["format"]:
        changes = list(recorded["again"])
        if any(found[part] != recorded[part] for part in ("types", "names")):
            if not why:
                raise InvalidError(
                    f"format {found['format']}: its shapes are recorded, and these differ: raise "
                    'layout.FORMAT, or give `--again "why"` if no home of this format is in use'
                )
            changes.append(why)
    return {**found, "again": changes}


def test_a_recorded_shape_changes_only_with_a_new_number_or_a_reason() -> None:
    recorded = {"format": 3, "types": {"Head": {"next": "int"}}, "names": [], "again": ["a"]}
    same = {"format": 3, "types": {"Head": {"next": "int"}}, "names": []}
    other = {"format": 3, "types": {"Head": {"next": "str"}}, "names": []}
    assert record(recorded, same, "") == recorded
    with pytest.raises(InvalidError, match=r"raise layout\.FORMAT"):
        record(recorded, other, "")
    assert record(recorded, other, "b") == {**other, "again": ["a", "b"]}
    assert record(recorded, {**other, "format": 4}, "") == {**other, "format": 4, "again": []}
    with pytest.raises(InvalidError, match="never lower"):
        record(recorded, {**other, "format": 2}, "b")


def test_shapes_list_every_field() -> None:
    before = shapes()["types"]["Head"]
    assert before["next"] == "int = 0"
    assert set(before) == set(Head.__struct_fields__)


def test_everything_inside_a_stored_type_is_strict() -> None:
    for kind in stored_types():
        assert kind.__struct_config__.forbid_unknown_fields, kind
        for field in msgspec.structs.fields(kind):
            for part in nested(field.type):
                if isinstance(part, type) and hasattr(part, "__dataclass_fields__"):
                    pytest.fail(f"{kind.__name__}.{field.name}: a dataclass drops unknown fields")
                if isinstance(part, type) and issubclass(part, msgspec.Struct):
                    assert issubclass(part, Persisted), f"{kind.__name__}.{field.name}"


def test_a_field_of_a_newer_version_is_refused_and_not_dropped() -> None:
    newer = msgspec.msgpack.encode({**msgspec.to_builtins(Head()), "colour": "blue"})
    with pytest.raises(CorruptError, match=r"unknown field `colour`: a newer version .*: update"):
        decode_row(newer, Head, "head")
    with pytest.raises(CorruptError, match="keep it, and restore the catalog from a copy"):
        decode_row(b"\xc0", Head, "head")
    text = msgspec.json.encode({**msgspec.to_builtins(Head()), "colour": "blue"})
    with pytest.raises(CorruptError, match=r"unknown field `colour`: a newer version .*: update"):
        open_json(text + sealed._seal(text), Head, "head")
    assert decode_row(encode_row(Head()), Head, "head") == Head()


def test_a_catalog_file_has_the_format_of_the_home() -> None:
    assert sqlite._FORMAT == layout.FORMAT


def unpack(number: int, folder: Path) -> Path:
    with tarfile.open(HOMES / f"format-{number}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "home"


def test_every_earlier_format_has_a_home_here() -> None:
    found = {path.name for path in HOMES.glob("format-*.tar.gz")}
    assert found == {f"format-{number}.tar.gz" for number in range(1, layout.FORMAT)}


@pytest.mark.parametrize("number", range(1, layout.FORMAT))
def test_a_home_of_an_earlier_format_is_refused(number: int, tmp_path: Path) -> None:
    home = unpack(number, tmp_path)
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    with pytest.raises(InvalidError) as refused:
        open_home(home)
    assert f"has format {number}, this version of tidelog reads format" in str(refused.value)
    assert "use the version that created it" in str(refused.value)
    assert "\n" not in str(refused.value)
    after = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    after = {path: data for path, data in after.items() if not path.name.endswith(("-wal", "-shm"))}
    assert after == before


@pytest.mark.parametrize("number", range(1, layout.FORMAT))
def test_a_store_of_an_earlier_format_is_refused(number: int, tmp_path: Path) -> None:
    """As with a catalog that has no format of its own."""
    old = unpack(number, tmp_path)
    home, _ = create_home(load_settings(str(tmp_path / "new"), {}, tmp_path))
    home.close()
    shutil.copy(old / "objects" / "home.json", tmp_path / "new" / "objects" / "home.json")
    with pytest.raises(InvalidError, match=f"has format {number}, this version"):
        open_home(tmp_path / "new")


def test_a_home_of_a_newer_format_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, _ = create_home(load_settings(str(tmp_path / "home"), {}, tmp_path))
    home.close()
    monkeypatch.setattr(sqlite, "_FORMAT", layout.FORMAT - 1)
    with pytest.raises(InvalidError, match="update tidelog"):
        open_home(tmp_path / "home")
    monkeypatch.undo()
    monkeypatch.setattr(layout, "FORMAT", layout.FORMAT - 1)
    with pytest.raises(InvalidError, match="update tidelog"):
        open_home(tmp_path / "home")


if __name__ == "__main__":
    given = sys.argv[2] if sys.argv[1:2] == ["--again"] and len(sys.argv) == 3 else ""
    written = record(json.loads(SHAPES.read_text()), shapes(), given)
    SHAPES.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
