"""A real browser for the console's tests: Chromium of the system, driven by Selenium.

``SCREENSHOTS=docs/images`` in the environment keeps the pictures that tests take.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from tests.browser.person import Person
from tests.servers.fetch import Package, ensure, run_fetch
from tests.servers.tools import NPM, path_of

SCREENSHOTS = os.environ.get("SCREENSHOTS")
MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]


AXE_VERSION = "4.14.0"


def _fill_axe(folder: Path) -> None:
    """Bring axe-core, which looks for what people with disabilities cannot use, into a folder."""
    target = ["pack", f"axe-core@{AXE_VERSION}", "--pack-destination", str(folder)]
    run_fetch("axe-core", [path_of(NPM), *target])
    packed = folder / f"axe-core-{AXE_VERSION}.tgz"
    with tarfile.open(packed) as files:
        source = files.extractfile("package/axe.min.js")
        assert source is not None
        (folder / "axe.min.js").write_bytes(source.read())
    packed.unlink()


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core."""
    package = Package("axe-core", AXE_VERSION, "axe.min.js", (NPM,), _fill_axe)
    if shutil.which("npm") is None:
        pytest.skip("no npm: install Node.js, whose npm gets axe-core")
    return (ensure(package) / "axe.min.js").read_text()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """One browser for all tests; none of them leaves a cookie behind."""
    if MISSING:
        pytest.skip(
            f"no {' and no '.join(MISSING)}: apt-get install chromium chromium-driver "
            "fonts-dejavu-core fonts-noto-color-emoji"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    folder = tmp_path_factory.mktemp("chromium")
    for argument in (
        "--headless=new",
        "--no-sandbox",  # as root in a container there is none to be had
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--disable-background-networking",
        "--no-first-run",
        f"--user-data-dir={folder}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    with webdriver.Chrome(options=options, service=service) as driver:
        driver.set_page_load_timeout(60)
        yield driver


@pytest.fixture
def person(chromium: webdriver.Chrome) -> Iterator[Person]:
    """Somebody in front of a wide screen, by daylight; no page may have complained in the end."""
    found = Person(chromium, Path(SCREENSHOTS) if SCREENSHOTS else None)
    found.looks(1280, 900)
    yield found
    complaints = found.complaints()
    chromium.delete_all_cookies()
    chromium.get("about:blank")
    assert complaints == []
