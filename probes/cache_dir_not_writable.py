"""A job's user cannot write to the caches below its home, or has no account, as in a container with another user."""

from __future__ import annotations

import getpass
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

from kb.host import compiler_caches, is_noexec, is_writable, mount_of, user_name
from kb.namespaces import drop_capabilities, own_user
from kb.packages import release
from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Probe,
    clear,
    completed,
    exposed,
    raised,
    unknown,
)

CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2  # with these, root may write anywhere
NO_ACCOUNT = 54321
USER_VARIABLES = ("LOGNAME", "USER", "LNAME", "USERNAME")  # what getpass.getuser reads, in this order
CACHE_VARIABLES = (
    "XDG_CACHE_HOME",
    "TORCH_EXTENSIONS_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "HF_DATASETS_CACHE",
)
# Libraries that were built are loaded from these.
COMPILED = ("TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
KEY = "00" * 32  # of a Triton kernel, in hexadecimal
FALLBACK_IN_TORCH = (2, 13)


def in_foreign_home(
    ctx: Context, use_cache: Callable[[], str], fix: Mapping[str, str], image: Mapping[str, str], *, fixed: bool
) -> None:
    """Uses a cache in a home that belongs to another user. With `fixed`, the variables of the fix name folders.

    `image` has the folders that the variables of the image name, in both arms.
    """
    home = Path(ctx.path("home"))
    home.mkdir(mode=0o555)
    for name in CACHE_VARIABLES:
        os.environ.pop(name, None)
    os.environ["HOME"] = str(home)
    os.environ.update({name: ctx.path(folder) for name, folder in image.items()})
    drop_capabilities(CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH)
    if fixed:
        os.environ.update({name: ctx.path(folder) for name, folder in fix.items()})
    ctx.reached()
    written = use_cache()
    assert written.startswith(ctx.path("cache")), written


def build_extension() -> str:
    """Makes the folder in which torch builds an extension, as DeepSpeed's ops do, and writes a file there."""
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory("fused_adam", verbose=False))
    (folder / "build.ninja").write_text("ninja_required_version = 1.3\n")
    return str(folder)


def store_kernel() -> str:
    """Stores a file in Triton's cache, as every compiled kernel does. XDG_CACHE_HOME is set and changes nothing."""
    os.environ.setdefault("XDG_CACHE_HOME", os.path.join(os.path.dirname(os.environ["HOME"]), "cache"))
    from triton.runtime.cache import get_cache_manager  # type: ignore[import-not-found]

    return str(get_cache_manager(KEY).put("kernel", "kernel.txt", binary=False))


def load_rows() -> str:
    """Loads a file of rows with datasets, which writes them to its cache."""
    from datasets import load_dataset  # type: ignore[import-not-found]

    rows = os.path.join(tempfile.mkdtemp(), "rows.jsonl")
    Path(rows).write_text('{"text": "a"}\n')
    return str(load_dataset("json", data_files=rows, split="train").cache_files[0]["filename"])


def without_account(ctx: Context, look_up: Callable[[], str], *, named: bool, inductor_dir: bool = False) -> None:
    """Looks up who runs the job, as a user whose number is not in /etc/passwd; with `named`, USER is set.

    `inductor_dir` also names a folder for the cache of torch.compile.
    """
    for name in (*USER_VARIABLES, *CACHE_VARIABLES):
        os.environ.pop(name, None)
    own_user(NO_ACCOUNT)
    os.environ["TMPDIR"] = ctx.path("tmp")
    os.makedirs(ctx.path("tmp"))
    if named:
        os.environ["USER"] = "trainer"
    if inductor_dir:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = ctx.path("trainer")
    ctx.reached()
    name = look_up()
    assert name.endswith("trainer"), name


def inductor_cache() -> str:
    """The cache of torch.compile, which torch 2.6 and newer open for every backend."""
    from torch._inductor.codecache import cache_dir

    return str(cache_dir())


def without_home(ctx: Context, *, home: bool) -> None:
    """Looks for the home folder of a user without an account, with and without HOME."""
    own_user(NO_ACCOUNT)
    os.environ.pop("HOME", None)
    if home:
        os.environ["HOME"] = ctx.path("home")
    ctx.reached()
    assert str(Path.home()) == ctx.path("home")


def check(_: Mapping[str, Any]) -> Finding:
    """Can this process write to its caches, and has its user a name?"""
    folders = caches()
    closed = [f"{name}: {path} cannot be written" for name, path in folders.items() if not is_writable(path)]
    hub = hub_cache()
    no_exec = [f"{name}: {path} is mounted noexec" for name in COMPILED if is_noexec(path := folders[name])]
    shared = [f"{name}: {path} is on {kind}" for name, path in folders.items() if (kind := network_disk(path))]
    account = user_name()
    who = f"user {os.getuid()}: " + (account or f"no account, and none of {', '.join(USER_VARIABLES)} is set")
    home = f"HOME: {os.environ.get('HOME', 'not set')}"
    if os.path.expanduser("~") == "~":
        return exposed(who, home, "so Python knows no home", advice="set HOME in the job's environment")
    if closed:
        return exposed(who, home, *closed, advice="set HOME, or the variables of Fix 1, in the job's environment")
    if not account and release("torch") and release("torch")[:2] < FALLBACK_IN_TORCH:
        return exposed(who, home, advice="set USER, or update torch to 2.13 or newer")
    if not account:
        return unknown(who, home, "a library may ask for the user's name", advice="set USER in the job's environment")
    if not is_writable(hub):
        return unknown(
            who,
            home,
            f"HF_HUB_CACHE: {hub} cannot be written, which fails if a model is not complete there",
            advice="point HF_HUB_CACHE to a folder that this user may write, unless all models are there",
        )
    if no_exec:
        return unknown(
            who,
            home,
            *no_exec,
            "nothing that is compiled there can be loaded",
            advice="use a disk that is mounted without noexec",
        )
    if shared:
        return unknown(
            who, home, *shared, "several nodes that write there at once can break a file", advice="use a local disk"
        )
    if not any(name in os.environ for name in ("LOCAL_RANK", "RANK", "SLURM_PROCID", "KUBERNETES_SERVICE_HOST")):
        return unknown(
            who,
            home,
            "all caches can be written here, but the job may run as another user",
            advice="run this in the job's container, as its user",
        )
    return clear(who, home, *(f"{name}: {path}" for name, path in folders.items()))


