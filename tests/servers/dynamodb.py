"""DynamoDB Local: one process, tables in memory, the same for every key and region."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.servers import probe
from tests.servers.base import HOST, environment, free_port, workspace
from tests.servers.fetch import Package, ensure, maven_fill, pom_text, run_fetch
from tests.servers.java import java
from tests.servers.process import Launch, Process, started
from tests.servers.tools import JAVA, JAVAC, MAVEN, path_of, require

NAME = "dynamodb"
VERSION = "2.6.1"
COORDINATES = (f"com.amazonaws:DynamoDBLocal:{VERSION}",)
TOOLS = (JAVA, JAVAC, MAVEN)

HEAP_MB = 512
REGION = "us-east-1"
MAIN = Path(__file__).with_name("LoopbackDynamoDb.java")

# The server reads the key and the region out of the header and does not verify the signature.
_LIST_TABLES_HEADERS = {
    "Content-Type": "application/x-amz-json-1.0",
    "X-Amz-Target": "DynamoDB_20120810.ListTables",
    "Authorization": f"AWS4-HMAC-SHA256 Credential=probe/20260101/{REGION}/dynamodb/aws4_request, "
    "SignedHeaders=host, Signature=none",
}


@dataclass(frozen=True)
class DynamoDb:
    """A running server; any access key and secret are accepted."""

    endpoint: str
    region: str
    process: Process

    @property
    def address(self) -> str:
        return self.endpoint


@contextmanager
def running() -> Iterator[DynamoDb]:
    """A server of one's own; it forgets its tables on `process.restart()`."""
    require(NAME, (JAVA,))
    jars = ensure(PACKAGE)
    port = free_port()
    with workspace(NAME) as folder:
        launch = Launch(
            name=NAME,
            command=_command(jars, port),
            environment=environment(),
            folder=folder,
            answers=lambda: _lists_tables(port),
        )
        with started(launch) as process:
            yield DynamoDb(f"http://{HOST}:{port}", REGION, process)


def _command(jars: Path, port: int) -> list[str]:
    return java(
        *(MAIN.stem, "-port", str(port), "-inMemory", "-sharedDb", "-disableTelemetry"),
        heap_mb=HEAP_MB,
        classpath=(jars,),
        options=(f"-Djava.library.path={jars}",),
    )


def _lists_tables(port: int) -> bool:
    status, body = probe.http(port, method="POST", headers=_LIST_TABLES_HEADERS, body="{}")
    return status == 200 and b"TableNames" in body


def _fill(folder: Path) -> None:
    maven_fill(NAME, COORDINATES, folder)
    source = folder / MAIN.name
    shutil.copyfile(MAIN, source)
    run_fetch(
        NAME,
        [path_of(JAVAC), "-proc:none", "-d", str(folder), "-cp", f"{folder}/*", str(source)],
    )


PACKAGE = Package(
    server=NAME,
    version=VERSION,
    recipe=pom_text(NAME, COORDINATES) + MAIN.read_text(),
    tools=(JAVAC, MAVEN),
    fill=_fill,
)
