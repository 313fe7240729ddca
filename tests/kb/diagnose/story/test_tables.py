"""Rows of tables: their header names the values, however far above it stands."""

from __future__ import annotations

import pytest

from kb.diagnose.story.excerpt import Excerpt, Part
from kb.diagnose.story.lines import read_lines
from kb.diagnose.story.progress import read_progress
from kb.diagnose.story.tables import read_tables

PIPES = "  iter |    loss |   gnorm |      lr |  tok/s"
SPACES = "Epoch   GPU_mem   box_loss   cls_loss   Instances   lr"


def metrics(*lines: str) -> list[dict[str, float]]:
    data = "".join(f"{line}\n" for line in lines).encode()
    found = map(read_progress, read_tables(read_lines([Excerpt("job.log", None, None, (Part(1, data),))])))
    return [dict(progress.metrics) for progress in found if progress and progress.metrics]


@pytest.mark.parametrize("prefix", ["", "[default0]:", "2: "])
def test_a_row_has_the_names_of_its_header(prefix: str) -> None:
    rows = ["    19 |  1.1639 |   0.847 | 3.0e-03 |  17635", "    20 |     nan |   0.730 | 3.0e-03 |   6112"]
    first, second = metrics(f"{prefix}{PIPES}", f"{prefix}-------+---------", *(prefix + row for row in rows))
    assert first == {"loss": 1.1639, "grad_norm": 0.847, "lr": 0.003, "tok_s": 17635.0}
    assert str(second["loss"]) == "nan"


def test_lines_between_the_rows_do_not_end_a_table() -> None:
    found = metrics(PIPES, "1 | 4.4 | 0.9 | 0.003 | 12", "saving checkpoint to out", "2 | 4.1 | 1.0 | 0.003 | 14")
    assert [values["loss"] for values in found] == [4.4, 4.1]


def test_columns_may_be_set_apart_by_spaces() -> None:
    (values,) = metrics(SPACES, "1/100   2.3   1.25   0.75   64   0.01")
    assert (values["box_loss"], values["lr"]) == (1.25, 0.01)


def test_a_row_of_another_width_and_a_sentence_stay_what_they_are() -> None:
    assert metrics(PIPES, "1 | 2 | 3", "the loss | and the lr | are fine") == []
    assert metrics("so the loss of a step is what we print here", "1 2 3 4 5 6 7 8 9 10 11") == []


def test_each_rank_has_its_own_table() -> None:
    assert metrics(f"[rank0]: {PIPES}", "[rank1]: 1 | 4.4 | 0.9 | 0.003 | 12") == []