def caches() -> Dict[str, str]:
    """Where torch, Triton and Hugging Face libraries of this process write, by variable."""
    environ = os.environ.get
    return {
        "TORCH_EXTENSIONS_DIR": environ("TORCH_EXTENSIONS_DIR") or os.path.join(user_cache(), "torch_extensions"),
        **compiler_caches(),
        "HF_DATASETS_CACHE": environ("HF_DATASETS_CACHE") or os.path.join(hugging_face(), "datasets"),
    }


def user_cache() -> str:
    return os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")


def hugging_face() -> str:
    return os.environ.get("HF_HOME") or os.path.join(user_cache(), "huggingface")


def hub_cache() -> str:
    """Where models are; a folder that cannot be written serves if they are complete."""
    environ = os.environ.get
    return environ("HF_HUB_CACHE") or environ("HUGGINGFACE_HUB_CACHE") or os.path.join(hugging_face(), "hub")


def network_disk(path: str) -> str:
    """The kind of file system of a path if several nodes share it, such as nfs4; "" otherwise."""
    kind = mount_of(os.path.abspath(path)).kind
    return kind if kind.startswith(("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse.")) else ""


def experiment(
    name: str, job: Callable[..., None], fix: str, expect: Expect, because: Tuple[str, str], **changes: Any
) -> Experiment:
    """One rank; the arms differ in the keyword `fix`."""
    control, treatment = (
        Arm(partial(job, **{fix: fixed}), expect=end, because=why, fidelity="cpu")
        for fixed, end, why in zip((False, True), (expect, completed()), because)
    )
    return Experiment(
        name=name,
        control=control,
        treatment=treatment,
        world_size=1,
        **{"needs": Needs(packages={}), "expected_s": (0.3, 0.3), **changes},
    )


def foreign_home(
    name: str, use_cache: Callable[[], str], fix: Dict[str, str], image: Optional[Dict[str, str]] = None, **changes: Any
) -> Experiment:
    return experiment(
        name,
        partial(in_foreign_home, use_cache=use_cache, fix=fix, image=image or {}),
        "fixed",
        raised(r"PermissionError: \[Errno 13\] Permission denied: '\S+/home/\.(cache|triton)"),
        ("the home belongs to another user", f"{next(iter(fix))} names a folder that this user may write"),
        **{"needs": Needs(), **changes},
    )


probe = Probe(
    check=check,
    experiments=(foreign_home("extensions", build_extension, {"XDG_CACHE_HOME": "cache"}),),
    variants=(
        foreign_home(
            "triton",
            store_kernel,
            {"TRITON_CACHE_DIR": "cache/triton"},
            needs=Needs(packages={"triton": ""}),
        ),
        foreign_home(
            "datasets",
            load_rows,
            {"XDG_CACHE_HOME": "cache"},
            needs=Needs(packages={"datasets": ">=2.14"}),
            deadline_s=60,
        ),
        foreign_home(
            "image",
            load_rows,
            {"HF_HOME": "cache/huggingface"},
            {"HF_HOME": "home/.cache/huggingface", "XDG_CACHE_HOME": "cache"},
            needs=Needs(packages={"datasets": ">=2.14"}),
            deadline_s=60,
        ),
        experiment(
            "account",
            partial(without_account, look_up=getpass.getuser),
            "named",
            raised(r"getpwuid\(\): uid not found: 54321|No username set in the environment"),
            ("user 54321 has no account", "USER names the user"),
        ),
        experiment(
            "inductor",
            partial(without_account, look_up=inductor_cache),
            "named",
            raised(r"KeyError: 'getpwuid\(\): uid not found: 54321'|No username set in the environment"),
            ("user 54321 has no account", "USER names the user"),
            needs=Needs(packages={"torch": ">=2.1,<2.13"}),
            deadline_s=60,
            expected_s=(3, 3),
        ),
        experiment(
            "inductor-dir",
            partial(without_account, look_up=inductor_cache, inductor_dir=True),
            "named",
            raised(r"KeyError: 'getpwuid\(\): uid not found: 54321'|No username set in the environment"),
            (
                "user 54321 has no account, and TORCHINDUCTOR_CACHE_DIR does not name all folders of the compiler",
                "USER names the user",
            ),
            needs=Needs(packages={"torch": ">=2.8,<2.13"}),
            deadline_s=60,
            expected_s=(3, 3),
        ),
        experiment(
            "home-unset",
            without_home,
            "home",
            raised(r"RuntimeError: (Could not|Can't) determine home directory"),
            ("HOME is not set, and user 54321 has no account", "HOME is set"),
        ),
    ),
)
