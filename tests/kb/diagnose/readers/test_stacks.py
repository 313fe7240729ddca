"""Stacks of processes: dumps of py-spy 0.4 as it prints them, of this interpreter's faulthandler, and nonsense."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb.diagnose.readers.stacks import read_stacks
from kb.diagnose.readers.structured import Unreadable

GATHERS = """\
Process 21300: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 21300 (idle): "MainThread"
    all_gather (torch/distributed/distributed_c10d.py:4287)
    _exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)
    all_gather_object (torch/distributed/distributed_c10d.py:3513)
    _exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)
        Arguments:
            args: (<list at 0x7fc4d150d9d0>)
    step (train.py:42)
    <module> (train.py:90)
"""
LOADS = """\
Process 21301: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 21301 (idle): "MainThread"
    _PollLikeSelector.select (selectors.py:415)
    wait (multiprocessing/connection.py:947)
    Queue.get (multiprocessing/queues.py:113)
    _MultiProcessingDataLoaderIter._try_get_data (torch/utils/data/dataloader.py:1291)
    _BaseDataLoaderIter.__next__ (torch/utils/data/dataloader.py:725)
    Trainer._inner_training_loop (transformers/trainer.py:2400)
    main (train.py:71)
    <module> (train.py:90)
Thread 21312 (idle): "QueueFeederThread"
    Condition.wait (threading.py:327)
    Thread._bootstrap (threading.py:1002)
"""
WORKER = """\
Process 21311: python train.py
Python v3.11.7 (/usr/bin/python3.11)
Parent Process 21301: python train.py

Thread 21311 (active): "MainThread"
    __getitem__ (data.py:10)
    _worker_loop (torch/utils/data/_utils/worker.py:374)
    BaseProcess.run (multiprocessing/process.py:108)
    <module> (train.py:90)
