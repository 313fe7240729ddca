"""The description of the API is complete, and its examples are true to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from kb.sharing.shared_report import SharedReport

pytest_plugins = ["tests.support.app_fixtures"]

MODELS = [  # by name: nothing imports a shell
    "kb.api.schemas.content:SearchResult",
    "kb.api.schemas.content:EntryList",
    "kb.api.schemas.content:EntryDocument",
    "kb.api.schemas.feedback:FeedbackDocument",
    "kb.api.schemas.feedback:FeedbackPage",
    "kb.api.schemas.feedback:CommentPage",
    "kb.api.schemas.health:Health",
    "kb.api.schemas.health:Readiness",
    "kb.api.schemas.reports:ReportDocument",
    "kb.api.schemas.reports:ReportPage",
    "kb.api.schemas.reports:ReportList",
    "kb.api.schemas.reports:Receipt",
    "kb.api.schemas.diagnosis:DiagnosisDocument",
    "kb.api.schemas.context:ContextDocument",
]
OPERATIONS = {
    ("/v1/search", "get"): "search",
    ("/v1/search", "post"): "searchText",
    ("/v1/diagnose", "post"): "diagnose",
    ("/v1/context", "get"): "getContext",
    ("/v1/entries", "get"): "listEntries",
    ("/v1/entries/{id}", "get"): "getEntry",
    ("/v1/entries/{id}/reports", "get"): "listReportsOfEntry",
    ("/v1/reports", "get"): "listReports",
    ("/v1/reports", "post"): "postReport",
    ("/v1/reports/{number}", "get"): "getReport",
    ("/v1/feedback", "get"): "listFeedback",
    ("/v1/feedback", "post"): "postFeedback",
    ("/v1/feedback/comments", "get"): "listComments",
    ("/v1/gaps", "get"): "listGaps",
    ("/v1/gaps/{digest}", "delete"): "forgetGap",
    ("/v1/admin/reindex", "post"): "reindex",
    ("/v1/admin/audit", "get"): "listAudit",
    ("/healthz", "get"): "health",
    ("/readyz", "get"): "readiness",
    ("/metrics", "get"): "metrics",
}
OPEN = {"health", "readiness"}  # who watches the service needs no key
SCOPES = {"postReport": "report", **dict.fromkeys(("forgetGap", "listComments", "reindex", "listAudit"), "admin")}
READS = {"searchText", "diagnose"}  # by POST since a question is long: nothing is written


@pytest.fixture(scope="module")
def description() -> dict[str, Any]:
    """Of an application that was never started: describing it needs neither index nor store."""
    create_app, settings = resolve_name("kb.api.app:create_app"), resolve_name("kb.api.settings:Settings")
    document: dict[str, Any] = create_app(settings(roots=())).openapi()
    return document


def operations(description: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for item in description["paths"].values():
        yield from item.values()


def test_it_is_served_as_it_is_made(client: httpx.Client, description: dict[str, Any]) -> None:
    assert client.get("/openapi.json").json() == json.loads(json.dumps(description))


def test_it_names_every_operation_once(description: dict[str, Any]) -> None:
    assert description["openapi"].startswith("3.1")
    result = {
        (path, method): operation["operationId"]
        for path, item in description["paths"].items()
        for method, operation in item.items()
    }
    assert result == OPERATIONS


@pytest.mark.parametrize(("path", "method"), OPERATIONS, ids=lambda item: item)
def test_each_operation_is_described_with_an_example(description: dict[str, Any], path: str, method: str) -> None:
    operation = description["paths"][path][method]
    assert operation["summary"]
    assert operation["description"]
    for parameter in operation.get("parameters", []):
        assert parameter["description"], parameter["name"]
    for response in (result for status, result in operation["responses"].items() if status in ("200", "201", "202")):
        for kind, content in response["content"].items():
            if kind == "application/json":
                model = description["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
                assert model["examples"]
                assert model["description"]


def test_errors_are_described_as_problems(description: dict[str, Any]) -> None:
    for operation in operations(description):
        for status, response in operation["responses"].items():
            if status[0] in "45":
                assert response["content"] == {
                    "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
                }
    assert "HTTPValidationError" not in description["components"]["schemas"]


def test_what_the_front_may_answer_is_described(description: dict[str, Any]) -> None:
    for operation in operations(description):
        name, statuses = operation["operationId"], set(operation["responses"])
        assert ({"401", "429", "503"} <= statuses) or name in OPEN
        assert ({"400", "408", "413"} <= statuses) == ("requestBody" in operation)
        assert ("403" in statuses) or name not in {*SCOPES, *READS, "postFeedback"}


def test_headers_are_described_where_they_are_sent(description: dict[str, Any]) -> None:
    for operation in operations(description):
        for status, response in operation["responses"].items():
            assert "X-Request-ID" in response["headers"]
            assert ("Retry-After" in response["headers"]) == (status in ("429", "503"))
            assert ("WWW-Authenticate" in response["headers"]) == (status == "401")


def test_who_may_do_what_is_described(description: dict[str, Any]) -> None:
    assert description["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for operation in operations(description):
        name = operation["operationId"]
        if name in OPEN:
            assert operation["security"] == []
        elif name in SCOPES:
            assert operation["security"] == [{"key": [SCOPES[name]]}]
        else:
            assert operation["security"] == [{"key": []}, {}]


def test_only_what_writes_needs_more_than_reading(description: dict[str, Any]) -> None:
    for path, item in description["paths"].items():
        for method, operation in item.items():
            is_read = method == "get" or operation["operationId"] in READS
            assert is_read or operation["operationId"] in {*SCOPES, "postFeedback"}, path


def test_every_reference_leads_somewhere_and_every_tag_is_explained(description: dict[str, Any]) -> None:
    text = json.dumps(description)
    named = {part.partition('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]}
    assert named <= set(description["components"]["schemas"])
    tags = {tag for operation in operations(description) for tag in operation["tags"]}
    assert {item["name"] for item in description["tags"] if item["description"]} == tags


def test_an_entry_is_described_in_its_three_forms(description: dict[str, Any]) -> None:
    answer = description["paths"]["/v1/entries/{id}"]["get"]["responses"]["200"]
    assert set(answer["content"]) == {"application/json", "text/markdown", "text/html"}


def test_the_body_of_a_report_is_described_with_an_example_that_fits(description: dict[str, Any]) -> None:
    body = description["paths"]["/v1/reports"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/SharedReport"}
    sent = SharedReport.model_validate_json(json.dumps(body["example"]))
    assert json.loads(sent.model_dump_json(exclude_none=True)) == body["example"]


@pytest.mark.parametrize("name", MODELS)
def test_an_example_fits_its_model(name: str) -> None:
    model: type[BaseModel] = resolve_name(name)
    (example,) = model.model_json_schema()["examples"]
    assert json.loads(model.model_validate_json(json.dumps(example)).model_dump_json()) == example


def test_what_is_served_fits_the_models(client: httpx.Client) -> None:
    for path, name in {
        "/v1/search?q=thing": "content:SearchResult",
        "/v1/context?q=thing": "context:ContextDocument",
        "/v1/entries": "content:EntryList",
        "/v1/entries/slow-disk": "content:EntryDocument",
        "/v1/entries/slow-disk/reports": "reports:ReportList",
        "/v1/reports": "reports:ReportPage",
        "/v1/feedback": "feedback:FeedbackPage",
    }.items():
        resolve_name(f"kb.api.schemas.{name}").model_validate_json(client.get(path).text)
