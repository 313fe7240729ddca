"""The skew: how far the clock of a node is ahead of this machine's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Skew:
    """The node's clock is `ahead_s` ahead (negative: behind), give or take `margin_s`, half the round trip."""

    ahead_s: float
    margin_s: float

    @classmethod
    def between(cls, there: tuple[float, float], here: tuple[float, float]) -> Skew:
        """The skew from the first and last time on each clock; the times there lie between the two moments here."""
        least, most = there[1] - here[1], there[0] - here[0]
        return cls((least + most) / 2, (most - least) / 2)

    @property
    def is_certain(self) -> bool:
        """Whether the clocks certainly differ."""
        return abs(self.ahead_s) > self.margin_s

    def to_json(self) -> dict[str, float]:
        return {"ahead_s": round(self.ahead_s, 3), "margin_s": round(self.margin_s, 3)}
