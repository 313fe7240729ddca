"""A container may no longer open the GPU's device nodes, although they still exist.

The device is /dev/null under another name. A mount with `nodev` refuses it as the device cgroup does: a process that
has it open keeps it, but no process can open it again. A stub of NVML opens the device, as the driver's library does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import subprocess
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Tuple

from kb.namespaces import bind_over, own_user
from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Probe,
    Unavailable,
    clear,
    completed,
    exposed,
    raised,
    unknown,
)

STUB = """
#include <fcntl.h>
#include <unistd.h>
int nvmlInit(void) {
    int handle = open("%s", O_RDWR);
    if (handle < 0) return 999; /* NVML_ERROR_UNKNOWN */
    close(handle);
    return 0;
}
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
"""


def start_container(ctx: Context) -> str:
    """Creates the device node of a container, which processes may open at first."""
    own_user()
    device = ctx.path("nvidiactl")
    Path(device).touch()
    bind_over("/dev/null", device)
    return device


def reload_units(device: str, declared: List[str]) -> None:
    """Does what `systemctl daemon-reload` does: only the devices that the unit lists may be opened afterwards."""
    if device in declared:
        return
    command = ["mount", "-o", "remount,bind,nodev", device]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if ran.returncode:
        raise Unavailable(f"this machine does not allow a mount with nodev: {ran.stdout.strip()}")


def load_nvml(ctx: Context, device: str) -> None:
    """Loads a libnvidia-ml.so.1 that opens this device; torch finds it by that name."""
    Path("nvml.c").write_text(STUB % device)
    library = ctx.path("libnvidia-ml.so.1")
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", library, "nvml.c"], check=True)
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def count_gpus(ctx: Context, *, declared: bool) -> None:
    """torch counts the GPUs before and after a reload. A hook let the device in, or (`declared`) the runtime did."""
    device = start_container(ctx)
    load_nvml(ctx, device)
    import torch

    assert torch.cuda._raw_device_count_nvml() == 1
    ctx.reached()
    reload_units(device, [device] if declared else [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        count = torch.cuda._raw_device_count_nvml()
    assert count == 1
    ctx.note(gpus=count)


def train_on(ctx: Context, *, restarted: bool) -> None:
    """A job has its device open while systemd reloads the units. It goes on, or (`restarted`) starts again."""
    device = start_container(ctx)
    handle = os.open(device, os.O_RDWR)
    ctx.reached()
    reload_units(device, [])
    if restarted:
        os.close(handle)
        handle = os.open(device, os.O_RDWR)
    assert os.write(handle, b"step") == 4
    assert stat.S_ISCHR(os.stat(device).st_mode)  # `ls` still shows the node in both arms


# --- the check: can GPU nodes be opened here, and would a reload on this host take them from a container? -------------

UNITS = Path("/run/systemd/transient")


def check(params: Mapping[str, Any]) -> Finding:
    """Can the GPU nodes be opened here? As root on a host: do the units of its containers list their GPUs?"""
    nodes = [path for path in sorted(Path("/dev").glob("nvidia*")) if re.search(r"nvidia(\d+|ctl|-uvm)$", path.name)]
    if not nodes:
        advice = "run this inside the container of the job, or as root on its host"
        return unknown("kb found no /dev/nvidia* here", advice=advice)
    refused = {str(node): number for node in nodes for number in [refusal(node)] if number}
    if refused.get("/dev/nvidiactl") == errno.EPERM:
        advice = "restart the container, then start it with its devices declared (CDI, --device)"
        message = "/dev/nvidiactl exists, but no device cgroup rule allows it: Operation not permitted (EPERM)"
        return exposed(message, advice=advice)
    if errno.EPERM in refused.values():
        names = ", ".join(name for name, number in refused.items() if number == errno.EPERM)
        return unknown(f"a device cgroup refuses {names}, as a scheduler does with the GPUs of other jobs")
    if refused:
        errors = ", ".join(sorted({errno.errorcode.get(number, str(number)) for number in refused.values()}))
        source = "file modes or SELinux" if errors == "EACCES" else "the driver or the card"
        return unknown(f"{source}, not a device cgroup, refuses {', '.join(refused)}: {errors}")
    evidence = f"all {len(nodes)} GPU nodes can be opened here"
    listed, lacking, hidden = containers_with_gpus()
    if lacking:
        message = (
            f"the units of {', '.join(lacking)} do not list the GPUs that they use; a daemon-reload takes them away"
        )
        return exposed(evidence, message, advice="start these containers with their devices declared (CDI, --device)")
    if hidden or not listed:
        advice = "run this as root on the host while the job runs"
        return unknown(evidence, "kb sees no unit of a container that uses GPUs", advice=advice)
    return clear(evidence, f"the units of all {len(listed)} containers that use GPUs list them: {', '.join(listed)}")


def refusal(node: Path) -> int:
    """Returns the error number with which the kernel refuses this node, or 0. Opens it only if access(2) refuses."""
    if os.access(node, os.R_OK | os.W_OK):
        return 0
    try:
        os.close(os.open(node, os.O_RDWR))
    except OSError as error:
        return error.errno or errno.EACCES
    return 0


def containers_with_gpus() -> Tuple[List[str], List[str], bool]:
    """Returns the scopes with open GPU nodes that list all of them, those that do not, and whether any is hidden."""
    scopes: Dict[str, str] = {}
    used: Dict[str, bool] = {}
    hidden = False
    try:
        for name in {path.name.replace(".scope.d", ".scope") for path in UNITS.glob("*.scope*")}:
            files = [UNITS / name, UNITS / f"{name}.d/50-DevicePolicy.conf", UNITS / f"{name}.d/50-DeviceAllow.conf"]
            text = "".join(file.read_text(errors="replace") for file in files if file.is_file())
            if "DevicePolicy=strict" in text:  # otherwise every device is allowed, as in a privileged container
                scopes[name] = text
                hidden = hidden or not re.search("DeviceAllow=.", text)  # crun keeps its rules in a BPF program
    except OSError:
        hidden = True
    for group in Path("/proc").glob("[0-9]*/cgroup"):
        try:
            text = group.read_text(errors="replace")
            scope = next((name for name in scopes if name in text), "")
            for link in (group.parent / "fd").iterdir() if scope else ():
                if os.readlink(link).startswith("/dev/nvidia"):
                    used[scope] = used.get(scope, True) and allowed(link, scopes[scope])
        except PermissionError:
            hidden = True
        except OSError:
            continue  # the process has ended
    known = [name for name in used if re.search("DeviceAllow=.", scopes[name])]
    return [name for name in known if used[name]], [name for name in known if not used[name]], hidden


def allowed(link: Path, text: str) -> bool:
    """Do the rules of a unit name this open node, by its number, its path or the name of its kind?"""
    device = os.stat(link).st_rdev
    major, minor = os.major(device), os.minor(device)
    kinds = re.findall(rf"^ *{major} (\S+)$", Path("/proc/devices").read_text(errors="replace"), re.M)
    names = [f"/dev/char/{major}:{minor}", os.readlink(link), *(f"char-{kind}" for kind in [major, *kinds])]
    return any(re.search(rf"DeviceAllow=(-|\+)?{re.escape(str(name))}( |$)", text, re.M) for name in names)


NO_CGROUP = "the device cgroup that systemd rebuilds from the unit; a mount with nodev refuses /dev/null instead"


def reloaded(
    name: str,
    fails: Callable[[Context], None],
    works: Callable[[Context], None],
    pattern: str,
    because: Tuple[str, str],
    needs: Needs,
    expected_s: float,
) -> Experiment:
    def arm(job: Callable[[Context], None], expect: Expect, clause: str) -> Arm:
        return Arm(job, expect, clause, "stand-in", NO_CGROUP)

    return Experiment(
        name=name,
        control=arm(fails, raised(pattern), because[0]),
        treatment=arm(works, completed(), because[1]),
        world_size=1,
        needs=needs,
        expected_s=(expected_s, expected_s),
    )


probe = Probe(
    check=check,
    experiments=(
        reloaded(
            "reload",
            partial(count_gpus, declared=False),
            partial(count_gpus, declared=True),
            r"Can't initialize NVML",
            (
                "a hook allowed the device without telling systemd, so a reload of the units takes it away",
                "the runtime declared the device to systemd, so a reload keeps it",
            ),
            Needs(packages={"torch": ">=2.1"}, programs=("gcc", "mount")),
            2.0,
        ),
    ),
    variants=(
        reloaded(
            "restart",
            partial(train_on, restarted=True),
            partial(train_on, restarted=False),
            r"Permission denied: '\S*nvidiactl'",
            (
                "the job starts again after the reload and cannot open the device",
                "the job goes on with the device that it has already opened",
            ),
            Needs(packages={}, programs=("mount",)),
            0.2,
        ),
    ),
)
