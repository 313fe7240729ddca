"""`kb test`: the signatures of all entries against the logs that they must match and those that they must not."""

from __future__ import annotations

from kb.content.roots import configured_roots

from ..terminal.output import JsonFlag, RootOption, emit, notice, shown, style


def test(as_json: JsonFlag = False, roots: RootOption = None) -> int:
    """Test the signatures: every log of an entry must match, no look-alike, and no log of a healthy job.

    Exit code 0 when they hold, 1 with findings.
    """
    from kb.authoring import signature_tests
    from kb.content.catalog import load_catalog

    chosen = configured_roots(tuple(roots or ()))
    found = load_catalog(chosen)
    healthy = signature_tests.healthy_logs(chosen)
    findings = sorted(signature_tests.mismatches(found, healthy))
    for problem in found.problems:
        notice(f"left out: {problem.message}")
    counts = {
        "entries": len(found),
        "logs": sum(len(entry.logs) for entry in found),
        "look_alikes": sum(len(entry.look_alikes) for entry in found),
        "healthy": len(healthy),
        "findings": len(findings),
    }
    if as_json:
        emit("test", findings=[finding.to_json() for finding in findings], counts=counts)
    else:
        for one in findings:
            print(f"{shown(one.path)}:{one.line}: {style(one.rule, 'cyan')}: {one.message}")
        told = "{entries} entries: {logs} logs, {look_alikes} look-alikes, {healthy} healthy logs".format(**counts)
        print(f"{told}: {f'{len(findings)} findings' if findings else 'clean'}")
    return 1 if findings or found.problems else 0
