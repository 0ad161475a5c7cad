"""The AWS template: sound by its linter, fit for the code, and with rights that are really used."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import boto3
import pytest
from click.testing import CliRunner

from tests.aws.test_ingest import record, request
from tests.deploy.recorder import Recorder, Right, recording
from tests.deploy.template import TEMPLATE, allowed_by, allows, read_template
from tests.servers.dynamodb import DynamoDb
from tests.servers.moto import Moto
from tests.servers.s3 import S3
from tests.support.lambda_endpoint import FUNCTION, lambda_endpoint
from tests.support.waiting import until
from tidelog import Event, Home
from tidelog.aws import consumer_handler, playback_handler
from tidelog.catalog import dynamodb
from tidelog.cli.main import cli
from tidelog.errors import TidelogError, UnavailableError
from tidelog.home import create_home, open_home
from tidelog.log.notifier import Notification
from tidelog.log.notify_targets import open_target
from tidelog.settings import load_settings

LINT = "import sys; from cfnlint.runner import main; sys.exit(main())"


def test_the_linter_has_nothing_to_say() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LINT, "--non-zero-exit-code", "informational", str(TEMPLATE)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout


def test_the_table_has_the_shape_that_the_catalog_wants() -> None:
    table = read_template()["Resources"]["Table"]["Properties"]
    types = {each["AttributeName"]: each["AttributeType"] for each in table["AttributeDefinitions"]}
    key = tuple(
        (e["AttributeName"], e["KeyType"], types[e["AttributeName"]]) for e in table["KeySchema"]
    )
    assert key == dynamodb._KEY


def test_the_scribe_has_a_period_an_expiry_and_one_round_at_a_time() -> None:
    parts = read_template()["Resources"]
    queue = parts["ScribeQueue"]["Properties"]
    function = parts["ScribeFunction"]["Properties"]
    assert parts["ScribeSchedule"]["Properties"]["ScheduleExpression"] == {"Ref": "ScribePeriod"}
    assert queue["MessageRetentionPeriod"] == {"Ref": "ScribeExpirySeconds"}
    assert function["ReservedConcurrentExecutions"] == 1
    assert parts["ScribeRounds"]["Properties"]["BatchSize"] == 1
    assert queue["VisibilityTimeout"] >= function["Timeout"]


FUNCTIONS = ("Scribe", "Consumer", "Pump", "Pixel", "Playback")


@pytest.mark.parametrize("place", [*(f"{each}Function" for each in FUNCTIONS), "ConfigString"])
def test_the_config_strings_open(place: str, tmp_path: Path) -> None:
    template = read_template()
    if place in template["Outputs"]:
        text = template["Outputs"][place]["Value"]["Sub"]
    else:
        function = template["Resources"][place]["Properties"]
        text = function["Environment"]["Variables"]["TIDELOG_HOME"]["Sub"]
    for name, value in (("Bucket", "b"), ("Prefix", "events"), ("Table", "t")):
        text = text.replace(f"${{{name}}}", value)
    settings = load_settings(text.replace("${AWS::Region}", "eu-west-1"), {}, tmp_path)
    assert settings.store == "s3://b/events?region=eu-west-1"
    assert settings.catalog == "dynamodb://t?region=eu-west-1"


def load_function(name: str) -> Any:
    """Returns a module that the image of the functions holds."""
    spec = importlib.util.spec_from_file_location(name, TEMPLATE.with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_function_of_the_template_is_in_the_image() -> None:
    parts = read_template()
    commands = [
        part["Properties"]["ImageConfig"]["Command"][0]
        for part in parts["Resources"].values()
        if part["Type"] == "AWS::Lambda::Function"
    ]
    for given in commands:
        is_text = isinstance(given, str)
        command = given if is_text else parts["Parameters"][given["Ref"]]["Default"]
        module, _, name = command.rpartition(".")
        assert callable(getattr(load_function(module), name))


def test_notifications_call_the_consumer() -> None:
    parts = read_template()["Resources"]
    subscription = parts["ConsumerSubscription"]["Properties"]
    assert subscription["TopicArn"] == {"Ref": "NotificationTopic"}
    assert subscription["Endpoint"] == {"GetAtt": "ConsumerFunction.Arn"}
    assert parts["ConsumerPermission"]["Properties"]["SourceArn"] == {"Ref": "NotificationTopic"}


def test_function_of_the_scribe_does_a_turn_and_raises_failures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = load_function("scribe_function")
    folder = str(tmp_path / "home")
    monkeypatch.setenv("TIDELOG_LEASE_TTL_MS", "1000")  # how long the other one is watched
    with create_home(load_settings(folder, dict(os.environ), tmp_path))[0] as home:
        home.create_topic("orders")
        home.append("orders", [Event(b"one")])
        monkeypatch.setenv("TIDELOG_HOME", folder)
        assert module.handle({}, None)["topics"] == 1
        scribe = home.scribe()._holding
        assert scribe.try_take()
        with scribe.beating(), pytest.raises(UnavailableError, match="another scribe"):
            module.handle({}, None)


@dataclass
class Cloud:
    """A home behind recorders."""

    home: str  # config string
    recorder: Recorder
    names: dict[str, str]


@pytest.fixture
def cloud(
    s3_server: S3,
    dynamodb_server: DynamoDb,
    moto_server: Moto,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[Cloud]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    monkeypatch.setenv("AWS_REGION", s3_server.region)
    monkeypatch.setenv("TIDELOG_LEASE_TTL_MS", "600000")  # nobody is taken for dead here
    bucket, table = s3_server.fresh_bucket("policies"), f"policies-{uuid.uuid4().hex[:8]}"
    sns = boto3.client("sns", endpoint_url=moto_server.endpoint, region_name=moto_server.region)
    topic = sns.create_topic(Name=table)["TopicArn"]
    sns.close()
    recorder = Recorder()
    with ExitStack() as stack:
        s3 = stack.enter_context(recording(s3_server.endpoint, recorder))
        rows = stack.enter_context(recording(dynamodb_server.endpoint, recorder))
        told = stack.enter_context(recording(moto_server.endpoint, recorder))
        store = quote(f"s3://{bucket}/events?endpoint={s3}&region={s3_server.region}", safe=":/")
        catalog = quote(f"dynamodb://{table}?endpoint={rows}&region=us-east-1", safe=":/")
        home = f"tidelog:?store={store}&catalog={catalog}"
        made = create_home(load_settings(home, {}, tmp_path))[0]
        made.create_topic("orders", 2, notify=[f"sns:{topic}?endpoint={told}"])
        made.close()
        recorder.rights.clear()
        yield Cloud(
            home,
            recorder,
            {"Bucket": bucket, "Prefix": "events", "Table": table, "NotificationTopic": topic},
        )


@pytest.mark.server
def test_producers_need_what_their_policy_allows_and_no_less(cloud: Cloud) -> None:
    """One with a name and one without, a lost reply of each server, and notifications."""
    with open_home(cloud.home) as home:
        cloud.recorder.lose = [f"PUT /{cloud.names['Bucket']}"]
        with home.producer("orders", name="importer") as producer:
            producer.send(b"one", key=b"k").result(60)
        home.append("orders", [Event(b"two", b"k"), Event(b"three", b"l")])
        cloud.recorder.lose = ["POST /"]
        home.append("orders", [Event(b"four", b"k")])
        until(lambda: any(r.action == "sns:Publish" for r in list(cloud.recorder.rights)))
    _check("ProducerPolicy", cloud)


@pytest.mark.server
def test_consumers_need_what_their_policy_allows_and_no_less(cloud: Cloud) -> None:
    """Two members that share, commit, seek and leave; a read by offset; an object that is gone."""
    with open_home(cloud.home) as home:
        home.append("orders", [Event(b"%d" % n, b"%d" % n) for n in range(100)])
    cloud.recorder.rights.clear()
    with open_home(cloud.home) as home:
        _consume(home)
        assert list(home.read("orders", 0))
        assert home.lag("orders")
    _lose_an_object(cloud)
    with open_home(cloud.home) as home, pytest.raises(TidelogError):
        list(home.read("orders", 0))
    _check("ConsumerPolicy", cloud)


@pytest.mark.server
def test_the_consumer_function_needs_what_its_role_allows_and_no_less(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is notified by SNS, stops before the end, and is called again by its own notification."""
    with open_home(cloud.home) as home:
        home.append("orders", [Event(b"%d" % n) for n in range(30)], partition=0)
        until(lambda: any(r.action == "sns:Publish" for r in list(cloud.recorder.rights)))
    monkeypatch.setenv("TIDELOG_HOME", cloud.home)
    notice = '{"topic": "orders", "partition": 0, "offset": 29}'
    records = {"Records": [{"EventSource": "aws:sns", "Sns": {"Message": notice}}]}
    cloud.recorder.rights.clear()
    function = load_function("consumer_function")
    handle = consumer_handler(function.show, "printer", max_events=20)
    [first] = handle(records, None)["partitions"]
    assert (first["events_read"], first["notified_again"]) == (20, True)
    [second] = function.handle(records, None)["partitions"]
    assert (second["events_read"], second["done"]) == (10, True)
    assert capsys.readouterr().out.splitlines()[-1] == "orders/0/29: b'29'"
    allowed = allowed_by("ConsumerRole", cloud.names) + allowed_by("ConsumerPolicy", cloud.names)
    refused = [r for r in cloud.recorder.rights if not any(allows(each, r) for each in allowed)]
    assert refused == []
    assert Right("sns:Publish", cloud.names["NotificationTopic"]) in cloud.recorder.rights


