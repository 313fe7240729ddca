"""The GPUs that nvidia-smi lists, and whether an arm released its GPU memory."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kb.harness.subprocesses import CommandResult, run
from kb.runtime.survey_fields import Reader, Unknown

SMI_S = 10.0  # without persistence mode, the driver first wakes every GPU, about a second each
TOLERANCE_MIB = 100
PATIENCE_S = 10.0  # the driver frees a context when its last descriptor closes


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as nvidia-smi lists it. `utilization_percent` is None in MIG mode, sizes are None on unified memory."""

    index: int | None = None
    uuid: str | None = None
    name: str | None = None
    driver_version: str | None = None
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    memory_free_mib: int | None = None
    utilization_percent: int | None = None
    compute_mode: str | None = None
    pci_bus_id: str | None = None
    mig_mode: str | None = None
    ecc_uncorrected: int | None = None


# The name of each field in nvidia-smi, and its type.
FIELDS: Mapping[str, tuple[str, type[int | str]]] = {
    "index": ("index", int),
    "uuid": ("uuid", str),
    "name": ("name", str),
    "driver_version": ("driver_version", str),
    "memory_total_mib": ("memory.total", int),
    "memory_used_mib": ("memory.used", int),
    "memory_free_mib": ("memory.free", int),
    "utilization_percent": ("utilization.gpu", int),
    "compute_mode": ("compute_mode", str),
    "pci_bus_id": ("pci.bus_id", str),
    "mig_mode": ("mig.mode.current", str),
    "ecc_uncorrected": ("ecc.errors.uncorrected.volatile.total", int),
}


def list_gpus(reader: Reader) -> tuple[tuple[Gpu, ...] | None, str]:
    """All GPUs, and the reason if nvidia-smi does not answer at all, else ""."""
    ran, columns = _listing()
    return reader.value("gpus", lambda: _gpus(reader, ran, columns)), ran.failure


def nvidia_smi(*arguments: str) -> CommandResult:
    return run(["nvidia-smi", *arguments], SMI_S)


def smi_output(ran: CommandResult) -> str:
    """What nvidia-smi printed. Raises `Unknown` with its error message, which may be on standard output."""
    if ran.failure or ran.exit_code:
        raise Unknown(ran.failure or _complaint(ran, ran.stdout))
    return ran.stdout


def _complaint(ran: CommandResult, messages: str) -> str:
    lines = (messages.strip() or ran.stderr.strip() or "no message").splitlines()
    return f"nvidia-smi (exit code {ran.exit_code}): {lines[0]}"


def _query(columns: Sequence[str]) -> CommandResult:
    return nvidia_smi(f"--query-gpu={','.join(columns)}", "--format=csv,noheader,nounits")


def _rows(ran: CommandResult, columns: Sequence[str]) -> tuple[list[dict[str, str]], str]:
    """The lines about GPUs, and other lines, since nvidia-smi may report a lost GPU and list the others."""
    rows, messages = [], []
    for line in ran.stdout.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(columns):
            rows.append(dict(zip(columns, cells, strict=True)))
        else:
            messages.append(line)
    return rows, "\n".join(messages).strip()


def _listing() -> tuple[CommandResult, list[str]]:
    """The answer and its columns, without the fields that an old driver refuses."""
    columns = [column for column, _ in FIELDS.values()]
    while True:
        ran = _query(columns)
        refused = re.search(r'Field "(.+?)" is not a valid field', ran.stdout + ran.stderr)
        if not refused or refused.group(1) not in columns:
            return ran, columns
        columns.remove(refused.group(1))


def _gpus(reader: Reader, ran: CommandResult, columns: list[str]) -> tuple[Gpu, ...]:
    if ran.failure:
        raise Unknown(ran.failure)
    rows, messages = _rows(ran, columns)
    if not rows:
        raise Unknown(_complaint(ran, messages))
    if ran.exit_code or messages:
        reader.reasons["gpus"] = _complaint(ran, messages)
    return tuple(_gpu(reader, number, row) for number, row in enumerate(rows))


def _gpu(reader: Reader, number: int, row: Mapping[str, str]) -> Gpu:
    sources: dict[str, Callable[[], int | str]] = {
        name: partial(_cell, row.get(column), kind) for name, (column, kind) in FIELDS.items()
    }
    return Gpu(**reader.values(f"gpus.{number}", sources))


def _cell(cell: str | None, kind: type[int | str]) -> int | str:
    if cell is None:
        raise Unknown("this nvidia-smi does not know the field")
    if not cell or cell == "N/A" or cell.startswith("[") or (kind is int and not cell.isdigit()):
        raise Unknown(f"nvidia-smi says {cell!r}")
    return kind(cell)


def used_memory(uuids: tuple[str, ...]) -> dict[str, int]:
    """MiB in use on each of these GPUs; empty if the driver does not answer."""
    columns = ("uuid", "memory.used")
    rows, _ = _rows(_query(columns), columns)
    used = {row["uuid"]: row["memory.used"] for row in rows if row["uuid"] in uuids}
    return {uuid: int(mib) for uuid, mib in used.items() if mib.isdigit()}


def not_released(before: dict[str, int]) -> list[str]:
    """A sentence per GPU whose memory use is still above the baseline after `PATIENCE_S`."""
    end = time.monotonic() + PATIENCE_S
    while True:
        now = used_memory(tuple(before))
        held = {uuid: now.get(uuid, used) - used for uuid, used in before.items()}
        left = [f"GPU {uuid}: {more} MiB not released" for uuid, more in held.items() if more > TOLERANCE_MIB]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.5)
