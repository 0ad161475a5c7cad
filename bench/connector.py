"""The jars of Spark's own Kafka connector, which only the benchmark's peer needs.

Fetched by Maven into the cache of test servers, each jar by itself: Spark brings the rest. Not
every registry has the connector's token provider in its own version; it takes an older one.
"""

from __future__ import annotations

import functools

from tests.servers.fetch import Package, ensure, maven_fill, pom_text
from tests.servers.tools import MAVEN

NAME = "spark-kafka"
VERSION = "4.2.0"
COORDINATES = (
    f"org.apache.spark:spark-sql-kafka-0-10_2.13:{VERSION}",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.12.1",
)
PACKAGE = Package(
    server=NAME,
    version=VERSION,
    recipe=pom_text(NAME, COORDINATES, alone=True),
    tools=(MAVEN,),
    fill=functools.partial(maven_fill, NAME, COORDINATES, alone=True),
)


def jars() -> str:
    """Their paths, as ``spark.jars`` wants them."""
    return ",".join(map(str, sorted(ensure(PACKAGE).glob("*.jar"))))
