"""Moves hits whose fix was verified on hardware like the reader's to the front. It does no I/O.

Hardware is like the reader's if it has the same GPU model, and more so with the same torch release. Without a model,
only torch is compared. Only verdicts on the current wording of a fix, run on GPUs, count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kb.search.ranking import RELEVANT, Preference
from kb.search.results import Hit, VerifiedOn
from kb.sharing.hardware_names import gpu_name, version
from kb.store.reports import VerdictCount
from kb.verify.verdict import Verdict

CONTRADICTS = frozenset({Verdict.FIX_INEFFECTIVE, Verdict.INVERTED})
MAX_LIKENESS = 2
COUNT = re.compile(r"^\s*\d+\s*[xX×*]")  # `8 x H100`
WORD = re.compile(r"[A-Za-z0-9]+")
NO_MODEL = re.compile(r"\d+\s*g[bi]*|hbm\d\w*|gddr\d\w*|sxm\d*|pcie\d*|nvl\d*", re.IGNORECASE)
RELEASE = re.compile(r"\s*v?(\d+\.\d+)")


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware of a reader: the GPU name in their words, and the torch version; "" for unknown."""

    gpu: str = ""
    torch: str = ""

    def __bool__(self) -> bool:
        return bool(gpu_model(self.gpu) or release(self.torch))

    def likeness(self, row: VerdictCount) -> int:
        """The likeness of other hardware, from 0 (different) to `MAX_LIKENESS`."""
        is_same_torch = bool(release(self.torch)) and release(row.torch) == release(self.torch)
        if not gpu_model(self.gpu):
            return int(is_same_torch)
        return 1 + is_same_torch if gpu_model(row.gpu) == gpu_model(self.gpu) else 0


def preference(verdict_counts: Iterable[VerdictCount], digests: Mapping[str, str], here: Hardware) -> Preference | None:
    """The `Preference` of a search for answers verified on this hardware; None for unknown hardware."""
    return partial(prefer, verdict_counts=verdict_counts, digests=digests, here=here) if here else None


def prefer(
    hits: Sequence[Hit], verdict_counts: Iterable[VerdictCount], digests: Mapping[str, str], here: Hardware
) -> tuple[Hit, ...]:
    """The hits in order of preference, with `verified_on` if hardware is the reason.

    Only hits with at least half the best score are reordered, since a working fix is not yet an answer. `digests` are
    the digests of the current entries, by id.
    """
    rows: dict[str, list[VerdictCount]] = {hit.id: [] for hit in hits}
    for row in verdict_counts:
        if row.entry_id in rows and row.fidelity == "hardware" and row.entry_digest == digests.get(row.entry_id):
            rows[row.entry_id].append(row)
    threshold = RELEVANT * max((hit.score for hit in hits), default=0.0)
    judged = [_judge(rows[hit.id], here) if hit.score >= threshold else (0, None) for hit in hits]
    order = sorted(range(len(hits)), key=lambda number: -judged[number][0])
    return tuple(replace(hits[number], verified_on=judged[number][1]) for number in order)


def _judge(rows: Iterable[VerdictCount], here: Hardware) -> tuple[int, VerifiedOn | None]:
    """The likeness of the hardware that verified a fix; 0 if as many reports from such hardware contradict it."""
    alike = [(here.likeness(row), row) for row in rows]
    for level in range(MAX_LIKENESS, 0, -1):
        similar = [row for likeness, row in alike if likeness >= level]
        verified = [row for row in similar if row.verdict == Verdict.VERIFIED]
        count = sum(row.count for row in verified)
        if count > sum(row.count for row in similar if row.verdict in CONTRADICTS):
            last = max(verified, key=lambda row: row.last)
            return level, VerifiedOn(gpu_name(last.gpu), version(last.torch), count, _reason(last, here))
    return 0, None


def _reason(row: VerdictCount, here: Hardware) -> str:
    same = []
    if gpu_model(here.gpu):
        same.append(f"the same GPU model, {gpu_model(row.gpu)}")
    if release(here.torch) and release(row.torch) == release(here.torch):
        same.append(f"the same torch release, {release(row.torch)}")
    return f"its fix was verified on hardware like yours: {', and '.join(same)}"


def gpu_model(name: str) -> str:
    """The model in a name: `NVIDIA H100 80GB HBM3`, `8 x h100` and `H100-SXM5` are `H100`; "" if there is none."""
    words = WORD.findall(COUNT.sub("", name))
    models = (word.upper() for word in words if re.search(r"\d", word) and not NO_MODEL.fullmatch(word))
    return next(models, "")


def release(version: str) -> str:
    """The release of `2.7.1+cu126` is `2.7`; "" for anything but a version."""
    match = RELEASE.match(version)
    return match[1] if match else ""
