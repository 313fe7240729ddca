"""The settings in the advice of a check become a command that can be pasted."""

from __future__ import annotations

import pytest

from kb.verify.advice import with_command


@pytest.mark.parametrize(
    ("advice", "command"),
    [
        ("--set checkpoint=/path/to/checkpoint-1000", "`kb verify an-entry --set checkpoint=/path/to/checkpoint-1000`"),
        (
            "measure it: --set nodes=2 --set gpus=8, then",
            "measure it: `kb verify an-entry --set nodes=2 --set gpus=8`, then",
        ),
        (
            "--set nodes=2 --set command='torchrun --nproc-per-node 8 train.py'; or a file",
            "`kb verify an-entry --set nodes=2 --set command='torchrun --nproc-per-node 8 train.py'`; or a file",
        ),
        ('--set command="python train.py"', '`kb verify an-entry --set command="python train.py"`'),
        ("`nvidia-smi -q`, then --set gpu=0", "`nvidia-smi -q`, then --set gpu=0"),
        ("nothing to set", "nothing to set"),
    ],
)
def test_settings_become_a_command_of_the_entry(advice: str, command: str) -> None:
    assert with_command(advice, "an-entry") == command
