"""Parsers that tests share are let go before the interpreter ends, as DuckDB wants it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.codec.parsers.layouts import opened_once


@pytest.fixture(scope="session", autouse=True)
def _parsers_are_let_go() -> Iterator[None]:
    yield
    opened_once.cache_clear()
