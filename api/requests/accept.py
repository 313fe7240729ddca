"""Content negotiation: which of the media types we have does an Accept header prefer? (RFC 9110, 12.5.1)"""

from __future__ import annotations


def preferred(accept: str, offers: tuple[str, ...]) -> str | None:
    """The offer of the highest quality; among equals the earliest; None when none is acceptable."""
    ranges = [_range(part) for part in accept.split(",") if part.strip()]
    best = max(offers, key=lambda offer: _quality(offer, ranges))
    return best if _quality(best, ranges) > 0 else None


def _quality(offer: str, ranges: list[tuple[str, float]]) -> float:
    """That of the most specific range the offer is in; without any range everything is acceptable."""
    kind = offer.partition("/")[0]
    qualities = dict(sorted(ranges, key=lambda range_: range_[1]))  # of a range that comes twice the best counts
    for candidate in (offer, f"{kind}/*", "*/*"):
        if candidate in qualities:
            return qualities[candidate]
    return 0.0 if ranges else 1.0


def _range(part: str) -> tuple[str, float]:
    """`text/markdown;q=0.5` -> ("text/markdown", 0.5). A quality that is no number counts as 1."""
    name, *parameters = (piece.strip().lower() for piece in part.split(";"))
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return name, min(max(float(parameter[2:]), 0.0), 1.0)
            except ValueError:
                break
    return name, 1.0
