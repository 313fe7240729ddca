"""`/docs`: the reference of the API, generated from /openapi.json, without scripts or other hosts."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from markupsafe import Markup, escape

from .page import page

JSON = "application/json"
CODE = re.compile(r"`([^`]+)`")

router = APIRouter()
Schemas = Mapping[str, dict[str, Any]]


@router.get("/docs")
async def reference_page(request: Request) -> HTMLResponse:
    description = request.app.openapi()
    schemas = description["components"]["schemas"]
    address = str(request.base_url).rstrip("/")
    operations = list(_operations(description, schemas, address))
    groups = [
        {**tag, "operations": [operation for operation in operations if tag["name"] in operation["tags"]]}
        for tag in description["tags"]
    ]
    models = [_model(name, schema) for name, schema in schemas.items()]
    return page(request, "reference.html", groups=groups, models=models, address=address)


def prose(text: str) -> Markup:
    """The paragraphs of a description as HTML, with text in backticks as code."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return Markup("").join(Markup("<p>{}</p>").format(_with_code(paragraph)) for paragraph in paragraphs)


def type_name(schema: Mapping[str, Any]) -> Markup:
    """The name of a type with links to models, for instance `list of Hit or null`."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return Markup('<a href="#{0}">{0}</a>').format(name)
    if options := schema.get("anyOf"):
        return Markup(" or ").join(type_name(option) for option in options)
    if values := schema.get("enum"):
        return Markup(", ").join(Markup("<code>{}</code>").format(value) for value in values)
    if schema.get("type") == "array":
        return Markup("list of {}").format(type_name(schema.get("items", {})))
    name = "bytes" if schema.get("format") == "binary" else schema.get("format") or schema.get("type", "anything")
    return escape(name)


def _with_code(text: str) -> Markup:
    parts = CODE.split(" ".join(text.split()))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if number % 2 else escape(part) for number, part in enumerate(parts)
    )


def _operations(description: Mapping[str, Any], schemas: Schemas, address: str) -> Iterator[dict[str, Any]]:
    for path, item in description["paths"].items():
        for method, operation in item.items():
            body = operation.get("requestBody", {})
            yield {
                "id": operation["operationId"],
                "method": method.upper(),
                "path": path,
                "tags": operation["tags"],
                "summary": operation["summary"],
                "text": prose(operation["description"]),
                "access": _access(operation["security"]),
                "parameters": [_parameter(parameter) for parameter in operation.get("parameters", [])],
                "body_text": prose(body["description"]) if "description" in body else "",
                "bodies": [(media, type_name(content["schema"])) for media, content in body.get("content", {}).items()],
                "responses": [_response(status, item) for status, item in operation["responses"].items()],
                "curl": _curl(f"{address}{path}", method, operation, schemas),
            }


def _access(security: list[dict[str, list[str]]]) -> str:
    if not security:
        return "no key"
    if {} in security:
        return "scope read; no key on the machine of the service"
    return f"scope {', '.join(security[0]['key'])}"


def _parameter(parameter: Mapping[str, Any]) -> dict[str, Any]:
    schema = parameter["schema"]
    default = schema.get("default")
    return {
        "name": parameter["name"],
        "place": parameter["in"],
        "is_required": parameter.get("required", False),
        "type": type_name(schema),
        "default": "" if default in (None, "") else json.dumps(default),
        "text": _with_code(parameter["description"]),
    }


def _response(status: str, response: Mapping[str, Any]) -> dict[str, Any]:
    types = [type_name(content["schema"]) for content in response.get("content", {}).values() if content.get("schema")]
    return {"status": status, "text": response["description"], "type": Markup(" or ").join(dict.fromkeys(types))}


def _model(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    examples = schema.get("examples", [])
    return {
        "name": name,
        "text": prose(schema.get("description", "")),
        "members": [
            (member, type_name(part), _with_code(part.get("description", "")), member in schema.get("required", ()))
            for member, part in schema.get("properties", {}).items()
        ],
        "choices": schema.get("enum", []),
        "example": json.dumps(examples[0], indent=2, ensure_ascii=False) if examples else "",
    }


def _curl(url: str, method: str, operation: Mapping[str, Any], schemas: Schemas) -> str:
    """A curl command for an operation, with example values for everything that it requires."""
    query, words = {}, ["curl", "-s"]
    for parameter in operation.get("parameters", []):
        if not parameter.get("required"):
            continue
        value = str(_example(parameter, schemas))
        if parameter["in"] == "path":
            url = url.replace(f"{{{parameter['name']}}}", value)
        elif parameter["in"] == "header":
            words += ["-H", f"{parameter['name']}: {value}"]
        else:
            query[parameter["name"]] = value
    if {} not in operation["security"] and operation["security"]:
        words += ["-H", "Authorization: Bearer KEY"]
    bodies = operation.get("requestBody", {}).get("content", {})
    if "text/plain" in bodies:
        words += ["-H", "Content-Type: text/plain", "--data-binary", "@train.log"]
    elif JSON in bodies:
        text = json.dumps(_example(bodies[JSON], schemas), ensure_ascii=False)
        words += ["-H", f"Content-Type: {JSON}", "-d", text]
    elif method != "get":
        words += ["-X", method.upper()]
    return shlex.join([*words, f"{url}?{urlencode(query)}" if query else url])


def _example(described: Mapping[str, Any], schemas: Schemas) -> Any:
    """The example of a parameter, a body or a model."""
    schema = described.get("schema", {})
    if "example" in described:
        return described["example"]
    if name := schema.get("$ref", "").rpartition("/")[2]:
        schema = schemas[name]
    examples = described.get("examples") or schema.get("examples") or [""]
    return examples[0]
