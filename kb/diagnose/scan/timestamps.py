"""Parses the time at the beginning of a line.

A date gives seconds since the epoch: in UTC if the line has no time zone, in the year in which the log was written if
it has no year. The kernel's seconds since boot stay as they are, so times are comparable only within one source. A
clock without a date is ignored, since it is as often a duration.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from functools import lru_cache

FRONT = 160  # characters at the beginning of a line that are searched for a time
DAY = 86400.0
LATEST = 4e9  # seconds since the epoch; a file may claim any time of writing, but the calendar has an end
CALENDAR_END = 253_402_300_800.0  # the year 10000, which a time zone can reach

CLOCK = re.compile(
    r"""(\d\d):(?<![\d:]...)(\d\d):(\d\d)(?!\d|:\d)
        (?:[.,](\d{1,9}))?                                  # fraction
        (?:[ ]?(Z|UTC|[+-]\d\d:?\d\d)(?![\w:]))?            # zone
        (?:[ ](20\d\d)(?!\d))?                              # year, as ctime and dmesg -T have it
    """,
    re.ASCII | re.VERBOSE,
)
DATE = re.compile(  # right before the clock
    r"""(?:
        (?P<year>\d{4})[-/](?P<month>\d\d)[-/](?P<day>\d\d)(?:[T_]|[ ]{1,2})
      | (?P<us_month>\d\d)/(?P<us_day>\d\d)/(?P<us_year>\d{4}|\d\d)[ ]
      | [A-Z](?P<glog_month>\d\d)(?P<glog_day>\d\d)[ ]                  # E1121 03:04:05
      | (?<![\d-])(?P<short_month>\d\d)-(?P<short_day>\d\d)[ ]          # INFO 11-21 03:04:05
      | (?P<name>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[ ]{1,2}(?P<named_day>\d{1,2})[ ]
    )$""",
    re.ASCII | re.VERBOSE,
)
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
COUNTED = re.compile(r"\[ {0,8}(\d{1,10}\.\d{3,9})\]|\[?(1\d{9}(?:\.\d{1,9})?)\]?(?=[ \t:,])", re.ASCII)


def parse_timestamp(text: str, written: float | None = None) -> float | None:
    """Seconds, or None if the line does not begin with a time. `written` is when its log was last written."""
    if match := COUNTED.match(text):
        return float(match[1] or match[2])
    clock = CLOCK.search(text, 0, FRONT)
    if clock is None:
        return None
    date = DATE.search(text, max(0, clock.start() - 13), clock.start())
    if date is None:
        return None
    hours, minutes, seconds, fraction, zone, year = clock.groups()
    second_of_day = int(hours) * 3600 + int(minutes) * 60 + int(seconds) + float(f"0.{fraction or 0}")
    midnight = _day(date[0], year, written)
    if midnight is None:
        return None
    moment = midnight + second_of_day - _offset(zone)
    return moment if moment < CALENDAR_END else None


@lru_cache(maxsize=1024)
def _day(date: str, year: str | None, written: float | None) -> float | None:
    """Midnight of the date before a clock."""
    match = DATE.search(date)
    if match is None:
        return None
    part = match.groupdict()
    known_year = part["year"] or part["us_year"] or (year if part["name"] else None)
    month = MONTHS.index(part["name"]) + 1 if part["name"] else int(_first(part, "month"))
    day = int(part["named_day"] or _first(part, "day"))
    if known_year:
        return _midnight(int(known_year) + (2000 if len(known_year) == 2 else 0), month, day)
    latest = time.time() if written is None else written
    this_year = time.gmtime(min(max(latest, 0.0), LATEST)).tm_year
    midnight = _midnight(this_year, month, day)
    # In a log of January, a line of December is from last year; a line of tomorrow is from another time zone.
    return _midnight(this_year - 1, month, day) if midnight is None or midnight > latest + DAY else midnight


def _first(part: dict[str, str | None], name: str) -> str:
    return part[name] or part[f"us_{name}"] or part[f"glog_{name}"] or part[f"short_{name}"] or "0"


def _midnight(year: int, month: int, day: int) -> float | None:
    try:
        return datetime(year, month, day, tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _offset(zone: str | None) -> float:
    """How many seconds a time zone is ahead of UTC."""
    if zone is None or zone in ("Z", "UTC"):
        return 0.0
    digits = zone[1:].replace(":", "")
    seconds = int(digits[:2]) * 3600.0 + int(digits[2:]) * 60.0
    return -seconds if zone[0] == "-" else seconds
