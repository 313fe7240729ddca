"""Controls that end otherwise than they declare, although the declared text was printed: none of them is verified."""

from __future__ import annotations

import pytest

from tests.support.console import ContentRoot, Kb

PRINTS = 'if not is_fixed:\n    print("warning: the thing broke: code 7", flush=True)\n    '
OTHER_ENDINGS = {
    "exits-with-0": PRINTS + "sys.exit(0)",
    "exits-with-1": PRINTS + "os._exit(1)",
    "raises-something-else": PRINTS + "raise ValueError('another reason')",
    "breaks-while-it-handles-that": """
        if not is_fixed:
            try:
                raise RuntimeError("the thing broke: code 7")
            except RuntimeError:
                raise ValueError("another reason")
    """,
    "is-interrupted": PRINTS + "raise KeyboardInterrupt",
    "is-killed": PRINTS + "os.kill(os.getpid(), signal.SIGKILL)",
}
RANK_1_FAILS_FIRST = """
if not is_fixed and ctx.rank == 1:
    raise ImportError("No module named x")
if not is_fixed:
    time.sleep(0.3)
    raise RuntimeError("the thing broke: code 7")
"""
RANK_0_HANGS_AFTER_RANK_1 = """
if not is_fixed and ctx.rank == 1:
    raise ImportError("No module named x")
while not is_fixed:
    time.sleep(0.1)
"""
WITHOUT_GPU = """
Probe(experiments=(Experiment(
    name="nccl", backend="nccl", world_size=1, needs=Needs(packages={}),
    control=Arm(partial(job, is_fixed=False), expect=raised("broke"), because="it is broken", fidelity="hardware"),
    treatment=Arm(partial(job, is_fixed=True), expect=completed(), because="it is whole", fidelity="hardware"),
),))
"""


def test_what_was_only_printed_is_not_what_failed(kb: Kb, content: ContentRoot) -> None:
    for name, body in OTHER_ENDINGS.items():
        content.incident(name, body)
    verdicts = {
        report["id"]: report["verdict"]
        for report in kb("verify", *OTHER_ENDINGS, "--json", "--repeat", "1").json["reports"]
    }
    assert verdicts == dict.fromkeys(OTHER_ENDINGS, "other-failure")


def test_an_abort_a_direct_cause_and_an_exit_with_a_message_are_failures_of_their_own(
    kb: Kb, content: ContentRoot
) -> None:
    content.incident("aborts", PRINTS + "os.abort()")
    content.incident(
        "wraps",
        """
        if not is_fixed:
            try:
                raise RuntimeError("the thing broke: code 7")
            except RuntimeError as cause:
                raise ValueError("step 3 failed") from cause
        """,
    )
    content.incident("exits-with-a-message", 'if not is_fixed:\n    sys.exit("the thing broke: code 7")')
    ended = kb("verify", "aborts", "wraps", "exits-with-a-message", "--json")
    assert ended.json["summary"] == {"verified": 3}


def test_a_rank_that_only_follows_another_failure_verifies_nothing_unless_that_is_declared(
    kb: Kb, content: ContentRoot
) -> None:
    content.incident("follows", RANK_1_FAILS_FIRST, 'make(raised("broke"), world_size=2)')
    content.incident("hangs-on", RANK_0_HANGS_AFTER_RANK_1, 'make(hung("in job"), world_size=2, deadline_s=2)')
    content.incident(
        "declared", RANK_1_FAILS_FIRST, 'make(raised("broke", after="ImportError: No module"), world_size=2)'
    )
    content.incident("other-cause", RANK_1_FAILS_FIRST, 'make(raised("broke", after="SIGKILL"), world_size=2)')
    ended = kb("verify", "follows", "hangs-on", "declared", "other-cause", "--json")
    reports = {report["id"]: report for report in ended.json["reports"]}
    assert {name: report["verdict"] for name, report in reports.items()} == {
        "follows": "other-failure",
        "hangs-on": "other-failure",
        "declared": "verified",
        "other-cause": "other-failure",
    }
    assert "rank 1: ImportError: No module named x" in reports["follows"]["evidence"]


@pytest.mark.usefixtures("few_entries")
def test_a_probe_that_needs_no_gpu_is_never_of_hardware_fidelity(kb: Kb, content: ContentRoot) -> None:
    content.incident("pretends", probe=WITHOUT_GPU.strip())
    ended = kb("verify", "pretends", "--json")
    assert ended.json["verdict"] == "inconclusive"
    assert "hardware fidelity, but the experiment needs no GPU" in ended.json["reason"]
    assert "broken-probe" in {finding["rule"] for finding in kb("lint", "--json").json["findings"]}


def test_two_functions_are_not_one_job_with_one_change(kb: Kb, content: ContentRoot) -> None:
    content.raw_probe(
        "unrelated",
        """
        from kb.probe import Arm, Context, Experiment, Needs, Probe, completed, raised

        def breaks(ctx: Context) -> None:
            ctx.reached()
            raise RuntimeError("the thing broke: code 7")

        def works(ctx: Context) -> None:
            ctx.reached()

        probe = Probe(experiments=(Experiment(
            name="plain", world_size=1, needs=Needs(packages={}),
            control=Arm(breaks, expect=raised("broke"), because="it is broken", fidelity="cpu"),
            treatment=Arm(works, expect=completed(), because="it is whole", fidelity="cpu"),
        ),))
        """,
    )
    ended = kb("verify", "unrelated", "--json")
    assert (ended.code, ended.json["verdict"]) == (3, "inconclusive")
    assert "the arms run two functions" in ended.json["reason"]


def test_two_equal_arms_prove_no_fix(kb: Kb, content: ContentRoot) -> None:
    content.incident("equal")
    path = content.path / "probes" / "equal.py"
    path.write_text(path.read_text().replace("is_fixed=True", "is_fixed=False"))
    ended = kb("verify", "equal", "--json")
    assert (ended.code, ended.json["verdict"]) == (1, "fix-ineffective")
