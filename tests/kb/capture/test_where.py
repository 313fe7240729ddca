"""`--nodes WHERE`, the reasons why a node did not answer, and what its clock shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from kb.capture.gather import _document, agent_script
from kb.capture.skew import Skew
from kb.capture.transport import nodes
from kb.capture.transport.connection import Connection
from kb.capture.transport.exchange import Reply
from kb.capture.transport.kubernetes import FORM
from kb.capture.transport.refusal import reason
from kb.errors import CaptureFailed, UsageError
from tests.support.nodes import script


def test_hosts_are_named_once_in_their_order() -> None:
    found = nodes.resolve("ssh:b,me@a,b").connections
    assert [(node.name, node.command[-5:-4]) for node in found] == [("b", ("b",)), ("a", ("me@a",))]
    assert "-oBatchMode=yes" in "".join(found[0].command)


@pytest.mark.parametrize(
    "where", ["pdsh:a", "ssh:", "ssh:-oProxyCommand=x", "ssh:a b", "ssh:@/no/such/file", "slurm:1;2"]
)
def test_what_names_no_nodes_is_a_usage_error(where: str) -> None:
    with pytest.raises(UsageError):
        nodes.resolve(where)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("app=x", (None, "app=x", None)),
        ("team/app=x,tier in (a)#torch", ("team", "app=x,tier in (a)", "torch")),
        ("training.kubeflow.org/job-name=x", (None, "training.kubeflow.org/job-name=x", None)),
        ("team/training.kubeflow.org/job-name=x", ("team", "training.kubeflow.org/job-name=x", None)),
    ],
)
def test_a_namespace_has_no_dot(where: str, expected: tuple[str | None, ...]) -> None:
    match = FORM.fullmatch(where)
    assert match is not None
    assert match.group("namespace", "selector", "container") == expected


def test_a_tool_that_is_missing_or_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="there is no squeue here"):
        nodes.resolve("slurm:7")
    script(tmp_path / "squeue", "echo PENDING 7")
    with pytest.raises(UsageError, match="Slurm job 7 is PENDING, not running"):
        nodes.resolve("slurm:7")
    script(tmp_path / "kubectl", "echo 'error: You must be logged in' >&2; exit 1")
    with pytest.raises(CaptureFailed, match="kubectl failed: error: You must be logged in"):
        nodes.resolve("kubectl:app=x")
    script(tmp_path / "kubectl", """echo '{"items": []}'""")
    with pytest.raises(UsageError, match="no pod with app=x runs"):
        nodes.resolve("kubectl:app=x")


@pytest.mark.parametrize(
    ("errors", "code", "expected"),
    [
        ("Host key verification failed.", 255, "Host key verification failed.: connect to it once by hand, to accept its key"),
        ("me@n: Permission denied (publickey).", 255, "`ssh -o BatchMode=yes n0 true` must work"),
        ("bash: line 1: python3: command not found", 127, "kb needs a python3 on the PATH there"),
        ("python3 is 3.6 there", 1, "put a newer python3 first"),
        ('exec: "python3": executable file not found in $PATH: unknown\ncommand terminated with exit code 127', 127,
         'exec: "python3": executable file not found in $PATH: unknown: kb needs a python3'),
        ("srun: error: Unable to create step for job 7: Invalid job id specified", 1, "the job has ended"),
        ("", None, "it did not return in 5 s: the node may hang, that is evidence"),
        ("", 0, "it returned nothing that kb can read"),
    ],
)  # fmt: skip
def test_a_node_that_did_not_answer_has_a_reason_and_a_remedy(errors: str, code: int | None, expected: str) -> None:
    assert expected in reason(Connection("n0", ()), Reply(b"", errors, code, 0.0, 5.0))


def test_what_a_login_prints_before_is_left_out() -> None:
    assert _document(b'Welcome!\n{"jobs": []}') == {"jobs": []}
    assert _document(b"Welcome!") is None


def test_an_old_python_is_told_before_anything_else_runs() -> None:
    assert agent_script({}).index("python3 is %d.%d there") < agent_script({}).index('sys.modules["kb_agent.main"]')


def test_the_skew_is_bounded_by_the_way_to_the_node() -> None:
    skew = Skew.between((174.0, 174.5), (100.0, 101.0))
    assert (skew.ahead_s, skew.margin_s) == (73.75, 0.25)
    assert skew.is_certain
    assert not Skew.between((100.2, 100.4), (100.0, 101.0)).is_certain
