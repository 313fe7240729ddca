"""A container may no longer open the GPU's device nodes, which are still there.

The device is /dev/null under another name, and a mount with `nodev` refuses it as the device cgroup does: who has it
open keeps it, who opens it anew does not get it. A stub of NVML opens it first, as the library of the driver does.
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
    """The device node of a container, which at first may be opened."""
    own_user()
    device = ctx.path("nvidiactl")
    Path(device).touch()
    bind_over("/dev/null", device)
    return device


def reload_units(device: str, declared: List[str]) -> None:
    """What `systemctl daemon-reload` leaves: the devices that the unit lists, and no other."""
    if device in declared:
        return
    command = ["mount", "-o", "remount,bind,nodev", device]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if ran.returncode:
        raise Unavailable(f"no mount with nodev on this machine: {ran.stdout.strip()}")


def load_nvml(ctx: Context, device: str) -> None:
    """Load a libnvidia-ml.so.1 that opens this device; torch finds it by that name."""
    Path("nvml.c").write_text(STUB % device)
    library = ctx.path("libnvidia-ml.so.1")
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", library, "nvml.c"], check=True)
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def count_gpus(ctx: Context, *, declared: bool) -> None:
    """torch counts the GPUs before and after a reload; a hook let the device in, or the runtime declared it."""
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
    """A job that has its device open while the units are reloaded; it goes on, or is started again."""
    device = start_container(ctx)
    handle = os.open(device, os.O_RDWR)
    ctx.reached()
    reload_units(device, [])
    if restarted:
        os.close(handle)
        handle = os.open(device, os.O_RDWR)
    assert os.write(handle, b"step") == 4
    assert stat.S_ISCHR(os.stat(device).st_mode)  # ls shows the node in both arms


# --- the check: may the GPU nodes be opened here, and on a host: would a reload take them from a container? -----------

UNITS = Path("/run/systemd/transient")


def check(params: Mapping[str, Any]) -> Finding:
    """Ask the kernel for the GPU nodes of this place; as root on a host, read the units of its containers."""
    nodes = [path for path in sorted(Path("/dev").glob("nvidia*")) if re.search(r"nvidia(\d+|ctl|-uvm)$", path.name)]
    if not nodes:
        where = "run this inside the container of the job, or as root on its host"
        return unknown("no /dev/nvidia* here", advice=where)
    refused = {str(node): why for node in nodes for why in [refusal(node)] if why}
    if refused.get("/dev/nvidiactl") == errno.EPERM:
        advice = "restart the container, then start it with its devices declared (CDI, --device)"
        return exposed(
            "/dev/nvidiactl: there, and Operation not permitted (EPERM): no rule lets it pass", advice=advice
        )
    if errno.EPERM in refused.values():
        names = ", ".join(name for name, why in refused.items() if why == errno.EPERM)
        return unknown(f"{names}: refused by a device cgroup, as a scheduler does with the GPUs of others")
    if refused:
        reasons = ", ".join(sorted({errno.errorcode.get(why, str(why)) for why in refused.values()}))
        why = "file modes or SELinux refuse it" if reasons == "EACCES" else "the driver or the card answers so"
        return unknown(f"{', '.join(refused)}: {reasons}, not a device cgroup: {why}")
    evidence = f"all {len(nodes)} GPU nodes may be opened here"
    listed, lacking, hidden = containers_with_gpus()
    if lacking:
        missing = (
            f"{', '.join(lacking)}: has GPUs open, and its unit does not list them: a daemon-reload takes them away"
        )
        return exposed(evidence, missing, advice="start these containers with their devices declared (CDI, --device)")
    if hidden or not listed:
        why = "no unit of a container with open GPUs can be seen here: run this as root on the host while the job runs"
        return unknown(evidence, why)
    return clear(evidence, f"the units of all {len(listed)} containers with open GPUs list them: {', '.join(listed)}")


def refusal(node: Path) -> int:
    """The error number with which the kernel refuses this node, or 0. What access(2) grants is not opened."""
    if os.access(node, os.R_OK | os.W_OK):
        return 0
    try:
        os.close(os.open(node, os.O_RDWR))
    except OSError as error:
        return error.errno or errno.EACCES
    return 0


def containers_with_gpus() -> Tuple[List[str], List[str], bool]:
    """Scopes whose processes have GPU nodes open: those that list all of them, those that lack one, is any hidden?"""
    scopes: Dict[str, str] = {}
    used: Dict[str, bool] = {}
    hidden = False
    try:
        for name in {path.name.replace(".scope.d", ".scope") for path in UNITS.glob("*.scope*")}:
            files = [UNITS / name, UNITS / f"{name}.d/50-DevicePolicy.conf", UNITS / f"{name}.d/50-DeviceAllow.conf"]
            text = "".join(file.read_text(errors="replace") for file in files if file.is_file())
            if "DevicePolicy=strict" in text:  # else every device is allowed: a privileged container
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
            continue  # it has ended
    known = [name for name in used if re.search("DeviceAllow=.", scopes[name])]
    return [name for name in known if used[name]], [name for name in known if not used[name]], hidden


def allowed(link: Path, text: str) -> bool:
    """Whether the rules of a unit name this open node: by number, by path, or by the name of its kind."""
    device = os.stat(link).st_rdev
    major, minor = os.major(device), os.minor(device)
    kinds = re.findall(rf"^ *{major} (\S+)$", Path("/proc/devices").read_text(errors="replace"), re.M)
    names = [f"/dev/char/{major}:{minor}", os.readlink(link), *(f"char-{kind}" for kind in [major, *kinds])]
    return any(re.search(rf"DeviceAllow=(-|\+)?{re.escape(str(name))}( |$)", text, re.M) for name in names)


NO_CGROUP = "the device cgroup, which systemd fills again from the unit: a mount with nodev, /dev/null for the GPU"


def reloaded(
    name: str,
    fails: Callable[[Context], None],
    works: Callable[[Context], None],
    pattern: str,
    because: Tuple[str, str],
    needs: Needs,
    expected_s: float,
) -> Experiment:
    def arm(job: Callable[[Context], None], expect: Expect, why: str) -> Arm:
        return Arm(job, expect, why, "stand-in", NO_CGROUP)

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
                "the device was let in behind the back of systemd, whose reload does not restore it",
                "the runtime declared the device, so the reload restores it",
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
                "the job is started again after the reload and opens the device anew",
                "the job goes on with the device that it has open",
            ),
            Needs(packages={}, programs=("mount",)),
            0.2,
        ),
    ),
)
