"""`kb verify`: which experiments run, how often, and what variants add."""

from __future__ import annotations

import pytest

from tests.support.console import ContentRoot, Kb


def test_repeats_are_counted_with_an_interval(kb: Kb, content: ContentRoot) -> None:
    content.incident("breaks")
    repeats = kb("verify", "breaks", "--json", "--repeat", "4").json["repeats"]
    assert (repeats["pairs"], repeats["control_failures"], repeats["treatment_failures"]) == (4, 4, 0)
    assert repeats["p"] == pytest.approx(1 / 70, abs=1e-4)


def test_a_stochastic_experiment_is_repeated_until_it_is_clear(kb: Kb, content: ContentRoot) -> None:
    content.incident("sometimes", probe='make(raised("the thing broke"), stochastic=True)')
    report = kb("verify", "sometimes", "--json").json
    assert report["verdict"] == "verified"
    assert report["repeats"]["pairs"] == 4


VARIANT = """replace(make(raised("the thing broke")), variants=(replace(
    make(raised("the thing broke")).experiments[0], name="library", {change}),))"""


def with_variant(content: ContentRoot, change: str) -> None:
    content.incident("both", probe=VARIANT.format(change=change))
    path = content.path / "probes" / "both.py"
    path.write_text("from dataclasses import replace\n" + path.read_text())


def test_a_variant_runs_besides_the_experiment(kb: Kb, content: ContentRoot) -> None:
    with_variant(content, "expected_s=(1, 1)")
    report = kb("verify", "both", "--json").json
    assert (report["verdict"], report["experiment"]) == ("verified", "plain")
    assert [(item["experiment"], item["verdict"]) for item in report["variants"]] == [("library", "verified")]


def test_a_variant_whose_library_is_missing_says_so(kb: Kb, content: ContentRoot) -> None:
    with_variant(content, 'needs=Needs(packages={"no-such-library": ""})')
    report = kb("verify", "both", "--json").json
    assert (report["verdict"], report["variants"]) == ("verified", [])
    assert "no-such-library is not installed" in report["skipped"][0]["reason"]


def test_a_variant_that_contradicts_takes_the_verdict(kb: Kb, content: ContentRoot) -> None:
    with_variant(
        content,
        'treatment=make(raised("the thing broke")).experiments[0].treatment.__class__('
        'partial(job, is_fixed=False), expect=completed(), because="not fixed", fidelity="cpu")',
    )
    ended = kb("verify", "both", "--json")
    report = ended.json
    assert ended.code == 1
    assert report["verdict"] == "fix-ineffective"
    assert report["reason"].startswith("variant library: ")


REFUSED = """replace(make(raised("the thing broke")), experiments=(
    replace(make(raised("the thing broke")).experiments[0], name="strong", control=Arm(
        refuse, expect=raised("the thing broke"), because="it cannot run", fidelity="cpu"),
        treatment=Arm(refuse, expect=completed(), because="it cannot run", fidelity="cpu")),
    make(raised("the thing broke")).experiments[0]))"""


def test_an_experiment_that_the_machine_refuses_gives_way_to_the_next(kb: Kb, content: ContentRoot) -> None:
    content.incident("fragile", probe=REFUSED)
    path = content.path / "probes" / "fragile.py"
    refuse = "def refuse(ctx):\n    raise Unavailable('no namespaces here')\n\n\n"
    source = "from dataclasses import replace\nfrom kb.probe import Unavailable\n" + path.read_text()
    path.write_text(source.replace("def make(", refuse + "def make("))
    report = kb("verify", "fragile", "--json").json
    assert (report["verdict"], report["experiment"]) == ("verified", "plain")
    assert report["skipped"] == [{"experiment": "strong", "reason": "no namespaces here"}]
