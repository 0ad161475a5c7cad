"""Each server is used once, as a test would use it: what it is there for must work."""

import contextlib
import json
import os
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from confluent_kafka import Consumer

from tests.servers.base import free_port
from tests.servers.cassandra import Cassandra
from tests.servers.dynamodb import DynamoDb
from tests.servers.kafka import Kafka
from tests.servers.moto import Moto
from tests.servers.process import Process
from tests.servers.s3 import S3, running
from tests.servers.spark import SparkCluster

FIXTURES = ("kafka_server", "dynamodb_server", "cassandra_server", "s3_server", "moto_server")
ANSWER_SECONDS_MAX = 90


def test_tests_that_share_a_server_run_in_one_process(request: pytest.FixtureRequest) -> None:
    is_spread = "PYTEST_XDIST_WORKER" in os.environ
    assert request.node.nodeid.endswith("@tests/servers/test_servers.py") == is_spread


@pytest.mark.server
def test_kafka_gives_back_what_was_produced(kafka_server: Kafka) -> None:
    topic = _unique("topic")
    producer = kafka_server.producer()
    producer.produce(topic, b"hello")
    assert producer.flush(ANSWER_SECONDS_MAX) == 0
    consumer = Consumer(
        {
            "bootstrap.servers": kafka_server.bootstrap,
            "group.id": topic,
            "auto.offset.reset": "earliest",
        }
    )
    try:
        consumer.subscribe([topic])
        message = consumer.poll(ANSWER_SECONDS_MAX)
    finally:
        consumer.close()
    assert message is not None
    assert message.error() is None
    assert message.value() == b"hello"


