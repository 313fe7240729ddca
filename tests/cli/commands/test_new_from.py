"""`kb new --from`: a log that nothing explained becomes a draft."""

from __future__ import annotations

from pathlib import Path

import pytest

from kb.authoring import unexplained_queue
from kb.content.parser import read_entry
from kb.patterns.literals import find
from kb.patterns.redos import backtracking_risk
from tests.support.console import Kb

LOG = """\
starting on 10.0.3.7, it's `quiet`
[rank3]: Traceback (most recent call last):
[rank3]:   File "/home/meichen/train.py", line 12, in <module>
[rank3]: acme.sharding.ShardError: shard 17 of 32 has 4096 rows ('it's odd'), peer 10.0.3.7:29500 has 4095
2026-03-02 04:10:31,377 ERROR acme: collective 0x7f5500a9fd298 timed out after 1800000 ms
"""


def draft(kb: Kb, home: Path, source: str | Path, entry_id: str = "shard-odd") -> Path:
    ended = kb("new", entry_id, "--from", source, "--root", home, "--json")
    assert ended.code == 0, ended.err
    return Path(ended.json["entry"])


def test_the_log_of_the_draft_is_redacted_and_found_by_its_patterns(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(LOG)
    entry = read_entry(draft(kb, tmp_path / "team", "train.log"), "team")
    log = entry.logs[0].text
    assert "meichen" not in log
    assert "10.0.3.7" not in log
    assert "shard 17 of 32 has 4096 rows ('it's odd'), peer <ip-1>:29500 has 4095" in log
    assert 1 <= len(entry.meta.signatures) <= 3
    for signature in entry.meta.signatures:
        assert find(signature.pattern, log)
        assert find(signature.pattern, signature.sample)
        assert not backtracking_risk(signature.pattern)
    other = "[rank9]: acme.sharding.ShardError: shard 2 of 8 has 128 rows ('it's odd'), peer 10.9.9.9:29400 has 127"
    assert find(entry.meta.signatures[0].pattern, other)


def test_nothing_is_finished_before_a_person_chose(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(LOG)
    linted = kb("lint", draft(kb, tmp_path / "team", "train.log"), "--json")
    assert linted.code == 1
    assert {item["rule"] for item in linted.json["findings"]} <= {"unfinished", "unfinished-probe"}
    assert any("only this incident prints it" in item["message"] for item in linted.json["findings"])


def test_an_id_of_the_queue_is_a_source(kb: Kb, tmp_path: Path) -> None:
    path = unexplained_queue.save(LOG, ["train.log"], ["rank 3 raised acme.sharding.ShardError"])
    text = draft(kb, tmp_path / "team", path.stem).read_text()
    assert "kb observed: rank 3 raised acme.sharding.ShardError" in text
    assert "ShardError: shard 17 of 32" in text


def test_of_a_long_log_the_lines_around_the_first_error_are_taken(kb: Kb, tmp_path: Path) -> None:
    quiet = "".join(f"step {number} is fine\n" for number in range(5000))
    (tmp_path / "train.log").write_text(quiet + LOG + quiet)
    entry = read_entry(draft(kb, tmp_path / "team", "train.log"), "team")
    log = entry.logs[0].text
    assert log.count("\n") < 100
    assert "step 4999 is fine" in log
    assert "ShardError" in log


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"all is well\n",
        b"\xff\x00\x1b[31mError: ```\n````\n'''\t--- {id} %s\x1b[0m\n",
        b"Error: " + b"a" * 100_000,
    ],
)
def test_any_file_gives_a_draft_that_can_be_read(kb: Kb, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train.log").write_bytes(content)
    read_entry(draft(kb, tmp_path / "team", "train.log"), "team")


@pytest.mark.parametrize("wrong", ["none.log", ".", "2026-01-01-0123456789ab"])
def test_a_source_that_is_none_is_a_usage_error_and_nothing_is_written(kb: Kb, tmp_path: Path, wrong: str) -> None:
    ended = kb("new", "shard-odd", "--from", wrong, "--root", tmp_path / "team")
    assert ended.code == 2
    assert wrong in ended.err
    assert not (tmp_path / "team").exists()
