"""A terminal hangs up while torchrun runs in it under nohup, and torchrun ends the training."""

from __future__ import annotations

import inspect
import os
import pty
import re
import shlex
import signal
import sys
import time
import traceback
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Callable, List, Mapping, Optional, Tuple

from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    clear,
    completed,
    exposed,
    symptom,
    unknown,
)

TORCHRUN = "torch.distributed.run"
OPTIONS = "--rdzv-backend=c10d --rdzv-endpoint=localhost:0 --local-addr=localhost --nproc-per-node=1"
# The terminals of these programs outlive the connection. The kernel stores 15 characters of a name.
MULTIPLEXERS = ("tmux", "screen", "zellij", "dtach", "abduco", "mosh-server")
# As process 1 of a container these forward signals, and an attached `docker run` forwards its hang-up to them.
FORWARDERS = ("tini", "docker-init", "podman-init", "dumb-init", "catatonit")
LAUNCHERS = re.compile(r"(^|/)(torchrun|accelerate|torch\.distributed\.(run|launch)|accelerate\.commands\.launch)$")


def train() -> None:
    """The worker: waits for the hang-up, trains some steps, and saves. It needs no torch."""
    steps = 10
    if "ignore" in sys.argv:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        steps = 50  # longer than the second that --shutdown-timeout=1 allows

    def write(name: str, text: str) -> None:
        part = Path("%s.%d" % (name, os.getpid()))
        part.write_text(text)
        part.rename(name)

    write("started", "%d %d" % (os.getppid(), os.getpid()))
    while not Path("hung-up").exists():
        time.sleep(0.02)
    for _ in range(steps):
        time.sleep(0.05)
    write("saved", str(os.getppid()))


def hang_up(ctx: Context, *, typed: str = "", forked: Optional[Callable[[], None]] = None) -> None:
    """Starts the launcher in a terminal of its own, waits for the worker, and closes the terminal.

    `typed` is the line that an interactive bash reads there. `forked` runs in a fork of this process, which is faster:
    in place of bash, or, with both, in the process group that bash has created for the typed line.
    """
    script = "import os, signal, sys, time\nfrom pathlib import Path\n\n%s\ntrain()\n" % inspect.getsource(train)
    Path("train.py").write_text(script)
    leader, terminal = pty.fork()
    if leader == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        if forked and not (typed and os.fork()):
            if typed and wait_for(lambda: bool(read("job")), 60):
                os.setpgid(0, int(read("job")))
            forked()
        environment = {**os.environ, "HISTFILE": ctx.path("history"), "TERM": "xterm"}
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)
    processes: List[int] = []
    try:
        if typed:
            command = "%s -m %s %s train.py > train.log 2>&1" % (shlex.quote(sys.executable), TORCHRUN, OPTIONS)
            line = typed.format("sleep 100" if forked else command)
            os.write(terminal, (line + "\necho $! > job.part; mv job.part job\n").encode())
        wait_for(lambda: bool(read("started")) or not is_running(leader), 60)
        assert read("started"), "the worker did not start: " + log()
        parent, worker = map(int, read("started").split())
        processes += [parent, worker, *(map(int, read("job").split()) if forked else ())]
        ctx.reached()
        os.close(terminal)
        if typed:
            os.waitpid(leader, 0)
        Path("hung-up").touch()
        saved = Path("saved")
        wait_for(lambda: saved.exists() or not is_running(worker), 20)
        if not saved.exists():
            wait_for(lambda: not is_running(parent), 20)
            last = re.search(r"\S*SignalException: .*", log())
            raise Symptom("the worker was ended during training: %s" % (last.group() if last else log()))
        if int(saved.read_text()) != parent:
            raise Symptom("the launcher ended without a message (log: %r), and its worker continues alone" % log())
        assert wait_for(lambda: not is_running(parent), 20), "torchrun is still running 20 s after the save"
        assert "Exception" not in log(), log()
    finally:
        for process in filter(is_running, processes):
            os.kill(process, signal.SIGKILL)


def launch(*options: str, nohup: bool = True, argument: str = "") -> None:
    """Runs `nohup python -m torch.distributed.run OPTIONS train.py` in this process, which has imported torch."""
    if nohup:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup does nothing else
    sys.argv = [TORCHRUN, *OPTIONS.split(), *options, "train.py", *argument.split()]
    with open("train.log", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        import_module(TORCHRUN).main()
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)


