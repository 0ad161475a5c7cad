"""What the tests of the server share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serving import Served, serving
from tests.support.visits import Browser


@pytest.fixture
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    """An open server on loopback, with a topic ``t`` of one partition.

    What else is in its home is up to the module of the test: its ``fill_home``, if it has one.
    """
    first = getattr(request.module, "fill_home", lambda home: None)
    with serving(tmp_path, first=first) as found:
        yield found


@pytest.fixture
def browser(served: Served) -> Iterator[Browser]:
    """A person's browser, in front of that server."""
    with Browser(served) as found:
        yield found
