"""What a person does with a browser: opens pages, reads, clicks, types, drags, and looks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, WebDriverException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select

__all__ = ["Person"]

T = TypeVar("T")
_FOCUSED = """
const at = document.activeElement, style = getComputedStyle(at);
const label = at.id ? document.querySelector(`label[for="${at.id}"]`) : null;
return {names: [at.textContent.trim(), at.name || "", at.getAttribute("aria-label") || "",
                label ? label.textContent : ""],
        seen: style.outlineStyle !== "none" && at.getClientRects().length > 0};
"""
PATIENCE_S = 90.0


class Person:
    """Somebody in front of a browser."""

    def __init__(self, driver: webdriver.Chrome, pictures: Path | None) -> None:
        self.driver = driver
        self._pictures = pictures

    def looks(self, width: int, height: int, scheme: str = "light") -> None:
        """On a screen of this size, in this light."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def opens(self, url: str) -> None:
        self.driver.get(url)

    def finds(self, css: str, text: str = "") -> WebElement:
        """The first element that has this text in it, once it is there."""
        return self.waits_for(lambda: self._find(css, text), f"{css} with `{text}`")

    def sees(self, text: str) -> str:
        """The page, once it says this."""
        said = self.waits_for(lambda: text in self.text and self.text, f"`{text}`")
        return str(said)

    def clicks(self, css: str, text: str = "") -> None:
        """On an element, which the page may replace meanwhile."""

        def click() -> bool:
            self._find(css, text).click()
            return True

        self.waits_for(click, f"{css} with `{text}`")

    def violations(self, axe: str, *rules: str) -> list[str]:
        """What axe-core finds wrong with the page, by some rules or by all: the rule, and where."""
        self.driver.set_script_timeout(120)
        self.driver.execute_script(axe)
        found = self.driver.execute_async_script(
            "const [rules, done] = arguments; const how = {resultTypes: ['violations']};"
            "if (rules.length) how.runOnly = {type: 'rule', values: rules};"
            "axe.run(how).then(done, (error) => done({violations: "
            "[{id: String(error), nodes: []}]}))",
            list(rules),
        )
        return [
            f"{each['id']}: {[node['target'] for node in each['nodes'][:3]]}"
            for each in found["violations"]
        ]

    def chooses(self, css: str, value: str) -> None:
        """An option of a list, by its value."""
        Select(self.finds(css)).select_by_value(value)

    def types(self, css: str, text: str) -> None:
        field = self.finds(css)
        field.clear()
        field.send_keys(text)

    def presses(self, *keys: str) -> None:
        """With the focus where it is."""
        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def replaces(self, text: str) -> None:
        """Select all of the field that has the focus, and type over it."""
        chain = ActionChains(self.driver).key_down(Keys.CONTROL).send_keys("a").key_up(Keys.CONTROL)
        chain.send_keys(text).perform()

    def tabs_to(self, text: str, most: int = 120) -> None:
        """Press Tab until the focus is on what has this text, name or label, and is seen there."""
        for _ in range(most):
            self.presses(Keys.TAB)
            found = self.driver.execute_script(_FOCUSED)
            assert found["seen"], f"the focus is not visible on {found['names']}"
            if text in found["names"]:
                return
        raise AssertionError(f"Tab does not lead to `{text}`:\n{self.text}")

    def tabs_back_to(self, text: str) -> None:
        """Press Shift and Tab once, which leads to what has this text."""
        chain = ActionChains(self.driver).key_down(Keys.SHIFT).send_keys(Keys.TAB)
        chain.key_up(Keys.SHIFT).perform()
        found = self.driver.execute_script(_FOCUSED)
        assert found["seen"], f"the focus is not visible on {found['names']}"
        assert text in found["names"], found["names"]

    def drags(self, css: str, start: float, end: float) -> None:
        """Over an element from left to right, between two parts of its width."""
        box = self.finds(css)
        width = box.size["width"]
        (
            ActionChains(self.driver)
            .move_to_element_with_offset(box, int((start - 0.5) * width), 0)
            .click_and_hold()
            .move_to_element_with_offset(box, int(((start + end) / 2 - 0.5) * width), 5)
            .move_to_element_with_offset(box, int((end - 0.5) * width), 0)
            .release()
            .perform()
        )

    def takes_a_picture(self, name: str) -> None:
        """Where somebody has asked for pictures."""
        if self._pictures is not None:
            self._pictures.mkdir(parents=True, exist_ok=True)
            self.driver.save_screenshot(str(self._pictures / f"console-{name}.png"))

    def waits_for(self, look: Callable[[], T], what: str) -> T:
        """Look again and again until there is something."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                found = look()
                if found:
                    return found
            except WebDriverException:
                pass  # not there yet, or replaced under our eyes
            assert time.monotonic() < until, f"no {what} on the page:\n{self.text}"
            time.sleep(0.05)

    def complaints(self) -> list[str]:
        """What the browser had to say: errors of scripts, refused loads, broken policies."""
        said = self.driver.get_log("browser")
        return [each["message"] for each in said if each["level"] in ("SEVERE", "WARNING")]

    @property
    def text(self) -> str:
        """All that can be read."""
        return str(self.driver.find_element(By.TAG_NAME, "body").text)

    @property
    def url(self) -> str:
        return str(self.driver.current_url)

    @property
    def is_too_wide(self) -> bool:
        """Whether the page must be pushed sideways to be read."""
        script = "return document.documentElement.scrollWidth > window.innerWidth + 1"
        return bool(self.driver.execute_script(script))

    def _find(self, css: str, text: str) -> WebElement:
        for element in self.driver.find_elements(By.CSS_SELECTOR, css):
            if element.is_displayed() and text in element.text:
                return element
        raise NoSuchElementException(css)
