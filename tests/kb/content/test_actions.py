"""What says what to do, and what only states something: items as entries have them."""

from __future__ import annotations

import pytest

from kb.content.actions import action

DO = (
    "`docker info | grep -i runtime` on the host of the container that failed.",
    "Switch `overlap_comm` off for a run: the loss stays finite, it is this.",
    "`py-spy dump --pid` on the missing rank while the others wait: inside `torch.save` is variant 3.",
    "**Harmless or not?** Compare the GPU in the warning with the one that the rank works on.",
    "**Find the rank that is missing from the messages**, then the end of *its* output.",
    "In the environment and on the node that failed: `python -c 'import torch'`.",
    "On every node, with the job's variables: `kb verify nccl-ib-misconfigured` lists the ports.",
    "If the setting is on and the error still appears, print `fsdp_plugin.use_orig_params`.",
    "`NCCL_DEBUG=INFO`, the line `Bootstrap : Using <name>:<address>` **of each node**.",
    "其他 rank 等待时，对缺席的 rank 用 `py-spy dump --pid`：停在 `torch.save` 里是第三种。",
    "**先找没有出现在报错里的那个 rank**，看它自己输出的结尾。",
    "比较各 rank 停在哪一次集合通信。",
    "在出错的环境和节点上：`python -c 'import torch'`",
)
STATE = (
    "The same timeout in the middle of an epoch is not this entry: see `slow-rank-exceeds-timeout`.",
    "**Not this:** the driver is older than what torch needs: `driver-too-old`.",
    "`SeqNum=1` on all ranks with equal sizes and nothing completed: `nccl-p2p-hang`.",
    "Out of memory on GPU 0 while the others are empty: `oom-all-ranks-on-gpu0`. Look there.",
    "If only one rank prints this, the others wait in a collective: `connection-reset-by-peer`.",
    "Files complete and written long before the timeout: variant 3.",
    "同样的超时发生在 epoch 中间：不是这里，看 `slow-rank-exceeds-timeout`。",
    "只报连接断开的 rank：看 `connection-reset-by-peer`，到最先退出的 rank 上找这个报错。",
    "数字改对之后才出现的 `Connection reset by peer` 是另一个问题。",
    "文件完整，而且早在超时之前就写完了：第三种。",
)


@pytest.mark.parametrize("item", DO)
def test_what_begins_with_a_command_or_a_verb_says_what_to_do(item: str) -> None:
    assert action(item) == item


@pytest.mark.parametrize("item", STATE)
def test_what_says_what_is_seen_and_which_entry_that_is_only_states(item: str) -> None:
    assert action(item) == ""


def test_marks_and_what_announces_missing_code_are_left_out() -> None:
    assert (
        action("Compare the sizes. [source 4] Equal: no. The next log is another one:")
        == "Compare the sizes. Equal: no."
    )
    assert action("Print the number of batches, which takes a minute without any model:") == ""
