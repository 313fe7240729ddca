"""What a control arm leaves, run here for real, leads back to its entry. All arms: `make confusion`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.console import GENEROUS_S, ContentRoot, Kb
from tests.support.warm_start import PIPE, VERIFY, start_warm

pytestmark = pytest.mark.slow

ARMS = {
    "rank-divergent-collectives": "gloo",
    "slow-rank-exceeds-timeout": "gloo",
    "oom-logits": "rlimit",
    "dataloader-shm-bus-error": "dataloader",
    "checkpoint-corrupt": "save",
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, built_in_index: Path) -> Path:
    """The folder that `kb verify --keep-logs` leaves."""
    pytest.importorskip("torch", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("kept")
    home = str(folder / "home")
    env = {"KB_ROOTS": "", "HOME": home, "XDG_DATA_HOME": home, "XDG_CACHE_HOME": str(built_in_index)}
    verifying = start_warm(
        *("verify", *ARMS, f"--keep-logs={folder}"),
        imports=VERIFY,
        cwd=folder,
        env={**os.environ, **env},
        stdout=PIPE,
        stderr=PIPE,
    )
    out, _ = verifying.communicate(2 * GENEROUS_S)
    assert verifying.returncode == 0, out.decode()
    return folder


def control(kept: Path, entry_id: str) -> Path:
    return kept / f"{entry_id}-{ARMS[entry_id]}-control"


def diagnosed(kb: Kb, *paths: Path) -> Any:
    return kb("diagnose", *paths, "--json").json


@pytest.mark.parametrize("entry_id", ARMS)
def test_the_folder_of_a_control_arm_is_diagnosed_as_its_entry(kb: Kb, kept: Path, entry_id: str) -> None:
    diagnosis = diagnosed(kb, control(kept, entry_id))
    assert (diagnosis["findings"][0]["id"], diagnosis["findings"][0]["role"]) == (entry_id, "root")
    assert diagnosis["problems"] == [], "what kb itself filed there is passed over"


def test_the_flight_recorder_dumps_of_a_hang_alone_name_the_entry_and_the_rank(kb: Kb, kept: Path) -> None:
    folder = control(kept, "rank-divergent-collectives")
    dumps = sorted(folder.glob("nccl_trace_rank_*"))
    assert [dump.name for dump in dumps] == ["nccl_trace_rank_0", "nccl_trace_rank_1"]
    diagnosis = diagnosed(kb, *dumps)
    assert (diagnosis["findings"][0]["id"], diagnosis["findings"][0]["role"]) == ("rank-divergent-collectives", "root")
    assert diagnosis["ranks"]["absent"] == [1]
    assert any(line["text"].startswith("rank 1 never issued collective 4 ") for line in diagnosis["observations"])


def test_the_dumps_of_a_slow_rank_name_it_and_how_late_it_came(kb: Kb, kept: Path) -> None:
    diagnosis = diagnosed(kb, *control(kept, "slow-rank-exceeds-timeout").glob("nccl_trace_rank_*"))
    (late,) = [line for line in diagnosis["observations"] if " came to collective " in line["text"]]
    assert late["rank"] == 0
    assert "which waits for 1.5 s" in late["text"]


def test_a_ranks_log_ends_as_a_job_of_its_own_would(kept: Path) -> None:
    log = (control(kept, "rank-divergent-collectives") / "rank0.log").read_text()
    assert "[rank0]: Traceback (most recent call last):" in log, "torch's own excepthook has printed it"
    assert "kb/worker.py" not in log
    assert "Timed out waiting" in log.splitlines()[-1]


def test_a_treatment_arm_has_no_findings(kb: Kb, kept: Path) -> None:
    for entry_id, experiment in ARMS.items():
        diagnosis = diagnosed(kb, kept / f"{entry_id}-{experiment}-treatment")
        assert diagnosis["findings"] == [], entry_id


def test_a_rank_that_died_of_a_signal_is_reported_as_torchrun_reports_it(
    kb: Kb, content: ContentRoot, tmp_path: Path
) -> None:
    content.incident("dies", "if not is_fixed:\n    os.kill(os.getpid(), signal.SIGKILL)", 'make(killed("SIGKILL"))')
    assert kb("verify", "dies", "--keep-logs", tmp_path / "logs").code == 0
    folder = tmp_path / "logs" / "dies-plain-control"
    rank, code, cause = (folder / "launcher.log").read_text().splitlines()
    assert rank == "  rank      : 0 (local_rank: 0)"
    assert code.startswith("  exitcode  : -9 (pid: ")
    assert cause.startswith("  traceback : Signal 9 (SIGKILL) received by PID ")
    assert "host-oom-killed" in [item["id"] for item in diagnosed(kb, folder)["findings"]]
