"""Texts that are hardest for a search engine: long, common, repeated, unknown and Chinese words."""

from __future__ import annotations

import random
import re
import string

from kb.content.catalog import load_catalog
from kb.content.roots import Root, builtin_root
from kb.search import synonyms
from kb.search.query import LONGEST_TEXT


def texts(roots: tuple[Root, ...]) -> dict[str, str]:
    """Texts by title. The same entries give the same texts."""
    rng = random.Random(0)
    files = [path for root in roots for path in root.entry_files()]
    raw = "\n".join(path.read_text(encoding="utf-8") for path in rng.sample(files, min(len(files), 60)))
    words = re.findall(r"[A-Za-z]{4,}", raw)
    chinese = re.findall(r"[\u4e00-\u9fff]+", raw)
    samples = [signature.sample for entry in load_catalog((builtin_root(),)) for signature in entry.meta.signatures]
    return {
        "text of entries": _cut(raw[len(raw) // 2 :]),
        "thousands of words": _cut(" ".join(rng.sample(words, min(len(words), 3000)))),
        "Chinese only": _cut("".join(rng.sample(chinese, min(len(chinese), 3000)))),
        "two languages": _cut(" ".join(word for pair in zip(words, chinese, strict=False) for word in pair)),
        "log lines of many incidents": _cut("\n".join(rng.sample(samples, len(samples)))),
        "every synonym": _cut(" ".join(word for group in synonyms.read() for word in group)),
        "the commonest words": "torch distributed nccl rank error timeout training gpu process 训练 超时 报错 显存",
        "one word repeated": _cut("timeout " * 2000),
        "one Chinese word repeated": "超时" * (LONGEST_TEXT // 2),
        "misspelt words": " ".join(_misspelt(word, rng) for word in rng.sample(sorted(set(words)), 22))[:199],
        "unknown words": " ".join("".join(rng.choices(string.ascii_lowercase, k=8)) for _ in range(22)),
        "a few misspelt words": " ".join(_misspelt(word, rng) for word in rng.sample(sorted(set(words)), 5)),
        "identifiers": _cut(" ".join("_".join(rng.choices(words, k=4)) for _ in range(500))),
        "one letter": "a" * LONGEST_TEXT,
        "parentheses": "(" * LONGEST_TEXT,
        "random characters": "".join(rng.choices(string.printable, k=LONGEST_TEXT)),
        "versions and numbers": _cut(
            " ".join(f"{rng.randrange(30)}.{rng.randrange(30)}.{rng.randrange(9)}" for _ in range(2000))
        ),
    }


def _cut(text: str) -> str:
    return text[:LONGEST_TEXT]


def _misspelt(word: str, rng: random.Random) -> str:
    at = rng.randrange(1, len(word) - 1)
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
