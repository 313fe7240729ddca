"""The documents that programs read stay as they are. After a change that is meant: `make contract`, and look at the diff."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.contract.documents import documents

pytestmark = pytest.mark.slow

KEPT = Path(__file__).with_name("documents.json")


def test_documents_are_what_they_were(tmp_path: Path) -> None:
    made = dict(documents(tmp_path))
    if os.environ.get("KB_RECORD_CONTRACT"):
        KEPT.write_text(json.dumps(made, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    assert made.keys() == kept.keys()
    for name, document in kept.items():
        assert agree(made[name], document), f"{name}: {made[name]} is not {document}"


def agree(made: Any, recorded: Any) -> bool:
    """Equal, but for what is null or an empty list on one machine and not on another."""
    if "..." in (made, recorded) or [] in (made, recorded):
        return True
    if isinstance(made, dict) and isinstance(recorded, dict):
        return made.keys() == recorded.keys() and all(agree(made[name], recorded[name]) for name in made)
    if isinstance(made, list) and isinstance(recorded, list):
        return len(made) == len(recorded) and all(map(agree, made, recorded))
    return bool(made == recorded)
