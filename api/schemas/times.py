"""Times in documents, which name the zone; the store has naive UTC."""

from __future__ import annotations

import datetime
from typing import Annotated, Any

from pydantic import AwareDatetime, BeforeValidator


def _with_zone(time: Any) -> Any:
    is_naive = isinstance(time, datetime.datetime) and time.tzinfo is None
    return time.replace(tzinfo=datetime.UTC) if is_naive else time


UtcTime = Annotated[AwareDatetime, BeforeValidator(_with_zone)]
