"""Fixture: whether an ordinary user may make namespaces on this machine."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.support.ordinary_user import NOBODY


@pytest.fixture
def allowed() -> None:
    """Ask another program whether this machine lets an ordinary user make namespaces."""
    user = NOBODY if os.getuid() == 0 else None
    try:
        asked = subprocess.run(
            ["unshare", "--user", "--map-root-user", "--mount", "--net", "--uts", "true"],
            user=user,
            cwd="/",
            capture_output=True,
            text=True,
        )
    except OSError as error:  # there is no such program, or this root may be nobody else
        pytest.skip(f"nobody can be asked whether namespaces are allowed: {error}")
    if asked.returncode:
        pytest.skip(f"namespaces are forbidden here: {asked.stderr.strip()}")
