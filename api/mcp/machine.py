"""What a server on stdio may do on its machine. `kb mcp` implements it, because nothing in kb.api starts a process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from kb.content.catalog import Catalog


class Machine(Protocol):
    """The machine that a server on stdio runs on. Its methods block and are called one at a time.

    `stop` is called from another thread. It ends the running call, which then raises `LaunchError`.
    """

    def versions(self) -> Mapping[str, str | None]:
        """Versions by package in the training environment. Raises `InterpreterError`."""

    def gpu(self) -> str:
        """The name of the first GPU; "" without a GPU, or if it does not answer."""

    def checks(self, catalog: Catalog) -> list[dict[str, Any]]:
        """The results of the read-only checks of all entries. Raises `LaunchError`."""

    def verify(self, catalog: Catalog, entry_id: str, settings: Mapping[str, str]) -> dict[str, Any]:
        """The report of a verification. Raises `KbError`."""

    def stop(self) -> None: ...
