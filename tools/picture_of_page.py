"""Photograph the page of `ladder report` for README and docs, into docs/figures/.

    ladder readme                     # makes docs/report.html, if it is stale
    python tools/picture_of_page.py   # needs Chromium, chromedriver, and `pip install -e '.[test]'`

No test compares the pictures, which depend on the machine's fonts: look at them.
"""

import base64
import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

DOCS = Path(__file__).resolve().parents[1] / "docs"
WINDOW = {"width": 1180, "height": 1000, "deviceScaleFactor": 1.5, "mobile": False}
# file -> what is photographed of the page, and the states in the address, several of what moves
PICTURES = {
    # the last step first, since previews show the first frame; in a loop it still comes last
    "report.gif": ("#player .mount", [f"#player?step={step}" for step in (4, 0, 1, 2, 3)]),
    "lite.png": ("#lite .mount", ["#lite?n=128"]),
    "tiles.png": ("#masks .mount", ["#masks"]),
    "pieces.png": ("#pieces .mount", ["#pieces"]),
}
COLOURS = 128
TALLEST = 900  # of a picture
STAYS = [4000, *[2000] * 4]  # milliseconds of each frame
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


def photograph(driver: Any, theme: str, selector: str, address: str) -> Image.Image:
    """What `selector` chooses of the page, in a 'light' or 'dark' theme, as wide as the window."""
    preferred = {"prefers-color-scheme": theme, "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in preferred.items()]
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", WINDOW)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.get("about:blank")
    driver.get((DOCS / "report.html").as_uri() + address)
    driver.execute_async_script(
        "const done = arguments[0]; const look = () => document.documentElement.dataset.ready"
        " ? done() : setTimeout(look, 20); look();"
    )
    box = driver.execute_script(
        "document.querySelector('.top').style.position = 'static';"
        "const box = document.querySelector(arguments[0]).getBoundingClientRect();"
        "return {x: 0, y: box.top + scrollY - 6, width: innerWidth,"
        " height: Math.min(box.height + 12, arguments[1]), scale: 1};", selector, TALLEST,
    )  # fmt: skip
    shot = {"clip": box, "captureBeyondViewport": True}
    shown = driver.execute_cdp_cmd("Page.captureScreenshot", shot)["data"]
    return Image.open(io.BytesIO(base64.b64decode(shown))).convert("RGB")


def save(frames: list[Image.Image], path: Path) -> None:
    """Write a PNG, or a GIF of several frames; one palette, so that only changes are stored."""
    colours: Any = frames[0].quantize(COLOURS, method=Image.Quantize.FASTOCTREE)
    palette, ground = colours.getpalette(), 3 * colours.getpixel((0, 0))
    palette[ground : ground + 3] = frames[0].getpixel((0, 0))  # exactly the page's, as around it
    colours.putpalette(palette)
    first, *others = [x.quantize(palette=colours, dither=Image.Dither.NONE) for x in frames]
    moving: dict[str, Any] = {"save_all": True, "append_images": others, "loop": 0}
    first.save(path, optimize=True, **(moving | {"duration": STAYS} if others else {}))


if __name__ == "__main__":
    if CHROMIUM is None or DRIVER is None:
        raise SystemExit("picture_of_page: chromium and chromedriver are not on the PATH")
    with started(CHROMIUM, DRIVER) as browser:
        for name, (selector, addresses) in PICTURES.items():
            for suffix, theme in (("", "light"), ("-dark", "dark")):
                frames = [photograph(browser, theme, selector, each) for each in addresses]
                path = DOCS / "figures" / name.replace(".", f"{suffix}.")
                save(frames, path)
                print(path.relative_to(DOCS.parent))
