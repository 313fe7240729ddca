"""JSON Schemas for simple clients."""

from __future__ import annotations

from typing import Any


def inline(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without references, which many clients do not follow, and without examples, which cost tokens."""

    def flat(node: Any) -> Any:
        if isinstance(node, list):
            return [flat(item) for item in node]
        if not isinstance(node, dict):
            return node
        if name := node.get("$ref", "").removeprefix("#/$defs/"):
            return flat({**schema["$defs"][name], **{key: value for key, value in node.items() if key != "$ref"}})
        return {key: flat(value) for key, value in node.items() if key not in ("$defs", "examples")}

    inlined: dict[str, Any] = flat(schema)
    return inlined
