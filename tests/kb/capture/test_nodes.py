"""A job on two nodes, each reached through ssh and a real sshd: one bundle, whatever a node does."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kb.capture.gather import read_parts
from kb.diagnose.inputs.streams import read_file
from tests.support.console import KB, run_kb, wait_for
from tests.support.hanging import CULPRIT, HangingJob, hanging_job
from tests.support.nodes import Nodes, script, ssh_nodes
from tests.support.slurm_nodes import slurm_job

pytest.importorskip("torch")
NAMES = ("gpu-17", "gpu-18")
SIZE = 4  # ranks, half of them on each node
ADDRESS = "gpu-17.cluster"
ODD = (
    "kb: rank 1 is in hanging_job.py:35 sleeping, in no collective, "
    "while ranks 0, 2 and 3 are in all_reduce called from hanging_job.py:139 add_up"
)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with ssh_nodes(tmp_path_factory.mktemp("ssh") / "nodes", NAMES) as made:
        yield made


@pytest.fixture(scope="module")
def job(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HangingJob]:
    before = [nodes.enter(NAMES[rank * 2 // SIZE]) for rank in range(SIZE)]
    with hanging_job("sleeping", tmp_path_factory.mktemp("job"), SIZE, before, ADDRESS) as hanging:
        yield hanging
        hanging.end_well()


def captured(nodes: Nodes, folder: Path, where: str, *options: str) -> Any:
    own = ("--out", str(folder), "--json", "--interval", "1", *options)
    ended = run_kb("capture", "--nodes", where, *own, cwd=folder, PATH=nodes.path)
    assert ended.code == 0, ended.out + ended.err
    return ended.json


def texts(document: Any) -> list[str]:
    return [line["text"] for line in document["diagnosis"]["observations"]]


@pytest.mark.usefixtures("job")
def test_a_rank_is_odd_among_those_of_all_nodes(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# of the job\ngpu-17 slots=2\n\nroot@gpu-18 slots=2  # the second\n")
    document = captured(nodes, tmp_path, "ssh:@hosts")
    assert texts(document)[0] == ODD
    assert document["diagnosis"]["ranks"]["absent"] == [CULPRIT]
    assert [(node["node"], node["name"], node["ranks"]) for node in document["nodes"]] == [
        ("node-0", "gpu-17", [0, 1]),
        ("node-1", "gpu-18", [2, 3]),
    ]
    assert all(abs(node["skew"]["ahead_s"]) <= node["skew"]["margin_s"] for node in document["nodes"])
    assert (document["problems"], [node["problems"] for node in document["nodes"]]) == ([], [[], []])
    files = bundle_files(document)
    assert first_sample(files, 3) - first_sample(files, 0) < 1.0
    for word in (b"gpu-17", b"gpu-18"):
        assert not any(word in content for content in files.values())
    again = run_kb("diagnose", document["bundle"], "--json", cwd=tmp_path).json
    assert [line["text"] for line in again["observations"]] == texts(document)


def bundle_files(document: Any) -> dict[str, bytes]:
    with read_file(document["bundle"], "bundle", print) as stream:
        return dict(read_parts(stream.read()))


def first_sample(files: dict[str, bytes], rank: int) -> float:
    import json

    (content,) = (content for name, content in files.items() if name.endswith(f"rank-{rank}/process.json"))
    return float(json.loads(content)["samples"][0]["time"])


@pytest.mark.usefixtures("job")
def test_nodes_that_do_not_answer_are_named_and_their_ranks_were_not_looked_at(nodes: Nodes, tmp_path: Path) -> None:
    with nodes.instead("gpu-18", "exec no-such-dir/python3"):
        document = captured(nodes, tmp_path, "ssh:gpu-18,gpu-17,no-such-host.invalid")
    seen = {node["name"]: node for node in document["nodes"]}
    assert seen["gpu-17"]["ranks"] == [0, 1]
    assert "kb needs a python3 on the PATH there" in seen["gpu-18"]["problems"][0]
    assert "Could not resolve hostname" in seen["no-such-host.invalid"]["problems"][0]
    assert "kb: node-1, node-2 did not answer: ranks 2 and 3 of 4 were not looked at" in texts(document)
    assert not {2, 3} & set(document["diagnosis"]["ranks"]["absent"])
    assert not any(b"no-such-host" in content for content in bundle_files(document).values())


@pytest.mark.usefixtures("job")
@pytest.mark.slow
def test_what_a_node_returned_until_it_was_cut_off_is_kept(nodes: Nodes, tmp_path: Path) -> None:
    with nodes.instead("gpu-18", "echo Welcome; python3 -I -S - | head -c 20000"):
        document = captured(nodes, tmp_path, "ssh:gpu-17,gpu-18")
    assert "was cut off" in document["nodes"][1]["problems"][0]
    assert document["nodes"][1]["ranks"] == [2, 3]


@pytest.mark.usefixtures("job")
@pytest.mark.slow
def test_a_node_that_hangs_is_given_up_at_the_deadline(nodes: Nodes, tmp_path: Path) -> None:
    with nodes.instead("gpu-18", "sleep 300"):
        document = captured(nodes, tmp_path, "ssh:gpu-17,gpu-18", "--seconds", "3")
    assert "did not return in 9 s" in document["nodes"][1]["problems"][0]
    assert "kb: node-1 did not answer: ranks 2 and 3 of 4 were not looked at" in texts(document)
    assert agents(nodes) == []


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_kb_that_is_ended_leaves_nothing_on_any_node(nodes: Nodes, tmp_path: Path, number: int) -> None:
    command = [str(KB), "capture", "--nodes", "ssh:gpu-17,gpu-18", "--out", str(tmp_path), "--interval", "60"]
    with subprocess.Popen(command, env={**os.environ, "PATH": nodes.path}, stderr=subprocess.PIPE) as kb:
        assert kb.stderr is not None
        assert b"collecting" in kb.stderr.readline()
        wait_for(lambda: len(agents(nodes)) == 2, "an agent on each node", 20)
        transports = children(kb.pid)
        kb.send_signal(number)
    assert len(transports) == 2
    wait_for(lambda: not agents(nodes), "the agents to end", 10)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in transports), "ssh to end", 10)
    assert list(tmp_path.iterdir()) == []


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def agents(nodes: Nodes) -> list[int]:
    """Processes of the capture on the nodes."""
    spaces = {os.readlink(f"/proc/{pid}/ns/pid") for pid in nodes.pids.values()}
    found = []
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes() if folder.name.isdigit() else b""
            if command.endswith(b"python3\0-I\0-S\0-\0") and os.readlink(folder / "ns" / "pid") in spaces:
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return found


PODS = """\
{"items": [{"metadata": {"name": "gpu-17", "namespace": "train"}, "status": {"phase": "Running"}},
           {"metadata": {"name": "gpu-18", "namespace": "train"}, "status": {"phase": "Running"}},
           {"metadata": {"name": "gpu-19", "namespace": "train"}, "status": {"phase": "Pending"}}]}"""


@pytest.mark.usefixtures("job")
def test_pods_are_nodes(nodes: Nodes, tmp_path: Path) -> None:
    """`kubectl` is a stand-in: it prints pods, and runs a command on the node with the name of the pod."""
    (tmp_path / "pods.json").write_text(PODS)
    entering = "; ".join(f"{name}) exec {' '.join(nodes.enter(name))} python3 -I -S - ;" for name in NAMES)
    body = f'echo "$@" >> {tmp_path}/calls\ncase "$1" in get) exec cat {tmp_path}/pods.json;; esac\ncase "$4" in {entering} esac'
    script(tmp_path / "bin" / "kubectl", body)
    ended = run_kb(
        "capture", "--nodes", "kubectl:train/job-name=bert#torch", "--out", tmp_path, "--json", "--interval", "1",
        cwd=tmp_path, PATH=f"{tmp_path}/bin:{os.environ['PATH']}",
    )  # fmt: skip
    assert texts(ended.json)[0] == ODD
    assert ended.json["problems"] == ["not running: gpu-19 (Pending)"]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == "get pods --output=json --request-timeout=10s --namespace=train --selector=job-name=bert"
    assert "exec --stdin --namespace=train gpu-17 --container=torch -- python3 -I -S -" in calls


@pytest.mark.slow
def test_a_slurm_job_is_captured_by_overlapping_steps(tmp_path: Path) -> None:
    """A real Slurm, whose two nodes are namespaces of this machine."""
    with slurm_job(tmp_path / "slurm", ("c-1", "c-2")) as (number, environment):
        step = ("srun", "--overlap", f"--jobid={number}", "--nodes=1", "--ntasks=1")
        before = [(*step, f"--nodelist=c-{rank // 2 + 1}", "env", "GLOO_SOCKET_IFNAME=lo") for rank in range(SIZE)]
        with hanging_job("sleeping", tmp_path / "job", SIZE, before, "c-1.cluster", environment) as job:
            options = ("--out", tmp_path, "--json", "--interval", "1")
            ended = run_kb(
                "capture", "--nodes", f"slurm:{number}", *options, cwd=tmp_path, SLURM_CONF=environment["SLURM_CONF"]
            )
            gone = run_kb(
                "capture", "--nodes", "slurm:4711", *options, cwd=tmp_path, SLURM_CONF=environment["SLURM_CONF"]
            )
            job.end_well()
    assert ended.code == 0, ended.out + ended.err
    assert texts(ended.json)[0] == ODD
    assert [(node["name"], node["ranks"]) for node in ended.json["nodes"]] == [("c-1", [0, 1]), ("c-2", [2, 3])]
    assert "Invalid job id" in gone.json["error"]["message"]
