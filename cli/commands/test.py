"""`kb test`: run the signatures of all entries on logs that they must match and logs that they must not match."""

from __future__ import annotations

from kb.content.roots import configured_roots

from ..terminal.output import JsonFlag, RootOption, emit, notice, shown, style


def test(as_json: JsonFlag = False, roots: RootOption = None) -> int:
    """Test that signatures match all logs of their entry, and no look-alike or log of a healthy job.

    Exit code 0 when all tests pass, 1 with findings.
    """
    from kb.authoring import signature_tests
    from kb.content.catalog import load_catalog

    chosen = configured_roots(tuple(roots or ()))
    catalog = load_catalog(chosen)
    healthy = signature_tests.healthy_logs(chosen)
    violations = sorted(signature_tests.mismatches(catalog, healthy))
    for problem in catalog.problems:
        notice(f"left out: {problem.message}")
    counts = {
        "entries": len(catalog),
        "logs": sum(len(entry.logs) for entry in catalog),
        "look_alikes": sum(len(entry.look_alikes) for entry in catalog),
        "healthy": len(healthy),
        "findings": len(violations),
    }
    if as_json:
        emit("test", findings=[violation.to_json() for violation in violations], counts=counts)
    else:
        for violation in violations:
            print(f"{shown(violation.path)}:{violation.line}: {style(violation.rule, 'cyan')}: {violation.message}")
        summary = "{entries} entries: {logs} logs, {look_alikes} look-alikes, {healthy} healthy logs".format(**counts)
        broken = f"{len(catalog.problems)} left out" if catalog.problems else ""
        found = f"{len(violations)} findings" if violations else ""
        print(f"{summary}: {', '.join(filter(None, (broken, found))) or 'clean'}")
    return 1 if violations or catalog.problems else 0
