"""Searches with the pattern of a signature, and finds its literals: texts of which every match contains one."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import product
from typing import Any

from kb.patterns.syntax import BRANCH, IN, LITERAL, REPEATS, SUBPATTERN, ZERO_WIDTH, has_flag, parse

LONG_LITERAL = 8  # characters; a literal this long is not a common word
MAX_TEXTS = 32  # a larger set is dropped in favour of a shorter text that more matches share

# Lines that healthy jobs print repeatedly, from transformers, torchtitan, Megatron, DeepSpeed, tqdm and NCCL.
HEALTHY_LINES = """\
{'loss': 2.31, 'grad_norm': 1.25, 'learning_rate': 2e-05, 'epoch': 0.5}
{'loss': '1.905', 'grad_norm': '0.8125', 'learning_rate': '1.9e-05', 'epoch': '0.52'}
{'train_runtime': 12.5, 'train_loss': 2.25, 'epoch': 1.0}
step: 10  loss: 2.31  grad_norm: 1.25  memory: 20.11GiB(25.2%)  tps: 4,210  mfu: 38.10%
 iteration 10/ 100 | lm loss: 2.310E+00 | loss scale: 1.0 | grad norm: 1.250 | number of nan iterations:   0 |
[2026-01-01 10:00:00,000] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, lr=[2e-05], mom=[(0.9, 0.95)]
 10%|█         | 10/100 [00:10<01:30, 1.00it/s, train_loss=2.31]
node01:101:102 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
"""

Texts = frozenset[str]
EMPTY: Texts = frozenset({""})


def find(pattern: str, text: str) -> re.Match[str] | None:
    """The first match of a signature in a log: `re.search`, case-sensitive, `^` and `$` at the ends of lines."""
    return compiled(pattern).search(text)


@lru_cache(maxsize=4096)  # `re` caches only 512 patterns, fewer than the entries have
def compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.MULTILINE)


def literals(pattern: str) -> Texts:
    """Case-sensitive texts of which every match contains at least one; empty if none are known.

    A log is searched for all of them at once before any pattern runs. If a pattern offers several sets, this is the
    one that is rarest in the logs of healthy jobs, then the one whose shortest text is longest.
    """
    parsed = parse(pattern)
    if has_flag(parsed, re.IGNORECASE):
        return frozenset()
    return _best(_literal_sets(parsed))


def last_literals(pattern: str) -> Texts:
    """The last set of a pattern whose texts are long and rare, where a match over several lines is complete.

    Healthy jobs often print the text that begins such a match ("Saving the model"), but not the text that ends it.
    """
    best = literals(pattern)
    rare = [
        texts
        for texts in _literal_sets(parse(pattern))
        if min(map(len, texts)) >= LONG_LITERAL and _selectivity(texts)[0] == 0
    ]
    return rare[-1] if best and rare else best


def _best(sets: list[Texts]) -> Texts:
    return max(sets, key=_selectivity, default=frozenset()) - EMPTY


def _selectivity(texts: Texts) -> tuple[int, int, int]:
    """How well a set separates the matches of its pattern from other text; larger is better."""
    return -sum(map(HEALTHY_LINES.count, texts)), min(map(len, texts), default=0), -len(texts)


def _literal_sets(parsed: Any) -> list[Texts]:
    """All sets of texts of which every match contains one."""
    sets: list[Texts] = []
    run = EMPTY  # all texts that the adjacent elements before this one can match
    for op, value in parsed:
        if op in ZERO_WIDTH:
            continue
        if op is LITERAL:  # the fast path for most elements; the code below takes four times as long
            character = chr(value)
            run = frozenset([text + character for text in run])
            continue
        exact = _exact(op, value)
        grown = frozenset(map("".join, product(run, exact))) if len(run) * len(exact) <= MAX_TEXTS else frozenset()
        if grown:
            run = grown
            continue
        sets += [run, *_inside(op, value)]
        run = exact or EMPTY
    return [texts for texts in (*sets, run) if "" not in texts and texts]


def _exact(op: Any, value: Any) -> Texts:
    """All texts that an element can match; empty if there are too many."""
    if op is LITERAL:
        return frozenset({chr(value)})
    if op is IN:
        return frozenset(chr(code) for _, code in value) if _is_short_set(value) else frozenset()
    if op is SUBPATTERN:
        return _exact_run(value[3])
    if op is BRANCH:
        branches = [_exact_run(branch) for branch in value[1]]
        texts: Texts = frozenset().union(*branches)
        return texts if all(branches) and len(texts) <= MAX_TEXTS else frozenset()
    if op in REPEATS and value[1] == 1:
        once = _exact_run(value[2])
        return once | EMPTY if once and value[0] == 0 else once
    return frozenset()


def _exact_run(parsed: Any) -> Texts:
    run = EMPTY
    for op, value in parsed:
        exact = _exact(op, value)
        if op in ZERO_WIDTH or not exact or len(run) * len(exact) > MAX_TEXTS:
            return frozenset()
        run = frozenset(map("".join, product(run, exact)))
    return run


def _is_short_set(members: Any) -> bool:
    return len(members) <= 4 and all(kind is LITERAL for kind, _ in members)


def _inside(op: Any, value: Any) -> list[Texts]:
    """The sets inside an element that can match too many texts."""
    if op is SUBPATTERN:
        return _literal_sets(value[3])
    if op is BRANCH:
        best = [_best(_literal_sets(branch)) for branch in value[1]]
        return [frozenset().union(*best)] if all(best) else []
    if op in REPEATS and value[0] > 0:
        return _literal_sets(value[2])
    return []
