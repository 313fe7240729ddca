"""`make gpu-check`: verify everything on this machine and keep the result as docs/verified/<machine>.json.

Without a GPU it says so and ends with 4: a report from such a machine would prove nothing that CI does not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

KB = str(Path(sys.executable).with_name("kb"))
VERIFIED = Path(__file__).resolve().parents[2] / "docs" / "verified"


def main() -> int:
    seen = json.loads(subprocess.run([KB, "env", "--json"], capture_output=True, text=True, check=True).stdout)
    gpus = seen.get("gpus") or []
    if not gpus:
        print("no GPU that answers here:", (seen.get("reasons") or {}).get("gpus", "unknown"), file=sys.stderr)
        return 4
    ended = subprocess.run([KB, "verify", "--all", "--json"], capture_output=True, text=True)
    document = json.loads(ended.stdout)
    name = f"{len(gpus)}x{gpus[0]['name']}".replace(" ", "-").lower()
    VERIFIED.mkdir(parents=True, exist_ok=True)
    path = VERIFIED / f"{name}.json"
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(document["summary"]), path)
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
