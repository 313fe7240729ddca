"""Entries, reports, logs and questions that try to run something in the browser of who reads them: all of it is text."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Page

from kb.store import feedback, gaps, reports
from kb.store.database import Database
from tests.support.chromium import launched, visit
from tests.support.replicas import Place, Replica, started
from tests.support.sample_data import report

pytestmark = pytest.mark.slow

SCRIPT = "<script>alert(1)</script>"
TEMPLATE = "{{ 1337 * 1337 }}${1337*1337}"
COMPUTED = "1787569"
BODY = f"""{SCRIPT} {TEMPLATE} <img src="https://example.org/x.png" onerror="alert(2)"> [probe]

<svg onload="alert(3)"><a xlink:href="javascript:alert(4)"><text y="20">x</text></a></svg>

[javascript](javascript:alert(5)) [data](data:text/html,{SCRIPT}) [mixed](JaVaScRiPt:alert(6)) <javascript:alert(7)>
![picture](https://example.org/pixel.png) [title](https://example.org "\\" onmouseover=\\"alert(8)")

<iframe src="https://example.org"></iframe><form action="https://example.org"><button>x</button></form>
<style>@import url("https://example.org/x.css");</style><base href="https://example.org/">
<meta http-equiv="refresh" content="0;url=https://example.org"><a href="https://example.org" ping="https://example.org">x</a>

| <img src=x onerror=alert(9)> | `</code><script>alert(10)</script>` |
| --- | --- |
| <details open ontoggle=alert(11)> | </table><script>alert(12)</script> |

```log"><script>alert(13)</script>
</pre></code><script>alert(14)</script> the thing broke: code 1
```

```log
the thing broke: code 2 {SCRIPT}
```
"""
FRONT = f"""---
id: hostile-thing
title: '{SCRIPT}"onmouseover=alert(20) x="{TEMPLATE}'
title_zh: '<img src=x onerror=alert(21)>'
status: confirmed
severity: low
tags: ['<svg onload=alert(22)>', '"><script>alert(23)</script>', 'javascript:alert(24)']
aliases: ['broken {SCRIPT} {TEMPLATE}']
signatures:
  - pattern: 'the thing broke: code \\d+'
    role: root
    source: '{SCRIPT}'
    sample: 'the thing broke: code 7 {SCRIPT}'
not_signatures: ['{SCRIPT}']
applies_to: {{'<b onclick=alert(25)>': '>=1'}}
references:
  - url: 'https://example.org/"onclick="alert(26)'
    shows: '{SCRIPT}{TEMPLATE}'
    grade: claimed
  - url: "https://example.org/'><script>alert(27)</script>"
    shows: '<img src=x onerror=alert(28)>'
    grade: read in thread
probe_waiver: '<img src=x onerror=alert(29)>{TEMPLATE}'
reviewed: 2026-01-01
---
"""
SECTIONS = ("Symptom", "Environment", "Root cause", "How to tell", "Fix", "Why it works", "Known cases")
IN_CHINESE = ("症状", "环境", "原因", "修复")

FOREIGN = "img, iframe, object, embed, base, form[action^=http], style, link[href^=http], script:not([src^='/static/'])"
INJECTED = """() => [...document.querySelectorAll("*")].flatMap(element => [...element.attributes]
  .filter(attribute => /^on/i.test(attribute.name)
    || (/^(href|src|action|xlink:href|formaction)$/i.test(attribute.name) && /^\\s*(javascript|data|vbscript):/i.test(attribute.value)))
  .map(attribute => `${element.tagName} ${attribute.name}=${attribute.value}`))"""


def hostile_entry() -> str:
    sections = "".join(f"## {heading}\n\n{BODY}\n\n" for heading in SECTIONS)
    chinese = "".join(f"### {heading}\n\n{BODY}\n\n" for heading in IN_CHINESE)
    return f"{FRONT}\n{sections}## 中文\n\n{chinese}"


def fill(database: Database) -> None:
    database.prepare()
    gpu = "<img src=x onerror=alert(30)>"
    document = report("f" * 64, [gpu], SCRIPT, TEMPLATE, "verified", SCRIPT, is_current=True)
    reports.add_shared(database, {**document, "id": "hostile-thing"}, SCRIPT, SCRIPT, SCRIPT)
    gaps.add(database, [("search", f"{BODY[:200]}", '"><script>alert(31)</script>'), ("diagnose", SCRIPT, "")])
    feedback.add(database, "hostile-thing", True, gpu, SCRIPT, SCRIPT, SCRIPT)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, built_in_index: Path, chromium: Browser) -> Iterator[Replica]:
    """A service whose contributors are not its friends."""
    path = tmp_path_factory.mktemp("hostile")
    shutil.copytree(built_in_index, path / "cache")
    for folder in ("entries", "probes"):
        (path / "root" / folder).mkdir(parents=True)
    (path / "root" / "entries" / "hostile-thing.md").write_text(hostile_entry(), encoding="utf-8")
    fill(Database.open(path / "service.db"))
    with started(Place(path, path / "cache", {"KB_ROOTS": str(path / "root")})) as replica:
        yield replica


def expect_inert(page: Page) -> None:
    """Beside what `visit` watches: nothing in the document could run later."""
    assert page.locator(FOREIGN).count() == 0
    assert page.evaluate(INJECTED) == []
    assert COMPUTED not in page.content()
    for link in page.locator("a[href^='https://example.org']").all():
        assert "noopener" in (link.get_attribute("rel") or "")


PAGES = (
    "/",
    "/?q=the+thing+broke%3A+code+7",
    f"/?q=broken+{quote(SCRIPT)}",
    f"/?q={quote(BODY)[:3000]}",
    f"/?tag={quote('<svg onload=alert(22)>')}",
    f"/?q=x&tag={quote(SCRIPT)}&status={quote(SCRIPT)}&lang={quote(SCRIPT)}",
    f"/?q=x&gpu={quote(SCRIPT)}&torch={quote(TEMPLATE)}",
    "/entries/hostile-thing",
    "/entries/hostile-thing?lang=zh",
    f"/entries/hostile-thing?told={quote(SCRIPT)}",
    f"/entries/{quote(SCRIPT, safe='')}",
    f"/{quote(SCRIPT, safe='')}",
    "/graph",
    "/gaps",
    f"/gaps?after={quote(SCRIPT)}",
    f"/sign-in?to={quote('/' + SCRIPT)}",
    f"/sign-in?to={quote('javascript:alert(1)')}",
)


@pytest.mark.parametrize("path", PAGES)
def test_nothing_that_was_contributed_or_asked_runs(chromium: Browser, hostile: Replica, path: str) -> None:
    with visit(chromium, hostile.url + path, expected="Failed to load resource") as page:
        expect_inert(page)
        page.mouse.move(300, 300)
        page.keyboard.press("Tab")
        page.wait_for_timeout(100)


def test_every_field_of_the_entry_was_shown(chromium: Browser, hostile: Replica) -> None:
    """Else the test above would prove nothing."""
    with visit(chromium, f"{hostile.url}/entries/hostile-thing") as page:
        text = page.locator("main").inner_text()
        for shown in (SCRIPT, TEMPLATE, "alert(5)", "alert(14)", "<img src=x onerror=alert(29)>", "alert(30)"):
            assert shown in text, shown
        assert page.locator(".tag").first.inner_text() == "<svg onload=alert(22)>"


def test_a_link_with_a_forbidden_scheme_is_text(chromium: Browser, hostile: Replica) -> None:
    with visit(chromium, f"{hostile.url}/entries/hostile-thing") as page:
        assert page.get_by_role("link", name="javascript", exact=True).count() == 0
        assert page.get_by_role("link", name="mixed", exact=True).count() == 0


def test_a_hostile_log_is_text_too(chromium: Browser, hostile: Replica) -> None:
    with visit(chromium, f"{hostile.url}/diagnose") as page:
        page.get_by_label("or paste text").fill(f"{BODY}\nthe thing broke: code 3 {SCRIPT}\n{TEMPLATE}\n")
        page.get_by_role("button", name="Diagnose").click()
        page.get_by_role("heading", name="What explains it").wait_for()
        expect_inert(page)
        assert SCRIPT in page.locator(".findings").inner_text()


def test_results_that_a_script_puts_into_the_page_are_inert_as_well(chromium: Browser, hostile: Replica) -> None:
    with visit(chromium, hostile.url) as page:
        page.get_by_label("Paste an error").fill(f"the thing broke: code 7 {SCRIPT}")
        page.locator(".hits h2 a").first.wait_for()
        expect_inert(page)
