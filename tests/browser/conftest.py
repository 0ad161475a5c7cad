"""A real browser for the console's tests: Chromium of the system, driven by Selenium.

``SCREENSHOTS=docs/images`` in the environment keeps the pictures that tests take.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from tests.browser.person import Person

SCREENSHOTS = os.environ.get("SCREENSHOTS")
MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]


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
