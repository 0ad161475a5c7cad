"""Kafka behind a proxy that cuts, resets, delays and hangs: every record is archived once."""

from __future__ import annotations

import uuid
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlencode

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.archive.test_archive import an_archive, drive, listed, payload
from tests.servers import kafka
from tests.support.certificates import make_certificates
from tests.support.faults import FaultPlan, WireFault
from tests.support.proxy import StreamProxy
from tests.support.waiting import until
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
LOT = 1_000  # records
RECORDS_MIN, RECORDS_MAX = 5 * LOT, 50 * LOT  # more where no fault was met


@pytest.mark.server
@pytest.mark.long
@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
def test_every_record_is_archived_once_through_a_faulty_network(
    tmp_path: Path, has_tls: bool
) -> None:
    plan = FaultPlan(5, RATES, enabled=False)
    certificates = make_certificates(tmp_path) if has_tls else None
    secure = {}
    if certificates is not None:
        secure = {"security.protocol": "SSL", "ssl.ca.location": str(certificates.authority)}
    ports: list[int] = []
    with ExitStack() as stack:

        def through_proxy(port: int) -> int:
            proxy = StreamProxy(
                kafka.HOST, port, plan, certificates.context if certificates else None
            )
            stack.callback(proxy.close)
            ports.append(proxy.port)
            return proxy.port

        stack.enter_context(kafka.running(advertised=through_proxy))
        bootstrap = f"{kafka.HOST}:{ports[0]}"
        settings = load_settings(str(tmp_path / "home"), {}, tmp_path)
        home = stack.enter_context(create_home(settings)[0])
        topic = f"faulty-{uuid.uuid4().hex}"
        given = {"bootstrap.servers": bootstrap, **secure}
        admin = AdminClient(given)  # lives until the answer is there
        admin.create_topics([NewTopic(topic, 3, 1)])[topic].result(60)
        producer = Producer({**given, "enable.idempotence": True})
        options = {"socket.timeout.ms": "3000", **secure}
        source = f"kafka://{bootstrap}/{topic}?{urlencode(options)}"
        archive = an_archive(home, "clicks", source, parser="json:at")

        def all_archived() -> bool:
            try:
                drive(home, archive)
            except UnavailableError:
                return False
            return True

        sent = 0
        while sent < RECORDS_MIN or (not plan.injected and sent < RECORDS_MAX):
            plan.enabled = False
            for number in range(sent, sent + LOT):
                producer.produce(topic, payload(number), partition=number % 3)
            producer.flush(60)
            sent += LOT
            plan.enabled = True
            until(all_archived, 240)
        assert plan.injected > 0, plan.counts
        plan.enabled = False
        drive(home, archive)
        assert listed(home, archive) == Counter(range(sent))
