"""The log of the service. Requests have a separate log, `kb.requests`."""

from __future__ import annotations

import logging

log = logging.getLogger("kb.api")
