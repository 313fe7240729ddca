"""How this kb was installed, so that a hint about a missing extra is a command that works.

kb is on no package index: `pip install gpu-kb` would find nothing, or somebody else's package.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

NAME = "gpu-kb"
UNKNOWN = "CHECKOUT_OR_WHEEL"


def install_command(extra: str) -> str:
    """The command that installs this kb again, from the same place, with an extra."""
    recorded = [dist.read_text("direct_url.json") for dist in distributions(name=NAME)]  # a checkout has one more
    origin: dict[str, Any] = next((json.loads(text) for text in recorded if text), {})
    return f"{installer(Path(sys.prefix))} {source(origin, extra)}"


def installer(environment: Path) -> str:
    """The command of the tool that manages an environment; uv and pipx leave a file in theirs."""
    if (environment / "uv-receipt.toml").is_file():
        return "uv tool install"
    if (environment / "pipx_metadata.json").is_file():
        return "pipx install --force"
    python = shlex.quote(sys.executable)
    return f"{python} -m pip install" if find_spec("pip") else f"uv pip install --python {python}"


def source(origin: Mapping[str, Any], extra: str) -> str:
    """What to install, quoted for a shell. `origin` is direct_url.json (PEP 610), empty if no installer wrote one."""
    url = origin.get("url", "")
    if not url:
        return shlex.quote(f"{UNKNOWN}[{extra}]")
    if "vcs_info" in origin:
        revision = origin["vcs_info"].get("requested_revision")
        address = f"{origin['vcs_info']['vcs']}+{url}{f'@{revision}' if revision else ''}"
        return shlex.quote(f"{NAME}[{extra}] @ {address}")
    if not url.startswith("file:"):
        return shlex.quote(f"{NAME}[{extra}] @ {url}")
    path = shlex.quote(f"{url2pathname(urlsplit(url).path)}[{extra}]")
    return f"-e {path}" if origin.get("dir_info", {}).get("editable") else path
