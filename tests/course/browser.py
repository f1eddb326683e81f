"""A headless Chromium that shows the page of `ladder report`, where there is one."""

import json
from contextlib import contextmanager
from pathlib import Path

import picture_of_page
import pytest
from ladder_command import PATIENCE
from picture_of_page import CHROMIUM, DRIVER

LIGHT, DARK = "light", "dark"


@contextmanager
def started():
    """A driver of a new browser; the test is skipped where there is no browser."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no browser: chromium and chromedriver are not on the PATH")
    pytest.importorskip("selenium", reason="selenium is not installed")
    with picture_of_page.started(CHROMIUM, DRIVER) as driver:
        driver.set_script_timeout(PATIENCE)
        yield driver


class Page:
    """A page in the browser; its methods wait until what they do has happened."""

    def __init__(self, driver, file):
        self.driver, self.file = driver, Path(file)

    def open(self, fragment="", width=1440, theme=LIGHT, motion="no-preference"):
        """Load the page anew, in a window of that width, for a reader with these preferences."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )
        features = {"prefers-color-scheme": theme, "prefers-reduced-motion": motion}
        named = [{"name": name, "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": named})
        self.driver.get("about:blank")  # or a new fragment would not load it again
        self.driver.get(self.file.as_uri() + fragment)
        self.until("document.documentElement.dataset.ready === 'true'")
        return self

    def js(self, code, *arguments):
        return self.driver.execute_script(code, *arguments)

    def until(self, condition, *arguments):
        """Wait until a condition in JavaScript holds."""
        from selenium.webdriver.support.wait import WebDriverWait

        def holds(_):
            return self.js(f"return {condition}", *arguments)

        WebDriverWait(self.driver, PATIENCE, poll_frequency=0.02).until(holds, condition)

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def text(self, selector):
        return self.js("return document.querySelector(arguments[0]).textContent", selector)

    def button(self, text, within="main"):
        """Press the button with that text."""
        found = self.js(
            "return [...document.querySelectorAll(`${arguments[1]} button`)]"
            ".filter((e) => e.textContent === arguments[0] && e.checkVisibility())", text, within,
        )  # fmt: skip
        assert len(found) == 1, f"{len(found)} buttons {text!r} in {within}"
        self.press(found[0])

    def press(self, element):
        """Press an element as a finger would: nothing may cover it."""
        self.js("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
        element.click()

    def labelled(self, label, within="main"):
        """The control with a label that begins so."""
        return self.js(
            "const [label, within] = arguments;"
            "return [...document.querySelectorAll(`${within} label`)]"
            ".find((e) => e.textContent.startsWith(label)).control", label, within,
        )  # fmt: skip

    def put(self, control, value):
        """Give a control a value, as if the reader had."""
        self.js(
            "const [control, value] = arguments; control.value = value;"
            "for (const name of ['input', 'change'])"
            " control.dispatchEvent(new Event(name, {bubbles: true}));", control, str(value),
        )  # fmt: skip

    def axe(self, where="document", **options):
        """What axe finds wrong, a line each; `where`: a selector in quotes, or a node."""
        found = pytest.importorskip("axe_core_python", reason="axe-core-python is not installed")
        self.js((Path(found.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
        found = self.driver.execute_async_script(
            f"const [options, done] = arguments; axe.run({where}, options).then(done);", options
        )
        assert found["passes"]
        return [
            f"{each['id']}: {node['html'][:120]} {node['failureSummary']}"
            for each in found["violations"] for node in each["nodes"]
        ]  # fmt: skip

    def errors(self):
        """What the console has of warnings and errors since the last call."""
        log = self.driver.get_log("browser")
        return [each["message"] for each in log if each["level"] in ("WARNING", "SEVERE")]

    def requests(self):
        """The URLs that were asked for since the last call."""
        log = (
            json.loads(each["message"])["message"] for each in self.driver.get_log("performance")
        )
        return [
            each["params"]["request"]["url"]
            for each in log if each["method"] == "Network.requestWillBeSent"
        ]  # fmt: skip
