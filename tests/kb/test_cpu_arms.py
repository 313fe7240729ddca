"""The limit on address space holds in a forked process and leaves this one alone."""

from __future__ import annotations

import os
import resource

import pytest

from kb.cpu_arms import limit_address_space

MIB = 1 << 20
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # since 3.12


def allocates(mib: int, room_mib: int) -> bool:
    """Whether a child with this much room can allocate a block."""
    pid = os.fork()
    if pid == 0:
        try:
            limit_address_space(room_mib * MIB)
            os._exit(0 if len(bytearray(mib * MIB)) else 1)
        except MemoryError:
            os._exit(1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_only_what_has_room_can_be_allocated() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    assert allocates(32, room_mib=64)
    assert not allocates(96, room_mib=64)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
