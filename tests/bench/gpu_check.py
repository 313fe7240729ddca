"""`make gpu-check`: verify everything on this machine, and record what its GPUs proved in docs/verified/<machine>.json.

The record names the kind of machine, never the machine: see `kb.records.hardware`. Exits with 4 if there is no GPU.
`PYTHON_OF=/path/to/python` runs the arms in another environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from kb.errors import UsageError
from kb.records.hardware import file_name, record

KB = str(Path(sys.executable).with_name("kb"))
VERIFIED = Path(__file__).resolve().parents[2] / "docs" / "verified"


def main() -> int:
    seen = json.loads(subprocess.run([KB, "env", "--json"], capture_output=True, text=True, check=True).stdout)
    if not seen["gpus"]:
        print("no GPU answers here:", seen["reasons"].get("gpus", "unknown"), file=sys.stderr)
        return 4
    other = ["--python", os.environ["PYTHON_OF"]] if os.environ.get("PYTHON_OF") else []
    ended = subprocess.run([KB, "verify", "--all", "--json", *other], stdout=subprocess.PIPE, text=True)
    document = json.loads(ended.stdout)
    try:
        proved = record(document["reports"])
    except UsageError as error:
        print(f"{error.message}: {error.hint}", file=sys.stderr)
        return 4
    path = VERIFIED / file_name(proved["machine"])
    path.write_text(json.dumps(proved, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(document["summary"]), path)
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
