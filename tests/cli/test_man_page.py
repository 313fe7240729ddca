"""`docs/kb.1` is what the help says now, and a manual page that `man` can show."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest

from tests.support.console import CHECKOUT, GENEROUS_S


@pytest.fixture(scope="module")
def man_page() -> ModuleType:
    spec = spec_from_file_location("man_page", CHECKOUT / "docs" / "site" / "man_page.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_the_help_of_now(man_page: ModuleType) -> None:
    assert man_page.PAGE.read_text() == man_page.manual(), "write it: python docs/site/man_page.py"


@pytest.mark.skipif(not shutil.which("groff"), reason="needs groff")
def test_it_is_shown_without_a_warning(man_page: ModuleType) -> None:
    shown = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", man_page.PAGE], capture_output=True, text=True, timeout=GENEROUS_S
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "kb key revoke" in re.sub(".\x08", "", shown.stdout), "bold is a letter over itself"
