"""Which of what a rule finds is nobody's, what makes two of a kind equal, and which words tell of one."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

# Sites that logs point to: not the reader's. `example.org` would be.
PUBLIC = """
    aka.ms anaconda.com anaconda.org apache.org arxiv.org conda.io deepspeed.ai docker.com docker.io freedesktop.org
    github.com github.io githubusercontent.com gitlab.com gnu.org google.com googleapis.com hf.co huggingface.co
    kernel.org lightning.ai llvm.org microsoft.com modelscope.cn numpy.org nvcr.io nvidia.com open-mpi.org
    openai.com pydantic.dev pypi.org python.org pytorch.org ray.io readthedocs.io readthedocs.org scipy.org
    slack.com stackoverflow.com tensorflow.org ubuntu.com vllm.ai wandb.ai wikipedia.org
""".split()  # noqa: SIM905 - words are read more easily than quotes
NOTHING = {"none", "null", "true", "false", "nil", "undefined", "***"}
LOCAL = NOTHING | {"localhost", "localhost.localdomain", "auto", "unknown", "static", "env", "file"}
NOBODY = NOTHING | {"", "root", "nobody", "id", "name"}
# Names that are words of every log: hidden where a path or field says what they are, never as a mere word.
COMMON = set(
    """
    admin anaconda app base build cache checkpoint conda cuda data default dev docker exp gpu head host job jovyan
    launcher lib linux log login main master model models nccl node output python pytorch ray research rank root run
    runner server shared slurm software spark src support system team test tests tmp torch train trainer training
    ubuntu user users work worker workspace
    """.split()  # noqa: SIM905
)
SOURCE_FILE = re.compile(r"\.(?:py|pyx|cc|cpp|cxx|cu|cuh|c|h|hpp|rs|go|so|log|json|yaml|yml|sh|txt|md|out|err)$")
RANK = re.compile(r"(?:rank|default|trainer|worker|local_rank)\d*", re.IGNORECASE)


def canonical(kind: str, value: str) -> str:
    """What makes two of a kind equal; "" for an address that is none."""
    if kind == "ip":
        return _address(value)
    return value.lower() if kind in ("host", "mac", "email") else value


def _address(value: str) -> str:
    for text in (value, value.rstrip(":")):
        try:
            found = ipaddress.ip_address(text)
        except ValueError:
            continue
        if isinstance(found, ipaddress.IPv6Address):
            if not any(map(str.isdigit, text)):  # `ad::add` is a function
                return ""
            found = found.ipv4_mapped or found
        is_nobodys = found.is_loopback or found.is_unspecified or str(found).startswith("255.")
        return "" if is_nobodys else str(found)
    return ""


def is_harmless(kind: str, value: str) -> bool:
    """Whether it stays although it has the form: `root`, `localhost`, `None`, the site of a project."""
    name = value.lower()
    if kind == "user":
        return name in NOBODY
    if kind == "host":
        is_other = name.replace(".", "").isdigit() or SOURCE_FILE.search(name) or RANK.fullmatch(name)
        return name in LOCAL or bool(is_other) or _is_public(name)
    return kind in ("token", "secret") and (name in NOTHING or (kind == "token" and name.isdigit()))


def _is_public(host: str) -> bool:
    """A site that logs point to, not a machine of those who run it: machines have numbers."""
    is_site = any(host == site or host.endswith("." + site) for site in PUBLIC)
    return is_site and not re.search(r"\d", host)


def words_of(kind: str, key: str) -> Iterator[str]:
    """The words that tell of it alone: a name that is no common word, the short form of a host, a long secret."""
    name = key.lower()
    if kind == "user" and len(name) > 2 and name not in COMMON:
        yield name
    elif kind == "host":
        short = name.partition(".")[0]
        yield from (one for one in {name, short} if re.search(r"[\d-]", one) and len(one) > 3 and one not in COMMON)
    elif kind in ("token", "secret") and len(name) > 7 and re.search(r"\d", name):
        yield name
