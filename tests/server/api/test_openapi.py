"""The description: it names every operation, and what it describes holds for any input.

Cases are generated from the description, some that fit it and some that do not, and every check of
schemathesis runs on each answer. What no description can say is left out of cases that fit: two
parameters that exclude each other, the lines of a body, and SQL.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from schemathesis.checks import CHECKS, CheckFunction, load_all_checks
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import negative_data_rejection

from tests.support.machine_clock import MachineClock
from tests.support.serving import Served, serving
from tidelog import Event
from tidelog.server.api.openapi import description
from tidelog.server.app import OPERATIONS
from tidelog.server.options import ServeOptions

EXAMPLES = 15  # for each operation, in `make test`
MANY = 400  # the same, in `make test-long`
SLOW_S = 1.0  # without the time in which the machine stalls
Shared = tuple[Served, MachineClock]
REFUSED = [400, 401, 403, 404, 405, 413, 415, 431]  # statuses for what does not fit

load_all_checks()
schemathesis.openapi.format(
    "date-time",
    st.datetimes(
        min_value=datetime(1970, 1, 2),  # noqa: DTZ001 - it gets its zone below
        max_value=datetime(9999, 12, 30),  # noqa: DTZ001
    ).map(lambda moment: moment.isoformat() + "Z"),
)


@schemathesis.serializer("application/x-ndjson")
def _lines(context: schemathesis.SerializationContext, value: Any) -> bytes:
    """As text where it is some; whatever else was made up, as a line of JSON."""
    return value.encode() if isinstance(value, str) else json.dumps(value).encode()


def test_every_operation_is_described_and_nothing_else() -> None:
    described = {
        (method.upper(), path, operation["operationId"], operation["security"] != [])
        for path, methods in description(ServeOptions())["paths"].items()
        for method, operation in methods.items()
    }
    assert described == {(o.method, o.path, o.name, o.right is not None) for o in OPERATIONS}


def test_every_operation_names_the_scope_that_the_server_asks_for() -> None:
    described = {
        operation["operationId"]: operation.get("x-scope")
        for methods in description(ServeOptions())["paths"].values()
        for operation in methods.values()
    }
    assert described == {o.name: o.right for o in OPERATIONS}


def test_examples_fit_their_schemas() -> None:
    api = description(ServeOptions())
    checked = 0
    for methods in api["paths"].values():
        for operation in methods.values():
            bodies = [operation["requestBody"]] if "requestBody" in operation else []
            for each in (*bodies, *operation["responses"].values()):
                for kind, content in each.get("content", {}).items():
                    if "example" in content and kind == "application/json":
                        schema = {**content["schema"], "components": api["components"]}
                        jsonschema.Draft202012Validator(schema).validate(content["example"])
                        checked += 1
    assert checked > 10


def test_the_description_is_served(served: Served) -> None:
    assert served.client.get("/openapi.json").json() == description(ServeOptions())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("home")
    with serving(folder, topic_default="t") as found, MachineClock(folder) as clock:
        found.home.append("t", [Event(b"x%d" % n, b"\xff", "i", 5, "t") for n in range(50)])
        yield found, clock
    count = sum(STATUSES.values())
    print(f"{count} requests, the slowest {max(TOOK_S):.2f} s: {dict(STATUSES)}")


CONFIG = SchemathesisConfig.from_dict(
    {"checks": {"negative_data_rejection": {"expected-statuses": REFUSED}}}
)
schema = schemathesis.openapi.from_dict(
    description(ServeOptions(topic_default="t")), config=CONFIG
).exclude(path=["/topics/{topic}/tail", "/sql"])
STATUSES: Counter[int] = Counter()
TOOK_S = [0.0]
HOW: dict[str, Any] = {
    "deadline": None,
    "phases": [Phase.explicit, Phase.generate],
    "suppress_health_check": list(HealthCheck),
}


@schema.parametrize()
@settings(max_examples=EXAMPLES, **HOW)
def test_any_request_is_answered_as_described(shared: Shared, case: schemathesis.Case) -> None:
    check(shared, case)


@pytest.mark.long
@schema.parametrize()
@settings(max_examples=MANY, **HOW)
def test_many_requests_are_answered_as_described(shared: Shared, case: schemathesis.Case) -> None:
    check(shared, case)


def check(shared: Shared, case: schemathesis.Case) -> None:
    """Send it, once as it is and once for a topic that is there, and look at the answers."""
    served, clock = shared
    fits = case.meta is not None and case.meta.generation.mode.is_positive
    left_out: list[CheckFunction] = []
    if fits:
        fit(case)
    if case.path == "/track/{topic}.gif":
        left_out = [negative_data_rejection]  # a pixel stores parameters of any name
    if case.query and "wait" in case.query:
        case.query["wait"] = "0"  # it would wait
        left_out = [negative_data_rejection]  # what did not fit may have been this
    for is_there in (False, True):
        if is_there:
            name_topic(case)
            left_out = [negative_data_rejection]  # the same
        began_s = clock.now_s
        answer = case.call(base_url=served.url, timeout=60)
        TOOK_S.append(clock.now_s - began_s)
        assert TOOK_S[-1] < SLOW_S
        STATUSES[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS.get_all(), excluded_checks=left_out)


def fit(case: schemathesis.Case) -> None:
    """Leave out what contradicts the rest, in a case that fits the description by itself."""
    query, headers = case.query or {}, case.headers or {}
    query.pop("cursor", None)  # only a page knows one
    if "start" in query:
        query["end"] = "9999-12-31T00:00:00Z"  # else it may be before the start
    headers.pop("Tidelog-If-Absent", None)  # it needs ids that are not there
    headers.pop("Tidelog-Time", None)
    headers.pop("Idempotency-Key", None)  # the same one may come with other events
    if case.media_type in ("application/json", "application/x-ndjson"):
        for name in ("Tidelog-Id", "Tidelog-Key", "Tidelog-Type"):
            headers.pop(name, None)
    if case.media_type == "application/x-ndjson":
        case.body = json.dumps({"value": str(case.body)})


def name_topic(case: schemathesis.Case) -> None:
    for place in (case.path_parameters, case.query):
        if place and "topic" in place:
            place["topic"] = "t"
    if case.path_parameters and "partition" in case.path_parameters:
        case.path_parameters["partition"] = 0
