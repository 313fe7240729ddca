"""Reads untrusted structured inputs: JSON within bounds, and values of the type that a reader expects."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

LARGEST = 256 << 20  # bytes of an input; a flight-recorder dump of 2000 collectives with their stacks has two million
MOST_VALUES = 5_000_000  # bounds memory: one byte of a hostile input can make an object of 64 bytes
MOST_DIGITS = 40


class Unreadable(ValueError):
    """The input is damaged or not of its kind; the message says why. Readers raise nothing else."""


def load_json(data: bytes | str, most_values: int = MOST_VALUES) -> Any:
    """Parse JSON; bytes that are not UTF-8 are replaced. Raises `Unreadable`."""
    if len(data) > LARGEST:
        raise Unreadable(f"it is larger than {LARGEST >> 20} MiB")
    text = data.decode(errors="replace") if isinstance(data, bytes) else data
    if sum(map(text.count, "[{,")) > most_values:
        raise Unreadable(f"it has more than {most_values:,} values")
    try:
        return json.loads(
            text.removeprefix("\ufeff"),
            object_hook=_yield_to_threads,
            parse_int=_bounded(int),
            parse_float=_bounded(float),
        )
    except RecursionError:
        raise Unreadable("its JSON is nested too deeply") from None
    except ValueError as error:  # also raised for a number with more digits than Python converts
        raise Unreadable(f"not JSON: {str(error)[:200]}") from None


def _yield_to_threads(document: dict[str, Any]) -> dict[str, Any]:
    """The unchanged object. Without a callback, json's C parser lets no other thread run; a dump may have 20 MB."""
    return document


def _bounded(convert: Callable[[str], float]) -> Callable[[str], float]:
    """Limit the digits that `convert` gets: a million digits, or some thousand well-chosen floats, take a second."""

    def parse(digits: str) -> float:
        if len(digits) > MOST_DIGITS:
            raise ValueError(f"a number has more than {MOST_DIGITS} digits")
        return convert(digits)

    return parse


def as_integer(value: Any) -> int | None:
    """An integer below 2**63, given as a number or as digits; None for anything else."""
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and len(value) < 20:
        return int(value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and abs(value) < 1 << 63 else None


def as_text(value: Any, longest: int = 200) -> str:
    """A string on one line, cut to `longest` characters; empty for anything else."""
    return " ".join(value[:longest].split()) if isinstance(value, str) else ""
