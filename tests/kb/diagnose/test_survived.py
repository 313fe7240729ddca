"""What a job printed before it made progress did not end it: an exception that no entry knows keeps its place."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kb.content.catalog import Catalog, load_catalog
from kb.content.entry import Role
from kb.content.roots import builtin_root
from kb.diagnose.diagnosis import Diagnosis

Answer = Callable[..., Diagnosis]

STEP = "step {0} | loss 2.{0} | 412 ms\n"
UNKNOWN = (
    "Traceback (most recent call last):\n"
    '  File "/srv/train.py", line 88, in main\n    batch = read(row)\n'
    '  File "/srv/rows.py", line 12, in read\n    raise ValueError("bad data in row 3")\n'
    "ValueError: bad data in row 3\n"
)
PORT = "gpu-48:21050:21188 [0] transport/net_ib.cc:93 NCCL WARN NET/IB : Got async event : port error\n"
WATCHDOG = (
    "[rank3]:[E1122 03:14:15.926535897 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=811, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for 600042 milliseconds "
    "before timing out.\n"
)


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog([builtin_root()])


def test_a_warning_does_not_explain_what_ended_the_job_many_steps_later(answer: Answer, catalog: Catalog) -> None:
    warnings = [
        (entry.id, signature.sample)
        for entry in catalog
        for signature in entry.meta.signatures
        if signature.role is not Role.CONTEXT and "warn" in f"{signature.sample} {signature.source}".lower()
    ]
    assert len(warnings) > 50
    for entry_id, sample in warnings:
        diagnosis = answer(f"{STEP.format(11)}{sample}\n{STEP.format(12)}{STEP.format(90)}{UNKNOWN}")
        first = diagnosis.ranks.first_failure
        assert diagnosis.unexplained, (entry_id, sample)
        assert first is not None and first.text == "ValueError: bad data in row 3", (entry_id, sample)


def test_a_warning_without_progress_behind_it_still_counts(answer: Answer) -> None:
    diagnosis = answer(f"{STEP.format(11)}{PORT}{UNKNOWN}")
    assert diagnosis.findings[0].id == "ib-link-flapping"


def test_a_known_consequence_keeps_the_warning_that_led_to_it(answer: Answer) -> None:
    diagnosis = answer(f"{STEP.format(11)}{PORT}{STEP.format(12)}{STEP.format(13)}{WATCHDOG}")
    assert "ib-link-flapping" in [finding.id for finding in diagnosis.findings]
