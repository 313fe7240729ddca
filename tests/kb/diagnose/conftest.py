"""A diagnosis of texts, with the entries that ship."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kb.content.roots import configured_roots
from kb.diagnose.diagnosis import Diagnosis, diagnose
from kb.diagnose.inputs.sources import Stream
from kb.diagnose.scan.scan import scan
from kb.diagnose.scan.signature_matcher import Matcher
from kb.search.index_cache import open_index


@pytest.fixture(scope="module")
def answer(built_in_index: Path) -> Iterator[Callable[..., Diagnosis]]:
    """Diagnose texts, each a log of its name, with the built-in entries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(built_in_index))
        patch.delenv("KB_ROOTS", raising=False)
        index = open_index(configured_roots(()))
    with index:
        matcher = Matcher(index.signatures)

        def diagnose_logs(*anonymous: str, **logs: str) -> Diagnosis:
            texts = {**{f"{number}.log": text for number, text in enumerate(anonymous)}, **logs}
            streams = [Stream(name, iter([text.encode()])) for name, text in texts.items()]
            return diagnose(index, scan(streams, matcher))

        yield diagnose_logs