def read(name: str) -> str:
    return Path(name).read_text() if Path(name).exists() else ""


def log() -> str:
    return read("train.log")


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def is_running(process: int) -> bool:
    try:
        return Path("/proc/%d/stat" % process).read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# --- the check: what would a hang-up do to the launchers that run now? ---------------------------------------------


def check(params: Mapping[str, Any]) -> Finding:
    """Do launchers of this user handle SIGHUP and have a terminal that can hang up? Reads /proc."""
    processes = [params["pid"]] if params["pid"] else launchers()
    if not processes:
        return unknown(
            "this user runs no torchrun or accelerate on this machine", advice="start the job, or run --set pid=12345"
        )
    findings = [judge(process) for process in processes]
    evidence = [line for finding in findings for line in finding.evidence]
    for state in ("exposed", "unknown", "clear"):
        chosen = [finding for finding in findings if finding.state == state]
        if chosen:
            return Finding(state, evidence, chosen[0].advice)
    return unknown(*evidence)


def launchers() -> List[int]:
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if directory.stat().st_uid == os.getuid() and is_launcher(int(directory.name)):
                found.append(int(directory.name))
        except OSError:
            continue  # the process has ended
    return sorted(found)[:8]


def is_launcher(process: int) -> bool:
    words = Path("/proc/%d/cmdline" % process).read_bytes().decode(errors="replace").split("\0")
    return any(map(LAUNCHERS.search, words[:8]))


def judge(process: int) -> Finding:
    try:
        status = Path("/proc/%d/status" % process).read_text()
        _, (parent, group, _, terminal, foreground) = stat_of(process)
        cgroup = Path("/proc/%d/cgroup" % process).read_text()
        if not is_launcher(process):
            return unknown(
                "process %d is not torchrun or accelerate, and kb must examine its launcher" % process,
                advice="find the launcher with pgrep -f torchrun, then run --set pid=PID",
            )
    except (OSError, ValueError) as error:
        return unknown("kb cannot read process %d: %s" % (process, error))
    hang_up_bit = 1 << (signal.SIGHUP - 1)
    masks = re.findall(r"^(Sig(?:Ign|Cgt)):\s+([0-9a-fA-F]+)$", status, re.M)
    reactions = {name: int(mask, 16) & hang_up_bit for name, mask in masks}
    if len(reactions) < 2:
        return unknown("/proc/%d/status does not say which signals it handles" % process)
    if reactions["SigIgn"]:
        return ends_with_session(process, cgroup, "process %d ignores SIGHUP" % process)
    if reactions["SigCgt"]:
        reaction = "process %d handles SIGHUP and then ends its workers" % process
    else:
        reaction = "SIGHUP ends process %d" % process
    if not terminal:
        return ends_with_session(process, cgroup, reaction, "it has no terminal that could hang up")
    multiplexer = ancestor(parent, MULTIPLEXERS)
    if multiplexer:
        window = "its terminal belongs to %s: it survives a lost connection, but not the closing of its window"
        return unknown(reaction, window % multiplexer)
    if group == foreground:
        return exposed(reaction, "it runs in the foreground of a terminal", advice="start it in tmux, or with setsid")
    return unknown(
        reaction,
        "it runs in the background of a terminal; kb cannot tell whether the shell will send it a hang-up",
        advice="in that shell run `jobs`, then `disown %1` with the number it prints",
    )


def ends_with_session(process: int, cgroup: str, *evidence: str) -> Finding:
    session = re.search(r"session-[^/\s]+\.scope|user@\d+\.service", cgroup)
    if session:
        way = "with KillUserProcesses=yes" if session.group().startswith("session") else "without enable-linger"
        scope = "it belongs to %s: %s systemd ends it at the last logout of the user" % (session.group(), way)
        return unknown(
            *evidence,
            scope,
            advice="run loginctl show-user $USER -p Linger; ask the administrator for KillUserProcesses",
        )
    step = re.search(r"job_\d+/step_(?!batch)\w+", cgroup)
    if step:
        return unknown(
            *evidence, "it belongs to Slurm's %s, and ends when the command of that step ends" % step.group()
        )
    try:
        name, numbers = stat_of(1)
    except (OSError, ValueError) as error:
        return unknown(*evidence, "kb cannot read process 1: %s" % error)
    if numbers[3]:
        return unknown(*evidence, "process 1 (%s) has a terminal: if that hangs up, the whole container ends" % name)
    if process == 1 or name in FORWARDERS:
        return unknown(*evidence, "if `docker run` is attached, it forwards its hang-up to process 1 (%s)" % name)
    return clear(*evidence)


