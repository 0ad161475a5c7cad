"""What the tests of the server share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.serving import Served, serving


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """An open server on loopback, with a topic ``t`` of one partition."""
    with serving(tmp_path) as found:
        yield found
