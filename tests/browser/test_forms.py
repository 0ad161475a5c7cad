"""The console's forms and dialogs in a real browser, by keys alone, and how pages look.

Pages with fixed data are compared with pictures in ``pictures/``, at a quarter of their size and
with tolerance, so that only a change that people would notice fails. With other fonts than those of
the pictures the comparison is skipped. ``PICTURES=again`` takes the pictures again.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from tests.browser.person import Person
from tests.support.serving import Served, serving
from tidelog import Event, Home

PICTURES = Path(__file__).parent / "pictures"
AGAIN = os.environ.get("PICTURES") == "again"
TIME_MS = 1_794_736_800_000
DIFFERENT_MAX = 0.01  # of the pixels
_SHRUNK = """
const [now, before, done] = arguments;
const load = (data) => new Promise((ok, no) => {
  const image = new Image(); image.onload = () => ok(image); image.onerror = no;
  image.src = "data:image/png;base64," + data;
});
const drawn = (image, width, height) => {
  const canvas = document.createElement("canvas");
  canvas.width = width; canvas.height = height;
  const pen = canvas.getContext("2d");
  pen.imageSmoothingQuality = "high";
  pen.drawImage(image, 0, 0, width, height);
  return [canvas, pen.getImageData(0, 0, width, height).data];
};
(async () => {
  const image = await load(now);
  const width = Math.round(image.width / 4), height = Math.round(image.height / 4);
  const [canvas, pixels] = drawn(image, width, height);
  let different = 1;
  if (before) {
    const other = await load(before);
    if (other.width === width && other.height === height) {
      const [, others] = drawn(other, width, height);
      let count = 0;
      for (let at = 0; at < pixels.length; at += 4) {
        const away = [0, 1, 2].map((part) => Math.abs(pixels[at + part] - others[at + part]));
        if (Math.max(...away) > 48) count += 1;
      }
      different = count / (pixels.length / 4);
    }
  }
  done({picture: canvas.toDataURL("image/png").split(",")[1], different});
})().catch((error) => done({picture: "", different: String(error)}));
"""
_FONTS = """
const pen = document.createElement("canvas").getContext("2d");
return ["15px " + getComputedStyle(document.body).fontFamily, "13px monospace"].map((font) => {
  pen.font = font; return pen.measureText("The quick brown fox 0123456789").width.toFixed(1);
}).join(" ");
"""


def fill(home: Home) -> None:
    home.create_topic("orders", 2)
    events = [
        Event(
            b'{"order": %d, "amount": %d.5, "customer": {"id": "c-%d"}}' % (n, 3 * n, n % 3),
            key=b"c-%d" % (n % 3),
            id=f"order-{n}",
            timestamp=TIME_MS + 60_000 * n,
            type="order.placed",
            headers=(("trace", b"17"),),
        )
        for n in range(12)
    ]
    home.append("orders", events)
    home.archives.create("daily", source="topic:orders", parser="timestamp").run()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("home"), first=fill) as found:
        yield found


def place_of(served: Served, event_id: str) -> str:
    at = served.home.get("orders", event_id).position
    return f"/console/topics/orders/events/{at.partition}/{at.offset}"


def test_a_topic_is_created_and_filled_by_keys_alone(
    served: Served, person: Person, axe: str
) -> None:
    person.opens(f"{served.url}/console/topics")
    person.tabs_to("Create a topic")
    person.presses(Keys.ENTER)
    person.finds("h1", "Create a topic")
    person.presses("no good", Keys.ENTER)
    person.finds("#name-error", "give 1 to")
    assert all("400" in each for each in person.complaints())  # the browser notes the answer
    assert person.violations(axe) == []
    person.replaces("by-keys")
    person.presses(Keys.ENTER)
    person.finds("h1", "by-keys")
    person.tabs_to("Append an event")
    person.presses(Keys.ENTER)
    person.tabs_to("value")
    person.presses('{"amount": 12}')
    person.tabs_to("id")
    person.presses("e-1", Keys.ENTER)
    person.finds("#preview-title", "This event will be appended")
    assert person.violations(axe) == []
    person.takes_a_picture("append-preview")
    person.presses(Keys.ENTER)  # the focus is on the button
    person.sees("This event was appended")
    person.tabs_to("Correct …")
    person.presses(Keys.ENTER)
    person.tabs_to("value")
    person.replaces('{"amount": 13}')
    person.tabs_to("why")
    person.presses("wrong price", Keys.ENTER)
    person.finds("pre.diff ins", '"amount": 13')
    assert person.violations(axe) == []
    person.takes_a_picture("correct-preview")
    person.presses(Keys.ENTER)
    person.sees("This event was corrected")
    assert served.home.get("by-keys", "e-1").value == b'{"amount": 13}'


def test_an_archive_is_backfilled_and_promoted_by_keys_alone(
    served: Served, person: Person, axe: str
) -> None:
    person.opens(f"{served.url}/console/archives/daily")
    person.tabs_to("Build a new generation")
    person.presses(Keys.ENTER)
    person.tabs_to("granularity")
    person.presses("hour", Keys.ENTER)
    person.tabs_to("Preview …")
    person.presses(Keys.ENTER)
    person.sees("Generation 2 is built beside generation 1")
    assert person.violations(axe) == []
    person.takes_a_picture("backfill")
    person.presses(Keys.ENTER)
    person.finds("h1", "Jobs")
    person.sees("generation 2 has 12 more events")
    assert person.violations(axe) == []
    person.takes_a_picture("jobs")
    person.opens(f"{served.url}/console/archives/daily")
    person.tabs_to("Promote …")
    person.presses(Keys.ENTER)
    person.finds("h1", "Make generation 2 of daily the live one?")
    person.tabs_back_to("Promote it")  # the focus is on what changes nothing
    person.presses(Keys.ENTER)
    person.sees("generation 2 is the live one")
    assert served.home.archives.get("daily").info.generation == 2
    person.opens(f"{served.url}/console/archives/daily")
    person.tabs_to("Roll back …")
    person.presses(Keys.ENTER)
    person.finds("h1", "Roll daily back to generation 1?")
    person.tabs_back_to("Roll back")
    person.presses(Keys.ENTER)
    person.sees("generation 1 is the live one")
    assert served.home.archives.get("daily").info.generation == 1
    served.home.archives.get("daily").rollback(generation=2)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_look_as_in_their_pictures(
    served: Served, person: Person, width: int, scheme: str
) -> None:
    person.looks(width, 900, scheme)
    person.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "UTC"})
    pages = {
        "events": "/console/topics/orders/events?by=newest",
        "event": place_of(served, "order-7"),
        "correct": place_of(served, "order-7") + "/correct",
        "create-topic": "/console/create-topic",
    }
    taken = {}
    for page, path in pages.items():
        person.opens(served.url + path)
        person.finds("h1")
        hide = "for (const e of document.querySelectorAll('dd .faint')) e.style.visibility='hidden'"
        person.driver.execute_script(hide)  # how long ago it was
        taken[page] = person.driver.get_screenshot_as_base64()
    fonts = person.driver.execute_script(_FONTS)
    known = PICTURES / "fonts.txt"
    if AGAIN:
        PICTURES.mkdir(exist_ok=True)
        known.write_text(fonts)
    person.opens("about:blank")
    for page, now in taken.items():
        file = PICTURES / f"{page}-{width}-{scheme}.png"
        before = "" if AGAIN else base64.b64encode(file.read_bytes()).decode()
        found = person.driver.execute_async_script(_SHRUNK, now, before)
        if AGAIN:
            file.write_bytes(base64.b64decode(found["picture"]))
        elif fonts != known.read_text():
            pytest.skip(f"fonts are {fonts}, those of the pictures {known.read_text()}")
        else:
            message = f"{page} differs in {found['different']:.1%} of its pixels: look at it"
            assert found["different"] < DIFFERENT_MAX, message
