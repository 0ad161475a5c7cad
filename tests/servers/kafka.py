"""Kafka in KRaft mode: one process that is broker and controller."""

import functools
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import (
    IsolationLevel,
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from tests.servers import probe
from tests.servers.base import HOST, ServerError, environment, free_port, workspace
from tests.servers.fetch import Package, ensure, maven_fill, pom_text
from tests.servers.java import java
from tests.servers.process import Launch, Process, started
from tests.servers.tools import JAVA, MAVEN, require
from tests.support.waiting import until

NAME = "kafka"
VERSION = "4.3.1"
COORDINATES = (
    f"org.apache.kafka:kafka_2.13:{VERSION}",
    # Kafka's artifact brings no logger of its own; without one a failed start says nothing.
    "org.slf4j:slf4j-simple:1.7.36",
)
TOOLS = (JAVA, MAVEN)
PACKAGE = Package(
    server=NAME,
    version=VERSION,
    recipe=pom_text(NAME, COORDINATES),
    tools=(MAVEN,),
    fill=functools.partial(maven_fill, NAME, COORDINATES),
)

HEAP_MB = 512
CLUSTER_ID = "VGlkZWxvZ1Rlc3RDbHVzdA"  # any 16 bytes in base64; each server has its own folder
FORMAT_SECONDS_MAX = 60

# The two requests of the probe, both in version 1 of their own format.
_METADATA, _FIND_COORDINATOR = 3, 10


@dataclass(frozen=True)
class Kafka:
    """A running broker."""

    bootstrap: str
    process: Process

    @property
    def address(self) -> str:
        return self.bootstrap

    def admin(self) -> AdminClient:
        return AdminClient(self._properties())

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None
    ) -> None:
        wanted = NewTopic(name, partitions, 1, config=dict(config or {}))
        admin = self.admin()  # lives until the answer is there
        for future in admin.create_topics([wanted]).values():
            future.result()
        until(lambda: self.partitions(name) == partitions)  # it is told of a moment later

    def partitions(self, topic: str) -> int:
        """How many the broker tells of; 0 for a topic that it does not know."""
        admin = self.admin()
        asked = admin.describe_topics(TopicCollection([topic]))
        try:
            return len(asked[topic].result().partitions)
        except KafkaException:
            return 0

    def producer(self, **more: Any) -> Producer:
        """A client that sends each message once and in order; more properties with ``_`` for ``.``.

        Without idempotence a message that is sent again may come twice, or behind later ones: the
        broker tells of a new topic before its partitions take anything.
        """
        named = {key.replace("_", "."): value for key, value in more.items()}
        return Producer({**self._properties(), "enable.idempotence": True, **named})

    def settle(self, topic: str, partitions: int) -> None:
        """Waits until all transactions are over: a commit does not wait for the brokers' markers.

        For a moment after a topic is created, its partitions have no leader that answers.
        """
        admin = self.admin()
        places = [TopicPartition(topic, number) for number in range(partitions)]

        def ends(level: IsolationLevel) -> list[int]:
            asked = {place: OffsetSpec.latest() for place in places}
            answers = admin.list_offsets(asked, isolation_level=level)
            return [answer.result().offset for answer in answers.values()]

        def settled() -> bool:
            try:
                return ends(IsolationLevel.READ_COMMITTED) == ends(IsolationLevel.READ_UNCOMMITTED)
            except KafkaException as exc:
                if exc.args[0].code() == KafkaError.NOT_LEADER_FOR_PARTITION:
                    return False
                raise

        until(settled, 120)

    def _properties(self) -> dict[str, Any]:
        return {"bootstrap.servers": self.bootstrap, "log_level": 0}


@contextmanager
def running(
    session_ms: int = 60_000, advertised: Callable[[int], int] = lambda port: port
) -> Iterator[Kafka]:
    """A broker of one's own; it keeps its data over `process.restart()`.

    ``advertised`` gets its port and returns the one that clients are sent to, such as a proxy's.

    After a kill it cannot come back before its old session has run out: who restarts it gives a
    short one. A broker that stalls for longer is fenced, and refuses to create topics.
    """
    require(NAME, (JAVA,))
    jars = ensure(PACKAGE)
    port, controller_port = free_port(), free_port()
    with workspace(NAME) as folder:
        properties = folder / "kraft.properties"
        text = _properties(port, controller_port, folder / "data", session_ms)
        clients = f"advertised.listeners=PLAINTEXT://{HOST}:"
        text = text.replace(f"{clients}{port}", f"{clients}{advertised(port)}")
        properties.write_text(text)
        _format(jars, properties)
        launch = Launch(
            name=NAME,
            command=_java(jars, "kafka.Kafka", str(properties)),
            environment=environment(),
            folder=folder,
            answers=lambda: _has_broker(port) and _has_group_coordinator(port),
        )
        with started(launch) as process:
            yield Kafka(f"{HOST}:{port}", process)


def _properties(port: int, controller_port: int, data: Path, session_ms: int) -> str:
    return f"""
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{HOST}:{controller_port}
listeners=PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}
advertised.listeners=PLAINTEXT://{HOST}:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={data}

# One node cannot replicate, and one partition of each internal topic is enough.
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=1

# A consumer group's first assignment does not wait for more members.
group.initial.rebalance.delay.ms=0

broker.session.timeout.ms={session_ms}
broker.heartbeat.interval.ms=500

# Few threads, and a small buffer for the cleaner, whose default is a quarter of our heap.
num.network.threads=2
num.io.threads=4
log.cleaner.dedupe.buffer.size=4194304
"""


def _java(jars: Path, *arguments: str) -> list[str]:
    options = ("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Djava.awt.headless=true")
    return java(*arguments, heap_mb=HEAP_MB, classpath=(jars,), options=options)


def _format(jars: Path, properties: Path) -> None:
    """Prepare the data folder, which KRaft refuses to do by itself."""
    command = _java(jars, "kafka.tools.StorageTool", "format", "-t", CLUSTER_ID)
    done = subprocess.run(
        [*command, "-c", str(properties)],
        capture_output=True,
        text=True,
        timeout=FORMAT_SECONDS_MAX,
        check=False,
    )
    if done.returncode != 0:
        raise ServerError(
            f"{NAME}: formatting its data folder failed, exit code {done.returncode}: "
            f"see what it says\n{done.stdout}{done.stderr}"
        )


def _has_broker(port: int) -> bool:
    """Whether a broker is registered and not fenced: those are what metadata lists."""
    of_no_topic = struct.pack(">i", 0)
    answer = probe.exchange(port, _request(_METADATA, of_no_topic), answer_bytes=12)
    _length, _correlation, brokers = struct.unpack(">iii", answer)
    return bool(brokers > 0)


def _has_group_coordinator(port: int) -> bool:
    """Whether a consumer group has its coordinator.

    The first one to ask makes the broker create the topic of group offsets. If that were the first
    consumer of a test, it would wait for three seconds before it asked again.
    """
    group = b"probe"
    of_the_group = struct.pack(">h", len(group)) + group + bytes(1)
    answer = probe.exchange(port, _request(_FIND_COORDINATOR, of_the_group), answer_bytes=14)
    _length, _correlation, _throttle_ms, error_code = struct.unpack(">iiih", answer)
    return bool(error_code == 0)


def _request(api_key: int, body: bytes) -> bytes:
    """A request with its length in front: api, version 1, correlation 1, no client id, body."""
    request = struct.pack(">hhih", api_key, 1, 1, -1) + body
    return struct.pack(">i", len(request)) + request
