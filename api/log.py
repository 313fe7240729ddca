"""The log of the service. Requests have one of their own, `kb.requests`."""

from __future__ import annotations

import logging

log = logging.getLogger("kb.api")
