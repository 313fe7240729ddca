"""Every error kb raises on purpose, and the exit code that each one ends a command with.

    KbError                     5   a message, and a hint on what to do next
    ├── UsageError              2   the command line, a query or a request is wrong
    │   ├── UnknownEntry        2   no entry has this id; the nearest ids are in the hint
    │   ├── BadParameter        2   a `--set` that the probe does not take, or of the wrong type
    │   └── KeyReused           2   an idempotency key was reused for another report
    ├── ContentError            2   an entry or a content root cannot be used; carries file, line, rule
    ├── ProbeError              5   a probe file cannot be loaded or breaks its contract
    ├── InterpreterError        2   `--python` names nothing that can run a probe
    ├── LaunchError             5   the harness itself could not start or watch an arm
    ├── DeadlineExceeded      124   the overall `--timeout` of a command ran out
    ├── Interrupted           130   Ctrl-C, or a signal that means the same
    ├── OutputLost              5   standard output cannot be written, as on a full disk
    ├── IndexUnavailable        5   the search index can neither be read nor built
    │   └── ServiceBusy         5   too many requests wait for the same threads of a service
    ├── StoreUnavailable        5   the store of reports can neither be read nor written
    ├── CaptureFailed           5   a capture returned nothing, or its bundle cannot be written
    ├── KeyNeeded               2   the request has no API key, or one that the service does not accept
    ├── NotAllowed              2   the service knows the caller, who may not do this
    └── TooManyRequests         5   the caller exceeded the rate limit; carries the seconds to wait

Exceptions of other libraries are converted to one of these where they occur: YAML and pydantic in
`kb.content.parser`, Whoosh in `kb.search.index`, SQLAlchemy in `kb.store.database`, OSError where a process is started.
"""

from __future__ import annotations

from pathlib import Path


class KbError(Exception):
    """The base of all these errors. `message` says what happened, `hint` what to do next (may be empty)."""

    exit_code = 5

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    @property
    def kind(self) -> str:
        """Name used in JSON error documents, for instance `unknown-entry`."""
        name = type(self).__name__
        return "".join(f"-{c.lower()}" if c.isupper() else c for c in name).lstrip("-")


class UsageError(KbError):
    """The command line, a query or a request is wrong."""

    exit_code = 2


EVERY_ID = "`kb list`, or GET /v1/entries, shows every id; KB_ROOTS or `--root` adds those of your team"


class UnknownEntry(UsageError):
    """No entry has this id."""

    def __init__(self, entry_id: str, nearest: tuple[str, ...]) -> None:
        hint = f"nearest: {', '.join(nearest)}" if nearest else EVERY_ID
        super().__init__(f"no entry is called {entry_id!r}", hint)
        self.nearest = nearest


class BadParameter(UsageError):
    """A `--set key=value` that no chosen probe takes, or whose value has the wrong type."""


class KeyReused(UsageError):
    """An idempotency key was reused for another report. The first report stays."""


class ContentError(KbError):
    """An entry or content root cannot be used. `line` counts from 1; `rule` is the linter's name for it."""

    exit_code = 2

    def __init__(self, path: Path, line: int, rule: str, message: str, hint: str = "") -> None:
        super().__init__(f"{path}:{line}: {rule}: {message}", hint or "`kb lint` lists every finding")
        self.path = path
        self.line = line
        self.rule = rule
        self.detail = message


class ProbeError(KbError):
    """A probe file raises at import, defines no probe, or breaks the contract of `kb.probe`."""


class InterpreterError(KbError):
    """The interpreter given by `--python` does not exist or cannot run a probe."""

    exit_code = 2


class LaunchError(KbError):
    """The harness could not start, watch or clean up an arm. This says nothing about the incident."""


class DeadlineExceeded(KbError):
    """The overall deadline of the command expired before it completed."""

    exit_code = 124


class Interrupted(KbError):
    """The command was interrupted before it completed."""

    exit_code = 130

    def __init__(self, message: str = "interrupted") -> None:
        super().__init__(message)


class OutputLost(KbError):
    """Standard output cannot be written, and what it has so far is incomplete."""


class IndexUnavailable(KbError):
    """The search index can neither be opened nor built."""


class ServiceBusy(IndexUnavailable):
    """Too many requests wait for the same threads of a service."""


class StoreUnavailable(KbError):
    """The store of reports can neither be read nor written."""


class CaptureFailed(KbError):
    """A capture returned nothing, or its bundle cannot be written. The job was not touched."""


class KeyNeeded(KbError):
    """The request has no API key, or an unknown, wrong or revoked one. The message never says which."""

    exit_code = 2


class NotAllowed(KbError):
    """The scope of the caller's key, or the page that the request comes from, does not allow this."""

    exit_code = 2


class TooManyRequests(KbError):
    """The caller exceeded the rate limit; the next request is accepted in `retry_s` seconds."""

    def __init__(self, retry_s: float) -> None:
        super().__init__("too many requests", f"try again in {retry_s:.0f} s")
        self.retry_s = retry_s
