"""Settings of a service: arguments in `kb serve` and tests, `KB_*` variables under another ASGI server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from kb.content.roots import Root, configured_roots
from kb.errors import UsageError

from .requests.rate_limits import RateLimit


class Anonymous(StrEnum):
    """Who may read without a key."""

    LOOPBACK = "loopback"  # a client on this machine, without a proxy
    NOBODY = "nobody"
    EVERYBODY = "everybody"  # `kb serve --insecure`


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one service. `database` is a URL or the path of a SQLite file; None is the user's own.

    `rate` limits the requests of one key, for instance `600/minute`; "" means no limit. With `listens_early`, requests
    get 503 while the content is read. Without it, the service does not answer until then: one of several workers can
    afford that, since the others answer.
    """

    roots: tuple[Root, ...]
    database: str | Path | None = None
    anonymous: Anonymous = Anonymous.LOOPBACK
    rate: str = "600/minute"
    listens_early: bool = True

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] = os.environ, *, roots: tuple[Root, ...] | None = None
    ) -> Self:
        """Settings from `KB_ROOTS`, `KB_DATABASE_URL`, `KB_ANONYMOUS` and `KB_RATE`. Raises `UsageError`."""
        try:
            anonymous = Anonymous(environment.get("KB_ANONYMOUS", Anonymous.LOOPBACK))
        except ValueError:
            hint = f"one of {', '.join(Anonymous)}"
            raise UsageError(f"invalid KB_ANONYMOUS={environment['KB_ANONYMOUS']!r}", hint) from None
        rate = environment.get("KB_RATE", "600/minute")
        RateLimit.parse(rate)
        return cls(
            roots=configured_roots() if roots is None else roots,
            database=environment.get("KB_DATABASE_URL") or None,
            anonymous=anonymous,
            rate=rate,
        )

    def but(self, **changed: Any) -> Self:
        return replace(self, **changed)
