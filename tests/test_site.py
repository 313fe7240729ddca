"""The site: every entry has its page, every link within it leads somewhere, and nothing comes from another host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from kb.content.area import Area
from kb.content.catalog import load_catalog
from kb.content.roots import builtin_root
from kb.records import hardware
from tests.support.console import CHECKOUT

pytestmark = pytest.mark.slow

LOADING = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """Links, ids and what is loaded of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.add(given.get("id", ""))
        if tag == "a":
            self.links.append(given.get("href", ""))
        elif tag in LOADING and given.get("rel") != "canonical":
            self.loaded.append(given.get(LOADING[tag], ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(built)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, env=env, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"python3 -m http.server -d {built} 8001" in ended.stdout  # from a file, its links open folders
    return built


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("index.html")}


def test_every_entry_has_a_page_with_its_verdicts(site: Path) -> None:
    catalog = load_catalog((builtin_root(),))
    for entry in catalog.current():
        text = (site / "entries" / entry.id / "index.html").read_text(encoding="utf-8")
        assert f"kb verify {entry.id}" in text
        assert (hardware.NEVER in text) == (
            hardware.has_gpu_arms(catalog.probe_file(entry)) and entry.id not in hardware.proofs((builtin_root(),))
        )


def test_the_home_page_has_every_area_with_its_number_of_entries(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    entries = load_catalog((builtin_root(),)).current()
    rows = dict(re.findall(r'<a href="entries/#([a-z]+)">[^<]*</a></td>\s*<td[^>]*>(\d+)</td>', text))
    assert rows == {str(area): str(sum(entry.meta.area is area for entry in entries)) for area in Area}


def test_every_link_within_the_site_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (parts.fragment and target in pages and parts.fragment not in pages[target].ids):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []


def test_nothing_is_loaded_from_another_host(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert [url for url in page.loaded if urlsplit(url).netloc] == [], path


def test_the_graph_is_drawn_with_the_entries_as_links(site: Path) -> None:
    whole = Page((site / "graph" / "index.html").read_text(encoding="utf-8"))
    assert sum(link.startswith("../entries/") for link in whole.links) >= len(load_catalog((builtin_root(),)))
