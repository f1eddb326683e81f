"""Photograph the page of `ladder report` for README: docs/figures/report.png, and its dark twin.

    ladder readme                     # makes docs/report.html, if it is stale
    python tools/picture_of_page.py   # needs Chromium, chromedriver, and `pip install -e '.[test]'`

The lesson is shown in its third step. No test compares the pictures, which depend on the machine's
fonts: look at them.
"""

import base64
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
WINDOW = {"width": 1180, "height": 1000, "deviceScaleFactor": 1.5, "mobile": False}
STEP = "#player?step=3"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


@contextmanager
def started(chromium: str, driver: str) -> Iterator[Any]:
    """A Selenium driver of a new headless browser; ImportError where Selenium is missing."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=driver)
    with webdriver.Chrome(options=options, service=service) as started:
        yield started


def photograph(driver: Any, theme: str) -> bytes:
    """The lesson's table and outputs as a PNG, in a 'light' or 'dark' theme."""
    preferred = {"name": "prefers-color-scheme", "value": theme}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", WINDOW)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [preferred]})
    driver.get("about:blank")
    driver.get((DOCS / "report.html").as_uri() + STEP)
    driver.execute_async_script(
        "const done = arguments[0]; const look = () => document.documentElement.dataset.ready"
        " ? done() : setTimeout(look, 20); look();"
    )
    box = driver.execute_script(
        "const box = document.querySelector('#player .mount').getBoundingClientRect();"
        "return {x: 0, y: box.top + scrollY - 6, width: innerWidth,"
        " height: Math.min(box.height + 12, 900), scale: 1};"
    )
    shot = {"clip": box, "captureBeyondViewport": True}
    return base64.b64decode(driver.execute_cdp_cmd("Page.captureScreenshot", shot)["data"])


if __name__ == "__main__":
    if CHROMIUM is None or DRIVER is None:
        raise SystemExit("picture_of_page: chromium and chromedriver are not on the PATH")
    with started(CHROMIUM, DRIVER) as browser:
        for suffix, theme in (("", "light"), ("-dark", "dark")):
            path = DOCS / "figures" / f"report{suffix}.png"
            path.write_bytes(photograph(browser, theme))
            print(path.relative_to(DOCS.parent))
