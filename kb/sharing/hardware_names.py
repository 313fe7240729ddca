"""Normalizes GPU names and versions to the forms of NVML and PEP 440.

Reports come from anybody with a key, and these names are shown next to answers, also to language models. Therefore
everything that is neither a word of a GPU name nor part of a version is dropped.
"""

from __future__ import annotations

import re

UNKNOWN_GPU = "unknown GPU"
MOST_WORDS = 8
MAKERS = r"NVIDIA|AMD|Intel|Tesla|GeForce|Quadro|TITAN|Instinct|Radeon|Jetson|GRID"
KINDS = (
    r"RTX|GTX|GT|PRO|Pro|Ti|SUPER|Super|XT|XTX|Ada|Generation|Blackwell|Hopper|Ampere|Laptop|Server|Workstation|Edition|"
    r"Data|Center|GPU|Max|Max-Q|Orin|Thor|AGX|NX|Nano|Xavier|DGX|Spark|PCIe|PCIE|NVL|NVL\d{1,3}|SXM\d?|OAM|MIG|X|V|Xp"
)
MODEL = r"(?:[A-Z]{1,3}\d{1,4}[A-Z]{0,2}|\d{3,4}[DS]?)"  # H100, GB200, 4090, MI300X, L40S
MEMORY = r"\d{1,4}\s?G[Bi]{0,2}|HBM\d[a-zA-Z]?|GDDR\d[A-Z]?|\d{1,2}g\.\d{1,3}gb"
WORD = re.compile(rf"(?:{MAKERS}|{KINDS}|{MODEL}|{MEMORY})(?:-(?:{KINDS}|{MODEL}|{MEMORY})){{0,3}}")
COUNT = re.compile(r"^\s*\d{1,3}\s*[xX×*]\s*")  # `8 x H100`

LOCAL = r"cpu|xpu|cu\d{2,3}|rocm\d[\d.]{0,8}|git[0-9a-f]{7,12}|[0-9a-f]{7,12}(?:\.nv\d\d\.\d\d)?"
VERSION = re.compile(
    rf"\d{{1,5}}(?:\.\d{{1,5}}){{0,3}}(?:(?:a|b|rc|\.dev|\.post)\d{{1,8}}){{0,2}}(?:\+(?:{LOCAL})(?![\w.]))?"
)


def gpu_name(text: str) -> str:
    """The words of a GPU name: `NVIDIA A100-SXM4-80GB`; "" for an empty text, `UNKNOWN_GPU` for anything else."""
    words = [name for word in COUNT.sub("", text).split() for name in (word, word.upper()) if WORD.fullmatch(name)]
    words = list(dict.fromkeys(words))[:MOST_WORDS]
    is_name = any(re.search(r"\d|TITAN", word) for word in words)
    return " ".join(words) if is_name else UNKNOWN_GPU if text.strip() else ""


def version(text: str) -> str:
    """The version at the beginning of a text, such as `2.7.1+cu126`; "" if there is none."""
    match = VERSION.match(text.strip().removeprefix("v"))
    return match[0] if match else ""
