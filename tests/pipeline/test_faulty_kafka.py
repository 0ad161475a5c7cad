"""Kafka behind a proxy that cuts, resets, delays and hangs: every record is archived once."""

from __future__ import annotations

import uuid
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.pipeline.test_archive import an_archive, drive, listed, payload
from tests.servers import kafka
from tests.support.faults import FaultPlan, WireFault
from tests.support.proxy import StreamProxy
from tests.waiting import until
from tidelog.errors import UnavailableError
from tidelog.home import create_home
from tidelog.settings import load_settings

RATES = {
    WireFault.LOSE_REPLY: 0.03,
    WireFault.CUT_REPLY: 0.05,
    WireFault.RESET: 0.03,
    WireFault.DELAY: 0.05,
    WireFault.HANG: 0.01,
}
RECORDS = 5_000


@pytest.mark.server
@pytest.mark.long
def test_every_record_is_archived_once_through_a_faulty_network(tmp_path: Path) -> None:
    plan = FaultPlan(5, RATES, enabled=False)
    with ExitStack() as stack:

        def through_proxy(port: int) -> int:
            proxy = StreamProxy(kafka.HOST, port, plan)
            stack.callback(proxy.close)
            return proxy.port

        server = stack.enter_context(kafka.running(advertised=through_proxy))
        settings = load_settings(str(tmp_path / "home"), {}, tmp_path)
        home = stack.enter_context(create_home(settings)[0])
        topic = f"faulty-{uuid.uuid4().hex}"
        server.create_topic(topic, 3)
        producer = server.producer()
        for number in range(RECORDS):
            producer.produce(topic, payload(number), partition=number % 3)
        producer.flush(60)
        source = f"kafka://{server.bootstrap}/{topic}?socket.timeout.ms=3000"
        archive = an_archive(home, "clicks", source, parser="json:at")
        plan.enabled = True

        def all_archived() -> bool:
            try:
                drive(home, archive)
            except UnavailableError:
                return False
            return True

        until(all_archived, 240)
        assert plan.injected > 0, plan.counts
        plan.enabled = False
        drive(home, archive)
        assert listed(home, archive) == Counter(range(RECORDS))
