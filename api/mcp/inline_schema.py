"""JSON Schemas for simple clients."""

from __future__ import annotations

from typing import Any


def inline(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without references, which many clients do not follow, and without redundant members.

    Redundant are a title, which repeats the name of its argument, and a default of null for an optional argument.
    """

    def flat(node: Any) -> Any:
        if isinstance(node, list):
            return [flat(item) for item in node]
        if not isinstance(node, dict):
            return node
        if name := node.get("$ref", "").removeprefix("#/$defs/"):
            return flat({**schema["$defs"][name], **{key: value for key, value in node.items() if key != "$ref"}})
        return {key: flat(value) for key, value in node.items() if key != "$defs" and not _is_empty(key, value)}

    inlined: dict[str, Any] = flat(schema)
    return inlined


def _is_empty(key: str, value: Any) -> bool:
    """Whether a member is redundant. An argument called `title` is not: its value is a schema, not a text."""
    return (key == "title" and isinstance(value, str)) or (key == "default" and value is None)
