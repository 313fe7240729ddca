"""The description of the API is complete, and its examples are true to it."""

from __future__ import annotations

import json
from pkgutil import resolve_name
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

pytest_plugins = ["served"]

schemas = resolve_name("kb.api.schemas")  # by name: nothing imports a shell

OPERATIONS = {
    ("/v1/search", "get"): "search",
    ("/v1/diagnose", "post"): "diagnose",  # reads a body and keeps nothing
    ("/v1/entries", "get"): "listEntries",
    ("/v1/entries/{id}", "get"): "getEntry",
    ("/v1/entries/{id}/reports", "get"): "listReports",
    ("/healthz", "get"): "health",
    ("/readyz", "get"): "readiness",
}
diagnosis_schemas = resolve_name("kb.api.diagnosis_schemas")


@pytest.fixture
def description(client: httpx.Client) -> dict[str, Any]:
    document: dict[str, Any] = client.get("/openapi.json").json()
    return document


def test_it_names_every_operation_once_and_nothing_writes(description: dict[str, Any]) -> None:
    assert description["openapi"].startswith("3.1")
    found = {
        (path, method): operation["operationId"]
        for path, item in description["paths"].items()
        for method, operation in item.items()
    }
    assert found == OPERATIONS


@pytest.mark.parametrize(("path", "method"), OPERATIONS, ids=lambda one: one)
def test_each_operation_is_described_with_an_example(description: dict[str, Any], path: str, method: str) -> None:
    operation = description["paths"][path][method]
    assert operation["summary"]
    assert operation["description"]
    answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
    model = description["components"]["schemas"][answer["$ref"].rpartition("/")[2]]
    assert model["examples"]
    for parameter in operation.get("parameters", []):
        assert parameter["description"]


def test_errors_are_described_as_problems(description: dict[str, Any]) -> None:
    for item in description["paths"].values():
        for status, response in next(iter(item.values()))["responses"].items():
            assert status == "200" or list(response["content"]) == ["application/problem+json"]
    assert set(description["paths"]["/v1/entries/{id}"]["get"]["responses"]) == {"200", "404", "406", "422", "503"}
    assert "HTTPValidationError" not in description["components"]["schemas"]


def test_an_entry_is_described_in_both_its_forms(description: dict[str, Any]) -> None:
    answer = description["paths"]["/v1/entries/{id}"]["get"]["responses"]["200"]
    assert set(answer["content"]) == {"application/json", "text/markdown"}


@pytest.mark.parametrize(
    "name", ["SearchResult", "EntryList", "EntryDocument", "ReportList", "Health", "Readiness", "DiagnosisDocument"]
)
def test_an_example_fits_its_model(name: str) -> None:
    model: type[BaseModel] = getattr(schemas, name, None) or getattr(diagnosis_schemas, name)
    (example,) = model.model_json_schema()["examples"]
    assert json.loads(model.model_validate_json(json.dumps(example)).model_dump_json()) == example


def test_what_is_served_fits_the_models(client: httpx.Client) -> None:
    schemas.SearchResult.model_validate_json(client.get("/v1/search?q=thing").text)
    schemas.EntryList.model_validate_json(client.get("/v1/entries").text)
    schemas.EntryDocument.model_validate_json(client.get("/v1/entries/slow-disk").text)
    schemas.ReportList.model_validate_json(client.get("/v1/entries/slow-disk/reports").text)
