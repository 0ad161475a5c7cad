"""Addresses of sources: what they may say, and what is refused before anything is sent."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest

from tidelog.connectors.by_url import open_source
from tidelog.connectors.kafka.client import KafkaAddress, source_address
from tidelog.connectors.kafka.source import KafkaSource
from tidelog.connectors.source import SourcePartition, SourceRange
from tidelog.errors import InvalidError
from tidelog.model.address import parse_address
from tidelog.settings import load_settings


def kafka(rest: str, **environ: str) -> KafkaAddress:
    return source_address(parse_address(f"kafka://{rest}"), environ)


@pytest.mark.parametrize(
    ("address", "servers"),
    [
        ("a/clicks", "a:9092"),
        ("a:9093/clicks", "a:9093"),
        ("a,b:9093/clicks", "a:9093,b:9093"),
        ("a:1,b:2/clicks", "a:1,b:2"),
        ("[::1]:9093/clicks", "[::1]:9093"),
        ("[::1]/clicks", "[::1]:9092"),
    ],
)
def test_brokers_share_a_port_or_have_their_own(address: str, servers: str) -> None:
    assert kafka(address).servers == servers


def test_properties_pass_through_under_their_own_names() -> None:
    place = kafka("a/clicks?isolation.level=read_uncommitted&sasl.mechanisms=PLAIN&client.id=x")
    wanted = {"isolation.level": "read_uncommitted", "sasl.mechanisms": "PLAIN", "client.id": "x"}
    assert place.properties == wanted


def test_a_pattern_is_told_from_a_name() -> None:
    assert kafka("a/^clicks-.*").is_pattern
    assert kafka("a/^clicks-%3F").topic == "^clicks-?"
    assert not kafka("a/clicks").is_pattern


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("kafka://a", "is not a valid topic"),
        ("kafka://a/x/y", "is not a valid topic"),
        ("kafka://a/..", "is not a valid topic"),
        ("kafka:///clicks", "a broker is missing"),
        ("kafka://a,,b/clicks", "a broker is missing"),
        ("kafka://a/^(", "not a valid regular expression"),
        ("kafka://a/t?no.such.property=1", 'No such configuration property: "no.such.property"'),
        ("kafka://a/t?isolation.level=maybe", 'Invalid value "maybe"'),
        ("kafka://a/t?error_cb=print", "error_cb"),
        ("kafka://a/t?enable.auto.commit=true", "the reader keeps positions"),
        ("kafka://a/t?group.id=mine", "no group is joined"),
        ("kafka://a/t?auto.offset.reset=earliest", "never moved"),
        ("kafka://a/t?enable.partition.eof=false", "where a range without events ends"),
        ("kafka://a/t?bootstrap.servers=b", "come before the topic"),
        ("kafka://a/t?allow.auto.create.topics=true", "creates nothing"),
        ("kafka://a/t?sasl.password=hush", "looks like a secret"),
        ("kafka://a/t?ssl.key.password=hush", "looks like a secret"),
        ("kafka://a/t?ssl.key.pem=hush", "TIDELOG_KAFKA_SSL_KEY_PEM"),
        ("kafka://me:hush@a/t", "names a user or password"),
        ("kafak://a/t", "did you mean `kafka`?"),
        ("file:", "give file:PATH"),
        ("file://elsewhere/x", "give file:PATH"),
        ("file:/x?format=parkett", "did you mean `parquet`"),
        ("file:/x?formt=parquet", "did you mean `format`"),
        ("file:/x?generation=one", "is not a valid generation"),
        ("file:/x?format=jsonlines&mode=evnts", "did you mean `events`"),
        ("file:/x?format=parquet&schema=n%20bigit", "bigint"),
        ("file:/x?token=hush", "looks like a secret"),
        ("fil:/x", "did you mean `file`"),
        ("topic:orders", "name the home"),
        ("orders", "has no scheme"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(address: str, says: str) -> None:
    with pytest.raises(InvalidError) as caught:
        open_source(address, environ={})
    assert says in caught.value.message
    assert "\n" not in caught.value.message
    assert "hush" not in caught.value.message


def test_secrets_come_from_the_environment_and_stay_out_of_sight() -> None:
    secrets = {"TIDELOG_KAFKA_SASL_PASSWORD": "hush", "TIDELOG_KAFKA_SSL_KEY_PASSWORD": "hush too"}
    url = "kafka://a/t?security.protocol=SASL_SSL&sasl.mechanisms=PLAIN&sasl.username=me"
    with pytest.raises(InvalidError, match=r"sasl\.username and sasl\.password must be set"):
        open_source(url, environ={})
    source = open_source(url, environ=secrets)
    place = source_address(parse_address(url), secrets)
    assert place.secrets == {"sasl.password": "hush", "ssl.key.password": "hush too"}
    for shown in (source.url, repr(source), repr(place), str(pickle.dumps(source))):
        assert "hush" not in shown


def test_a_pickled_source_takes_the_secrets_of_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    source = KafkaSource(kafka("a/t"), timeout_s=3)
    monkeypatch.setenv("TIDELOG_KAFKA_SASL_PASSWORD", "theirs")
    there = pickle.loads(pickle.dumps(source))
    assert (there.url, there._timeout_s) == (source.url, 3)
    assert there._kafka.secrets == {"sasl.password": "theirs"}


def test_settings_know_the_secrets_of_kafka(tmp_path: Any) -> None:
    names = ("SASL_PASSWORD", "SSL_KEY_PASSWORD", "SSL_KEYSTORE_PASSWORD", "SSL_KEY_PEM")
    environ = {f"TIDELOG_KAFKA_{name}": "hush" for name in names}
    assert load_settings(None, environ, tmp_path).is_default


def test_a_missing_library_is_told_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith("tidelog.connectors.kafka.source")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(InvalidError, match=r"pip install 'tidelog\[kafka\]'"):
        open_source("kafka://a/t", environ={})


def test_other_packages_may_add_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        def load(self) -> Any:
            return lambda address, environ: (address.host, environ)

    def find_plugins(group: str, name: str) -> list[Entry]:
        return [Entry()] if (group, name) == ("tidelog.sources", "rabbit") else []

    monkeypatch.setattr("tidelog.connectors.by_url.find_plugins", find_plugins)
    opened: Any = open_source("rabbit://a/t", environ={"x": "y"})
    assert opened == ("a", {"x": "y"})


def test_positions_are_offsets() -> None:
    source = open_source("kafka://a/t", environ={})
    assert source.before("9", "10")
    assert not source.before("10", "10")
    assert source.count("9", "12") == 3
    for wrong in ("", "-1", "x", "1.5", "٣"):
        with pytest.raises(InvalidError, match="is not an offset"):
            source.before(wrong, "1")


def test_a_range_that_is_empty_or_backwards_asks_nobody() -> None:
    source = open_source("kafka://127.0.0.1:1/t", environ={})
    partition = SourcePartition("t", "0")
    (chunk,) = source.read(SourceRange(partition, "7", "7"))
    assert (chunk.batch.num_rows, chunk.position) == (0, "7")
    with pytest.raises(InvalidError, match="runs backwards"):
        next(source.read(SourceRange(partition, "7", "6")))
