"""The console as a person uses it, in a real browser."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.browser.person import Person
from tests.support.serving import Served, serving
from tidelog import Event, Home
from tidelog.archive.archive import committed_files, create_archive, find_archive, open_pipeline
from tidelog.coordination.tokens import create_token
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.model.event import to_iso
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pump import PumpOptions, open_pump
from tidelog.pipeline.tasks import LocalWorkers

HOSTILE = "<img src=x onerror=\"document.title='broken into'\"><script>document.title='x'</script>"
HOUR_MS = 3_600_000


def fill(home: Home) -> None:
    """Traffic of a few hours, a consumer on its way, an archive with dead letters, and a pump."""
    chance = random.Random(7)
    now_ms = home.context.clock.now_ms()
    for name, partitions in (("orders", 4), ("clicks", 2), ("orders-again", 4), ("hostile", 1)):
        home.create_topic(name, partitions)
    times = sorted(now_ms - int(abs(chance.gauss(0, 1.2)) * 2 * HOUR_MS) for _ in range(4_000))
    home.append("orders", [order(number, at) for number, at in enumerate(times)])
    home.update("orders", "order-3990", order(1, now_ms).value, why="wrong amount")
    home.delete("orders", "order-3991", why="entered twice")
    home.append("clicks", [Event(b'{"page": "/p/%d"}' % n, key=b"v%d" % n) for n in range(500)])
    home.append(
        "hostile", [Event(HOSTILE.encode(), key=HOSTILE.encode(), id=HOSTILE, type=HOSTILE)]
    )
    for topic, name, polls in (("orders", "billing", 4), ("orders", "search-index", 1)):
        with home.consumer(topic, name) as consumer:
            for _ in range(polls):
                consumer.poll(300)
            consumer.commit()
    wanted = Archive(
        "daily",
        home.context.ids.new(),
        "topic:orders",
        "partition",
        home.store.url,
        "archives/daily",
        now_ms,
        {1: ArchiveFormat(parser="iso8601:at")},
        dead_share_max=1.0,
    )
    create_archive(home.context, wanted)
    home.append("orders", [Event(b'{"made": "2026-11-15T10:00:00Z"}') for _ in range(12)])
    pipeline = open_pipeline(home.context, home.archives.get("daily").info, LocalWorkers())
    Driver(home.context, pipeline, DriverOptions()).run()
    pump = open_pump(home.context, PumpOptions("topic:clicks", "t", "copying"), LocalWorkers())
    Driver(home.context, pump, DriverOptions()).run()


def order(number: int, at_ms: int) -> Event:
    value = {"order": number, "amount": number % 211 + 0.5, "at": to_iso(at_ms)}
    customer = f"customer-{number % 40}"
    return Event(
        json.dumps({**value, "customer": customer}).encode(),
        key=customer.encode(),
        id=f"order-{number}",
        timestamp=at_ms,
        type="order.placed",
    )


@pytest.fixture(scope="module")
def home_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("home"), first=fill) as found:
        yield found


@pytest.fixture
def served(home_served: Served) -> Served:
    return home_served


PAGES = {
    "overview": "/",
    "topics": "/console/topics",
    "create-topic": "/console/create-topic",
    "append": "/console/topics/orders/produce",
    "correct": "/console/topics/orders/events/0/3/correct",
    "topic": "/console/topics/orders",
    "events": "/console/topics/orders/events?by=time&start=-30m",
    "hostile": "/console/topics/hostile/events",
    "event": "/console/topics/orders/events/0/3",
    "consumers": "/console/consumers",
    "consumer": "/console/consumer?topic=orders&name=billing",
    "archives": "/console/archives",
    "archive": "/console/archives/daily",
    "files": "/console/archives/daily/files?under=orders",
    "dead-letters": "/console/archives/daily/dead",
    "pump": "/console/pumps/copying",
    "journals": "/console/journals",
    "journal": "/console/topics/orders/journals",
    "jobs": "/console/jobs",
    "tokens": "/console/tokens",
    "sql": "/console/sql?q=select+1",
    "docs": "/docs",
}


@pytest.mark.parametrize(
    ("name", "width", "height", "scheme"),
    [
        pytest.param("light", 1280, 900, "light", marks=pytest.mark.long),
        ("dark", 1280, 900, "dark"),
        ("phone", 390, 844, "light"),
    ],
)
def test_every_page_fits_its_screen(
    served: Served, person: Person, axe: str, name: str, width: int, height: int, scheme: str
) -> None:
    """And axe-core, by the rules of WCAG, finds nothing on it that some people cannot use."""
    person.looks(width, height, scheme)
    grounds = set()
    for page, path in PAGES.items():
        person.opens(served.url + path)
        person.finds("h1")
        if page == "topic":
            person.finds("#timeline rect.bar")
        assert not person.is_too_wide, page
        assert person.driver.title.endswith("Tidelog"), page
        ground = "return getComputedStyle(document.body).backgroundColor"
        grounds.add(person.driver.execute_script(ground))
        person.takes_a_picture(page if name == "light" else f"{page}-{name}")
        rules = ["color-contrast"] if scheme == "dark" else []  # all else is the same by night
        assert person.violations(axe, *rules) == [], page
    assert len(grounds) == 1
    red = int(re.findall(r"\d+", grounds.pop())[0])
    assert (red < 60) == (scheme == "dark")


@pytest.mark.parametrize("width", [780, 1024])
def test_every_page_fits_half_a_screen(served: Served, person: Person, width: int) -> None:
    """Where tables of many columns have no room; the header has one row for its links."""
    person.looks(width, 900)
    header = "return document.querySelector('header').getBoundingClientRect().height"
    for page, path in PAGES.items():
        person.opens(served.url + path)
        person.finds("h1")
        assert not person.is_too_wide, page
        assert person.driver.execute_script(header) < 100, page
        person.takes_a_picture(f"{page}-{width}")


def test_an_event_is_found_by_time_on_the_timeline(served: Served, person: Person) -> None:
    person.opens(f"{served.url}/console/topics")
    person.clicks("table a", "orders")
    person.finds("#timeline rect.bar")
    whole = person.finds("#timeline-says", "events from").text
    person.drags("#timeline", 0.55, 0.75)
    person.waits_for(lambda: "start=" in person.url, "range in the address")
    person.waits_for(
        lambda: (said := person.finds("#timeline-says").text) != whole and "events from" in said,
        "narrower range",
    )
    person.drags("#timeline", 0.4, 0.6)
    before = person.url
    person.waits_for(lambda: person.finds("#timeline rect.bar"), "bars")
    person.takes_a_picture("timeline-zoomed")
    said = person.finds("#timeline-says", "events from").text
    start, end = re.findall(r"\d{4}-\S+Z", said)
    person.clicks("#timeline-look")
    person.finds("table.events tbody tr")
    times = [each.text for each in person.driver.find_elements(By.CSS_SELECTOR, "td time")]
    assert times == sorted(times)
    assert all(start <= time <= end for time in times)
    person.clicks("table.events tbody th a")
    person.sees("order.placed")
    person.finds("pre.bytes", '"amount"')
    person.clicks(".tabs a", "Hex")
    person.finds("pre.bytes", "00000000  7b 22")
    person.driver.back()
    person.driver.back()
    person.driver.back()
    person.waits_for(lambda: person.url == before, "page where we began")


def test_charts_are_in_the_time_zone_of_their_reader(served: Served, person: Person) -> None:
    zone = "Emulation.setTimezoneOverride"
    person.driver.execute_cdp_cmd(zone, {"timezoneId": "Asia/Kolkata"})
    try:
        person.opens(f"{served.url}/console/topics/orders")
        said = person.finds("#timeline-says", "+05:30")
        assert (said.get_attribute("title") or "").endswith("Z (UTC)")
        person.opens(f"{served.url}/console/archives/daily")
        shown = person.finds("figcaption time")
        there = datetime.fromisoformat(shown.get_attribute("datetime") or "")
        assert shown.text == (there + timedelta(hours=5, minutes=30)).strftime("%Y-%m-%d %H:%M")
    finally:
        person.driver.execute_cdp_cmd(zone, {"timezoneId": ""})


def test_times_are_typed_in_the_time_zone_of_their_reader(served: Served, person: Person) -> None:
    zone = "Emulation.setTimezoneOverride"
    person.driver.execute_cdp_cmd(zone, {"timezoneId": "Asia/Kolkata"})
    try:
        person.opens(f"{served.url}/console/topics/orders")
        person.finds("#timeline-says", "+05:30")
        person.clicks("#timeline-play")
        person.finds("#playback label", "Asia/")
        shown = person.finds("#play-start").get_attribute("value") or ""
        assert datetime.fromisoformat(shown.replace(" +", "+")).utcoffset() == timedelta(
            hours=5, minutes=30
        )
        person.opens(f"{served.url}/console/topics/orders/events?by=time")
        person.types('input[name="start"]', "2026-11-15 10:00")
        person.types('input[name="end"]', "-5m")
        person.clicks("#find button")
        person.waits_for(lambda: "start=2026-11-15T04%3A30%3A00.000Z" in person.url, "UTC")
        assert "end=-5m" in person.url
        kept = person.finds('input[name="start"]').get_attribute("value")
        assert kept == "2026-11-15 10:00:00.000 +05:30"
    finally:
        person.driver.execute_cdp_cmd(zone, {"timezoneId": ""})


def test_the_timeline_by_keys_alone(served: Served, person: Person) -> None:
    person.opens(f"{served.url}/console/topics/orders")
    person.finds("#timeline rect.bar")
    person.driver.execute_script("document.getElementById('timeline').focus()")
    person.presses(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    person.finds("#timeline rect.bar.on")
    chosen = person.finds("#timeline-says", "events from").text
    person.presses(Keys.ENTER)
    person.waits_for(lambda: "start=" in person.url, "range in the address")
    start = re.findall(r"\d{4}-\S+Z", chosen)[0]
    person.finds("#timeline-says", start[:16])
    person.presses("-")
    person.waits_for(lambda: start not in person.finds("#timeline-says").text, "wider range")
    person.presses(Keys.ESCAPE)
    person.waits_for(lambda: "start=" not in person.url, "whole range")


def test_the_tail_is_followed_while_events_arrive(served: Served, person: Person) -> None:
    person.opens(f"{served.url}/console/topics/orders")
    person.clicks("a.button", "Follow the tail")
    person.finds("#tail-says", "Waiting for events")
    for number in range(5):
        served.home.append("orders", [order(90_000 + number, served.home.context.clock.now_ms())])
        person.finds("#tail-rows tr", f'"order": {90_000 + number}')
    served.home.append("orders", [Event(f"\u061c\xad{HOSTILE}".encode(), key=b"\xff"), Event(None)])
    person.finds("#tail-rows tr", rf"\u{{61c}}\u{{ad}}{HOSTILE}")
    person.finds("#tail-rows tr", "tombstone")
    person.finds("#tail-says", "7 events since you began to follow")
    person.takes_a_picture("tail")
    assert "broken" not in person.driver.title
    person.clicks("#tail-switch")
    served.home.append("orders", [Event(b"while it is paused")])
    time.sleep(0.6)
    assert "while it is paused" not in person.finds("#tail-rows").text
    person.types("#tail-filter", "wanted")
    person.clicks("#tail-switch")
    person.finds("#tail-says", "since you began to follow")
    served.home.append("orders", [Event(b"not this"), Event(b"this is WANTED")])
    person.finds("#tail-rows tr", "this is WANTED")
    assert "not this" not in person.finds("#tail-rows").text


def test_a_copied_table_runs_nothing_in_a_spreadsheet(served: Served, person: Person) -> None:
    person.opens(f"{served.url}/console/sql")
    person.types("#query", """select '=HYPERLINK("http://x")' a, '@x' b, -1.5 c, 'a=b' d""")
    person.clicks("button", "Run")
    person.finds("#rows td", "HYPERLINK")
    person.driver.execute_script("navigator.clipboard.writeText = (text) => { window.got = text; }")
    person.clicks("[data-copy-table]")
    copied = person.waits_for(lambda: person.driver.execute_script("return window.got"), "copy")
    assert copied == "a\tb\tc\td\n'=HYPERLINK(\"http://x\")\t'@x\t-1.5\ta=b"


def test_a_cursor_is_moved(served: Served, person: Person) -> None:
    person.opens(f"{served.url}/console/consumers")
    person.clicks("table a", "billing")
    person.finds("h1", "billing")
    person.chooses('select[name="where"]', "earliest")
    person.clicks("#seek button")
    said = person.sees("will be handled again")
    assert "Move the cursor of billing?" in said
    person.takes_a_picture("move")
    person.clicks("a.button", "Leave it as it is")
    person.finds("h1", "billing")
    assert any(lag.cursor for lag in served.home.lag("orders") if lag.consumer == "billing")
    person.chooses('select[name="where"]', "earliest")
    person.clicks("#seek button")
    person.clicks("button", "Move the cursor")
    person.sees("Cursor moved")
    lags = [lag for lag in served.home.lag("orders") if lag.consumer == "billing"]
    assert all(not lag.cursor for lag in lags)
    person.clicks("a.button", "Back to billing")
    person.finds("#lag")
    person.sees(f"{sum(lag.events for lag in lags):,} events")


def test_dead_letters_are_replayed(served: Served, person: Person) -> None:
    person.opens(f"{served.url}/console/archives")
    person.clicks("table a", "daily")
    person.clicks("a.button", "Dead letters")
    person.sees("field at is missing or null")
    person.types('input[name="parser"]', "iso8601:made")
    person.clicks("button", "Preview the replay …")
    person.sees("Parser iso8601:made accepts 12 of 12, and rejects 0.")
    person.takes_a_picture("replay")
    person.clicks("button", "Replay them")
    person.sees("12 archived now, 0 still dead")
    person.takes_a_picture("replayed")
    person.opens(f"{served.url}/console/archives/daily/dead")
    person.sees("There are none")
    archive = find_archive(served.home.context, "daily")
    assert sum(file.events for _, file in committed_files(served.home.context, archive)) == 4_011


def test_a_person_is_erased_and_the_proof_is_seen(served: Served, person: Person) -> None:
    person.opens(f"{served.url}/console/topics/orders/events?by=key&key=customer-11")
    person.clicks("table.events tbody th a")
    person.clicks("a.button", "Erase …")
    person.finds("h1", "Journals of orders")
    person.finds('textarea[name="ids"]').clear()
    person.types('input[name="key"]', "customer-11")
    person.types('input[name="why"]', "request 2026-118")
    person.clicks("#erase button")
    said = person.sees("That cannot be undone")
    assert "customer-11" in said
    person.takes_a_picture("erase")
    person.clicks("button", "Erase them for good")
    said = person.sees("Erased: nothing is left")
    assert "request 2026-118" in said
    person.takes_a_picture("proof")
    keys = [event.key for part in range(4) for event in served.home.read("orders", part)]
    assert b"customer-11" not in keys
    person.opens(f"{served.url}/console/topics/orders/journals")
    person.sees("delete by key")
    person.takes_a_picture("audit")
    person.opens(f"{served.url}/console/topics/orders/events?by=key&key=customer-11")
    person.sees("None of those that were looked at fits")


def test_a_range_is_played_back_into_another_topic(served: Served, person: Person) -> None:
    person.opens(f"{served.url}/console/topics/orders")
    person.finds("#timeline rect.bar")
    person.drags("#timeline", 0.5, 0.7)
    person.waits_for(lambda: "start=" in person.url, "range in the address")
    person.finds("#timeline-says", "events from")
    person.clicks("#timeline-play")
    person.types('input[name="target"]', "orders-again")
    person.clicks("#playback button")
    person.sees("to orders-again")
    person.clicks("button", "Begin the playback")
    person.sees("events played")
    played = re.search(r"([\d,]+) events played", person.text)
    assert played is not None
    copied = sum(state.events for state in served.home.partitions("orders-again"))
    assert copied == int(played[1].replace(",", "")) > 0
    zone = "Emulation.setTimezoneOverride"
    person.driver.execute_cdp_cmd(zone, {"timezoneId": "Asia/Kolkata"})
    try:
        person.opens(f"{served.url}/console/jobs")
        person.finds("tbody th a", "+05:30 to ")
    finally:
        person.driver.execute_cdp_cmd(zone, {"timezoneId": ""})


def test_figures_keep_up_by_themselves(served: Served, person: Person) -> None:
    served.home.create_topic("growing")
    person.opens(f"{served.url}/console/topics?q=growing")
    person.finds("table tbody tr", "growing")
    served.home.append("growing", [Event(b"x") for _ in range(1234)])
    person.finds("table tbody tr", "1,234")


def test_light_and_dark_can_be_chosen(served: Served, person: Person) -> None:
    person.opens(f"{served.url}/")
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = person.driver.execute_script(ground)
    person.clicks("#theme")
    dark = person.driver.execute_script(ground)
    assert light != dark
    person.opens(f"{served.url}/console/topics")  # it is remembered
    assert person.driver.execute_script(ground) == dark
    person.clicks("#theme")
    assert person.driver.execute_script(ground) == light


def test_keys_lead_from_page_to_page(served: Served, person: Person) -> None:
    person.opens(f"{served.url}/")
    person.finds("h1", "Overview")
    person.presses(Keys.TAB)
    assert person.driver.switch_to.active_element.text == "Skip to the contents"
    person.presses("g", "t")
    person.finds("h1", "Topics")
    person.presses("/")
    person.presses("clicks", Keys.ENTER)
    person.waits_for(lambda: "q=clicks" in person.url, "search")
    person.waits_for(lambda: "orders" not in person.finds("table tbody").text, "shorter table")


def test_hostile_values_stay_values(served: Served, person: Person) -> None:
    for path in ("/console/topics/hostile/events", "/console/topics/hostile/events/0/0"):
        person.opens(served.url + path)
        person.sees(HOSTILE)
        assert person.driver.title.endswith("Tidelog")
        assert not person.driver.find_elements(By.CSS_SELECTOR, 'img[src="x"]')


def test_the_first_token_is_made_and_used(person: Person, tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        person.opens(f"{served.url}/console/tokens")
        person.types('input[name="label"]', "mine")
        assert person.finds('input[name="admin"]').is_selected(), "or no page could create another"
        person.clicks("button", "Create it")
        text = person.finds("#token").text
        person.opens(f"{served.url}/console/topics")
        person.sees("This home needs a token")
        person.takes_a_picture("login")
        person.types('input[name="token"]', "wrong")
        person.clicks("main button", "Log in")
        person.sees("This token is unknown, expired, or has no scope")
        person.types('input[name="token"]', text)
        person.clicks("main button", "Log in")
        person.finds(".who .badge", "mine")
        cookies = {each["name"]: each for each in person.driver.get_cookies()}
        assert cookies["tidelog_console"]["httpOnly"]
        assert cookies["tidelog_console"]["sameSite"] == "Strict"
        _, reads = create_token(served.home.context, ["read"], "only looks")
        person.clicks("button", "Log out")
        person.types('input[name="token"]', reads)
        person.clicks("main button", "Log in")
        person.finds(".who .badge", "read only")
        person.opens(f"{served.url}/console/tokens")
        assert not person.driver.find_elements(By.CSS_SELECTOR, "main form")
        refused = [text for text in person.complaints() if "401" not in text]
        assert refused == []  # the browser notes the answers that asked for a token
