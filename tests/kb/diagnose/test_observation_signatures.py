"""The sentences that kb derives from dumps and stacks, as they are really derived, against the entries' signatures."""

from __future__ import annotations

from typing import Any

import pytest

from kb.content.catalog import load_catalog
from kb.content.entry import Role
from kb.content.roots import builtin_root
from kb.diagnose.readers.stacks import read_stacks
from kb.harness.flight_compare import find_mismatches
from kb.patterns.literals import find

ENTRIES = load_catalog((builtin_root(),)).current()


def roots(sentence: str) -> set[str]:
    return _with(sentence, Role.ROOT)


def cascades(sentence: str) -> set[str]:
    return _with(sentence, Role.CASCADE)


def _with(sentence: str, role: Role) -> set[str]:
    return {
        entry.id
        for entry in ENTRIES
        for signature in entry.meta.signatures
        if signature.role is role and find(signature.pattern, sentence)
    }


def call(seq: int, op: str = "all_reduce", size: int = 4, frames: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    sizes = {"sizes": [[size]], "dtypes": ["Float"], "frames": list(frames)}
    return {"group": "0", "seq": seq, "op": f"nccl:{op}", "state": "started", "retired": False, **sizes, **more}


def sentences(**ranks: list[dict[str, Any]]) -> list[str]:
    return [finding.text for finding in find_mismatches({int(name[1:]): calls for name, calls in ranks.items()})]


@pytest.mark.parametrize("many", [2, 4, 40])
def test_different_operations_mean_divergence_however_many_ranks_there_are(many: int) -> None:
    sentence, *_ = sentences(**{f"r{rank}": [call(1, ("all_reduce", "all_gather")[rank % 2])] for rank in range(many)})
    assert roots(sentence) == {"rank-divergent-collectives"}, sentence


@pytest.mark.parametrize("many", [2, 4, 40])
def test_different_sizes_of_one_operation_mean_a_shape_mismatch(many: int) -> None:
    sentence, *_ = sentences(**{f"r{rank}": [call(1, size=(4, 5)[rank % 2])] for rank in range(many)})
    assert roots(sentence) == {"collective-shape-mismatch"}, sentence


def test_one_call_from_different_lines_means_divergence() -> None:
    here, there = ("train.py:38 train",), ("train.py:39 train",)
    done: dict[str, Any] = {"state": "completed", "retired": True}
    missing, lines = sentences(
        r0=[call(1, frames=here, **done), call(2, frames=there)], r1=[call(1, frames=there, **done)]
    )
    assert roots(lines) == {"rank-divergent-collectives"}
    assert roots(missing) == set(), "a rank that never came may be late, dead or elsewhere"
    assert {"rank-divergent-collectives", "uneven-inputs-hang"} <= cascades(missing)


@pytest.mark.parametrize(
    ("frame", "entry_id"),
    [
        ("trainer.py:310 save_model", "checkpoint-save-allgather-timeout"),
        ("rollout.py:44 generate", "zero3-generate-hang"),
    ],
)
def test_where_the_waiting_rank_called_from_can_decide(frame: str, entry_id: str) -> None:
    sentence, *_ = sentences(r0=[call(1, "all_gather", frames=(frame,))], r1=[])
    assert roots(sentence) == {entry_id}, sentence


@pytest.mark.parametrize("function", ["load_checkpoint", "read_checkpoint", "set_model_state_dict", "checkpoint_block"])
def test_a_load_or_a_recomputation_is_no_save(function: str) -> None:
    sentence, *_ = sentences(r0=[call(1, "all_gather", frames=(f"train.py:310 {function}",))], r1=[])
    assert roots(sentence) == set(), sentence


def test_a_call_after_the_others_timeout_means_a_slow_rank() -> None:
    first, second = (call(1, time_created_ns=int(at * 1e9), timeout_ms=600_000) for at in (100, 2000))
    sentence, *_ = sentences(r0=[first], r1=[second])
    assert roots(sentence) == {"slow-rank-exceeds-timeout"}


def test_all_ranks_in_one_collective_points_to_transport_and_with_gloo_only_to_threads() -> None:
    sentence, *_ = sentences(r0=[call(7)], r1=[call(7)])
    assert roots(sentence) == set()
    assert {"nccl-p2p-hang", "nccl-ib-misconfigured"} <= cascades(sentence)
    assert cascades(sentence.replace("completed it", "completed it, on gloo")) == {"watchdog-heartbeat-stuck"}


STACK = """Thread 0x00007f703b050b80 (most recent call first):
  File "/opt/venv/lib/python3.11/site-packages/{file}", line 50 in {function}
  File "/workspace/train.py", line 71 in main
  File "/workspace/train.py", line 90 in <module>
"""


@pytest.mark.parametrize(
    ("file", "function", "expected"),
    [
        ("filelock/_api.py", "acquire", (set(), {"stale-cache-lock"})),
        ("torch/utils/file_baton.py", "wait", (set(), {"stale-cache-lock"})),
        ("torch/utils/data/dataloader.py", "_try_get_data", (set(), {"slow-rank-exceeds-timeout"})),
        ("torch/_dynamo/convert_frame.py", "_compile", (set(), {"compile-rank-skew"})),
        ("torch/serialization.py", "save", (set(), {"checkpoint-save-allgather-timeout"})),
    ],
)
def test_the_stack_of_the_missing_rank_points_to_what_it_does(
    file: str, function: str, expected: tuple[set[str], set[str]]
) -> None:
    (line,) = read_stacks(STACK.format(file=file, function=function), "rank1.stacks", 1)
    assert (roots(line.text), cascades(line.text)) == expected, line.text
