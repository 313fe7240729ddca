"""/openapi.json: what FastAPI derives from the routes, extended by what the middleware adds to every operation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from kb.sharing.shared_report import SharedReport

from ..requests import access
from ..requests.problems import MEDIA_TYPE, Problem, documented

REF = "#/components/schemas/{model}"
KEY = "key"
SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "bearerFormat": "kb_<id>_<secret>",
    "description": "A key of `kb key new`: to read, report or administer. Programs on this machine need none to read.",
}
SCOPES: dict[object, str] = {access.reporter: "report", access.admin: "admin"}
TAGS = {
    "search": "The incident that a text is about.",
    "diagnose": "What made a job fail, from its log.",
    "context": "Cited claims for a language model.",
    "entries": "The incidents: symptom, cause, fix.",
    "reports": "What verifications showed, on which machines.",
    "feedback": "Did an entry help?",
    "gaps": "Questions without a good answer.",
    "admin": "For operators.",
    "health": "For monitoring.",
}
REQUEST_ID = {"description": "Id of this request in the server log.", "schema": {"type": "string"}}
SECONDS = {"description": "Seconds to wait before trying again.", "schema": {"type": "integer"}}
QUOTA = {
    "RateLimit": {
        "description": "Of a limited caller: requests left (r), and seconds until all are (t).",
        "schema": {"type": "string"},
    },
    "RateLimit-Policy": {"description": "Requests (q) in a window of seconds (w).", "schema": {"type": "string"}},
}
CHALLENGE = {"description": "`Bearer`", "schema": {"type": "string"}}
HEADERS = {"401": {"WWW-Authenticate": CHALLENGE}, "429": {"Retry-After": SECONDS}, "503": {"Retry-After": SECONDS}}


def install(app: FastAPI, routers: Iterable[APIRouter]) -> None:
    """Describe the application with these routers, once, when the description is first requested."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = describe(app, routers)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI documents it


def describe(app: FastAPI, routers: Iterable[APIRouter]) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    scopes = {route.operation_id: _scope(route.dependant) for route in routes}
    for path, method, operation in operations(document):
        is_open, scope = path in access.OPEN, scopes.get(operation["operationId"], "")
        if not is_open:
            _add_middleware(operation, method, scope)
        operation["security"] = [] if is_open else _security(scope)
        _add_headers(operation, {} if is_open else QUOTA)
    used = {tag for _, _, operation in operations(document) for tag in operation["tags"]}
    document["tags"] = [
        {"name": name, "description": description} for name, description in TAGS.items() if name in used
    ]
    components = document.setdefault("components", {})
    components["securitySchemes"] = {KEY: SCHEME}
    components["schemas"] = dict(sorted({**components.get("schemas", {}), **_models()}.items()))
    return document


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(path, method, operation) for each operation of a description."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield path, method, operation


def _scope(dependant: Dependant) -> str:
    """The scope that an operation needs beyond reading; "" if reading is enough."""
    for dependency in dependant.dependencies:
        if scope := SCOPES.get(dependency.call, "") or _scope(dependency):
            return scope
    return ""


def _add_middleware(operation: dict[str, Any], method: str, scope: str) -> None:
    """Add the answers that the middleware may give instead of the operation."""
    statuses = [401, 429, 503]
    if scope or method != "get":
        statuses.append(403)
    if "requestBody" in operation:
        statuses += [400, 408, 413]
    added = {str(status): response for status, response in documented(*statuses).items()}
    operation["responses"] = dict(sorted({**added, **operation["responses"]}.items()))


def _security(scope: str) -> list[dict[str, list[str]]]:
    """The security requirements of a scope. An empty one means that no key is needed if everybody may read."""
    return [{KEY: [scope]}] if scope else [{KEY: []}, {}]


def _add_headers(operation: dict[str, Any], common: dict[str, Any]) -> None:
    for status, response in operation["responses"].items():
        headers = {**response.get("headers", {}), **HEADERS.get(status, {}), **common, "X-Request-ID": REQUEST_ID}
        response["headers"] = headers
        if MEDIA_TYPE in response.get("content", {}):
            response["content"] = {MEDIA_TYPE: {"schema": {"$ref": REF.format(model=Problem.__name__)}}}


def _models() -> dict[str, Any]:
    """Models that no signature of an operation mentions."""
    models: dict[str, Any] = {}
    for model in (Problem, SharedReport):
        schema = model.model_json_schema(ref_template=REF)
        models |= schema.pop("$defs", {})
        models[model.__name__] = schema
    return models
