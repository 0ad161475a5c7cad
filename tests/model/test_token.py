"""What a token may be granted."""

from __future__ import annotations

from typing import Any

import pytest

from tidelog.errors import InvalidError
from tidelog.model.token import Grant, grants_of


@pytest.mark.parametrize("given", [["everything"], "read", [Grant("", "orders")], [None]])  # type: ignore[arg-type]
def test_unknown_scopes_are_refused_by_name(given: Any) -> None:
    with pytest.raises(InvalidError, match="unknown: give one of pixel, append, read"):
        grants_of(given)
