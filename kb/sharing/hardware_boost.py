"""Hits with those first whose fix was verified on hardware like the reader's. Pure: reports in, an order out.

Hardware is like the reader's when it is the same model of GPU, and more so with the same release of torch. Who names no
GPU is compared by torch alone. What counts is the fix in its present wording, tried on the GPUs themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kb.search.ranking import RELEVANT
from kb.search.results import Hit, VerifiedOn
from kb.store.reports import Standing
from kb.verify.verdict import Verdict

CONTRADICTS = frozenset({Verdict.FIX_INEFFECTIVE, Verdict.INVERTED})
MOST_ALIKE = 2
COUNT = re.compile(r"^\s*\d+\s*[xX×*]")  # `8 x H100`
WORD = re.compile(r"[A-Za-z0-9]+")
NO_MODEL = re.compile(r"\d+\s*g[bi]*|hbm\d\w*|gddr\d\w*|sxm\d*|pcie\d*|nvl\d*", re.IGNORECASE)
RELEASE = re.compile(r"\s*v?(\d+\.\d+)")


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a reader has: the name of their GPUs as they say it, the version of their torch; "" for unknown."""

    gpu: str = ""
    torch: str = ""

    def __bool__(self) -> bool:
        return bool(gpu_model(self.gpu) or release(self.torch))

    def likeness(self, one: Standing) -> int:
        """0 for other hardware, up to `MOST_ALIKE`."""
        is_same_torch = bool(release(self.torch)) and release(one.torch) == release(self.torch)
        if not gpu_model(self.gpu):
            return int(is_same_torch)
        return 1 + is_same_torch if gpu_model(one.gpu) == gpu_model(self.gpu) else 0


def prefer(
    hits: Sequence[Hit], standings: Iterable[Standing], digests: Mapping[str, str], here: Hardware
) -> tuple[Hit, ...]:
    """The hits in the order of preference, with `verified_on` where that is why.

    Only hits that score at least half as much as the best change places: that a fix works does not make it an answer.
    `digests` are those of the entries now, by id.
    """
    tried: dict[str, list[Standing]] = {}
    for standing in standings:
        if standing.fidelity == "hardware" and standing.entry_digest == digests.get(standing.entry_id):
            tried.setdefault(standing.entry_id, []).append(standing)
    least = RELEVANT * max((hit.score for hit in hits), default=0.0)
    judged = [_judged(tried.get(hit.id, ()), here) if hit.score >= least else (0, None) for hit in hits]
    places = sorted(range(len(hits)), key=lambda number: -judged[number][0])
    return tuple(replace(hits[number], verified_on=judged[number][1]) for number in places)


def _judged(tried: Iterable[Standing], here: Hardware) -> tuple[int, VerifiedOn | None]:
    """How alike the hardware is that verified the fix; not when as many reports from such hardware contradict."""
    alike = [(here.likeness(one), one) for one in tried]
    for level in range(MOST_ALIKE, 0, -1):
        some = [one for likeness, one in alike if likeness >= level]
        good = [one for one in some if one.verdict == Verdict.VERIFIED]
        count = sum(one.count for one in good)
        if count > sum(one.count for one in some if one.verdict in CONTRADICTS):
            last = max(good, key=lambda one: one.last)
            return level, VerifiedOn(last.gpu, last.torch, count, _reason(last, here))
    return 0, None


def _reason(one: Standing, here: Hardware) -> str:
    same = []
    if gpu_model(here.gpu):
        same.append(f"the same GPU model, {gpu_model(one.gpu)}")
    if release(here.torch) and release(one.torch) == release(here.torch):
        same.append(f"the same torch release, {release(one.torch)}")
    return f"its fix was verified on hardware like yours: {', and '.join(same)}"


def gpu_model(name: str) -> str:
    """`NVIDIA H100 80GB HBM3`, `8 x h100` and `H100-SXM5` are `H100`; "" when no word of it is a model."""
    words = WORD.findall(COUNT.sub("", name))
    models = (word.upper() for word in words if re.search(r"\d", word) and not NO_MODEL.fullmatch(word))
    return next(models, "")


def release(version: str) -> str:
    """`2.7.1+cu126` is of the release `2.7`; "" when it is no version."""
    found = RELEASE.match(version)
    return found[1] if found else ""
