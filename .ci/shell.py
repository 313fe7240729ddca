"""Shell code in How to tell and Fix, checked by ShellCheck: what a reader pastes at night has no surprise in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kb.content.roots import builtin_root
from kb.lint.body import Kind, blocks
from kb.lint.fixes import ADVISING

# SC2034, SC2154: a snippet sets for the next one, and uses what the job's script has set. SC2046, SC2086: what is
# split is split on purpose. SC1083: `{...}` stands for what the reader fills in. SC2012, SC2016, SC2155 are style.
LEFT_OUT = "SC2034,SC2154,SC2046,SC2086,SC1083,SC2012,SC2016,SC2155"


def main() -> int:
    found = [remark for path in builtin_root().entry_files() for remark in remarks(path)]
    print("\n".join(found) or "shell snippets: clean")
    return 1 if found else 0


def remarks(path: Path) -> list[str]:
    """One line for each remark of ShellCheck on the snippets of an entry, with file and line."""
    found = []
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.kind is Kind.CODE and block.section in ADVISING and block.tag in ("bash", "sh"):
            command = [str(Path(sys.executable).with_name("shellcheck")), "--shell", block.tag, "--format", "json"]
            ended = subprocess.run(
                [*command, "--exclude", LEFT_OUT, "-"], input=block.text, capture_output=True, text=True, check=False
            )
            found += [
                f"{path}:{block.line + remark['line']}: SC{remark['code']}: {remark['message']}"
                for remark in json.loads(ended.stdout)
            ]
    return found


if __name__ == "__main__":
    sys.exit(main())
