"""Known vulnerabilities of the versions in constraints.txt, found by pip-audit.

Exit code 1 if there are any. If no advisory service can be reached, a warning says that nothing was audited, and the
exit code is 0, since that says nothing about the packages.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND = ("-r", "constraints.txt", "--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json")


def main() -> int:
    command = [str(Path(sys.executable).with_name("pip-audit")), *COMMAND]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        packages: list[dict[str, Any]] = json.loads(ended.stdout)["dependencies"]
    except ValueError:
        packages = []
    audited = [one for one in packages if "vulns" in one]
    if not audited:
        why = ended.stderr.strip().splitlines()[-1:] if not packages else [packages[0]["skip_reason"]]
        print("warning: NOTHING WAS AUDITED, no service of advisories answers here:", *why, file=sys.stderr)
        return 0
    known = [f"{one['name']} {one['version']}: {bug['id']}" for one in audited for bug in one["vulns"]]
    left = [f"{one['name']}: {one['skip_reason']}" for one in packages if "vulns" not in one]
    print(f"{len(audited)} packages audited, {len(known)} known vulnerabilities", *known, sep="\n")
    print(*(f"not audited: {one}" for one in left), sep="\n", file=sys.stderr)
    return 1 if known else 0


if __name__ == "__main__":
    sys.exit(main())
