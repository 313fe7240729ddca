"""Which values redaction keeps, which values are equal, and which words alone identify a value."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

# Sites that logs refer to. They are public, unlike the reader's host.
PUBLIC_SITES = """
    aka.ms anaconda.com anaconda.org apache.org arxiv.org conda.io deepspeed.ai docker.com docker.io freedesktop.org
    github.com github.io githubusercontent.com gitlab.com gnu.org google.com googleapis.com hf.co huggingface.co
    kernel.org lightning.ai llvm.org microsoft.com modelscope.cn numpy.org nvcr.io nvidia.com open-mpi.org
    openai.com pydantic.dev pypi.org python.org pytorch.org ray.io readthedocs.io readthedocs.org scipy.org
    slack.com stackoverflow.com tensorflow.org ubuntu.com vllm.ai wandb.ai wikipedia.org
""".split()  # noqa: SIM905 - words are read more easily than quotes
EMPTY_VALUES = {"none", "null", "true", "false", "nil", "undefined", "***"}
LOCAL_HOSTS = EMPTY_VALUES | {"localhost", "localhost.localdomain", "auto", "unknown", "static", "env", "file"}
SYSTEM_USERS = EMPTY_VALUES | {"", "root", "nobody", "id", "name"}
# Words of every log. They are hidden if a path or field shows that they are names, but not as single words.
COMMON_WORDS = set(
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
    """The canonical form of a value; "" for an address that is invalid or identifies no machine."""
    if kind == "ip":
        return _canonical_address(value)
    return value.lower() if kind in ("host", "mac", "email") else value


def _canonical_address(value: str) -> str:
    for text in (value, value.rstrip(":")):
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            continue
        if isinstance(address, ipaddress.IPv6Address):
            if not any(map(str.isdigit, text)):  # `ad::add` is a function
                return ""
            address = address.ipv4_mapped or address
        is_generic = address.is_loopback or address.is_unspecified or str(address).startswith("255.")
        return "" if is_generic else str(address)
    return ""


def is_allowed(kind: str, value: str) -> bool:
    """Whether a value stays although a rule matches it: `root`, `localhost`, `None`, the site of a project."""
    name = value.lower()
    if kind == "user":
        return name in SYSTEM_USERS
    if kind == "host":
        is_other = name.replace(".", "").isdigit() or SOURCE_FILE.search(name) or RANK.fullmatch(name)
        return name in LOCAL_HOSTS or bool(is_other) or _is_public_site(name)
    return kind in ("token", "secret") and (name in EMPTY_VALUES or (kind == "token" and name.isdigit()))


def _is_public_site(host: str) -> bool:
    """Whether a host is a public site. A name with a digit is a machine at that site, which is not public."""
    is_site = any(host == site or host.endswith("." + site) for site in PUBLIC_SITES)
    return is_site and not re.search(r"\d", host)


def identifying_words(kind: str, key: str) -> Iterator[str]:
    """The words that identify a value anywhere: an uncommon name, the short form of a host, a long secret."""
    name = key.lower()
    if kind == "user" and len(name) > 2 and name not in COMMON_WORDS:
        yield name
    elif kind == "host":
        for word in {name, name.partition(".")[0]}:
            if re.search(r"[\d-]", word) and len(word) > 3 and word not in COMMON_WORDS:
                yield word
    elif kind in ("token", "secret") and len(name) > 7 and re.search(r"\d", name):
        yield name
