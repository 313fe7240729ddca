"""Keys, feedback, gaps, the audit log and the number of the content: what a service keeps beside reports."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kb.errors import StoreUnavailable, UsageError
from kb.store import audit, content_generation, feedback, gaps, keys, reports, tables
from kb.store.database import Database
from kb.store.keys import Scope

pytest_plugins = ["tests.support.postgres_fixtures"]

HOSTILE = ("'; DROP TABLE gap; --", "%", "\0", "\ud800", "标题")
EARLY, LATE = datetime.datetime(2026, 1, 1), datetime.datetime(2026, 1, 2)


def test_an_empty_store_answers_everything_with_nothing(database: Database) -> None:
    assert not (keys.list_all(database) or feedback.counts(database) or gaps.page(database) or audit.page(database))
    assert content_generation.generation(database) == 0


def test_a_key_is_kept_as_a_hash_and_found_by_the_id_in_its_text(database: Database) -> None:
    key, text = keys.new(database, "ci", Scope.REPORT)
    [stored] = keys.list_all(database)
    assert stored.key == key
    assert stored.secret_hash == keys.fingerprint(text)
    assert keys.parse(text) == key.id
    secret = text.split("_", 2)[2]
    assert secret not in repr(stored)


def test_no_two_keys_are_alike(database: Database) -> None:
    texts = {keys.new(database, "ci", Scope.READ)[1] for _ in range(10)}
    assert len(texts) == len({keys.parse(text) for text in texts}) == 10


@pytest.mark.parametrize(
    "text", ["", "kb_", "kb_abc_def", f"kb_ABCDEFGH_{'a' * 43}", f"kb_abcdefgh_{'a' * 44}", "\ud800"]
)
def test_what_has_not_the_form_of_a_key_has_no_id(text: str) -> None:
    assert keys.parse(text) is None
    assert keys.parse(f"kb_abcdefgh_{'a' * 43}\n") is None


@pytest.mark.parametrize("name", ["", " ", "a\nb", "\0", "\x1b[2J", "\ud800"])
def test_the_name_of_a_key_is_a_line_of_text(database: Database, name: str) -> None:
    with pytest.raises(UsageError, match="a key cannot be called"):
        keys.new(database, name, Scope.READ)
    key, _ = keys.new(database, "'; DROP TABLE api_key; -- 标题", Scope.READ)
    assert [stored.key for stored in keys.list_all(database)] == [key]


def test_a_scope_covers_those_before_it() -> None:
    assert [[item.covers(other) for other in Scope] for item in Scope] == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]


def test_a_revoked_key_stays_revoked_since_the_first_time(database: Database) -> None:
    key, _ = keys.new(database, "ci", Scope.READ)
    keys.revoke(database, key.id, actor="me")
    [revoked] = keys.list_all(database)
    assert revoked.key.revoked_at
    keys.revoke(database, key.id, actor="me")
    assert keys.list_all(database) == [revoked]
    assert [item.action for item in audit.page(database)] == ["key.revoke"]


@pytest.mark.parametrize("key_id", ["abcdefgh", *HOSTILE])
def test_revoking_an_unknown_key_is_an_error_and_revokes_none(database: Database, key_id: str) -> None:
    keys.new(database, "ci", Scope.READ)
    with pytest.raises(UsageError, match="no key has the id"):
        keys.revoke(database, key_id)
    assert keys.list_all(database)[0].key.revoked_at is None


def test_the_last_use_of_keys_never_goes_back(database: Database) -> None:
    item, two = (keys.new(database, name, Scope.READ)[0].id for name in ("one", "two"))
    keys.record_uses(database, {item: LATE, two: EARLY, "gone": LATE})
    keys.record_uses(database, {item: EARLY, two: LATE})
    keys.record_uses(database, {})
    assert {stored.key.id: stored.key.last_used_at for stored in keys.list_all(database)} == {item: LATE, two: LATE}


def test_feedback_is_counted_by_entry_and_gpu(database: Database) -> None:
    for helped, gpu in ((True, "H100"), (True, "H100"), (False, "H100"), (False, "")):
        feedback.add(database, "a", helped, gpu, "2.7", "thanks", "anonymous")
    feedback.add(database, "b", True, "A100", "", "", "node")
    assert feedback.counts(database) == [("a", "", 0, 1), ("a", "H100", 2, 1), ("b", "A100", 1, 0)]
    assert feedback.counts(database, "b") == [("b", "A100", 1, 0)]
    assert feedback.counts(database, after=("a", ""), limit=1) == [("a", "H100", 2, 1)]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_is_kept_as_a_text(database: Database, text: str) -> None:
    feedback.add(database, text, True, text, text, text, text, request_id=text)
    assert [count.helped for count in feedback.counts(database, text)] == [1]
    gaps.add(database, [(text, text, text)])
    [gap] = gaps.page(database)
    assert gaps.page(database, after=gap.digest) == []
    with pytest.raises(UsageError):
        gaps.forget(database, text)
    with pytest.raises(UsageError):
        gaps.page(database, after=text)
    assert len(audit.page(database)) == 1


def test_a_gap_is_counted_each_time_it_is_asked(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaps, "now", lambda: EARLY)
    gaps.add(database, [("search", "why", ""), ("diagnose", "why", "")])
    monkeypatch.setattr(gaps, "now", lambda: LATE)
    gaps.add(database, [("search", "why", "near"), ("search", "why", "nearer")])
    search, diagnose = gaps.page(database)
    assert (search.kind, search.text, search.count, search.first, search.last) == ("search", "why", 3, EARLY, LATE)
    assert search.best in ("near", "nearer")
    assert (diagnose.kind, diagnose.count, diagnose.last) == ("diagnose", 1, EARLY)


def test_gaps_are_paged_by_frequency_then_by_time(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    for day, text in enumerate("abcdefg", 1):
        at = datetime.datetime(2026, 1, day)
        monkeypatch.setattr(gaps, "now", lambda at=at: at)
        gaps.add(database, [("search", text, "")] * (2 if text in "bd" else 1))
    seen: list[str] = []
    after = None
    while page := gaps.page(database, limit=2, after=after):
        seen += [gap.text for gap in page]
        after = page[-1].digest
    assert seen == list("dbgfeca")


def test_beyond_their_bound_the_rarest_and_oldest_gaps_go(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaps, "MAX_GAPS", 3)
    for day, text in enumerate("aabcd", 1):
        at = datetime.datetime(2026, 1, day)
        monkeypatch.setattr(gaps, "now", lambda at=at: at)
        gaps.add(database, [("search", text, "")])
    assert [gap.text for gap in gaps.page(database)] == ["a", "d", "c"]


def test_a_forgotten_gap_is_gone_and_cannot_be_forgotten_again(database: Database) -> None:
    gaps.add(database, [("search", "a", ""), ("search", "b", "")])
    gone = gaps.page(database)[0].digest
    gaps.forget(database, gone, actor="me")
    assert gone not in [gap.digest for gap in gaps.page(database)]
    with pytest.raises(UsageError, match="no gap has the digest"):
        gaps.forget(database, gone, actor="me")
    assert [item.subject for item in audit.page(database)] == [f"gaps/{gone}"]


def test_gaps_that_many_count_at_once_are_all_counted(database: Database) -> None:
    words = [("search", text, "") for text in "abcdefgh"]
    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(gaps.add, database, words[::step]) for _ in range(6) for step in (1, -1)]:
            done.result()
    assert [gap.count for gap in gaps.page(database)] == [12] * 8


def test_content_is_advanced_by_one_each_time_by_however_many(database: Database) -> None:
    with ThreadPoolExecutor(6) as pool:
        numbers = list(pool.map(lambda _: content_generation.advance(database, actor="me"), range(12)))
    assert sorted(numbers) == list(range(1, 13))
    assert content_generation.generation(database) == 12


REPORT: dict[str, Any] = {
    **dict.fromkeys(("id", "verdict", "fidelity", "entry_digest", "probe_digest", "kb_version"), "x"),
    "started_at": "2026-03-01T00:00:00+00:00",
    "duration_s": 1.0,
}
WRITES: dict[str, Callable[[Database], Any]] = {
    "key.new": lambda database: keys.new(database, "n", Scope.READ, actor="me", request_id="r"),
    "feedback.create": lambda database: feedback.add(database, "a", True, "", "", "", "me", request_id="r"),
    "report.create": lambda database: reports.add_shared(database, REPORT, "me", "k", "d", request_id="r"),
    "reindex": lambda database: content_generation.advance(database, actor="me", request_id="r"),
}


@pytest.mark.parametrize("action", WRITES)
def test_a_write_and_its_line_in_the_audit_log_are_kept_together(database: Database, action: str) -> None:
    before = tables.now()
    WRITES[action](database)
    [line] = audit.page(database)
    assert (line.actor, line.action, line.request_id, line.outcome) == ("me", action, "r", "ok")
    assert before <= line.at <= tables.now()


@pytest.mark.parametrize("action", WRITES)
def test_a_write_whose_line_cannot_be_kept_is_not_kept(database: Database, action: str) -> None:
    database.prepare()
    with database.writing() as session:
        session.connection().exec_driver_sql("ALTER TABLE audit RENAME TO elsewhere")
    with pytest.raises(StoreUnavailable, match="audit"):
        WRITES[action](database)
    assert not (keys.list_all(database) or feedback.counts(database) or reports.page(database))
    assert content_generation.generation(database) == 0


def write_down(database: Database, subject: str) -> None:
    with database.writing() as session:
        audit.add(session, "me", "reindex", subject)


def test_the_audit_log_is_paged_from_the_last_line(database: Database) -> None:
    for number in range(5):
        write_down(database, f"generations/{number}")
    seen: list[str] = []
    before = None
    while page := audit.page(database, limit=2, before=before):
        seen += [line.subject for line in page]
        before = page[-1].id
    assert seen == [f"generations/{number}" for number in (4, 3, 2, 1, 0)]


def test_a_clock_that_jumps_back_changes_nothing_in_the_audit_log(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_down(database, "first")
    monkeypatch.setattr(audit, "now", lambda: datetime.datetime(1999, 1, 1))
    write_down(database, "second")
    assert [line.subject for line in audit.page(database)] == ["second", "first"]
