"""Children that do not want to end. Nothing hangs, nothing survives, and the verdict is still right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.console import ContentRoot, Kb, arm_directories, is_running

IGNORES_TERM = """
if not is_fixed:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(0.1)
"""

STOPS_ITSELF = """
if not is_fixed:
    os.kill(os.getpid(), signal.SIGSTOP)
"""

DOUBLE_FORKS = """
code = (
    "import os, sys, time\\n"
    "if os.fork(): os._exit(0)\\n"
    "os.setsid()\\n"
    "if os.fork(): os._exit(0)\\n"
    "open(sys.argv[1], 'w').write(str(os.getpid()))\\n"
    "time.sleep(600)\\n"
)
note = Path(os.environ["PIDS"]) / ("fixed" if is_fixed else "broken")
subprocess.Popen([sys.executable, "-c", code, str(note)])
while not note.exists() or not note.read_text():
    time.sleep(0.02)
if not is_fixed:
    raise RuntimeError("the thing broke: code 7")
"""

LEAVES_SHARED_MEMORY = """
import mmap
path = "/dev/shm/kb_test_%d" % os.getpid()
file = open(path, "w+b")
file.truncate(4096)
view = mmap.mmap(file.fileno(), 4096)
Path(os.environ["PIDS"], "shm-fixed" if is_fixed else "shm-broken").write_text(path)
time.sleep(3)  # the guard looks four times a second
if not is_fixed:
    raise RuntimeError("the thing broke: code 7")
"""


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a hostile child writes what it left: inherited by the arms."""
    path = tmp_path / "pids"
    path.mkdir()
    monkeypatch.setenv("PIDS", str(path))
    return path


@pytest.mark.parametrize("body", [IGNORES_TERM, STOPS_ITSELF], ids=["ignores TERM", "stops itself"])
def test_a_rank_that_will_not_end_costs_its_deadline_and_is_gone(kb: Kb, content: ContentRoot, body: str) -> None:
    content.incident("stubborn", body, 'make(killed("SIGKILL"), deadline_s=2)')
    ended = kb("verify", "stubborn", "--json", "--repeat", "1")
    report = ended.json
    assert report["arms"]["control"]["outcome"] == "hung"
    assert report["arms"]["treatment"]["outcome"] == "completed"
    assert report["leftovers"] == []
    assert not arm_directories()


def test_a_hang_that_the_entry_declares_is_verified_with_its_stack(kb: Kb, content: ContentRoot) -> None:
    content.incident("stuck", IGNORES_TERM, 'make(hung("in job"), deadline_s=2)')
    ended = kb("verify", "stuck", "--json")
    assert ended.json["verdict"] == "verified"
    assert ended.code == 0
    assert "in job" in ended.json["evidence"]


def test_a_child_that_forks_twice_and_keeps_stdout_open_is_found_and_ended(
    kb: Kb, content: ContentRoot, pids: Path
) -> None:
    content.incident("runaway", DOUBLE_FORKS)
    ended = kb("verify", "runaway", "--json")
    assert ended.json["verdict"] == "verified"
    assert ended.json["leftovers"] == []
    assert ended.json["arms"]["treatment"]["strays"], "a process that outlives its rank is reported"
    for note in ("broken", "fixed"):
        assert not is_running(int((pids / note).read_text()))


def test_shared_memory_left_by_a_rank_is_removed(kb: Kb, content: ContentRoot, pids: Path) -> None:
    content.incident("leaky", LEAVES_SHARED_MEMORY)
    ended = kb("verify", "leaky", "--json")
    assert ended.json["verdict"] == "verified"
    for note in ("shm-broken", "shm-fixed"):
        assert not Path((pids / note).read_text()).exists()


def test_a_gigabyte_on_stdout_neither_fills_the_disk_nor_the_report(kb: Kb, content: ContentRoot) -> None:
    flood = """
    if not is_fixed:
        line = "x" * (1 << 20)
        try:
            for _ in range(1024):
                print(line)
        except OSError as error:
            raise RuntimeError("the thing broke: code %d" % error.errno)
    """
    content.incident("flood", flood, 'make(raised("the thing broke"), deadline_s=120)')
    ended = kb("verify", "flood", "--json")
    assert ended.json["verdict"] == "verified", "the write fails with EFBIG at 256 MiB"
    assert len(ended.out) < 1 << 20


def test_what_a_rank_measured_survives_its_death(kb: Kb, content: ContentRoot) -> None:
    body = (
        "ctx.note(seen=41)\nctx.note(seen=42, more='x')\nif not is_fixed:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    content.incident("dies", body, 'make(killed("SIGKILL"))')
    report = kb("verify", "dies", "--json").json
    assert report["verdict"] == "verified"
    for arm in ("control", "treatment"):
        assert report["arms"][arm]["ranks"][0]["facts"] == {"seen": 42, "more": "x"}
