"""`judge` with a time limit: the output of an arm may have an endless line, on which a search takes minutes."""

from __future__ import annotations

from collections.abc import Sequence

from kb.harness.outcome import ArmOutcome
from kb.patterns import redos_timing
from kb.probe import Experiment
from kb.verify.verdict import Judgement, Verdict, judge

LONG_LINE = 2000  # characters; on a shorter line, a pattern that was proved safe needs milliseconds
PATTERN_S = 1.0  # CPU time for one pattern on the output of both arms


def judge_in_time(
    experiment: Experiment, control: ArmOutcome, treatment: ArmOutcome, patterns: Sequence[str]
) -> Judgement:
    """Call `judge` without the patterns that would take minutes on this output, such as an endless progress bar.

    Nothing can stop `re.search` in this process, neither a deadline nor Ctrl-C, so another process tries first.
    """
    texts = [text for arm in (control, treatment) for rank in arm.ranks for text in (rank.text, rank.stacks)]
    long_texts = [text for text in texts if max(map(len, text.split("\n"))) > LONG_LINE]
    if not long_texts:
        return judge(experiment, control, treatment, patterns)
    expected = list(filter(None, (experiment.control.expect.pattern, experiment.control.expect.after)))
    slow = redos_timing.slow(dict.fromkeys([*patterns, *expected], long_texts), PATTERN_S)
    for pattern in expected:
        if pattern in slow:
            return Judgement(Verdict.INCONCLUSIVE, f"the declared pattern takes too long on this output: {pattern}")
    return judge(experiment, control, treatment, [pattern for pattern in patterns if pattern not in slow])
