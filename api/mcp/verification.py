"""The report of a verification for a language model: the verdict and why, without stacks and logs. Pure.

`kb history ID --json` has the whole report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kb.sharing.shared_report import machine_kind

from .answers import BUDGET, Document, cut, encode, present, tokens

Report = Mapping[str, Any]
Size = tuple[int, int]  # entries of a list, characters of a text

SHORTER: tuple[Size, ...] = ((8, 400), (4, 400), (2, 200), (1, 100))
RESULT = ("verdict", "reason", "evidence", "fidelity", "stands_for", "repeats")
ARM = ("because", "expected", "outcome", "failure", "duration_s", "first_failing_rank", "flight_record", "ranks")
RANK = ("rank", "kind", "type", "message", "exit_code", "signal", "waiting_in")


def verification_answer(report: Report) -> Document:
    """A report with as much of its lists and texts as fits the budget."""
    documents = [_report(report, size) for size in SHORTER]
    return next((document for document in documents if tokens(encode(document)) <= BUDGET), documents[-1])


def _report(report: Report, size: Size) -> Document:
    variants = report["variants"]
    return (
        {"id": report["id"], **_result(report, size)}
        | present(
            variants=[
                {"experiment": variant["experiment"], **_result(variant, (1, size[1]))}
                for variant in variants[: size[0]]
            ],
            skipped=_short(report["skipped"], size),
            check=report["check"] and present(**_short(report["check"], size)),
            params=report["params"],
            machine=present(**machine_kind(report["environment"])),
            leftovers=_short(report["leftovers"], size),
        )
        | {"next_step": report["next_step"], "whole_report": f"kb history {report['id']} --json"}
    )


def _result(result: Report, size: Size) -> Document:
    arms = {name: _arm(arm, size) for name, arm in (result["arms"] or {}).items()}
    return present(**{name: _short(result[name], size) for name in RESULT}, arms=arms)


def _arm(arm: Report, size: Size) -> Document:
    """An arm with only those ranks that did not complete."""
    failed = [
        {name: rank[name] for name in RANK if rank[name] not in ("", None)}
        for rank in arm["ranks"]
        if rank["kind"] != "completed"
    ]
    return present(**{name: _short(value, size) for name, value in {**arm, "ranks": failed}.items() if name in ARM})


def _short(value: Any, size: Size) -> Any:
    """A value with texts cut and lists limited, and with the names and structure of the report."""
    if isinstance(value, str):
        return cut(value, size[1])
    if isinstance(value, Mapping):
        return {name: _short(member, size) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_short(member, size) for member in value[: size[0]]]
    return value
