"""What leaves a node of a report: everything that a reader of verdicts needs, and nothing that names anybody."""

from __future__ import annotations

import getpass
import json
import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kb.errors import UsageError
from kb.sharing.shared_report import (
    MAX_BYTES,
    MAX_EVIDENCE,
    MAX_GPUS,
    MAX_LINE,
    MAX_VARIANTS,
    MAX_WORD,
    SharedReport,
    to_shared_report,
)
from tests.support.console import ContentRoot, Kb

LONGEST = "\U0001f525"  # four bytes in UTF-8; JSON escapes no longer character that a report may have


def document(**members: Any) -> dict[str, Any]:
    """A report as `kb verify --json` prints it, with secrets in every part that is not to leave."""
    rank = {"rank": 0, "kind": "raised", "log": "user alice on gpu-node-17", "traceback": "/home/alice/train.py"}
    arm = {"outcome": "raised", "expected": "raised", "because": "it hangs", "duration_s": 1.5, "ranks": [rank]}
    return {
        "id": "some-entry",
        "title": "A title",
        "verdict": "verified",
        "reason": "because",
        "evidence": "Timed out waiting 2000ms",
        "experiment": "nccl",
        "fidelity": "hardware",
        "entry_digest": "a" * 64,
        "probe_digest": "b" * 64,
        "started_at": "2026-03-01T09:30:00+01:00",
        "duration_s": 3,
        "kb_version": "0.1.0",
        "check": None,
        "arms": {"control": {**arm, "first_failing_rank": 0}, "treatment": {**arm, "outcome": "completed"}},
        "variants": [],
        "environment": {
            "interpreter": "/home/alice/venv/bin/python",
            "host": {"id": "5bce98f73f3e", "kernel": "6.8.0-45-generic", "os": "Ubuntu 22.04.4 LTS"},
            "gpus": [{"name": "NVIDIA H100 80GB HBM3", "driver_version": "570.86.15", "uuid": "GPU-1"}] * 2,
            "variables": {"NCCL_SOCKET_IFNAME": "alice0"},
            "python": {
                "version": "3.12.3",
                "executable": "/home/alice/venv/bin/python",
                "torch": {"version": "2.7.0+cu126", "cuda": "12.6", "location": "/home/alice"},
                "packages": {"torch": "2.7.0+cu126", "nvidia-nccl-cu12": "2.26.2"},
            },
        },
        "params": {"config": "/home/alice/secret.json"},
        "next_step": "apply the fix",
        **members,
    }


def text_of(**members: Any) -> str:
    return to_shared_report(document(**members)).model_dump_json()


def test_the_kind_of_machine_is_told() -> None:
    machine = to_shared_report(document()).machine
    assert machine.model_dump() == {
        "gpus": ("NVIDIA H100 80GB HBM3",) * 2,
        "driver": "570.86.15",
        "torch": "2.7.0+cu126",
        "cuda": "12.6",
        "nccl": "2.26.2",
        "kernel": "6.8.0-45-generic",
        "os": "Ubuntu 22.04.4 LTS",
        "python": "3.12.3",
    }


def test_logs_variables_files_and_ids_of_hosts_stay() -> None:
    text = text_of()
    for secret in ("alice", "gpu-node-17", "5bce98f73f3e", "GPU-1", "secret.json", "IFNAME", "venv"):
        assert secret not in text


@pytest.mark.parametrize("part", ["title", "reason", "evidence", "next_step"])
def test_names_secrets_and_files_go_from_every_sentence(part: str) -> None:
    output = "hf_abcdefghijklmnopqrstuvwxyz0123 of /scratch/projectx/step_10 from 10.1.2.3 of bob@example.com"
    text = text_of(**{part: output})
    for secret in ("hf_abc", "projectx", "step_10", "10.1.2.3", "bob"):
        assert secret not in text


def test_nested_sentences_are_redacted_too() -> None:
    output = "see /scratch/projectx/x and 10.1.2.3"
    arm = {"outcome": "raised", "expected": "raised", "because": output}
    text = text_of(
        check={"state": "exposed", "evidence": [output], "advice": output},
        arms={"control": arm, "treatment": arm},
        variants=[{"experiment": "x", "verdict": "verified", "reason": output}],
        environment={"host": {"os": output}, "gpus": [{"name": output, "driver_version": output}]},
    )
    assert "projectx" not in text
    assert "10.1.2.3" not in text
    assert text.count("<path>") == 6  # the name of a GPU and a version have no place for one


def test_this_user_and_this_host_are_hidden_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "carol")
    monkeypatch.setattr(socket, "gethostname", lambda: "login07.cluster")
    text = text_of(reason="the run of carol on login07.cluster failed")
    assert "carol" not in text
    assert "login07" not in text


def test_a_machine_that_is_called_like_its_gpus_hides_them_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "h100")
    shared_report = to_shared_report(document(reason="it ran on h100"))
    assert shared_report.reason == "it ran on <host-1>"
    assert shared_report.machine.gpus == ("NVIDIA H100 80GB HBM3",) * 2


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-80GB",
        "Tesla V100-SXM2-32GB",
        "NVIDIA GH200 480GB",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "H800",
    ],
)
def test_names_of_gpus_are_no_names_of_machines(name: str) -> None:
    gpus = [{"name": name, "driver_version": "535.183.06"}]
    machine = to_shared_report(document(environment={"gpus": gpus, "python": {"version": "3.12.3"}})).machine
    assert (machine.gpus, machine.driver, machine.python) == ((name,), "535.183.06", "3.12.3")


def test_a_name_that_the_end_gives_away_is_hidden_at_the_beginning() -> None:
    assert "dave77" not in text_of(title="of dave77", next_step="look in /home/dave77")


