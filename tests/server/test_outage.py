"""A store or a catalog that is gone, slow, or comes back; and what the operator can see of it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import Served, error, serving
from tidelog.errors import CorruptError, UnavailableError
from tidelog.server.http import health, limits


class Switch:
    """Takes the store or the catalog of a home away, and gives it back."""

    def __init__(self, part: Any, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
        self.broken: Exception | None = None
        self.hangs = threading.Event()
        self.hangs.set()
        for name in names:
            monkeypatch.setattr(part, name, self._wrapped(getattr(part, name)))

    def _wrapped(self, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.hangs.wait(600)
            if self.broken is not None:
                raise self.broken
            return real(*args, **options)

        return call


SECRET = "/srv/secret/place"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stall of this machine is no outage."""
    monkeypatch.setattr(health, "_READY_S", 60.0)


@pytest.fixture
def store(served: Served, monkeypatch: pytest.MonkeyPatch) -> Switch:
    return Switch(served.home.context.store, monkeypatch, ("put", "get", "head"))


@pytest.fixture
def catalog(served: Served, monkeypatch: pytest.MonkeyPatch) -> Switch:
    return Switch(served.home.context.catalog, monkeypatch, ("get", "scan", "write"))


def test_a_store_that_is_gone_is_503_and_leaves_nothing(
    served: Served, store: Switch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert served.client.get("/readyz").json() == {"status": "ready"}
    served.post({"value": "before"})
    store.broken = UnavailableError(f"store `{SECRET}`: does not answer")
    for answer in (
        served.post({"value": "x"}),
        served.post([{"value": "x"}, {"value": "y"}]),
        served.post({"value": "x"}, idempotency_key="k"),
        served.client.get("/track/t.gif"),
        served.client.get("/readyz"),
    ):
        assert (answer.status_code, error(answer)["kind"]) == (503, "unavailable")
        assert int(answer.headers["retry-after"]) >= 1
        assert SECRET not in answer.text, "the inside of the home is not shown to clients"
    assert served.client.get("/healthz").status_code == 200, "the process is well"
    assert SECRET in capfd.readouterr().err, "the operator is told"
    store.broken = None
    assert served.post({"value": "after"}).status_code == 201
    assert served.post({"value": "x"}, idempotency_key="k").status_code == 201
    assert served.values() == [b"before", b"after", b"x"]
    assert served.client.get("/readyz").status_code == 200


def test_a_catalog_that_is_gone_is_503(served: Served, catalog: Switch) -> None:
    served.post({"value": "before"})
    catalog.broken = UnavailableError("catalog: does not answer")
    for path in ("/topics", "/topics/t", "/topics/t/partitions/0/events", "/readyz"):
        assert served.client.get(path).status_code == 503
    assert served.post({"value": "x"}).status_code == 503
    assert served.post({"value": "x"}, topic="unopened").status_code == 503
    catalog.broken = None
    assert served.values() == [b"before"]
    assert served.client.get("/readyz").status_code == 200


def test_a_home_that_hangs_is_not_ready_within_a_second_or_so(
    served: Served, store: Switch, catalog: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_READY_S", 1.0)
    store.hangs.clear()
    try:
        deadline = time.monotonic() + 60  # far less than the store hangs
        told = 0
        while told < 3:  # looks that hang are shared, and pile up nowhere
            answer = served.client.get("/readyz")
            assert answer.status_code == 503
            assert "store" in error(answer)["message"]
            told += "catalog" not in error(answer)["message"]  # it may come late by a stall
            assert time.monotonic() < deadline
        assert served.client.get("/healthz").status_code == 200
    finally:
        store.hangs.set()
    deadline = time.monotonic() + 60
    while served.client.get("/readyz").status_code != 200:
        assert time.monotonic() < deadline


def test_an_append_that_takes_too_long_has_an_unknown_outcome(
    served: Served, store: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.post({"value": "before"})
    monkeypatch.setattr(limits, "ANSWER_S", 0.5)
    store.hangs.clear()
    try:
        answer = served.post({"value": "slow"})
    finally:
        store.hangs.set()
    assert (answer.status_code, error(answer)["kind"]) == (504, "unknown_outcome")
    deadline = time.monotonic() + 60
    while served.values() != [b"before", b"slow"]:
        assert time.monotonic() < deadline, "here it was stored after all"
        time.sleep(0.05)


def test_damage_is_500_and_told_to_the_operator_alone(
    served: Served, store: Switch, capfd: pytest.CaptureFixture[str]
) -> None:
    served.post({"value": "x"})
    store.broken = CorruptError(f"object `{SECRET}`: does not fit its checksum")
    answer = damaged = served.client.get("/topics/t/partitions/0/events")
    assert (answer.status_code, error(answer)["kind"]) == (500, "corrupt")
    assert SECRET not in answer.text
    store.broken = RuntimeError(SECRET)  # a bug
    answer = served.client.get("/topics/t/partitions/0/events")
    assert (answer.status_code, error(answer)["kind"]) == (500, "internal")
    assert SECRET not in answer.text
    said = capfd.readouterr().err
    assert SECRET in said
    for each in (damaged, answer):
        assert f"(request {each.headers['x-request-id']})" in said, "two errors of one second"
    store.broken = RuntimeError("another bug")
    page = served.client.get("/console/topics/t/events")
    assert page.status_code == 500
    assert f"(request {page.headers['x-request-id']})" in capfd.readouterr().err
    store.broken = None
    assert served.client.get("/topics/t/partitions/0/events").status_code == 200


def test_a_store_that_is_gone_while_it_stops_does_not_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path, settings={"linger_ms": 300}) as served:
        served.post({"value": "x"})
        switch = Switch(served.home.context.store, monkeypatch, ("put",))
        switch.broken = UnavailableError("store: does not answer")
        assert served.client.get("/track/t.gif?ack=0").status_code == 200
    assert "does not answer" in capfd.readouterr().err, "a lost pixel is told"
    switch.broken = None


def test_requests_that_a_stop_cuts_off_are_told_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STOP_S", 0)
    with serving(tmp_path) as served:
        served.post({"value": "before"})
        catalog = Switch(served.home.context.catalog, monkeypatch, ("get", "scan", "write"))
        key = {"idempotency-key": "k"}
        asked = [
            served.client.build_request("POST", "/topics/t/events", content=b"v"),
            served.client.build_request("POST", "/topics/t/events", content=b"v", headers=key),
            served.client.build_request("DELETE", "/topics/t/ids/x"),
            served.client.build_request("GET", "/track/t.gif"),
            served.client.build_request("GET", "/topics/t"),
        ]
        catalog.hangs.clear()
        with ThreadPoolExecutor(len(asked)) as pool:
            sent = [pool.submit(served.client.send, each) for each in asked]
            try:
                while "tidelog_requests_in_flight 6.0" not in served.client.get("/metrics").text:
                    time.sleep(0.01)  # those five, and this question
                served.stop()
                answers = [each.result(60) for each in sent]
            finally:
                catalog.hangs.set()
    kinds = [(answer.status_code, error(answer)["kind"]) for answer in answers]
    assert kinds == [(504, "unknown_outcome")] * 4 + [(503, "unavailable")]
    assert all("x-request-id" in answer.headers for answer in answers)
