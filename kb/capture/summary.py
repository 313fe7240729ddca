"""Summarizes what a capture says about each node, for the answer and, redacted, for the manifest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kb.capture import bundle, plan
from kb.capture.skew import Skew
from kb.redaction.redactor import Redactor

MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """`node` is the folder in the bundle; `name` is the name by which kb reached it, empty for this machine."""

    node: str
    name: str
    ranks: tuple[int | None, ...]
    seconds: float
    skew: Skew | None
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "node": self.node,
            "name": self.name,
            "ranks": self.ranks,
            "seconds": round(self.seconds, 2),
            "skew": self.skew and self.skew.to_json(),
            "problems": self.problems,
        }

    def named_problems(self) -> Iterator[str]:
        """The problems, each preceded by the name of the node if it has one."""
        where = f"{self.name}: " if self.name else ""
        return (f"{where}{problem}" for problem in self.problems)


def identity(rank: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that identify a rank in a document."""
    return {key: rank[key] for key in ("rank", "rank_from", "pid")}


def summarize(node: bundle.Node) -> NodeSummary:
    ranks = tuple(rank["rank"] for rank in node.job["ranks"])
    problems = (node.reason,) if node.reason else tuple(_problems(node))
    if not node.reason and not ranks:
        problems = (*problems, "it has no process of the job")
    return NodeSummary(node.name, node.host, ranks, node.collected.seconds, node.skew, problems)


def about_nodes(
    nodes: Sequence[bundle.Node], summaries: Sequence[NodeSummary], files: Sequence[bundle.File], redactor: Redactor
) -> Iterator[dict[str, Any]]:
    """The nodes for the manifest, redacted; their steps are copied from the records."""
    records = {file.name: file for file in files if file.kind == "node"}
    for node, summary in zip(nodes, summaries, strict=True):
        steps = json.loads(records[f"{node.name}/node.json"].content)["steps"]
        ranks = [identity(rank) for rank in node.job["ranks"]]
        about = bundle.redact_value({**summary.to_json(), "ranks": ranks}, redactor)
        yield {**about, "name": node.name, "host": about["name"], "steps": steps}


def offered_windows(node: bundle.Node) -> list[str]:
    """What `--trigger` could ask on a node."""
    windows = plan.offered_windows(node.json("node/windows.json") or {})
    return [f"{window} on {node.name}" if node.host else window for window in windows]


def _problems(node: bundle.Node) -> list[str]:
    """A sentence per reason, with the steps that it applies to."""
    reasons: dict[str, list[str]] = {}
    for step in node.steps:
        if error := step.get("error"):
            places = reasons.setdefault(error.replace(str(step.get("pid", "")) or "\0", ""), [])
            place = f"{step['step']} of {step['where']}"
            if place not in places:
                places.append(place)
    sentences = [
        f"{', '.join(places[:4])}{' and others' if len(places) > 4 else ''}: {reason}"
        for reason, places in reasons.items()
    ]
    return [*node.collected.problems, *sentences][:MOST_PROBLEMS]
