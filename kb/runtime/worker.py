"""One process of a probe: a rank of an arm, a check, or the description of a probe file.

Runs in the reader's training interpreter, on the standard library and Python 3.9 only. `kb.runtime.forkserver` forks
it, or, for GPU arms, it is started as a file so that it inherits nothing of CUDA or NCCL. It writes its result into
`rank<N>.json` in the arm's directory, whole or not at all.
"""

import ctypes
import faulthandler
import importlib.util
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List, NoReturn  # works on Python 3.9

from kb.probe import STATES, Context, Finding, Probe, Symptom, Unavailable
from kb.runtime import evidence
from kb.runtime.declaration import contract_faults, describe

LARGEST_FILE = 256 << 20  # bytes a rank may write into one file; a larger write fails with EFBIG
LONGEST_TEXT = 4000  # characters of an error message or traceback in the result
LINGER_S = 8.0


def load_probe(path: str) -> Probe:
    """Run a probe file and return its `probe`. Raises `TypeError` if it defines none, and whatever the file raises."""
    spec = importlib.util.spec_from_file_location("kb_probe_" + Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise TypeError("%s is not a Python file" % path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    probe = getattr(module, "probe", None)
    if not isinstance(probe, Probe):
        raise TypeError("it defines no `probe = Probe(...)`")
    return probe


def main(spec: Dict[str, Any], rank: int) -> NoReturn:
    """Perform `spec["action"]` as this rank, write the result, and end the process."""
    _confine(spec, rank)
    actions: Dict[str, Callable[[Dict[str, Any], int], Dict[str, Any]]] = {
        "describe": _describe,
        "check": _check,
        "run": _run,
    }
    result = actions[spec["action"]](spec, rank)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    result.update(rank=rank, pid=os.getpid(), max_rss_mib=usage.ru_maxrss // 1024)
    _write(spec, rank, result)
    if spec["action"] == "run" and result["outcome"] != "completed":
        evidence.write_flight_record(spec, rank)  # after the result, since on a wedged GPU the recorder may not return
    elif spec["action"] == "run" and spec["linger"]:
        _linger(spec)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if result["outcome"] == "completed" else 3)  # a broken process group may abort in its destructors


def _confine(spec: Dict[str, Any], rank: int) -> None:
    """Set limits, directory and environment; write stacks on SIGUSR1."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives its guard
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    os.environ.update(spec["env"])
    tempfile.tempdir = None  # imports in the fork server may have cached a directory other than this arm's TMPDIR
    if spec["action"] == "run":  # a check sees the caller's values of these
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(spec["world_size"]))
    os.chdir(spec["dir"])
    stacks = open(os.path.join(spec["dir"], "rank%d.stacks" % rank), "w")  # noqa: SIM115  # open until the end
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)


def _describe(spec: Dict[str, Any], rank: int) -> Dict[str, Any]:
    def act() -> Dict[str, Any]:
        probe = load_probe(spec["probe"])
        return {"probe": describe(probe), "faults": contract_faults(probe)}

    return _guarded(act)


def _check(spec: Dict[str, Any], rank: int) -> Dict[str, Any]:
    def act() -> Dict[str, Any]:
        probe = load_probe(spec["probe"])
        given = {name: value for name, value in _typed(spec["params"]).items() if name in probe.params}
        if probe.check is None:
            return {"state": "", "takes": []}
        finding = probe.check({**{name: param.default for name, param in probe.params.items()}, **given})
        if not isinstance(finding, Finding) or finding.state not in STATES:
            raise TypeError("a check returns exposed(...), clear(...) or unknown(...), this one %r" % (finding,))
        evidence = list(map(str, finding.evidence))
        return {"state": finding.state, "evidence": evidence, "advice": str(finding.advice), "takes": sorted(given)}

    return _guarded(act)


def _run(spec: Dict[str, Any], rank: int) -> Dict[str, Any]:
    ctx = Context(rank, spec["world_size"], spec["backend"], Path(spec["dir"]), _typed(spec["params"]))
    if spec["world_size"] > 1:
        threading.Thread(target=evidence.answer_request, args=(spec, rank), daemon=True).start()

    def act() -> Dict[str, Any]:
        experiment = load_probe(spec["probe"]).every[spec["experiment"]]
        _prepare_torch(spec)
        try:
            getattr(experiment, spec["arm"]).job(ctx)
        except BaseException as error:
            _print_as_python_does(error)
            raise
        return {}

    return _guarded(act)


def _print_as_python_does(error: BaseException) -> None:
    """Write to the rank's log what a real job that ends like this prints; for a symptom, the measured values."""
    try:
        if isinstance(error, Symptom):
            sys.stderr.write("%s\n" % error)
        elif not isinstance(error, (Unavailable, SystemExit)):
            error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)  # only the job's frames
            sys.excepthook(type(error), error, error.__traceback__)  # torch's hook if it installed one: `[rank0]: ...`
    except Exception:  # no memory or disk left for printing
        return


def _guarded(act: Callable[[], Dict[str, Any]]) -> Dict[str, Any]:
    """The outcome of a call as plain data: completed, symptom, unavailable or raised."""
    started = time.time()
    try:
        result = act()
        result["outcome"] = "completed"
    except Symptom as error:
        result = {"outcome": "symptom", "type": "Symptom", "message": str(error)[-LONGEST_TEXT:]}
    except Unavailable as error:
        result = {"outcome": "unavailable", "message": str(error)[-LONGEST_TEXT:]}
    except BaseException as error:  # a probe's SystemExit or KeyboardInterrupt is its outcome too
        is_exit = isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int))
        result = {
            "outcome": "exited" if is_exit else "raised",
            "type": type(error).__name__,
            "message": str(error)[-LONGEST_TEXT:],
            "traceback": traceback.format_exc()[-LONGEST_TEXT:],
        }
    result.update(started=started, ended=time.time())
    return result