@pytest.mark.server
def test_dynamodb_refuses_a_put_whose_condition_fails(dynamodb_server: DynamoDb) -> None:
    client = _client("dynamodb", dynamodb_server)
    table = _unique("table")
    client.create_table(
        TableName=table,
        KeySchema=[{"AttributeName": "name", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "name", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    put = {
        "TableName": table,
        "Item": {"name": {"S": "first"}},
        "ConditionExpression": "attribute_not_exists(#name)",
        "ExpressionAttributeNames": {"#name": "name"},
    }
    client.put_item(**put)
    with pytest.raises(ClientError, match="ConditionalCheckFailedException"):
        client.put_item(**put)


@pytest.mark.server
def test_cassandra_applies_a_conditional_insert_once(cassandra_server: Cassandra) -> None:
    keyspace = _unique("keyspace").replace("-", "_")
    session = cassandra_server.session()
    try:
        session.execute(
            f"CREATE KEYSPACE {keyspace} WITH replication = "
            "{'class': 'SimpleStrategy', 'replication_factor': 1}"
        )
        session.execute(f"CREATE TABLE {keyspace}.lease (name text PRIMARY KEY, epoch int)")
        insert = f"INSERT INTO {keyspace}.lease (name, epoch) VALUES ('a', 1) IF NOT EXISTS"
        assert session.execute(insert).was_applied
        assert not session.execute(insert).was_applied
    finally:
        session.cluster.shutdown()


@pytest.mark.server
def test_s3_refuses_to_create_an_object_twice(s3_server: S3) -> None:
    bucket = s3_server.fresh_bucket()
    client = _client("s3", s3_server)
    client.put_object(Bucket=bucket, Key="one", Body=b"first", IfNoneMatch="*")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket=bucket, Key="one", Body=b"second", IfNoneMatch="*")
    assert client.get_object(Bucket=bucket, Key="one")["Body"].read() == b"first"


@pytest.mark.server
def test_s3_gives_each_test_a_bucket_of_its_own(s3_server: S3) -> None:
    assert s3_server.fresh_bucket() != s3_server.fresh_bucket()


@pytest.mark.server
def test_a_private_s3_keeps_its_objects_over_a_kill() -> None:
    with running() as server:
        client = _client("s3", server)
        bucket = server.fresh_bucket()
        client.put_object(Bucket=bucket, Key="one", Body=b"first")
        server.process.kill()
        assert not server.process.alive
        server.process.restart()
        assert client.get_object(Bucket=bucket, Key="one")["Body"].read() == b"first"


@pytest.mark.server
def test_moto_creates_a_kinesis_stream(moto_server: Moto) -> None:
    client = _client("kinesis", moto_server)
    stream = _unique("stream")
    client.create_stream(StreamName=stream, ShardCount=2)
    described = client.describe_stream(StreamName=stream)["StreamDescription"]
    assert len(described["Shards"]) == 2


@pytest.mark.server
def test_moto_keeps_every_record_of_puts_at_once(moto_server: Moto) -> None:
    stream = _unique("stream")
    _client("kinesis", moto_server).create_stream(StreamName=stream, ShardCount=1)

    def put(lots: int) -> list[str]:
        client = _client("kinesis", moto_server)
        records = [{"Data": b"any", "PartitionKey": "any"}] * 100
        answers = [client.put_records(StreamName=stream, Records=records) for _ in range(lots)]
        return [each["SequenceNumber"] for answer in answers for each in answer["Records"]]

    with ThreadPoolExecutor(4) as threads:
        numbers = [number for each in threads.map(put, [8] * 4) for number in each]
    assert len(set(numbers)) == len(numbers) == 3_200


@pytest.mark.spark
@pytest.mark.long
def test_spark_counts_on_both_workers(spark_cluster: SparkCluster, tmp_path: Path) -> None:
    # A process of its own: there can be one Spark context in a process, and it may be another's.
    script = """
import json, sys
from pyspark import SparkConf
from pyspark.sql import SparkSession
conf = SparkConf().setAll(list(json.loads(sys.argv[1]).items()))
spark = SparkSession.builder.config(conf=conf).getOrCreate()
print(spark.range(10).count())
"""
    settings = json.dumps(spark_cluster.settings())
    done = subprocess.run(
        [sys.executable, "-c", script, settings],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["10"]
    assert len(set(spark_cluster.worker_pids)) == 2


@pytest.mark.server
@pytest.mark.parametrize(
    "fixture", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in FIXTURES]
)
def test_server_listens_on_the_loopback_only(fixture: str, request: pytest.FixtureRequest) -> None:
    process: Process = request.getfixturevalue(fixture).process
    listening = _listening(process.pid)
    assert listening
    assert listening == {"127.0.0.1"}


@pytest.mark.spark
def test_spark_listens_on_the_loopback_only(spark_cluster: SparkCluster) -> None:
    for process in (spark_cluster.master, *spark_cluster.workers):
        assert _listening(process.pid) == {"127.0.0.1"}


def test_a_port_is_not_handed_out_twice() -> None:
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) == len(ports)


def _unique(noun: str) -> str:
    return f"{noun}-{uuid.uuid4().hex[:16]}"


def _client(service: str, server: DynamoDb | Moto | S3) -> Any:
    keys = (server.access_key, server.secret_key) if isinstance(server, S3) else ("any", "any")
    aws: Any = boto3  # its types want the service's name spelled out at each call
    return aws.client(
        service,
        endpoint_url=server.endpoint,
        region_name=server.region,
        aws_access_key_id=keys[0],
        aws_secret_access_key=keys[1],
    )


def _listening(pid: int) -> set[str]:
    """The addresses on which the process accepts connections, as the kernel lists them."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            links.append(str(link.readlink()))
    sockets = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    state_listening = "0A"
    return {
        _address(row[1].split(":")[0])
        for row in rows
        if row[3] == state_listening and row[9] in sockets
    }


def _address(kernel_hex: str) -> str:
    """An address as the kernel prints it: words in the machine's order, IPv4 mapped into IPv6."""
    mapped, last_word = kernel_hex[:-8], bytes.fromhex(kernel_hex[-8:])
    if mapped not in ("", "0000000000000000FFFF0000"):
        return kernel_hex
    return ".".join(str(byte) for byte in reversed(last_word))
