"""Content negotiation: the offer that an Accept header prefers (RFC 9110, 12.5.1)."""

from __future__ import annotations


def preferred(accept: str, offers: tuple[str, ...]) -> str | None:
    """The offer with the highest quality, the first of equal ones; None if none is acceptable."""
    ranges = [_parse_range(part) for part in accept.split(",") if part.strip()]
    best = max(offers, key=lambda offer: _quality(offer, ranges))
    return best if _quality(best, ranges) > 0 else None


def _quality(offer: str, ranges: list[tuple[str, float]]) -> float:
    """The quality of the most specific range that includes the offer; 1 for an empty header."""
    kind = offer.partition("/")[0]
    qualities = dict(sorted(ranges, key=lambda range_: range_[1]))  # a repeated range has its best quality
    for candidate in (offer, f"{kind}/*", "*/*"):
        if candidate in qualities:
            return qualities[candidate]
    return 0.0 if ranges else 1.0


def _parse_range(part: str) -> tuple[str, float]:
    """Parse `text/markdown;q=0.5` into ("text/markdown", 0.5). An invalid quality counts as 1."""
    name, *parameters = (piece.strip().lower() for piece in part.split(";"))
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return name, min(max(float(parameter[2:]), 0.0), 1.0)
            except ValueError:
                break
    return name, 1.0
