"""Draws docs/pages/*.png: every page, light and dark and on a phone. `make screenshots` runs it; look at what it made."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from tests.support.chromium import PHONE, filled_service, launched, visit
from tests.support.console import CHECKOUT, run_kb
from tests.support.sample_data import ENTRY, QUESTION

FOLDER = CHECKOUT / "docs" / "pages"
PORT = "8790"  # it is in the pictures
LOG = CHECKOUT / "tests" / "browser" / "save.log"
DESKTOP = {"width": 1100, "height": 680}  # in which a picture stays small
MODES: dict[str, dict[str, Any]] = {
    "light": {"viewport": DESKTOP, "color_scheme": "light"},
    "dark": {"viewport": DESKTOP, "color_scheme": "dark"},
    "phone": {"viewport": PHONE, "color_scheme": "light"},
}
PAGES = {
    "home": "/",
    "search": f"/?q={QUESTION}&gpu=H100",
    "entry": f"/entries/{ENTRY}",
    "entry-zh": f"/entries/{ENTRY}?lang=zh",
    "verdicts": f"/entries/{ENTRY}#verdicts",
    "diagnose": "/diagnose",
    "graph": "/graph",
    "gaps": "/gaps",
    "sign-in": "/sign-in",
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        run_kb("index", cwd=path, XDG_CACHE_HOME=str(path / "built"), KB_ROOTS="")
        with filled_service(path, path / "built", "--port", PORT) as service, launched() as browser:
            for mode, context in MODES.items():
                for name, address in PAGES.items():
                    with visit(browser, service.url + address, reduced_motion="reduce", **context) as page:
                        prepare(page, name)
                        page.screenshot(path=FOLDER / f"{name}-{mode}.png")


def prepare(page: Page, name: str) -> None:
    """What a person has done when the picture is taken."""
    if name == "diagnose":
        page.set_input_files("#log", LOG)
        page.get_by_role("button", name="Diagnose").click()
        page.get_by_role("heading", name="What explains it").wait_for()
        page.evaluate("scrollTo(0, 0)")


if __name__ == "__main__":
    main()
