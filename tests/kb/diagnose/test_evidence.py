"""Lines of evidence as documents cite them."""

from __future__ import annotations

import pytest

from kb.diagnose.evidence import Line


@pytest.mark.parametrize(
    ("seconds", "time"),
    [
        (1_772_353_800.0, "2026-03-01T08:30:00Z"),
        (1_772_353_800.25, "2026-03-01T08:30:00.250000Z"),
        (12.5, None),  # since the start of a machine
        (253_402_343_999.0, None),  # 9999-12-31T23:59:59-12:00
        (float("inf"), None),
        (None, None),
    ],
)
def test_a_time_is_a_moment_in_utc_or_nothing(seconds: float | None, time: str | None) -> None:
    assert Line("train.log", 1, "RuntimeError: x", time=seconds).to_json()["time"] == time
