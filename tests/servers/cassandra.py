"""Cassandra: one node that speaks CQL, also where the tests mean Scylla, which has no package."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import Cluster, Session

from tests.servers import probe
from tests.servers.base import HOST, environment, free_port, workspace
from tests.servers.fetch import Package, ensure, maven_fill, pom_text
from tests.servers.java import java
from tests.servers.process import Launch, Process, started
from tests.servers.tools import JAVA, MAVEN, require

NAME = "cassandra"
VERSION = "5.0.9"
COORDINATES = (f"org.apache.cassandra:cassandra-all:{VERSION}",)
TOOLS = (JAVA, MAVEN)
PACKAGE = Package(
    server=NAME,
    version=VERSION,
    recipe=pom_text(NAME, COORDINATES),
    tools=(MAVEN,),
    fill=functools.partial(maven_fill, NAME, COORDINATES),
)

HEAP_MB = 1_024

# The parts of the JDK that Cassandra reaches into; its own options for Java 17 list the same.
EXPORTS = (
    "java.base/java.lang.ref",
    "java.base/jdk.internal.misc",
    "java.management/com.sun.jmx.remote.security",
    "java.management.rmi/com.sun.jmx.remote.internal.rmi",
    "java.rmi/sun.rmi.registry",
    "java.rmi/sun.rmi.server",
    "java.sql/java.sql",
    "jdk.unsupported/sun.misc",
)
OPENS = (
    "java.base/java.io",
    "java.base/java.lang",
    "java.base/java.lang.module",
    "java.base/java.lang.reflect",
    "java.base/java.nio",
    "java.base/java.util",
    "java.base/jdk.internal.loader",
    "java.base/jdk.internal.math",
    "java.base/jdk.internal.module",
    "java.base/jdk.internal.ref",
    "java.base/jdk.internal.reflect",
    "java.base/jdk.internal.util.jar",
    "java.base/sun.nio.ch",
    "jdk.management/com.sun.management.internal",
)
PROPERTIES = {
    # A lone node has nobody to wait for: no settling, no delay, no farewell.
    "cassandra.skip_wait_for_gossip_to_settle": "0",
    "cassandra.ring_delay_ms": "0",
    "cassandra.superuser_setup_delay_ms": "-1",
    "cassandra.shutdown_announce_in_ms": "0",
    # Measured by filling a table at each start otherwise, which takes two seconds.
    "cassandra.memtable.row_overhead_size": "180",
    # The page cache outlives a killed process, and no test pulls the machine's plug.
    "cassandra.skip_sync": "true",
    # Nothing calls home.
    "chronicle.analytics.disable": "true",
    # It installs a security manager, which Java 18 and later refuse unless told so.
    "java.security.manager": "allow",
    # As its own options for Java 17 have them.
    "io.netty.tryReflectionSetAccessible": "true",
    "java.net.preferIPv4Stack": "true",
    "jdk.attach.allowAttachSelf": "true",
}

# Protocol version 4, no flags, stream 0, OPTIONS, empty body; SUPPORTED is the answer.
_OPTIONS_REQUEST = bytes([4, 0, 0, 0, 5, 0, 0, 0, 0])
_SUPPORTED = 6


@dataclass(frozen=True)
class Cassandra:
    """A running node, without passwords; its data centre is `datacenter1`."""

    host: str
    port: int
    process: Process

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def session(self, keyspace: str | None = None, login: tuple[str, str] | None = None) -> Session:
        """A client that bears a node that stalls. Shut its ``cluster`` down in the end."""
        cluster = Cluster(
            [self.host],
            port=self.port,
            auth_provider=PlainTextAuthProvider(*login) if login else None,
            connect_timeout=60,
            control_connection_timeout=60,
            schema_metadata_enabled=False,
            token_metadata_enabled=False,
        )
        session: Session = cluster.connect(keyspace)
        session.default_timeout = 60
        return session


@contextmanager
def running(settings: str = "") -> Iterator[Cassandra]:
    """A node of one's own; it keeps its data over `process.restart()`. More settings are YAML."""
    require(NAME, (JAVA,))
    jars = ensure(PACKAGE)
    port, storage_port = free_port(), free_port()
    with workspace(NAME) as folder:
        (folder / "cassandra.yaml").write_text(_yaml(port, storage_port) + settings)
        (folder / "logback.xml").write_text(LOGBACK)
        launch = Launch(
            name=NAME,
            command=_command(jars, folder),
            environment=environment(),
            folder=folder,
            answers=lambda: _supports_options(port),
            stop_seconds_max=0.5,  # it would drain for seconds what is about to be removed
        )
        with started(launch) as process:
            yield Cassandra(HOST, port, process)


LOGBACK = """<configuration>
  <appender name="stdout" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%d{HH:mm:ss.SSS} %-5level %logger{30}: %msg%n</pattern></encoder>
  </appender>
  <root level="WARN"><appender-ref ref="stdout"/></root>
</configuration>
"""


def _yaml(port: int, storage_port: int) -> str:
    return f"""
cluster_name: tidelog-test
partitioner: org.apache.cassandra.dht.Murmur3Partitioner
endpoint_snitch: SimpleSnitch
num_tokens: 8
auto_bootstrap: false
seed_provider:
  - class_name: org.apache.cassandra.locator.SimpleSeedProvider
    parameters:
      - seeds: "{HOST}:{storage_port}"
listen_address: {HOST}
storage_port: {storage_port}
rpc_address: {HOST}
start_native_transport: true
native_transport_port: {port}

# Every acknowledged write is in the commit log file before its answer, so a kill loses none.
commitlog_sync: batch
commitlog_segment_size: 8MiB
commitlog_total_space: 64MiB
auto_snapshot: false
hinted_handoff_enabled: false
key_cache_save_period: 0s
counter_cache_save_period: 0s

# Two cores: few threads, and patience where a busy machine would make a test fail.
concurrent_reads: 8
concurrent_writes: 8
read_request_timeout: 10s
range_request_timeout: 20s
write_request_timeout: 10s
cas_contention_timeout: 5s
request_timeout: 20s

# The limits of a Scylla server, for which this one stands in.
batch_size_warn_threshold: 128KiB
batch_size_fail_threshold: 1024KiB
"""


def _command(jars: Path, folder: Path) -> list[str]:
    settings = PROPERTIES | {
        "cassandra.config": (folder / "cassandra.yaml").as_uri(),
        "cassandra.storagedir": str(folder / "data"),
        "cassandra-foreground": "yes",
    }
    return java(
        "org.apache.cassandra.service.CassandraDaemon",
        heap_mb=HEAP_MB,
        classpath=(folder, jars),
        options=(
            *(f"--add-exports={package}=ALL-UNNAMED" for package in EXPORTS),
            *(f"--add-opens={package}=ALL-UNNAMED" for package in OPENS),
            "-XX:+ExitOnOutOfMemoryError",
            "-Xss256k",
            *(f"-D{name}={value}" for name, value in settings.items()),
        ),
    )


def _supports_options(port: int) -> bool:
    """Whether it answers CQL, which it does only after it has joined its ring."""
    answer = probe.exchange(port, _OPTIONS_REQUEST, answer_bytes=9)
    return answer[4] == _SUPPORTED
