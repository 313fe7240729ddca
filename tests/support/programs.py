"""Programs of the system that some tests run: `make system` installs them.

Without one, its tests are skipped and say so; where `KB_REQUIRE_ALL` is set, as in CI, they fail.
"""

from __future__ import annotations

import os
import shutil
from glob import glob
from typing import NoReturn

import pytest

ELSEWHERE = ("/usr/sbin", "/sbin", "/usr/lib/postgresql/*/bin")  # where Debian has what is on no user's PATH


def program(name: str) -> str:
    """The path of a program, for instance `nginx`; of several versions the newest."""
    places = [os.environ.get("PATH", os.defpath)]
    for pattern in ELSEWHERE:
        places += sorted(glob(pattern), key=lambda place: (len(place), place), reverse=True)
    result = shutil.which(name, path=os.pathsep.join(places))
    return result or missing(f"{name} is not installed: `make system` installs it on Debian")


def missing(reason: str) -> NoReturn:
    """Give this test up: a skip on the machine of a person, a failure where everything has to run."""
    if os.environ.get("KB_REQUIRE_ALL"):
        pytest.fail(f"{reason}; KB_REQUIRE_ALL is set", pytrace=False)
    pytest.skip(reason)
