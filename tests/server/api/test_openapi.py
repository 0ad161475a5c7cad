"""The description: it names every operation, and what it describes holds for any input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.serving import Served, serving
from tidelog import Event
from tidelog.server.api.openapi import description
from tidelog.server.app import OPERATIONS
from tidelog.server.options import ServeOptions

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
]


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


def test_the_description_is_served(served: Served) -> None:
    assert served.client.get("/openapi.json").json() == description(ServeOptions())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("home"), topic_default="t") as found:
        found.home.append("t", [Event(b"x%d" % n, b"\xff", "i", 5, "t") for n in range(50)])
        yield found


schema = schemathesis.openapi.from_dict(description(ServeOptions(topic_default="t")))
STREAM = "/topics/{topic}/tail"


@schema.exclude(path=STREAM).parametrize()
@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_nothing_that_fits_or_breaks_the_description_makes_the_server_fail(
    shared: Served, case: schemathesis.Case
) -> None:
    answer = case.call(base_url=shared.url, timeout=60)
    case.validate_response(answer, checks=CHECKS)


@schema.exclude(path=STREAM).parametrize()
@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_nor_does_it_for_a_topic_that_is_there(shared: Served, case: schemathesis.Case) -> None:
    for place in (case.path_parameters, case.query):
        if place and "topic" in place:
            place["topic"] = "t"
    if case.path_parameters and "partition" in case.path_parameters:
        case.path_parameters["partition"] = 0
    if case.query and "wait" in case.query:
        case.query["wait"] = "0"
    answer = case.call(base_url=shared.url, timeout=60)
    case.validate_response(answer, checks=CHECKS)
