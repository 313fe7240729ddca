"""Progress and metrics of a line, in every form in which trainers print them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb.diagnose.story.excerpt import Excerpt, Part
from kb.diagnose.story.lines import read_lines
from kb.diagnose.story.progress import (
    EVALUATE,
    LOAD,
    RESUME,
    SAVE,
    TEARDOWN,
    TOKENIZE,
    TRAIN,
    Progress,
    phase_of,
    read_metrics,
    read_progress,
)


def progress(text: str) -> Progress | None:
    (line,) = read_lines([Excerpt("job.log", None, None, (Part(1, text.encode()),))])
    return read_progress(line)


def known(text: str) -> Progress:
    found = progress(text)
    assert found, text
    return found


@pytest.mark.parametrize(
    ("text", "label", "count", "total"),
    [
        (" 35%|###5      | 14/40 [00:06<00:11,  2.25it/s]", "bar", 14, 40),
        ("Map:  50%|#####     | 5000/10000 [00:01<00:01, 4821.01 examples/s]", "Map", 5000, 10000),
        ("Map (num_proc=4):  50%|#####     | 5,000/10,000 [00:01<00:01, 4821.01 examples/s]", "Map (num_proc=4)", 5000, 10000),
        ("Epoch 0:  66%|██████▋   | 8/12 [00:00<00:00, 53.1it/s, v_num=0, train_loss=1.52]", "Epoch 0", 8, 12),
        ("weights:  12%|█▏        | 1.2G/9.9G [00:10<01:20, 108MB/s]", "weights", 1_200_000_000, 9_900_000_000),
        ("step 8/24 loss 1.25", "step", 8, 24),
        ("step 8 of 24", "step", 8, 24),
        ("step: 8 | loss: 1.25", "step", 8, None),
        ("global_step=8, loss=1.25", "global_step", 8, None),
        ("{'step': 8, 'loss': 1.25}", "step", 8, None),
        ('{"rank": 3, "step": 8, "loss": 1.25}', "step", 8, None),
        (" iteration       10/      24 | consumed samples:          320 | lm loss: 1.25E+00 |", "iteration", 10, 24),
        ("Epoch [1/2] Step [3/12] Loss 1.25", "step", 3, 12),
        ("Epoch 1 Batch 3/12", "batch", 3, 12),
        ("Epoch 3/10 done", "epoch", 3, 10),
        ("[3/40] compiling", "", 3, 40),
        ("tokenizing shard 37/40", "shard", 37, 40),
        ("uploading part 2 of 9", "part", 2, 9),
        ("第 3 步 损失 1.25", "step", 3, None),
        ("第3/40步", "step", 3, 40),
        ("第 2 轮", "epoch", 2, None),
        ("2026-11-22 01:38:57,154 - INFO - train - rank 3 step 8 loss 1.25", "step", 8, None),
    ],
)  # fmt: skip
def test_counters(text: str, label: str, count: int, total: int | None) -> None:
    found = known(text)
    assert (found.label, found.count, found.total) == (label, count, total)


@pytest.mark.parametrize(
    ("text", "metrics"),
    [
        ("step 8 loss 1.25 grad_norm 0.5 lr 1e-4", {"loss": 1.25, "grad_norm": 0.5, "lr": 1e-4}),
        ("{'loss': 1.25, 'grad_norm': 0.5, 'learning_rate': 1e-4, 'epoch': 0.5}", {"loss": 1.25, "grad_norm": 0.5, "lr": 1e-4}),
        ("{'loss': '1.25', 'grad_norm': 'nan', 'epoch': '0.5'}", {"loss": 1.25, "grad_norm": math.nan}),
        (" iteration 10/ 24 | learning rate: 1.000E-04 | lm loss: 1.25E+00 | loss scale: 1.0 | grad norm: 0.500 |", {"lr": 1e-4, "loss": 1.25, "loss_scale": 1.0, "grad_norm": 0.5}),
        ("Epoch 0:  66%|###| 8/12 [00:00<00:00, 53.1it/s, v_num=0, train_loss=1.25]", {"loss": 1.25}),
        ('{"step": 8, "loss": 1.25, "tokens/s": 1200}', {"loss": 1.25, "tokens_s": 1200.0}),
        ('{"step": 8, "loss": NaN}', {"loss": math.nan}),
        ("step 8 | loss -> 1.25 | gnorm 0.5", {"loss": 1.25, "grad_norm": 0.5}),
        ("step=8 loss=tensor(1.25, device='cuda:0')", {"loss": 1.25}),
        ("第 3 步 损失：1.25 学习率 1e-4", {"loss": 1.25, "lr": 1e-4}),
        ("step 8 loss nan grad_norm inf", {"loss": math.nan, "grad_norm": math.inf}),
        ("step 8 loss -inf", {"loss": -math.inf}),
        ("step 8 loss .5", {"loss": 0.5}),
        ("step 8 loss 1.25 loss 9.5", {"loss": 1.25}),
        ("step 8 val_loss 1.25", {"val_loss": 1.25}),
        ("step 8 train/loss 1.25 throughput 350.5", {"loss": 1.25, "throughput": 350.5}),
    ],
)  # fmt: skip
def test_metrics(text: str, metrics: dict[str, float]) -> None:
    found = dict(known(text).metrics)
    assert {name: str(value) for name, value in found.items()} == {name: str(value) for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("text", "phase"),
    [
        ("tokenizing shard 3/40", TOKENIZE),
        ("Generating train split: 100 examples", TOKENIZE),
        ("预处理 第 3 批", TOKENIZE),
        ("evaluating at step 8", EVALUATE),
        ("validation batch 16/30", EVALUATE),
        ("评估 第 3 批", EVALUATE),
        ("saving checkpoint to ckpt-12", SAVE),
        ("保存 第 3 步", SAVE),
        ("resuming from step 40", RESUME),
        ("loading shard 1/8", LOAD),
        ("downloading file 3 of 9", LOAD),
        ("加载模型", LOAD),
        ("training finished", TEARDOWN),
        ("训练完成", TEARDOWN),
        ("step 8 loss 1.25", TRAIN),
        ("[3/40] doing it", ""),
    ],
)
def test_words_name_the_phase(text: str, phase: str) -> None:
    assert known(text).phase == phase
    assert phase_of(text) == phase


@pytest.mark.parametrize(
    "text",
    [
        '  File "/work/train.py", line 8, in step',
        "    at step 8 of train.js",
        "hello world",
        "ValueError: the batch is empty",
        "UserWarning: saving is slow",
        "x" * 5000,
    ],
)
def test_other_lines_show_no_progress(text: str) -> None:
    assert progress(text) is None


def test_a_fraction_of_epochs_stands_in_for_the_step() -> None:
    found = known("{'loss': 1.25, 'epoch': 0.53}")
    assert (found.count, found.epoch) == (None, "0.53")


def test_progress_in_words() -> None:
    assert known("validation batch 16/30").text == "evaluate batch 16/30"
    assert known("step 8 loss 1.25").text == "train step 8"
    assert known("saving checkpoint").text == "save"
    assert known("[3/40] doing it").text == "output 3/40"


@pytest.mark.parametrize("text", ["blossom 1.25", "fleshnorm 3", "loss of power", "closs 1"])
def test_words_that_only_look_like_metrics_are_none(text: str) -> None:
    assert "loss" not in dict(read_metrics(text))


@given(
    st.integers(0, 10**9),
    st.one_of(st.floats(-1e6, 1e6, allow_subnormal=False).map(lambda value: f"{value:.6g}"), st.just("nan")),
    st.sampled_from(["step {} loss {}", "step: {} | loss: {} |", "{{'step': {}, 'loss': {}}}", "Step [{}/9] Loss={}"]),
)
def test_any_numbers_of_a_layout_are_read_as_they_stand(step: int, loss: str, layout: str) -> None:
    found = known(layout.format(step, loss))
    assert found.count == step
    assert str(dict(found.metrics)["loss"]) == str(float(loss))


@given(st.text(max_size=200))
def test_no_text_is_too_odd(text: str) -> None:
    for line in read_lines([Excerpt("job.log", None, None, (Part(1, text.encode("utf-8", "replace")),))]):
        read_progress(line)
