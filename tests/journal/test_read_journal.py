"""Journals by their URLs: what a reader without a home gets of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import pytest

import tidelog
from tests.support.serving import serving
from tidelog import Event, Home
from tidelog.errors import CorruptError, InvalidError, NotFoundError, UnavailableError
from tidelog.home import create_home
from tidelog.journal.listing import fetch_url
from tidelog.settings import load_settings

SCRIPT = Path(__file__).parents[2] / "docs" / "read_journals.py"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = create_home(load_settings(str(tmp_path / "home"), {}, tmp_path))[0]
    home.create_topic("t", 2)
    events = [
        Event(b"%d" % n, b"k%d" % n, f"id-{n}", 1_000 + n, "x", (("h", b"v"),)) for n in range(40)
    ]
    for first in range(0, 40, 10):
        home.append("t", events[first : first + 10])
    return home


def amend(home: Home) -> None:
    home.update("t", "id-3", b"small")
    home.update("t", "id-4", b"large" * 5_000)
    home.update("t", "id-5", None)
    home.delete("t", ["id-6", "id-39"])


def listed(home: Home) -> list[dict[str, object]]:
    """Entries as another program gets them."""
    found = home.journals("t", presign="1h")
    return [json.loads(msgspec.json.encode(entry)) for entry in found]


def read(home: Home) -> list[Event]:
    return [event for entry in listed(home) for event in tidelog.read_journal(entry)]


def expected(home: Home) -> list[Event]:
    starts = [state.start for state in home.partitions("t")]
    return [event for number in (0, 1) for event in home.read("t", number, starts[number])]


@pytest.mark.parametrize(
    "steps", ["runs", "amended runs", "journals", "amended journals", "trimmed"]
)
def test_reader_without_a_home_gets_what_the_topic_holds(home: Home, steps: str) -> None:
    if steps != "runs" and "runs" in steps:
        amend(home)
    if "journals" in steps or steps == "trimmed":
        home.compile("t")
    if steps == "amended journals":
        amend(home)
    if steps == "trimmed":
        home.trim("t", tidelog.ToOffsets({0: 5, 1: 7}))
    found = read(home)
    assert found == expected(home)
    assert found
    assert read(home) == [
        event for entry in home.journals("t", presign="1m") for event in tidelog.read_journal(entry)
    ]
    home.close()


def test_script_of_the_documents_reads_what_the_command_lists(home: Home) -> None:
    """It has neither tidelog nor credentials; pyarrow alone."""
    amend(home)
    lines = "".join(json.dumps(entry) + "\n" for entry in listed(home))
    done = subprocess.run(
        [sys.executable, "-S", "-c", _WITHOUT_TIDELOG, str(SCRIPT), _packages()],
        input=lines,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    wanted = expected(home)
    assert [each["id"] for each in found] == [event.id for event in wanted]
    assert [each["offset"] for each in found] == [event.offset for event in wanted]
    values = [None if event.value is None else event.value.decode() for event in wanted]
    assert [each["value"] for each in found] == values
    home.close()


def _packages() -> str:
    return str(Path(msgspec.__file__).parents[1])


_WITHOUT_TIDELOG = """
import runpy, sys
sys.modules["tidelog"] = None
sys.path.append(sys.argv[2])
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_entries_that_cannot_be_read_say_why(home: Home, tmp_path: Path) -> None:
    amend(home)
    plain = next(home.journals("t"))
    with pytest.raises(InvalidError, match="list it with presign"):
        list(tidelog.read_journal(plain))
    entry = next(each for each in home.journals("t", presign="1h") if each.updated)
    replace = msgspec.structs.replace
    with pytest.raises(InvalidError, match="lacks the new value"):
        list(tidelog.read_journal(replace(entry, values=())))
    with pytest.raises(CorruptError, match="checksum"):
        list(tidelog.read_journal(replace(entry, crc32c=1)))
    gone = replace(entry, url=(tmp_path / "gone").as_uri())
    with pytest.raises(NotFoundError, match="is gone"):
        list(tidelog.read_journal(gone))
    with pytest.raises(InvalidError, match="another kind"):
        list(tidelog.read_journal(replace(entry, url="ftp://host/x")))
    with pytest.raises(UnavailableError, match="no answer"):
        list(tidelog.read_journal(replace(entry, url="http://127.0.0.1:9/x")))
    with pytest.raises(InvalidError, match="give an entry"):
        list(tidelog.read_journal({"topic": "t"}))
    home.close()


def test_server_lists_what_is_needed_and_a_status_is_told(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.post({"value": "one", "id": "a"})
        served.home.update("t", "a", b"two")
        page = httpx.get(f"{served.url}/topics/t/journals?presign=1h").json()
        [entry] = page["journals"]
        assert [event.value for event in tidelog.read_journal(entry)] == [b"two"]
        with pytest.raises(NotFoundError, match="404"):
            fetch_url(f"{served.url}/nothing", "journal", 0, 1)


def test_event_exists_by_its_whole_id_until_it_is_deleted(home: Home) -> None:
    assert home.event_exists("t", "id-3")
    assert not home.event_exists("t", "id-")
    home.delete("t", "id-3")
    assert not home.event_exists("t", "id-3")
    with pytest.raises(NotFoundError, match="topic `u`"):
        home.event_exists("u", "id-3")
    home.close()


def test_turn_ends_after_so_many_amendments_and_the_next_goes_on(home: Home) -> None:
    home.compile("t")
    home.delete("t", [f"id-{n}" for n in range(40)])
    how = tidelog.ScribeOptions(
        policy=tidelog.CompilePolicy.everything(), max_amendments=1, grace_ms=None
    )
    first = home.scribe_once(how)
    assert first is not None
    assert (first.finished, first.compiled.journals) == (False, 1)
    second = home.scribe_once(how)
    assert second is not None
    assert first.compiled.amendments + second.compiled.amendments == 40
    with pytest.raises(InvalidError, match="max_amendments"):
        tidelog.ScribeOptions(max_amendments=0)
    home.close()