@pytest.mark.server
def test_functions_that_append_need_no_more_than_producers(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of records, given twice, and a pixel."""
    monkeypatch.setenv("TIDELOG_HOME", cloud.home)
    monkeypatch.setenv("PUMP_TOPIC", "orders")
    monkeypatch.setenv("PIXEL_TOPICS", "orders")
    batch = {"Records": [record(b"one", 1), record(b"two", 2, "l")]}
    pump = load_function("pump_function")
    assert [pump.handle(batch, None)["events"] for _ in range(2)] == [2, 2]
    answer = load_function("pixel_function").handle(request("/track.gif", "a=1"), None)
    assert answer["statusCode"] == 200
    with open_home(cloud.home) as home:
        assert sum(state.events for state in home.partitions("orders")) == 3
    allowed = allowed_by("ProducerPolicy", cloud.names)
    before = cloud.recorder.rights - {r for r in cloud.recorder.rights if "Query" in r.action}
    assert [r for r in before if not any(allows(each, r) for each in allowed)] == []
    parts = read_template()["Resources"]
    for name in ("PumpRole", "PixelRole"):
        assert {"Ref": "ProducerPolicy"} in parts[name]["Properties"]["ManagedPolicyArns"]


@pytest.mark.server
def test_playback_function_needs_what_its_role_allows(cloud: Cloud, moto_server: Moto) -> None:
    name = f"played-{uuid.uuid4().hex[:8]}"
    client = boto3.client("kinesis", endpoint_url=moto_server.endpoint, region_name="us-east-1")
    client.create_stream(StreamName=name, ShardCount=1)
    client.close()
    with open_home(cloud.home) as home:
        home.append("orders", [Event(b"one"), Event(b"two")], partition=0)
    cloud.recorder.rights.clear()
    with recording(moto_server.endpoint, cloud.recorder) as url:
        to = f"kinesis://{name}?endpoint_url={url}&region=us-east-1"
        played = playback_handler(to=to, home=cloud.home)({"topic": "orders"}, None)
    assert (played["events"], played["finished"]) == (2, True)
    names = {**cloud.names, "PlaybackStreamArn": f"*{name}"}
    allowed = allowed_by("PlaybackRole", names) + allowed_by("ConsumerPolicy", cloud.names)
    assert [r for r in cloud.recorder.rights if not any(allows(each, r) for each in allowed)] == []
    used = {right.action for right in cloud.recorder.rights}
    assert {each.action for each in allowed_by("PlaybackRole", names)} <= used


def test_who_notifies_the_consumer_directly_needs_one_right_more() -> None:
    recorder = Recorder()
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "word"}
    with lambda_endpoint() as endpoint, recording(endpoint.url, recorder) as url:
        target = open_target(f"lambda:{FUNCTION}?endpoint={url}", keys)
        target.send(Notification("orders", 0, 1))
    [allowed] = allowed_by("InvokePolicy", {"ConsumerFunction": FUNCTION})
    assert all(allows(allowed, right) for right in recorder.rights)
    assert recorder.rights


@pytest.mark.server
def test_the_scribe_needs_what_its_role_allows_and_no_less(cloud: Cloud, s3_server: S3) -> None:
    """A round over a topic with an update and a delete, with a sweep of what it replaced."""
    left_behind = {"Bucket": cloud.names["Bucket"], "Key": "events/topics/broken"}
    s3_server._client().create_multipart_upload(**left_behind)
    with open_home(cloud.home) as home:
        home.append("orders", [Event(b"%d" % n, b"k", id=f"o{n}") for n in range(50)])
        home.update("orders", "o1", b"other")
        home.delete("orders", ["o2"])
    cloud.recorder.rights.clear()
    for command in (["scribe", "--once", "--amended", "--grace", "0s"], ["sweep", "--grace", "0s"]):
        done = CliRunner().invoke(cli, ["--home", cloud.home, *command])
        assert done.exit_code == 0, (done.output, done.exception)
        time.sleep(1.1)  # the store tells ages in seconds
    _check("ScribeRole", cloud)


def _consume(home: Home) -> None:
    with home.consumer("orders", "billing") as one, home.consumer("orders", "billing") as two:
        handled = 0
        while handled < 100:
            for member in (one, two):
                handled += len(member.poll(30, timeout_s=0.1))
                member.commit()


def _lose_an_object(cloud: Cloud) -> None:
    before = set(cloud.recorder.rights)
    with open_home(cloud.home) as home:
        home.store.delete([info.key for info in home.store.list("topics/")])
    cloud.recorder.rights = before


def _check(policy: str, cloud: Cloud) -> None:
    allowed = allowed_by(policy, cloud.names)
    refused = {r for r in cloud.recorder.rights if not any(allows(each, r) for each in allowed)}
    assert refused == set(), "requests that AWS would refuse"
    unused = {
        each.action
        for each in allowed
        if not any(allows(each, right) for right in cloud.recorder.rights)
    }
    assert unused == set(), "rights that nobody needs"
    for each in allowed:
        for pattern in each.leading:
            used = [
                r for r in cloud.recorder.rights if allows(each._replace(leading=(pattern,)), r)
            ]
            assert used or _by_another_action(allowed, each.leading, pattern, cloud), pattern


def _by_another_action(
    allowed: list[object], leading: tuple[str, ...], pattern: str, cloud: Cloud
) -> bool:
    """A statement's keys are for all its actions: one of them must have used this one."""
    return any(
        allows(each._replace(leading=(pattern,)), right)  # type: ignore[attr-defined]
        for each in allowed
        if each.leading == leading  # type: ignore[attr-defined]
        for right in cloud.recorder.rights
    )


@pytest.mark.parametrize("policy", ["ProducerPolicy", "ConsumerPolicy"])
def test_neither_policy_reaches_beyond_its_purpose(policy: str) -> None:
    names = {"Bucket": "b", "Prefix": "events", "Table": "t", "NotificationTopic": "arn"}
    allowed = allowed_by(policy, names)
    assert not any("*" in each.action for each in allowed)
    beyond = [
        Right("s3:DeleteObject", "b/events/topics/x"),
        Right("s3:PutObject", "b/events/home.json"),
        Right("s3:GetObject", "b/events/archives/daily/x"),
        Right("s3:GetObject", "b/elsewhere/x"),
        Right("dynamodb:PutItem", "t", "home"),
        Right("dynamodb:GetItem", "t", "audit/x"),
        Right("dynamodb:PutItem", "other", "topic/x/0"),
        Right("dynamodb:PutItem", "t", "registry"),
        Right("dynamodb:DeleteItem", "t", "registry"),
        Right("dynamodb:UpdateItem", "t", "registry"),
        Right("dynamodb:PutItem", "t", "pipeline/x"),
        Right("dynamodb:PutItem", "t", "erased/x/00"),
        Right("dynamodb:Scan", "t"),
        Right("dynamodb:DeleteTable", "t"),
    ]
    other = {
        "ProducerPolicy": [
            Right("dynamodb:PutItem", "t", "consumer/x/y"),
            Right("dynamodb:PutItem", "t", "registry"),
        ],
        "ConsumerPolicy": [
            Right("dynamodb:PutItem", "t", "topic/x/0"),
            Right("s3:PutObject", "b/events/topics/x"),
            Right("sns:Publish", "arn"),
        ],
    }
    for right in beyond + other[policy]:
        assert not any(allows(each, right) for each in allowed), right
