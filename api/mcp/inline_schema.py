"""JSON Schemas for simple readers."""

from __future__ import annotations

from typing import Any


def plain(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without references, which many clients do not follow, and examples, which every model pays for."""

    def flat(node: Any) -> Any:
        if isinstance(node, list):
            return [flat(one) for one in node]
        if not isinstance(node, dict):
            return node
        if name := node.get("$ref", "").removeprefix("#/$defs/"):
            return flat({**schema["$defs"][name], **{key: value for key, value in node.items() if key != "$ref"}})
        return {key: flat(value) for key, value in node.items() if key not in ("$defs", "examples")}

    found: dict[str, Any] = flat(schema)
    return found