def _typed(params: Dict[str, List[Any]]) -> Dict[str, Any]:
    """The parameters in their declared types; JSON has paths as text."""
    return {
        name: Path(value) if kind == "path" and value is not None else value for name, (kind, value) in params.items()
    }


def _prepare_torch(spec: Dict[str, Any]) -> None:
    """Re-read a setting that torch read in the fork server; on GPUs select the device and cap its memory."""
    torch = sys.modules.get("torch")
    if torch is not None and "TORCH_DISTRIBUTED_DEBUG" in spec["env"]:
        torch.distributed.set_debug_level_from_env()
    if spec["gpu_memory_mib"]:
        import torch as gpu_torch

        device = int(os.environ["RANK"]) % gpu_torch.cuda.device_count()
        gpu_torch.cuda.set_device(device)
        total = gpu_torch.cuda.get_device_properties(device).total_memory
        fraction = min(1.0, (spec["gpu_memory_mib"] << 20) / total)
        gpu_torch.cuda.set_per_process_memory_fraction(fraction, device)


def _write(spec: Dict[str, Any], rank: int, result: Dict[str, Any]) -> None:
    path = os.path.join(spec["dir"], "rank%d.json" % rank)
    evidence.write_atomically(path, json.dumps(result, default=str).encode())


def _linger(spec: Dict[str, Any]) -> None:
    """Wait until every rank has a result, since leaving early breaks a rank that is still connecting."""
    end = time.monotonic() + LINGER_S
    paths = [os.path.join(spec["dir"], "rank%d.json" % rank) for rank in range(spec["world_size"])]
    while time.monotonic() < end and not all(map(os.path.exists, paths)):
        time.sleep(0.005)


def start(arguments: List[str]) -> NoReturn:
    """`worker SPEC RANK`: run one rank in a new process."""
    with open(arguments[0]) as file:
        spec = json.load(file)
    main(spec, int(arguments[1]))
