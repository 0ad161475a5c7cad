"""Over HTTP: 503 means that nothing was stored; 504 says what is, what is not, and what may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import Served, error, serving
from tidelog.errors import UnavailableError, UnknownOutcomeError


@pytest.fixture
def keys(tmp_path: Path) -> Any:
    with serving(tmp_path, partitions=4) as served:
        found = {served.home.partition_for("t", b"%d" % n): str(n) for n in range(50)}
        served.post([{"value": "before", "key": key} for key in found.values()])
        yield served, [found[number] for number in range(4)]


def test_partial_append_is_504_and_lists_unknown_events(
    keys: tuple[Served, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, key = keys
    catalog: Any = served.home.context.catalog
    write, get = catalog.write, catalog.get
    blind: set[str] = set()

    def lossy(partition: str, *changes: Any, write_id: str) -> None:
        if partition.endswith("/2") and partition.startswith("topic/"):
            blind.add(partition)
            raise UnknownOutcomeError("the reply was lost (injected)")
        write(partition, *changes, write_id=write_id)

    def unreadable(partition: str, row: str) -> Any:
        if partition in blind:
            raise UnavailableError("no answer (injected)")
        return get(partition, row)

    monkeypatch.setattr(catalog, "write", lossy)
    monkeypatch.setattr(catalog, "get", unreadable)
    answer = served.post([{"value": f"{n}", "key": key[n % 4]} for n in range(8)])
    assert answer.status_code == 504
    assert "retry-after" not in answer.headers
    told = error(answer)
    assert told["kind"] == "partial_append"
    assert told["context"]["unknown"] == [2, 6]
    known = [n for n, at in enumerate(told["context"]["positions"]) if at is not None]
    assert {0, 1, 4, 5} <= set(known)
    assert "injected" not in answer.text


@pytest.mark.parametrize("key", [None, "request-1"])
def test_failed_upload_is_503_and_safe_to_retry(
    keys: tuple[Served, list[str]], monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    served, _ = keys
    store: Any = served.home.context.store
    headers = {} if key is None else {"Idempotency_Key": key}

    def lost(key: str, data: bytes) -> str:
        raise UnknownOutcomeError("the reply was lost (injected)")

    with monkeypatch.context() as patch:
        patch.setattr(store, "put", lost)
        answer = served.post({"value": "x"}, **headers)
    assert (answer.status_code, error(answer)["kind"]) == (503, "unavailable")
    assert answer.headers["retry-after"]
    assert served.post({"value": "x"}, **headers).status_code == 201
    found = [value for number in range(4) for value in served.values("t", number)]
    assert found.count(b"x") == 1


def test_keyless_requests_are_spread_evenly(keys: tuple[Served, list[str]]) -> None:
    served, key = keys
    for number in range(24):
        assert served.post([{"value": "x"}] * 3).status_code == 201
        if number % 2:
            assert served.post({"value": "keyed", "key": key[0]}).status_code == 201
    counts = [served.values("t", number).count(b"x") for number in range(4)]
    assert max(counts) - min(counts) <= 3
