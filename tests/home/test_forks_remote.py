"""A forked child and remote stores: their threads are not there after a fork, so it is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.servers.s3 import S3
from tests.support.child_processes import ROOT
from tests.support.homes import a_store
from tidelog import Event
from tidelog.errors import InvalidError
from tidelog.home import create_home
from tidelog.settings import config_string, load_settings

pytestmark = pytest.mark.server


@pytest.fixture
def url(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    bucket = s3_server.fresh_bucket()
    return f"s3://{bucket}/some/prefix?endpoint={s3_server.endpoint}&region={s3_server.region}"


def check_refused(call: Callable[[], object], match: str) -> None:
    with pytest.raises(InvalidError, match=match) as told:
        call()
    assert "\n" not in str(told.value)


def in_child(work: Callable[[], None]) -> None:
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001 - shown, and the exit code tells
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_child_of_a_process_with_a_remote_home_is_refused(url: str, tmp_path: Path) -> None:
    config = config_string(url, f"sqlite://{tmp_path}/catalog.sqlite")
    home, _ = create_home(load_settings(config, dict(os.environ), tmp_path))
    home.create_topic("orders")
    home.append("orders", [Event(b"before")])

    def child() -> None:
        inherited = "open the home again in this one"
        check_refused(lambda: home.append("orders", [Event(b"refused")]), inherited)
        check_refused(lambda: list(home.read("orders")), inherited)
        check_refused(lambda: home.sweep(0), inherited)
        check_refused(lambda: home.verify("orders"), inherited)
        check_refused(home.inspect, inherited)
        check_refused(home.close, inherited)
        check_refused(lambda: home.store.put("x", b""), "forked from")
        check_refused(lambda: a_store(url), "forked from")

    in_child(child)
    home.append("orders", [Event(b"after")])
    assert [event.value for event in home.read("orders")] == [b"before", b"after"]
    home.close()


OPENS_AFTER = """
import os, sys
import tidelog.store.remote
from tests.support.homes import a_store

child = os.fork()
if child == 0:
    a_store(sys.argv[1]).put("a", b"by the child")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
store = a_store(sys.argv[1])
assert store.get("a") == b"by the child"
"""


def test_child_opens_a_remote_store_where_its_parent_had_none(url: str) -> None:
    subprocess.run([sys.executable, "-c", OPENS_AFTER, url], cwd=ROOT, check=True, timeout=120)
