"""System programs that some tests need; `make system` installs them.

Tests without their program are skipped with a reason; if `KB_REQUIRE_ALL` is set, as in CI, they fail.
"""

from __future__ import annotations

import os
import shutil
from glob import glob
from typing import NoReturn

import pytest

ELSEWHERE = ("/usr/sbin", "/sbin", "/usr/lib/postgresql/*/bin")  # not on a user's PATH in Debian


def program(name: str) -> str:
    """The path of a program, for instance `nginx`, in its newest version."""
    places = [os.environ.get("PATH", os.defpath)]
    for pattern in ELSEWHERE:
        places += sorted(glob(pattern), key=lambda place: (len(place), place), reverse=True)
    result = shutil.which(name, path=os.pathsep.join(places))
    return result or missing(f"{name} is not installed: `make system` installs it on Debian")


def missing(reason: str) -> NoReturn:
    """Abandon this test: skip it on a person's machine, fail it where everything has to run."""
    if os.environ.get("KB_REQUIRE_ALL"):
        pytest.fail(f"{reason}; KB_REQUIRE_ALL is set", pytrace=False)
    pytest.skip(reason)
