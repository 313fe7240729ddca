"""Loads a pickle of plain data: dictionaries, lists, tuples, text and numbers.

A pickle is a program. Here, the standard library's unpickler runs it without the opcodes that look up a name or call
something, and within bounds (docs/decisions/0022-reading-dumps.md). `kb.runtime.torch_save`, which reads checkpoints,
replaces every name by an inert stand-in instead, because a checkpoint contains classes; the dumps read here have none.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from typing import Any

from kb.diagnose.readers.structured import LARGEST, MOST_VALUES, Unreadable

PLAIN = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT1, pickle.BININT2, pickle.BININT, pickle.LONG1, pickle.BINFLOAT),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE),
    *(pickle.EMPTY_LIST, pickle.LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
)
DAMAGES = (  # what the unpickler raises for bytes that are not a pickle
    *(pickle.UnpicklingError, EOFError, struct.error),
    *(AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError),
)


def load_pickle(data: bytes, most_values: int = MOST_VALUES) -> Any:
    """The plain data in a pickle. Raises `Unreadable`."""
    if len(data) > LARGEST:
        raise Unreadable(f"it is larger than {LARGEST >> 20} MiB")
    try:
        return _PlainUnpickler(data, most_values).load()
    except Unreadable:
        raise
    except DAMAGES:
        raise Unreadable("its pickle is damaged") from None


class _PlainUnpickler(pickle._Unpickler):
    """Uses the unpickler written in Python, whose opcodes can be restricted and which lets other threads run."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes, most_values: int) -> None:
        super().__init__(io.BytesIO(data))
        handlers: dict[int, Any] = {opcode[0]: pickle._Unpickler.dispatch[opcode[0]] for opcode in PLAIN}
        handlers |= {pickle.SETITEM[0]: type(self).load_setitem, pickle.SETITEMS[0]: type(self).load_setitems}
        # An opcode takes at least one byte, so a short pickle cannot have too many.
        opcodes = _Opcodes(handlers) if len(data) <= most_values else _CountedOpcodes(handlers, most_values)
        self.dispatch = opcodes  # type: ignore[misc]  # per instance, since it counts

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key], [value])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._update(items[::2], items[1::2])

    def _update(self, keys: list[Any], values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or not all(isinstance(key, (str, int)) for key in keys):
            raise Unreadable("its pickle is damaged, or has keys that are not text")
        # The author of a pickle can make integer keys collide; Python salts the hashes of strings.
        target.update(zip(map(str, keys), values, strict=True))


class _Opcodes(dict[int, Any]):
    """The handlers by opcode."""

    def __missing__(self, opcode: int) -> Any:
        raise Unreadable(f"its pickle has the instruction 0x{opcode:02x}, which plain data does not need")


class _CountedOpcodes(_Opcodes):
    """Counts each opcode that runs, which bounds time and memory."""

    def __init__(self, handlers: dict[int, Any], most: int) -> None:
        super().__init__(handlers)
        self._left = self._most = most

    def __getitem__(self, opcode: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise Unreadable(f"its pickle has more than {self._most:,} instructions")
        return super().__getitem__(opcode)
