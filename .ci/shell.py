"""Check the shell code in How to tell and Fix with ShellCheck, so that pasting it has no surprises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kb.content.roots import builtin_root
from kb.lint.body import Kind, blocks
from kb.lint.fixes import ADVISING

# SC2034, SC2154: snippets share variables with each other and with the job's script. SC2046, SC2086: word splitting
# is intended. SC1083: `{...}` is a placeholder for the reader to fill in. SC2012, SC2016, SC2155 are style.
LEFT_OUT = "SC2034,SC2154,SC2046,SC2086,SC1083,SC2012,SC2016,SC2155"


def main() -> int:
    found = [remark for path in builtin_root().entry_files() for remark in remarks(path)]
    print("\n".join(found) or "shell snippets: clean")
    return 1 if found else 0


def remarks(path: Path) -> list[str]:
    """ShellCheck's remarks on the snippets of an entry, one line each, with file and line."""
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
