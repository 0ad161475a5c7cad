"""The archive for executors: what is in it, and what is not."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import msgspec
import pytest

import tidelog
from tidelog.api import spark_workers as environment
from tidelog.api.spark_workers import FOLDER, pack_environment
from tidelog.errors import AlreadyExistsError, InvalidError


def test_archive_has_tidelog_and_its_packages_without_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = environment._closure("tidelog", environment._EXTRAS)
    assert {"tidelog", "pyarrow", "numpy", "pandas", "obstore"} <= everything.keys()
    assert not {"pyspark", "py4j", "pytest", "starlette"} & everything.keys()
    few = {name: everything[name] for name in ("tidelog", "msgspec")}  # the whole takes seconds
    monkeypatch.setattr(environment, "_closure", lambda *_: few)
    file = tmp_path / "env.tar.gz"
    packed = pack_environment(file)
    with tarfile.open(file) as tar:
        names = tar.getnames()
    assert {"tidelog/__init__.py", "pyspark_tidelog/__init__.py", "msgspec/__init__.py"} <= {*names}
    assert any(name.endswith(".dist-info/entry_points.txt") for name in names)
    assert len(names) == len(set(names))
    assert not [name for name in names if "__pycache__" in name or name.startswith(("/", ".."))]
    assert packed.settings["spark.archives"] == f"{file}#{FOLDER}"
    roots = packed.driver_path.split(os.pathsep)
    assert str(Path(msgspec.__file__).parent.parent) in roots
    assert str(Path(tidelog.__file__).parent.parent) in roots
    assert [path.name for path in tmp_path.iterdir()] == ["env.tar.gz"]
    with pytest.raises(AlreadyExistsError, match="exists"):
        pack_environment(file)
    with pytest.raises(InvalidError, match=r"ends with \.tar\.gz"):
        pack_environment(tmp_path / "env.zip")
