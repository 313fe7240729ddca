"""What a bundle holds of what the agent returned: redacted, and whole also where a node was cut off."""

from __future__ import annotations

import json
import pickle
from typing import Any

from kb.capture.bundle import File, Node, files_of, redactor_of
from kb.capture.gather import Collected
from kb.capture.plan import describe, guessed_ranks, offered_windows

HOME = "/home/wilhelmina/train.py"
RANK = {
    "rank": 1, "rank_from": "RANK", "pid": 7, "start": 5, "has_nccl": False,
    "environment": {"MASTER_ADDR": "gpu-node-17.example.org", "RANK": "1"},
    "children": [{"pid": 8, "start": 6, "name": "python", "command": f"python {HOME}"}],
}  # fmt: skip
JOB: dict[str, Any] = {
    "id": 7, "launcher": None, "command": f"python {HOME}", "address": "gpu-node-17.example.org:29500", "slurm_job": "",
    "world_size": 2, "local_size": None, "ranks": [RANK],
}  # fmt: skip
PARTS = {
    "node/host.json": json.dumps({"host": "gpu-node-17", "kernel": "6.18"}).encode(),
    "rank-1/stack-2.txt": b"Process 7: python train.py\nThread 7 (idle): \"MainThread\"\n    f (train.py:3)\n",
    "rank-1/memory-map.json": json.dumps({"arguments": ["python", HOME], "libraries": []}).encode(),
    "rank-1/stderr.log": b"gpu-node-17: token hf_abcdefghijklmnopqrstuvwxyzABCDEF12 of 10.1.2.3\n",
    "node/sockets.txt": b"ESTAB 0 0 10.1.2.3:5 10.1.2.4:6 users:((\"python\",pid=7,fd=3))\n",
}  # fmt: skip


def made(**parts: bytes) -> dict[str, File]:
    collected = Collected({**PARTS, **{name.replace("__", "/"): data for name, data in parts.items()}}, (), 1.0)
    nodes = [Node(JOB, collected)]
    return {file.name: file for file in files_of(nodes, redactor_of(nodes))}


def test_no_person_host_address_or_secret_is_in_any_file() -> None:
    content = b"\n".join(file.content for file in made().values())
    for word in (b"wilhelmina", b"gpu-node-17", b"10.1.2.", b"hf_abc"):
        assert word not in content, word
    assert b"<ip-" in content


def test_equal_addresses_have_equal_placeholders_in_all_files() -> None:
    files = made()
    log = files["node-0/rank-1/stderr.log"].content.decode()
    sockets = json.loads(files["node-0/node.json"].content)["tools"]["sockets"]
    assert log.split(" of ")[1].strip() == sockets.split()[3].partition(":")[0]


def test_each_file_has_its_rank_and_kind() -> None:
    kinds = {name: (file.kind, file.rank) for name, file in made().items()}
    assert kinds == {
        "node-0/rank-1/process.json": ("process", 1),
        "node-0/node.json": ("node", None),
        "node-0/rank-1/stacks.txt": ("stacks", 1),
        "node-0/rank-1/stderr.log": ("log", 1),
    }


def test_a_dump_is_json_with_its_rank_and_a_damaged_one_is_left_out() -> None:
    dump = {"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": [{"record_id": 0, "frames": [HOME]}]}
    document = json.loads(made(**{"rank-1__flight.bin": pickle.dumps(dump, 2)})["node-0/rank-1/flight.json"].content)
    assert document["rank"] == 1
    assert "wilhelmina" not in json.dumps(document)
    assert "node-0/rank-1/flight.json" not in made(**{"rank-1__flight.bin": b"\x80\x02broken"})


def test_a_node_that_was_cut_off_has_what_came() -> None:
    record = json.loads(made()["node-0/rank-1/process.json"].content)
    assert record["samples"] == [None, None]
    assert "f (train.py:3)" in record["stacks"][1]


def test_a_job_is_described_for_a_person() -> None:
    assert describe({**JOB, "slurm_job": "4711"}) == f"rank 1 of 2, Slurm job 4711, python {HOME}"
    assert guessed_ranks(JOB) == ""
    assert "order" in guessed_ranks({"ranks": [{"rank": 0, "rank_from": "order in which process 3 started them"}]})
    windows = {"rank-0": {"pipe": "/tmp/p", "has_debug_server": True}, "rank-1": None}
    assert offered_windows(windows) == ["the dump pipe of NCCL of rank-0", "torch's debug server of rank-0"]
