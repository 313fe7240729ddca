"""The bytes of a dump to plain data: dictionaries, lists, tuples, text, numbers. JSON, or a pickle of nothing else.

A pickle is a program. This reader runs the few instructions that make plain data and refuses the others, so a name is
never looked up and nothing is ever called. `kb.runtime.torch_save`, which reads checkpoints, answers every name with
an inert stand-in instead, because a checkpoint is made of classes; no dump that is read here has one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

LARGEST = 256 << 20  # bytes of a dump; 2000 collectives with their stacks make about two million
MOST = 5_000_000  # values, which bounds memory: a hostile byte can make an object of 64
MOST_DIGITS = 40
DEEPEST = 100  # containers that are open at a time


class Unreadable(ValueError):
    """The input is not what it should be, or is damaged; the message says why. All that a parser here raises."""


def load(data: bytes) -> Any:
    """Plain data of a pickle or of a JSON document. Raises `Unreadable`."""
    if len(data) > LARGEST:
        raise Unreadable(f"it is larger than {LARGEST >> 20} MiB")
    return _Pickle(data).load() if data[:1] == b"\x80" else load_json(data)


def load_json(data: bytes | str) -> Any:
    """Raises `Unreadable`; bytes that are not UTF-8 inside of strings are replaced."""
    if len(data) > LARGEST:
        raise Unreadable(f"it is larger than {LARGEST >> 20} MiB")
    text = data.decode(errors="replace") if isinstance(data, bytes) else data
    if sum(map(text.count, "[{,")) > MOST:
        raise Unreadable(f"it has more than {MOST} values")
    try:
        return json.loads(
            text.removeprefix("\ufeff"),
            object_hook=_let_others_run,
            parse_int=_of_digits(int),
            parse_float=_of_digits(float),
        )
    except RecursionError:
        raise Unreadable("its JSON is nested too deeply") from None
    except ValueError as error:  # also a number of more digits than Python converts
        raise Unreadable(f"it is not JSON: {str(error)[:200]}") from None


def _let_others_run(found: dict[str, Any]) -> dict[str, Any]:
    """An object as it is. json's parser lets no other thread run until it is called back, and a dump has 20 MB."""
    return found


def _of_digits(make: Callable[[str], float]) -> Callable[[str], float]:
    """Numbers as dumps have them: Python takes a second for a million digits, or for some thousand clever floats."""

    def read(digits: str) -> float:
        if len(digits) > MOST_DIGITS:
            raise ValueError(f"a number has more than {MOST_DIGITS} digits")
        return make(digits)

    return read


def as_integer(value: Any) -> int | None:
    """An integer as dumps have it, a number or its digits as text; None for anything else."""
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and len(value) < 20:
        return int(value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and abs(value) < 1 << 63 else None


def as_text(value: Any, longest: int = 200) -> str:
    """A string on one line, cut to `longest` characters; empty for anything else."""
    return " ".join(value[:longest].split()) if isinstance(value, str) else ""


class _Pickle:
    """A machine for the instructions of protocols 2 to 5 that make plain data."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def load(self) -> Any:
        try:
            for _ in range(MOST):
                if (code := self.take(1)) == b".":
                    return self.result()
                if (act := INSTRUCTIONS.get(code)) is None:
                    raise Unreadable(f"its pickle has the instruction 0x{code.hex()}, which plain data does not need")
                act(self)
        except (IndexError, KeyError, struct.error):
            raise Unreadable("its pickle is damaged") from None
        raise Unreadable(f"its pickle has more than {MOST} instructions")

    def result(self) -> Any:
        if len(self.stack) != 1 or self.marks:
            raise Unreadable("its pickle ends in the middle of a value")
        return self.stack[0]

    def take(self, size: int) -> bytes:
        taken = self.data[self.at : self.at + size]
        if len(taken) < size:
            raise Unreadable("its pickle is cut short")
        self.at += size
        return taken

    def size(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        if len(self.marks) >= DEEPEST:
            raise Unreadable("its pickle is nested too deeply")
        self.marks.append(len(self.stack))

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count + (self.marks[-1] if self.marks else 0):
            raise Unreadable("its pickle is damaged")
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    def string(self, width: int) -> None:
        self.push(self.take(self.size(width)).decode(errors="replace"))

    def integer(self, width: int, signed: bool) -> None:
        self.push(int.from_bytes(self.take(width), "little", signed=signed))

    def long(self) -> None:
        if (width := self.size(1)) > 16:
            raise Unreadable("its pickle has a number that is no count and no time")
        self.integer(width, signed=True)

    def float(self) -> None:
        self.push(struct.unpack(">d", self.take(8))[0])

    def append(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise Unreadable("its pickle is damaged")
        self.stack[-1].extend(items)

    def set(self, items: list[Any]) -> None:
        into, keys = self.stack[-1], items[::2]
        if not isinstance(into, dict) or len(items) % 2 or not all(isinstance(key, (str, int)) for key in keys):
            raise Unreadable("its pickle is damaged, or has keys that are not text")
        into.update(zip(map(str, keys), items[1::2], strict=True))  # who chooses numbers chooses how they collide

    def remember(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def recall(self, width: int) -> None:
        self.push(self.memo[self.size(width)])


INSTRUCTIONS: dict[bytes, Callable[[_Pickle], Any]] = {
    b"\x80": lambda it: it.take(1),  # PROTO
    b"\x95": lambda it: it.take(8),  # FRAME
    b"(": _Pickle.mark,
    b"N": lambda it: it.push(None),
    b"\x88": lambda it: it.push(True),
    b"\x89": lambda it: it.push(False),
    b"K": lambda it: it.integer(1, signed=False),  # BININT1
    b"M": lambda it: it.integer(2, signed=False),  # BININT2
    b"J": lambda it: it.integer(4, signed=True),  # BININT
    b"\x8a": _Pickle.long,  # LONG1
    b"G": _Pickle.float,  # BINFLOAT
    b"X": lambda it: it.string(4),  # BINUNICODE
    b"\x8c": lambda it: it.string(1),  # SHORT_BINUNICODE
    b"\x8d": lambda it: it.string(8),  # BINUNICODE8
    b"}": lambda it: it.push({}),
    b"]": lambda it: it.push([]),
    b")": lambda it: it.push(()),
    b"t": lambda it: it.push(tuple(it.since_mark())),
    b"l": lambda it: it.push(it.since_mark()),
    b"\x85": lambda it: it.push(tuple(it.pop(1))),
    b"\x86": lambda it: it.push(tuple(it.pop(2))),
    b"\x87": lambda it: it.push(tuple(it.pop(3))),
    b"a": lambda it: it.append(it.pop(1)),
    b"e": lambda it: it.append(it.since_mark()),
    b"s": lambda it: it.set(it.pop(2)),
    b"u": lambda it: it.set(it.since_mark()),
    b"q": lambda it: it.remember(it.size(1)),  # BINPUT
    b"r": lambda it: it.remember(it.size(4)),  # LONG_BINPUT
    b"\x94": lambda it: it.remember(len(it.memo)),  # MEMOIZE
    b"h": lambda it: it.recall(1),  # BINGET
    b"j": lambda it: it.recall(4),  # LONG_BINGET
}
