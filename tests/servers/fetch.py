"""The cache of fetched servers: one folder per server and version, checked on every use.

How a package gets into the cache, and what a crash after each step leaves behind:

1. Take the package's file lock. A crash releases it.
2. If the folder is there and its manifest matches every file, use it.
3. Fetch into `<name>.partial`, emptied first. A crash leaves it; the next run empties it.
4. Write the manifest: the digest of the recipe and of each file.
5. Remove the old folder and rename the new one into place. A crash between the two leaves no
   folder, so the next run starts at 3.

Two runs that start at once meet at the lock: the second finds the first one's folder at step 2.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.servers.base import ServerError, environment
from tests.servers.tools import GO, MAVEN, Tool, path_of, require

MANIFEST = "manifest.json"
CACHE_VARIABLE = "TIDELOGTEST_CACHE"
FETCH_SECONDS_MAX = 1_200
OUTPUT_LINES_SHOWN = 20

# Pinned, so that the same command resolves dependencies in the same way under every Maven.
MAVEN_DEPENDENCY_PLUGIN = "3.8.1"


class FetchError(ServerError):
    """A package could not be brought into the cache."""


@dataclass(frozen=True)
class Package:
    """A server's files: what to fetch, with which tools, and how."""

    server: str
    version: str
    recipe: str  # what the files depend on, as text; when it changes, they are fetched anew
    tools: tuple[Tool, ...]
    fill: Callable[[Path], None]  # brings the files into an empty folder, or raises FetchError

    @property
    def name(self) -> str:
        """The folder's name in the cache."""
        return f"{self.server}-{self.version}"


def cache_folder() -> Path:
    """Where fetched servers are kept between runs."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else Path.home() / ".cache" / "tidelog-test"


def ensure(package: Package) -> Path:
    """The folder with the package's files, fetched if it is absent, broken or out of date."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / package.name
    with locked(cache / f"{package.name}.lock"):
        if not is_whole(folder, package.recipe):
            require(package.server, package.tools)
            _fetch(package, folder)
    return folder


def is_whole(folder: Path, recipe: str) -> bool:
    """Whether the folder holds exactly the files of its manifest, made by this recipe."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return bool(manifest == _manifest(folder, recipe))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file; a process that dies lets go of it."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def maven_fill(
    server: str, coordinates: Sequence[str], folder: Path, *, alone: bool = False
) -> None:
    """Bring the artifacts, each `group:artifact:version`, and all they need into the folder.

    With `alone` only the artifacts themselves.
    """
    pom = folder / "pom.xml"
    pom.write_text(pom_text(server, coordinates, alone=alone))
    # One Maven at a time: its local repository does not expect two writers.
    with locked(cache_folder() / "maven.lock"):
        run_fetch(
            server,
            [
                path_of(MAVEN),
                "-q",
                "-B",
                "-f",
                str(pom),
                "dependency:copy-dependencies",
                f"-DoutputDirectory={folder}",
                "-DincludeScope=runtime",
            ],
        )


def pom_text(server: str, coordinates: Sequence[str], *, alone: bool = False) -> str:
    """A project that is nothing but its dependencies; with `alone` without what those need."""
    without = "<exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion>"
    rest = f"<exclusions>{without}</exclusions>" if alone else ""
    dependencies = "\n".join(
        f"    <dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>"
        f"<version>{version}</version>{rest}</dependency>"
        for group, artifact, version in (coordinate.split(":") for coordinate in coordinates)
    )
    return f"""<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>tidelog.test</groupId>
  <artifactId>{server}</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <build><pluginManagement><plugins><plugin>
    <artifactId>maven-dependency-plugin</artifactId>
    <version>{MAVEN_DEPENDENCY_PLUGIN}</version>
  </plugin></plugins></pluginManagement></build>
  <dependencies>
{dependencies}
  </dependencies>
</project>
"""


def go_fill(server: str, target: str, folder: Path) -> None:
    """Build the Go program, named `module/path@version`, into the folder."""
    run_fetch(server, [path_of(GO), "install", target], {"GOBIN": str(folder)})


def run_fetch(
    server: str, command: Sequence[str], variables: Mapping[str, str] | None = None
) -> None:
    """Run one command of a fetch; raises FetchError with the end of its output."""
    said = " ".join([Path(command[0]).name, *command[1:]])
    try:
        done = subprocess.run(
            command,
            env=environment(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=FETCH_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FetchError(
            f"{server}: fetching took over {FETCH_SECONDS_MAX} s: run `{said}` by hand to see why"
        ) from error
    if done.returncode != 0:
        shown = "\n".join(done.stdout.splitlines()[-OUTPUT_LINES_SHOWN:])
        raise FetchError(
            f"{server}: fetching failed, exit code {done.returncode}: "
            f"see whether the registry can be reached and run `{said}` by hand\n{shown}"
        )


def _fetch(package: Package, folder: Path) -> None:
    partial = folder.with_name(f"{package.name}.partial")
    _remove(partial)
    partial.mkdir()
    package.fill(partial)
    manifest = _manifest(partial, package.recipe)
    if not manifest["files"]:
        raise FetchError(f"{package.server}: the fetch brought no file: its recipe is wrong")
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    _remove(folder)
    partial.rename(folder)


def _manifest(folder: Path, recipe: str) -> Mapping[str, object]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {
        "recipe": hashlib.sha256(recipe.encode()).hexdigest(),
        "files": {str(path.relative_to(folder)): _digest(path) for path in files},
    }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