"""
FAULT = """\
Thread 0x00007f19cd3286c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f19efa69b80 (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3245 in all_reduce
  File "/env/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/train.py", line 42 in step
  File "/home/me/train.py", line 90 in <module>
"""


def sentences(text: str, rank: int | None = None) -> list[str]:
    return [line.text for line in read_stacks(text, "stacks.txt", rank)]


def test_a_rank_in_a_collective_is_told_with_the_users_call() -> None:
    (line,) = read_stacks(GATHERS, "stacks.txt")
    assert line.text == "rank ? (pid 21300) is in all_gather_object called from train.py:42 step"
    assert (line.source, line.number, line.rank) == ("stacks.txt", 0, None)


def test_a_rank_that_is_somewhere_else_is_told_where() -> None:
    text = "is in the DataLoader called from train.py:71 main, not in a collective"
    assert sentences(LOADS) == [f"rank ? (pid 21301) {text}"]
    assert sentences(LOADS, 3) == [f"rank 3 {text}"]


def test_each_process_has_one_sentence_and_a_worker_of_a_dataloader_none() -> None:
    assert len(sentences(GATHERS + "\n" + LOADS + "-" * 80 + "\n" + WORKER)) == 2


def test_faulthandlers_stacks_are_read_and_the_main_thread_counts() -> None:
    assert sentences(FAULT, 2) == ["rank 2 is in all_reduce called from train.py:42 step"]
    assert sentences(
        FAULT.replace("Current thread", "Thread").replace("80 (most", "80 [python] (most"), 2
    ) == sentences(FAULT, 2)


def test_torchs_debug_server_says_whose_stacks_these_are() -> None:
    text = f"=== Rank 0: host:1 ===\n{FAULT}\n=== Rank 1: host:2 ===\n{LOADS}"
    assert [(line.rank, line.text.split(" called")[0]) for line in read_stacks(text, "stacks")] == [
        (0, "rank 0 is in all_reduce"),
        (1, "rank 1 is in the DataLoader"),
    ]


@pytest.mark.parametrize(
    "prefix", ["[rank{}]: ", "[default{}]:", "{}: ", "[1,{}]<stderr>:", "(Trainer rank={} pid=71) "]
)
def test_interleaved_lines_of_two_ranks_are_taken_apart_by_their_launchers_prefix(prefix: str) -> None:
    item, other = FAULT.splitlines(), FAULT.replace("42", "43").splitlines()
    mixed = "\n".join(f"{prefix.format(0)}{a}\n{prefix.format(1)}{b}" for a, b in zip(item, other, strict=True))
    assert sentences(mixed) == [
        "rank 0 is in all_reduce called from train.py:42 step",
        "rank 1 is in all_reduce called from train.py:43 step",
    ]


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        (["_write (torch/serialization.py:9)", "save (torch/serialization.py:8)"], "torch.save called from a.py:1 f{}"),
        (["tokenize_row (trl/trainer/kto.py:3)"], "tokenization called from a.py:1 f{}"),
        (["_batch_encode (transformers/tokenization_utils_fast.py:3)"], "tokenization called from a.py:1 f{}"),
        (["wait (threading.py:1)", "Dataset.map (datasets/arrow_dataset.py:3)"], "datasets.map called from a.py:1 f{}"),
        (["interaction (pdb.py:3)"], "the debugger called from a.py:1 f{}"),
        (["synchronize (torch/cuda/__init__.py:3)"], "torch.cuda.synchronize called from a.py:1 f"),
        (["backward (torch/autograd/__init__.py:3)"], "backward called from a.py:1 f"),
        (["init_process_group (torch/distributed/distributed_c10d.py:3)"], "init_process_group called from a.py:1 f{}"),
        (["_FooIter.send_all (b.py:3)"], "b.py:3 send_all"),
    ],
)
def test_what_a_rank_does_instead_is_named(frames: list[str], sentence: str) -> None:
    """`backward` and `synchronize` may hide a collective: nothing is said of one."""
    lines = [*frames, "f (a.py:1)", "<module> (a.py:2)"]
    text = "\n".join(['Thread 7 (idle): "MainThread"', *("    " + line for line in lines)])
    assert sentences(text, 0) == [f"rank 0 is in {sentence.format(', not in a collective')}"]


def test_py_spys_json_says_the_same_as_its_text() -> None:
    def thread(pid: int, name: str | None, *frames: tuple[str, str, int]) -> dict[str, Any]:
        shown = [
            {
                "name": name,
                "filename": f"/env/lib/python3.11/site-packages/{file}",
                "short_filename": file,
                "line": line,
            }
            for name, file, line in frames
        ]
        return {"pid": pid, "thread_id": 1, "thread_name": name, "active": False, "frames": shown, "process_info": None}

    feeder = thread(9, "QueueFeederThread", ("Condition.wait", "threading.py", 327))
    main = thread(9, "MainThread", ("all_reduce", "torch/distributed/distributed_c10d.py", 4287))
    main["frames"].append({"name": "step", "filename": "/home/me/train.py", "line": 42})
    assert sentences(json.dumps([feeder, main], indent=2)) == [
        "rank ? (pid 9) is in all_reduce called from train.py:42 step"
    ]


def test_what_this_interpreters_faulthandler_prints_is_read(tmp_path: Path) -> None:
    script = tmp_path / "prepare.py"
    script.write_text("import faulthandler\ndef tokenize():\n    faulthandler.dump_traceback()\ntokenize()")
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert sentences(ran.stderr, 4) == [
        "rank 4 is in tokenization called from prepare.py:3 tokenize, not in a collective"
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *((text, "it contains no stack") for text in ("", "hello\nworld", "[]", "[3]", "[[]]", GATHERS[:90])),
        ("[{}]", "not a py-spy dump: a thread has no frames"),
        ("[{", "not JSON: "),
        ('[{"a":' + "[" * 100_000, "its JSON is nested too deeply"),
    ],
)
def test_what_has_no_stack_is_unreadable_for_a_reason(text: str, reason: str) -> None:
    with pytest.raises(Unreadable, match=f"^{reason}"):
        read_stacks(text, "x")


SENTENCE = re.compile(r"rank (\d+|\?|\? \(pid \d+\)) is in .+")
HEADING = re.compile(r"=== Rank |Process |^\[(rank|default)")
PARTS = [*GATHERS.splitlines(), *WORKER.splitlines(), *FAULT.splitlines(), "=== Rank 3: h ===", "[rank3]: ", " " * 3000]


@given(st.lists(st.sampled_from(PARTS) | st.text(max_size=60), max_size=30))
def test_any_lines_below_a_stack_are_at_most_one_sentence_per_process(lines: list[str]) -> None:
    stacks = read_stacks("\n".join([GATHERS, *lines]), "x")
    assert all(SENTENCE.match(line.text) for line in stacks)
    headings = sum(bool(HEADING.search(line)) for text in lines for line in text.splitlines())
    assert len(stacks) <= 2 + headings


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=10),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["pid", "frames", "thread_name", "name", "filename", "line"]), inner, max_size=5
            )
        ),
    )
)
def test_json_is_a_sentence_if_it_has_a_frame(value: Any) -> None:
    frames = value.get("frames") if isinstance(value, dict) else None
    if isinstance(frames, list) and any(isinstance(frame, dict) for frame in frames):
        assert all(SENTENCE.match(line.text) for line in read_stacks(json.dumps([value]), "x"))
    else:
        with pytest.raises(Unreadable, match=r"^(it contains no stack|not a py-spy dump: )"):
            read_stacks(json.dumps([value]), "x")
