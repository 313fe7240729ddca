"""Log configuration of a service: lines at a terminal, JSON everywhere else."""

from __future__ import annotations

from typing import Any

FIELDS = {"levelname": "level", "name": "logger"}


def configuration(*, is_terminal: bool) -> dict[str, Any]:
    """A configuration for `logging.config.dictConfig`: one line on stderr for each request and each error."""
    plain = {"format": "%(asctime)s %(message)s", "datefmt": "%H:%M:%S"}
    structured = {
        "()": "pythonjsonlogger.json.JsonFormatter",
        "fmt": "%(levelname)s %(name)s %(message)s",
        "rename_fields": FIELDS,
        "timestamp": "time",
        "json_ensure_ascii": False,
    }
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": plain if is_terminal else structured},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}},
        "loggers": {"kb": {"level": "INFO"}, "uvicorn": {"level": "WARNING"}},
        "root": {"level": "WARNING", "handlers": ["stderr"]},
    }