def test_what_an_error_is_known_by_stays() -> None:
    text = "[/__w/pytorch/third_party/gloo/unbound_buffer.cc:129] Timed out waiting 1800000ms, /dev/shm is 64 MiB"
    assert to_shared_report(document(evidence=text)).evidence == (
        "[<path>/unbound_buffer.cc:129] Timed out waiting 1800000ms, /dev/shm is 64 MiB"
    )


def test_addresses_of_the_web_are_no_files() -> None:
    text = "see https://github.com/pytorch/pytorch/issues/1 and/or read it"
    assert to_shared_report(document(reason=text)).reason == text


def test_control_characters_and_turned_text_become_blanks() -> None:
    assert to_shared_report(document(reason="a\x1b[31m\u202eb\nc\x00")).reason == "a [31m b c"


def test_long_sentences_are_cut_and_long_lists_end() -> None:
    variant = {"experiment": "x" * 1000, "verdict": "verified", "reason": "r"}
    shared_report = to_shared_report(
        document(
            reason="word " * 1000,
            check={"state": "unknown", "evidence": ["e"] * 100, "advice": None},
            variants=[variant] * 100,
            environment={"gpus": [{"name": "H100", "driver_version": "1"}] * 1000},
        )
    )
    assert len(shared_report.reason) == MAX_LINE
    assert shared_report.reason.endswith("…")
    assert shared_report.check
    assert len(shared_report.check.evidence) == MAX_EVIDENCE
    assert len(shared_report.variants) == MAX_VARIANTS
    assert len(shared_report.machine.gpus) == MAX_GPUS


def test_times_are_told_in_utc() -> None:
    assert json.loads(text_of())["started_at"] == "2026-03-01T08:30:00Z"


def test_a_shared_report_is_shared_as_it_is() -> None:
    once = to_shared_report(document(reason="bob@example.com in /scratch/a/b"))
    assert to_shared_report(once.model_dump(mode="json")) == once
    assert SharedReport.model_validate_json(once.model_dump_json()) == once


def test_the_report_of_the_command_can_be_shared(content: ContentRoot, kb: Kb) -> None:
    content.incident("breaks-here")
    shared_report = to_shared_report(kb("verify", "breaks-here", "--json").json)
    assert (shared_report.id, shared_report.verdict, shared_report.fidelity) == ("breaks-here", "verified", "cpu")
    assert shared_report.arms
    assert (shared_report.arms.control.outcome, shared_report.arms.treatment.outcome) == ("raised", "completed")
    assert shared_report.machine.python
    assert str(content.path) not in shared_report.model_dump_json()


def test_the_largest_report_stays_below_the_limit() -> None:
    line, word = LONGEST * MAX_LINE, LONGEST * MAX_WORD
    arm = {"outcome": "harness-failure", "expected": word, "because": line}
    largest = SharedReport.model_validate_json(
        json.dumps(
            {
                "id": "a" * 100,
                **dict.fromkeys(("title", "reason", "evidence", "next_step"), line),
                "verdict": "fix-ineffective",
                "experiment": word,
                "fidelity": "stand-in",
                **dict.fromkeys(("entry_digest", "probe_digest"), "0" * 64),
                "started_at": "2026-03-01T08:30:00.123456+00:00",
                "duration_s": 1234567.1234567,
                "kb_version": "0" * 40,
                "check": {"state": "exposed", "evidence": [line] * MAX_EVIDENCE, "advice": line},
                "arms": {"control": arm, "treatment": arm},
                "variants": [{"experiment": word, "verdict": "not-applicable", "reason": line}] * MAX_VARIANTS,
                "machine": {
                    "gpus": [word] * MAX_GPUS,
                    **dict.fromkeys(("driver", "torch", "cuda", "nccl", "kernel", "os", "python"), word),
                },
            }
        )
    )
    assert len(largest.model_dump_json().encode()) < MAX_BYTES


@given(message=st.text(max_size=700))
@settings(max_examples=60)
def test_any_sentence_can_be_shared(message: str) -> None:
    shared_report = to_shared_report(
        document(reason=message, check={"state": "unknown", "evidence": [message], "advice": message})
    )
    assert SharedReport.model_validate_json(shared_report.model_dump_json()) == shared_report


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("id", "../etc/passwd"),
        ("id", "x" * 101),
        ("entry_digest", "Z" * 64),
        ("verdict", "confirmed"),
        ("fidelity", "gpu"),
        ("reason", "x" * (MAX_LINE + 1)),
        ("reason", "a\nb"),
        ("reason", "a\u202eb"),
        ("started_at", "2026-03-01T08:30:00"),
        ("started_at", "0001-01-01T00:00:00+14:00"),
        ("duration_s", -1),
        ("duration_s", "3"),
        ("machine", {"host": "gpu-node-17"}),
        ("environment", {}),
        ("variants", [{"experiment": "x", "verdict": "verified", "logs": "y"}]),
    ],
)
def test_what_may_not_be_in_a_shared_report_is_refused(member: str, value: object) -> None:
    sound = to_shared_report(document()).model_dump(mode="json")
    with pytest.raises(ValidationError):
        SharedReport.model_validate_json(json.dumps({**sound, member: value}))


@pytest.mark.parametrize("missing", ["id", "verdict", "started_at", "entry_digest"])
def test_what_is_no_report_is_refused_with_a_hint(missing: str) -> None:
    broken = document()
    del broken[missing]
    with pytest.raises(UsageError, match="not a report of kb"):
        to_shared_report(broken)


def test_a_lone_surrogate_is_no_text() -> None:
    sound = to_shared_report(document()).model_dump_json().replace("because", "\\ud800")
    with pytest.raises(ValidationError):
        SharedReport.model_validate_json(sound)
