"""What a server on stdio may do with the machine it runs on. `kb mcp` brings it: nothing here starts a process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from kb.content.catalog import Catalog


class Machine(Protocol):
    """The machine that a server on stdio runs on. Its methods block, and are called one at a time.

    `stop` is called meanwhile, from another thread: it ends what runs, and whoever waits for it gets a `LaunchError`.
    """

    def versions(self) -> Mapping[str, str | None]:
        """Package to version in the training environment. Raises `InterpreterError`."""

    def gpu(self) -> str:
        """The name of its first GPU; "" when there is none, or it does not answer."""

    def checks(self, found: Catalog) -> list[dict[str, Any]]:
        """What the read-only checks of all entries say. Raises `LaunchError`."""

    def verify(self, found: Catalog, entry_id: str, settings: Mapping[str, str]) -> dict[str, Any]:
        """The report of a verification. Raises `KbError`."""

    def stop(self) -> None: ...
