"""Starts a module of this folder in the reader's training interpreter: `python start.py MODULE ARGUMENT...`.

kb is not installed there and must not shadow the reader's modules. So this folder is removed from `sys.path`, and `kb`
becomes an empty package that finds its modules in the parent folder. Standard library, Python 3.9.
"""

import os
import sys

if __name__ == "__main__":
    _here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]
    _package = type(sys)("kb")
    _package.__path__ = [os.path.dirname(_here)]
    sys.modules["kb"] = _package

    import importlib

    importlib.import_module("kb.runtime." + sys.argv[1]).start(sys.argv[2:])
