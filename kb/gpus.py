"""GPU memory before and after an arm: a killed process must give back what it took."""

from __future__ import annotations

import time

from kb.commands import run

TOLERANCE_MIB = 100
PATIENCE_S = 10.0  # the driver frees a context when its last descriptor closes


def used_memory(uuids: tuple[str, ...]) -> dict[str, int]:
    """MiB in use on each of these GPUs; empty when the driver does not answer."""
    seen = run(["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"], 10.0)
    rows = (line.split(",") for line in seen.stdout.splitlines() if line.count(",") == 1)
    return {uuid.strip(): int(used) for uuid, used in rows if uuid.strip() in uuids and used.strip().isdigit()}


def not_released(before: dict[str, int]) -> list[str]:
    """What is still in use above the baseline after `PATIENCE_S`, one sentence per GPU."""
    end = time.monotonic() + PATIENCE_S
    while True:
        now = used_memory(tuple(before))
        held = {uuid: now.get(uuid, used) - used for uuid, used in before.items()}
        left = [f"GPU {uuid}: {more} MiB not released" for uuid, more in held.items() if more > TOLERANCE_MIB]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.5)
