"""Installing kb from its sources indexes the built-in entries, so that the first search builds nothing (decision 0018).

A checkout is also compiled, as pip compiles what it installs. Everything else is declared in pyproject.toml.
"""

from __future__ import annotations

import compileall
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent


class BuildWithIndex(build_py):
    """Puts the index into the wheel; of an editable installation into the checkout."""

    def run(self) -> None:
        if not self.editable_mode:  # an earlier build may have left files there that the checkout has no more
            shutil.rmtree(Path(self.build_lib) / "kb", ignore_errors=True)
        super().run()
        sys.path.insert(0, str(HERE))
        try:
            from kb.search.built_in_index import build
            from kb.search.generation import BUILT_IN_SEGMENT
        finally:
            sys.path.remove(str(HERE))
        home = HERE if self.editable_mode else Path(self.build_lib)
        build(home / BUILT_IN_SEGMENT.relative_to(HERE))
        if self.editable_mode:
            for folder in ("api", "cli", "kb"):
                compileall.compile_dir(HERE / folder, quiet=1)


setup(cmdclass={"build_py": BuildWithIndex})
