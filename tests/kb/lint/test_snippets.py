"""The names in code: by import, by custom, as keyword, as key of a configuration; never of an object."""

from __future__ import annotations

import pytest

from kb.lint.body import blocks
from kb.lint.snippets import names


@pytest.mark.parametrize(
    ("language", "code", "expected"),
    [
        ("python", "import torch\ntorch.cuda.empty_cache()", {"torch", "torch.cuda", "torch.cuda.empty_cache"}),
        ("python", "dist.barrier(device_ids=[0])", {"torch.distributed.barrier", "torch.distributed.barrier(device_ids"}),
        ("python", "# from peft import LoraConfig\nLoraConfig(r=8)", {"peft.LoraConfig", "peft.LoraConfig(r"}),
        ("python", "import torch.distributed as d\nd.get_rank()", {"torch.distributed", "torch.distributed.get_rank"}),
        ("python", "model.to(device)\nos.environ.get('RANK')", set()),
        ("python", "this is not Python", set()),
        ("json", '{"zero_optimization": {"stage": 3}}', {"deepspeed: zero_optimization", "deepspeed: zero_optimization.stage"}),
        ("yaml", "fsdp_config:\n  fsdp_version: 2", {"accelerate: fsdp_config", "accelerate: fsdp_config.fsdp_version"}),
        ("yaml", "volumes: [{name: dshm}]", set()),
        ("json", "[1, 2]", set()),
        ("bash", "import torch", set()),
    ],
)  # fmt: skip
def test_names_of_a_block(language: str, code: str, expected: set[str]) -> None:
    (block,) = blocks(f"## Fix\n\n```{language}\n{code}\n```\n")[1:]
    assert names(block) == expected
