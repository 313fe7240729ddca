"""The loss behind a resume, against that before it and that of the very start."""

from __future__ import annotations

import pytest

from kb.diagnose.story.attempts import read_attempts
from kb.diagnose.story.excerpt import Excerpt, Part
from kb.diagnose.story.lines import read_lines
from kb.diagnose.story.resume import losses_after_resume

BEFORE = [f"step {step} loss {4.0 - step / 10:.2f}" for step in range(1, 31)]  # 3.9 to 1.0


def sentences(*lines: str) -> list[str]:
    data = "".join(f"{line}\n" for line in lines).encode()
    return [
        fact.text
        for fact in losses_after_resume(read_attempts(read_lines([Excerpt("j", None, None, (Part(1, data),))])))
    ]


@pytest.mark.parametrize("resume", ["resuming from ckpt-30", "从 ckpt-30 恢复训练", "Restored optimizer from ckpt-30"])
def test_a_run_that_begins_again_where_it_should_go_on(resume: str) -> None:
    (text,) = sentences(*BEFORE, resume, "step 31 loss 3.85", "step 32 loss 3.7")
    assert (
        text
        == "kb: loss is 3.85 at step 31, behind a resume, and was 1.2 before it: as high as at the start of the run"
    )


def test_a_loss_that_is_only_higher() -> None:
    (text,) = sentences(*BEFORE, "resuming from ckpt-30", "step 31 loss 2.6")
    assert text == "kb: loss is 2.6 at step 31, behind a resume, and was 1.2 before it"


def test_a_resume_from_an_older_checkpoint_is_compared_with_that_step() -> None:
    assert sentences(*BEFORE, "resuming from ckpt-10", "step 11 loss 3.0", "step 12 loss 2.8") == []


@pytest.mark.parametrize(
    "lines",
    [
        [*BEFORE, "resuming from ckpt-30", "step 31 loss 1.1"],
        [*BEFORE, "step 31 loss 3.9"],  # a jump, and nobody resumed
        ["resuming from ckpt-0", *BEFORE],
        [*BEFORE[:3], "resuming from ckpt-3", "step 4 loss 9"],
        [*BEFORE, "resuming from ckpt-30", "step 1 loss 3.9"],  # a new run
    ],
)
def test_what_says_nothing(lines: list[str]) -> None:
    assert sentences(*lines) == []
