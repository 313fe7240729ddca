"""JSON Schemas for simple clients."""

from __future__ import annotations

from typing import Any


def inline(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without references, which many clients do not follow, and without what says nothing.

    A title repeats the name of its argument, and a default of null says that the argument may be left out.
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
    """An argument that is called `title` has a schema, not a text."""
    return (key == "title" and isinstance(value, str)) or (key == "default" and value is None)
