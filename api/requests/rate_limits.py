"""Rate limits: a number of requests in a period, for each name."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Self

from kb.errors import TooManyRequests, UsageError

PERIODS_S = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0}
MOST_NAMES = 10_000  # kept in memory
LONGEST_ADDRESS = 45  # characters; a longer text from a proxy is cut to save memory


@dataclass(frozen=True, slots=True)
class Quota:
    """What a name has left: `remaining` requests now, and all of `amount` after `reset_s` seconds."""

    amount: int
    period_s: float
    remaining: int
    reset_s: int

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers RateLimit and RateLimit-Policy (draft-ietf-httpapi-ratelimit-headers-10)."""
        policy, state = f"q={self.amount};w={self.period_s:.0f}", f"r={self.remaining};t={self.reset_s}"
        return [(b"ratelimit-policy", f'"default";{policy}'.encode()), (b"ratelimit", f'"default";{state}'.encode())]


class RateLimit:
    """At most `amount` requests at once, and as many again evenly over each period (GCRA, the leaky bucket as a meter).

    Each process counts separately, so n replicas with w workers admit up to n * w times as much. The clock is
    monotonic, so that setting back the time of the machine does not lock anybody out.
    """

    def __init__(self, amount: int, period_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._amount = amount
        self._interval_s = period_s / amount
        self._period_s = period_s
        self._clock = clock
        self._full_at: dict[str, float] = {}  # by name: the time when all of `amount` is available again

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The limit in a text such as `600/minute`; None for "", which means no limit. Raises `UsageError`."""
        if not text:
            return None
        amount, _, period = text.partition("/")
        if not amount.strip().isdecimal() or not int(amount) or period.strip() not in PERIODS_S:
            hint = f"for instance 600/minute; per {', '.join(PERIODS_S)}; empty for no limit"
            raise UsageError(f"invalid rate {text!r}", hint)
        return cls(int(amount), PERIODS_S[period.strip()])

    def take(self, name: str) -> None:
        """Count one request. Raises `TooManyRequests` with the seconds to wait."""
        now = self._clock()
        full_at = max(self._full_at.get(name, now), now) + self._interval_s
        wait_s = full_at - self._period_s - now
        if wait_s > 1e-6:  # a sum of intervals is not exact
            raise TooManyRequests(math.ceil(wait_s))
        if len(self._full_at) >= MOST_NAMES and name not in self._full_at:
            self._forget(now)
        self._full_at[name] = full_at

    def quota(self, name: str) -> Quota:
        owed_s = max(0.0, self._full_at.get(name, 0.0) - self._clock())
        used = math.ceil(owed_s / self._interval_s - 1e-6)
        return Quota(self._amount, self._period_s, max(0, self._amount - used), math.ceil(owed_s))

    def _forget(self, now: float) -> None:
        """Drop idle names, and the less busy half of the others."""
        busy = sorted(((at, name) for name, at in self._full_at.items() if at > now), reverse=True)
        self._full_at = {name: at for at, name in busy[: MOST_NAMES // 2]}


def client_network(host: str) -> str:
    """The network that counts as one client: an IPv4 address, or an IPv6 /64, all of which a single host can use."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:  # the name of a test client or the path of a socket
        return host[:LONGEST_ADDRESS]
    if isinstance(address, IPv6Address):
        return str(address.ipv4_mapped or IPv6Address(int(address) >> 64 << 64))
    return host
