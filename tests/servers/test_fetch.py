"""The cache fetches once, notices what is broken or out of date, and holds two runs apart."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.servers import fetch
from tests.servers.fetch import MANIFEST, FetchError, Package, ensure, pom_text, run_fetch
from tests.servers.tools import MissingToolError, Tool

ROOT = Path(__file__).resolve().parents[2]


class FakeRegistry:
    """Fills a folder with one file and remembers, in a file beside the cache, how often."""

    def __init__(self, calls: Path, *, seconds: float = 0.0, fails: bool = False) -> None:
        self.calls = calls
        self.seconds = seconds
        self.fails = fails

    def __call__(self, folder: Path) -> None:
        with self.calls.open("a") as file:
            file.write("call\n")
        (folder / "server.jar").write_text("bytes of a server")
        time.sleep(self.seconds)
        if self.fails:
            raise FetchError("fake: fetching failed: try again")

    @property
    def count(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(fetch.CACHE_VARIABLE, str(folder))
    return folder


@pytest.fixture
def registry(tmp_path: Path) -> FakeRegistry:
    return FakeRegistry(tmp_path / "calls")


def test_a_whole_package_is_fetched_once(cache: Path, registry: FakeRegistry) -> None:
    first = ensure(_package(registry))
    assert (first / "server.jar").read_text() == "bytes of a server"
    assert ensure(_package(registry)) == first == cache / "fake-1.0"
    assert registry.count == 1


@pytest.mark.parametrize("damage", ["changed", "truncated", "removed", "added", "no manifest"])
def test_a_broken_package_is_fetched_anew(cache: Path, registry: FakeRegistry, damage: str) -> None:
    folder = ensure(_package(registry))
    jar = folder / "server.jar"
    if damage == "changed":
        jar.write_text("bytes of a serveR")
    elif damage == "truncated":
        jar.write_text("bytes")
    elif damage == "removed":
        jar.unlink()
    elif damage == "added":
        (folder / "stray.jar").write_text("from elsewhere")
    else:
        (folder / MANIFEST).write_text("{")
    ensure(_package(registry))
    assert registry.count == 2
    assert jar.read_text() == "bytes of a server"
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, "server.jar"]


def test_a_changed_recipe_is_fetched_anew(cache: Path, registry: FakeRegistry) -> None:
    ensure(_package(registry, recipe="one"))
    ensure(_package(registry, recipe="two"))
    assert registry.count == 2


def test_a_failed_fetch_leaves_no_package_and_the_next_one_succeeds(
    cache: Path, registry: FakeRegistry
) -> None:
    registry.fails = True
    with pytest.raises(FetchError):
        ensure(_package(registry))
    assert not (cache / "fake-1.0").exists()
    registry.fails = False
    assert (ensure(_package(registry)) / "server.jar").exists()


def test_two_processes_at_once_fetch_once(cache: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    script = f"""
from pathlib import Path
from tests.servers.test_fetch import FakeRegistry, _package, ensure
ensure(_package(FakeRegistry(Path({str(calls)!r}), seconds=0.5)))
"""
    runs = [subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) for _ in range(2)]
    assert [run.wait(60) for run in runs] == [0, 0]
    assert FakeRegistry(calls).count == 1


def test_a_missing_tool_is_named_before_anything_is_fetched(
    cache: Path, registry: FakeRegistry
) -> None:
    tool = Tool("no-such-program", "install it")
    with pytest.raises(MissingToolError) as raised:
        ensure(_package(registry, tools=(tool,)))
    assert str(raised.value) == "fake: `no-such-program` is not on PATH: install it"
    assert registry.count == 0


def test_a_whole_package_needs_no_tool(cache: Path, registry: FakeRegistry) -> None:
    ensure(_package(registry))
    ensure(_package(registry, tools=(Tool("no-such-program", "install it"),)))
    assert registry.count == 1


def test_a_failed_command_shows_the_end_of_its_output() -> None:
    with pytest.raises(
        FetchError, match=r"(?s)fake: fetching failed, exit code 3: .*\nwhy it failed"
    ):
        run_fetch("fake", ["sh", "-c", "echo why it failed; exit 3"])


def test_a_pom_names_its_artifacts_and_no_address() -> None:
    text = pom_text("fake", ["group:artifact:1.2.3"])
    assert "<artifactId>artifact</artifactId><version>1.2.3</version>" in text
    assert "://" not in text


def _package(
    registry: FakeRegistry, *, recipe: str = "recipe", tools: tuple[Tool, ...] = ()
) -> Package:
    return Package(server="fake", version="1.0", recipe=recipe, tools=tools, fill=registry)