def stat_of(process: int) -> Tuple[str, List[int]]:
    """Name of a process; its parent, group, session, terminal (0 is none), and that terminal's foreground group."""
    name, _, rest = Path("/proc/%d/stat" % process).read_text().partition("(")[2].rpartition(")")
    return name, list(map(int, rest.split()[1:6]))


def ancestor(process: int, names: Tuple[str, ...]) -> str:
    while process > 1:
        try:
            name, (process, *_) = stat_of(process)
        except (OSError, ValueError):
            break
        if name.lower().startswith(names):
            return name
    return ""


HUNG_UP = r"ended during training: .*SignalException: Process \d+ got signal: 1$"
NOHUP = "nohup {} &"
PASSED_ON = "bash sends the hang-up to its jobs, and torchrun's handler replaces the ignore that nohup has set"


def experiment(
    name: str,
    control: Callable[[Context], None],
    treatment: Callable[[Context], None],
    because: Tuple[str, str],
    pattern: str = HUNG_UP,
    torch: str = ">=2.1",
    programs: Tuple[str, ...] = (),
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(control, symptom(pattern), because[0], "cpu"),
        treatment=Arm(treatment, completed(), because[1], "cpu"),
        world_size=1,
        needs=Needs(packages={"torch": torch}, programs=programs),
        deadline_s=110,
        expected_s=(3.5, 4.5) if programs else (1.0, 1.5),
    )


def typed(name: str, line: str, because: str, *programs: str, **settings: Any) -> Experiment:
    """`line` is the line that the user types in the treatment arm."""
    job, needed = partial(hang_up, **settings), ("bash", "nohup", *programs)
    return experiment(name, partial(job, typed=NOHUP), partial(job, typed=line), (PASSED_ON, because), programs=needed)


def forked(*options: str, argument: str = "", **settings: Any) -> Callable[[Context], None]:
    return partial(hang_up, forked=partial(launch, *options, argument=argument, **settings))


WITHOUT_HANDLER = "--signals-to-handle=SIGTERM,SIGINT"
DELAY = "--shutdown-timeout=1"  # since torch 2.12; older releases always wait for 30 s

probe = Probe(
    check=check,
    params={"pid": Param("int", "process id of the launcher (default: all torchrun and accelerate of this user)")},
    experiments=(
        typed(
            "setsid",
            "setsid nohup {} &",
            "setsid starts torchrun in a session of its own, which has no terminal and is not a job of the shell",
            "setsid",
        ),
    ),
    variants=(
        typed(
            "tmux",
            'tmux -S ./tmux.socket -f /dev/null new-session -d "{}"',
            "torchrun runs in a terminal of the tmux server, which stays open",
            "tmux",
        ),
        typed(
            "disown",
            "nohup {} & disown",
            "after disown, bash no longer sends the hang-up to the job",
            forked=launch,
        ),
        experiment(
            "ignored-in-script",
            forked(DELAY, argument="ignore"),
            forked(DELAY, WITHOUT_HANDLER, argument="ignore"),
            (
                "the script ignores SIGHUP, but torchrun handles it, waits for the worker, and kills it",
                "torchrun has no handler for SIGHUP, and ignores it as nohup has set it",
            ),
            torch=">=2.12",
        ),
        experiment(
            "signals-to-handle",
            forked(WITHOUT_HANDLER, nohup=False),
            forked(WITHOUT_HANDLER),
            (
                "torchrun runs without nohup and has no handler for SIGHUP, so SIGHUP ends torchrun alone",
                "torchrun has no handler for SIGHUP, and ignores it as nohup has set it",
            ),
            pattern="launcher ended without a message",
            torch=">=2.10",
        ),
    ),
)
