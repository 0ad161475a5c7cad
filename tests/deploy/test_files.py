"""What is shipped for deployment: the wheel, the container file, the units of systemd."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tidelog.cli.main import cli

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").iterdir())
CONTAINERS = sorted(DEPLOY.rglob("*Containerfile"))
INSTRUCTIONS = {
    *("ARG", "CMD", "COPY", "ENTRYPOINT", "EXPOSE", "FROM", "HEALTHCHECK", "RUN"),
    *("STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing of the checkout is touched."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist"],
        cwd=source,
        check=True,
        capture_output=True,
        timeout=120,
    )
    [built] = (source / "dist").glob("*.whl")
    return built


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    """Also those that are not Python: pages, style sheets, settings of Java's logging."""
    held = set(zipfile.ZipFile(wheel).namelist())
    for package in ("tidelog", "pyspark_tidelog"):
        for path in (ROOT / "src" / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert str(path.relative_to(ROOT / "src")) in held


def test_the_wheel_runs_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """In a fresh environment that has the same dependencies, in a folder that has nothing."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    uv = Path(sys.executable).with_name("uv")
    subprocess.run(
        [uv, "pip", "install", "-q", "--offline", "--no-deps", "--python", python, wheel],
        check=True,
        timeout=60,
    )
    [packages] = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")

    def run(*command: str) -> str:
        return subprocess.run(
            command,
            cwd=tmp_path,
            check=True,
            timeout=120,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        ).stdout

    tidelog = str(tmp_path / "venv" / "bin" / "tidelog")
    where = run(str(python), "-c", "import tidelog; print(tidelog.__file__)")
    assert where.startswith(str(packages))
    steps = run(tidelog, "demo", "--no-spark", "--clean", "--json").splitlines()
    assert sum(json.loads(line).get("events", 0) for line in steps if '"query"' in line) == 100_001
    said = run(tidelog, "up", "--port", "0", "--for", "1s", "--json").splitlines()
    assert any("console" in json.loads(line) for line in said)


def test_there_are_units() -> None:
    assert {path.suffix for path in UNITS} == {".service", ".timer"}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_is_well_formed_and_its_command_exists(path: Path) -> None:
    unit = configparser.RawConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    assert unit["Unit"]["Description"]
    if path.suffix == ".timer":
        assert path.with_suffix(".service").exists()
        assert unit["Install"]["WantedBy"] == "timers.target"
        return
    words = shlex.split(unit["Service"]["ExecStart"])
    assert words[0] == "/opt/tidelog/bin/tidelog"
    arguments = [word.replace("%i", "daily") for word in words[1:]]
    command: object = cli
    while arguments and hasattr(command, "commands") and arguments[0] in command.commands:
        command = command.commands[arguments.pop(0)]
    options = {opt for parameter in command.params for opt in parameter.opts}  # type: ignore[attr-defined]
    assert all(word in options for word in arguments if word.startswith("--"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_has_nothing_to_say(tmp_path: Path) -> None:
    """With programs and users that are here, since it looks for them."""
    for path in UNITS:
        text = path.read_text().replace("/opt/tidelog/bin/tidelog", "/bin/true")
        text = re.sub(r"^(User|Group)=tidelog", r"\1=root", text, flags=re.MULTILINE)
        name = path.name.replace("@", "@daily")
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", *(str(path) for path in sorted(tmp_path.iterdir()))],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    ours = [line for line in done.stderr.splitlines() if "tidelog" in line]
    assert ours == []


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.name)
def test_a_container_file_copies_what_is_there_and_runs_what_exists(path: Path) -> None:
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert {line.split()[0] for line in lines} <= INSTRUCTIONS
    assert lines[0].startswith("FROM ")
    for line in lines:
        words = line.split()
        if words[0] == "COPY" and not words[1].startswith("--from"):
            for source in words[1:-1]:
                assert any(ROOT.glob(source)), line
        if words[0] == "CMD" and "tidelog" in path.parent.name:
            assert json.loads(line.removeprefix("CMD "))[0] in cli.commands
    assert any(line.startswith("CMD ") for line in lines)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
@pytest.mark.parametrize("path", [p for p in UNITS if p.suffix == ".service"], ids=lambda p: p.name)
def test_services_have_few_rights(path: Path, tmp_path: Path) -> None:
    text = re.sub(r"(?m)^User=.*$", "User=nobody", path.read_text())
    unit = tmp_path / path.name.replace("@", "-x")
    unit.write_text(re.sub(r"(?m)^Group=.*$", "Group=nogroup", text))
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    found = re.search(r"exposure level for \S+: ([0-9.]+)", done.stdout)
    if found is None:
        pytest.skip("this systemd does not judge files")
    assert float(found[1]) < 3.0
    assert "UMask=0077" in text


def test_steps_create_the_home_before_its_services_start() -> None:
    """Otherwise they would restart for ever; and its files are the service's own."""
    steps = (ROOT / "docs" / "deploy.md").read_text()
    made = steps.index("tidelog --home /var/lib/tidelog/home init")
    assert made < steps.index("systemctl enable")
    for unit in UNITS:
        if unit.suffix == ".service":
            assert "UMask=0077" in unit.read_text(), unit.name


def locked(path: Path) -> dict[str, tuple[str, set[str]]]:
    """The packages of a lock, with their versions and hashes."""
    found: dict[str, tuple[str, set[str]]] = {}
    for line in path.read_text().splitlines():
        if match := re.match(r"([A-Za-z0-9._-]+)==([^ ;]+)", line):
            package = match[1]
            found[package] = (match[2], set())
        elif match := re.match(r"\s+--hash=(sha256:[0-9a-f]{64})", line):
            found[package][1].add(match[1])
    return found


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.lock")), ids=lambda path: path.name)
def test_images_have_the_versions_that_are_tested(path: Path) -> None:
    tested = locked(ROOT / "requirements.lock")
    packages = locked(path)
    assert packages
    for name, (version, hashes) in packages.items():
        assert hashes, name
        assert tested[name] == (version, hashes), f"{name}: run `make lock`"


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.name)
def test_images_install_only_what_is_locked(path: Path) -> None:
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    installs = re.findall(r"pip install [^&\n]*", text)
    assert installs
    for each in installs:
        assert "--require-hashes" in each or "--no-deps" in each, each


def test_examples_reach_the_server_in_its_container() -> None:
    """Arguments replace the image's command, and the container's loopback is not the machine's."""
    texts = [path.read_text() for path in (*CONTAINERS, ROOT / "docs" / "deploy.md")]
    examples = re.findall(r"podman (run|build)(.*)", re.sub(r"\\\n\s*", " ", "\n".join(texts)))
    assert len(examples) >= 6
    for kind, given in examples:
        if kind == "run" and re.search(r"tidelog (up|serve)\b", given):
            assert "--host 0.0.0.0" in given, given
        if kind == "build" and "/Containerfile" in given:
            assert "--format docker" in given, "the OCI format drops HEALTHCHECK"
