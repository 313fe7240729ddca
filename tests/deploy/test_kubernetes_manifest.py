"""deploy/kubernetes.yaml: its parts fit each other, the image and the service. No cluster is asked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import yaml
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from kb.errors import UsageError
from tests.support.console import CHECKOUT

DEPLOY = CHECKOUT / "deploy"
Object = dict[str, Any]


@pytest.fixture(scope="module")
def objects() -> dict[str, Object]:
    """By kind."""
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    result = {document["kind"]: document for document in documents}
    assert len(result) == len(documents)
    return result


@pytest.fixture(scope="module")
def pod(objects: dict[str, Object]) -> Object:
    result: Object = objects["Deployment"]["spec"]["template"]
    return result


@pytest.fixture(scope="module")
def container(pod: Object) -> Object:
    (result,) = pod["spec"]["containers"]
    assert isinstance(result, dict)
    return result


def test_every_selector_finds_the_pods(objects: dict[str, Object], pod: Object) -> None:
    labels = pod["metadata"]["labels"]
    assert objects["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert objects["Service"]["spec"]["selector"] == labels
    assert objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    (spread,) = pod["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == labels


def test_ports_are_those_of_the_image(objects: dict[str, Object], container: Object) -> None:
    (port,), (served,) = container["ports"], objects["Service"]["spec"]["ports"]
    assert f"EXPOSE {port['containerPort']}\n" in (DEPLOY / "Containerfile").read_text()
    assert container["args"][-2:] == ["--port", str(port["containerPort"])]
    probed = [container[name]["httpGet"]["port"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {served["targetPort"], *probed} == {port["name"]}


def test_probes_ask_what_the_service_has_and_a_database_that_is_away_restarts_nothing(container: Object) -> None:
    paths = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"startupProbe": "/healthz", "readinessProbe": "/readyz", "livenessProbe": "/healthz"}
    app = resolve_name("kb.api.app:create_app")(resolve_name("kb.api.settings:Settings")(roots=()))
    assert set(paths.values()) <= set(app.openapi()["paths"])


def test_the_settings_are_ones_that_the_service_reads(objects: dict[str, Object], container: Object) -> None:
    given = {**objects["ConfigMap"]["data"], **objects["Secret"]["stringData"]}
    assert {next(iter(item.values()))["name"] for item in container["envFrom"]} == {"kb"}
    settings = resolve_name("kb.api.settings:Settings").from_environment(given)
    assert settings.anonymous == "nobody"
    assert settings.database == given["KB_DATABASE_URL"]
    assert settings.rate == given["KB_RATE"]
    with pytest.raises(UsageError):
        resolve_name("kb.api.settings:Settings").from_environment({**given, "KB_ANONYMOUS": "whoever"})


@pytest.mark.parametrize("sender", ["127.0.0.1", "::1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "100.64.0.1"])
def test_as_it_stands_nobody_is_believed_who_says_for_whom_they_ask(objects: dict[str, Object], sender: str) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["client"][0], scope["scheme"]))

    trusted = objects["ConfigMap"]["data"]["FORWARDED_ALLOW_IPS"]
    headers = [(b"x-forwarded-for", b"198.51.100.7"), (b"x-forwarded-proto", b"https")]
    scope: Any = {"type": "http", "client": (sender, 5), "scheme": "http", "headers": headers}
    unused: Any = None
    asyncio.run(ProxyHeadersMiddleware(app, trusted)(scope, unused, unused))
    assert seen == [(sender, "http")]


def test_what_has_to_be_changed_is_named_at_its_head() -> None:
    head = (DEPLOY / "kubernetes.yaml").read_text().partition("apiVersion")[0]
    for name in ("image", "address of the database", "FORWARDED_ALLOW_IPS", "KB_ROOTS"):
        assert name in head.replace("\n# ", " ")


def test_it_runs_as_the_user_of_the_image_with_no_rights(pod: Object, container: Object) -> None:
    security, own = pod["spec"]["securityContext"], container["securityContext"]
    user = f"{security['runAsUser']}:{security['runAsGroup']}"
    assert f"USER {user}\n" in (DEPLOY / "Containerfile").read_text()
    assert security["runAsNonRoot"]
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True)
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert pod["spec"]["automountServiceAccountToken"] is False


def test_every_folder_that_is_written_is_mounted(pod: Object, container: Object) -> None:
    mounted = {item["name"]: item["mountPath"] for item in container["volumeMounts"]}
    assert sorted(mounted) == sorted(item["name"] for item in pod["spec"]["volumes"])
    assert {Path("/var/cache/kb"), Path("/tmp")} == set(map(Path, mounted.values()))


def test_one_replica_answers_whatever_is_rolled_out_or_drained(objects: dict[str, Object], container: Object) -> None:
    deployment = objects["Deployment"]["spec"]
    assert deployment["replicas"] > objects["PodDisruptionBudget"]["spec"]["minAvailable"] >= 1
    assert deployment["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    assert "memory" in container["resources"]["limits"]
