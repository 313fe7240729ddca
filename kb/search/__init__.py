"""Search: the index, queries and ranking. Nothing outside this package imports Whoosh.

Whoosh is from 2016; its files have invalid escapes and an `is` with a literal. Python warns about them whenever it
compiles such a file: at the first search if the installer compiles nothing (uv, pipx), and at every search if no .pyc
file can be written.
"""

import warnings

warnings.filterwarnings("ignore", category=SyntaxWarning, module=r"(.*[/\\])?whoosh[/\\.]")
