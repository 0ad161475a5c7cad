"""Packs Tidelog and what it needs into an archive for executors that have only Python and Spark.

Spark unpacks the archive beside each executor (``spark.archives``), and Python finds it by its
path. It has the packages of this Python as they are installed, so the executors' Python must be of
the same version on the same kind of machine. Spark itself is left out: executors have it.

The driver plans reads of the format ``tidelog`` with the executors' Python too, on its own machine.
That Python gets the driver's packages by ``PYTHONPATH``.
"""

from __future__ import annotations

import gzip
import os
import platform
import re
import sys
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from tidelog.errors import AlreadyExistsError, InvalidError

__all__ = ["FOLDER", "PackedEnvironment", "pack_environment"]

FOLDER = "tidelog-env"
"""Where executors find it: the name after ``#`` in ``spark.archives``."""

_OWN = ("tidelog", "pyspark_tidelog")  # packed as they are imported, installed or not
_NOT_NEEDED = ("pyspark", "py4j")
_EXTRAS = ("aws", "formats", "kafka", "scylla")  # packed if installed: tasks use them
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?([^;]*)(?:;(.*))?")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


@dataclass(frozen=True, slots=True)
class PackedEnvironment:
    """An archive for executors, and the settings with which Spark uses it."""

    file: Path
    bytes: int
    packages: tuple[str, ...]
    python: str  # the version that executors must have
    settings: dict[str, str]
    driver_path: str  # what PYTHONPATH is to be for the driver


def pack_environment(file: Path) -> PackedEnvironment:
    """Writes the archive. Raises ``AlreadyExistsError`` if there is such a file."""
    if not file.name.endswith((".tar.gz", ".tgz")):
        raise InvalidError(f"`{file}`: Spark unpacks by the name: give one that ends with .tar.gz")
    if file.exists():
        raise AlreadyExistsError(f"`{file}`: exists: choose another name, or delete it")
    packages = _closure("tidelog", _EXTRAS)
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        # Level 1: packages are mostly machine code, and more effort saves little.
        with gzip.open(part, "wb", 1) as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
            for path, name in _files(packages):
                tar.add(path, name, recursive=False)
        part.rename(file)
    finally:
        part.unlink(missing_ok=True)
    version = ".".join(platform.python_version_tuple()[:2])
    place = f"./{FOLDER}"
    settings = {
        "spark.archives": f"{file.absolute()}#{FOLDER}",
        "spark.executorEnv.PYTHONPATH": place,
    }
    names = tuple(sorted(packages))
    roots = os.pathsep.join(_roots(packages))
    return PackedEnvironment(file, file.stat().st_size, names, version, settings, roots)


def _roots(packages: dict[str, Distribution]) -> list[str]:
    """Returns the folders from which this Python imports the packages."""
    own = [_folder(module).parent for module in _OWN]
    others = [Path(str(package.locate_file(""))) for package in packages.values()]
    return [str(path) for path in dict.fromkeys([*own, *others])]


def _folder(module: str) -> Path:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise InvalidError(f"module `{module}`: is not installed for {sys.executable}")
    return Path(spec.origin).parent


def _closure(name: str, extras: Iterable[str]) -> dict[str, Distribution]:
    """Returns a package and all that it needs, as far as they are installed."""
    found: dict[str, Distribution] = {}
    todo = [(name, frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        name, wanted = todo.pop()
        name = re.sub(r"[-_.]+", "-", name).lower()
        if name in _NOT_NEEDED or (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        with suppress(PackageNotFoundError):
            found[name] = distribution(name)
            todo += _requirements(found[name], wanted)
    return found


def _requirements(
    package: Distribution, wanted: frozenset[str]
) -> Iterator[tuple[str, frozenset[str]]]:
    for text in package.requires or ():
        parsed = _REQUIREMENT.match(text)
        if parsed is None:
            continue
        name, extras, _, marker = parsed.groups()
        only = _EXTRA.search(marker or "")
        if only is None or only[1] in wanted:
            yield (
                name,
                frozenset(each.strip() for each in (extras or "").split(",") if each.strip()),
            )


def _files(packages: dict[str, Distribution]) -> Iterator[tuple[Path, str]]:
    """Yields each file to pack, and its name in the archive."""
    for module in _OWN:
        root = _folder(module)
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path, f"{module}/{path.relative_to(root).as_posix()}"
    for name, package in packages.items():
        for entry in package.files or ():
            path = Path(str(package.locate_file(entry)))
            is_own = name == "tidelog" and not entry.parts[0].endswith(".dist-info")
            if is_own or ".." in entry.parts or "__pycache__" in entry.parts:
                continue
            if path.is_file():
                yield path, entry.as_posix()
