"""The options by which `kb search` and `kb list` choose entries."""

from typing import Annotated

import typer

from kb.content.area import Area

from .completion import complete_areas, complete_frameworks, complete_statuses, complete_tags

TagOption = Annotated[
    list[str] | None,
    typer.Option("--tag", help="Only entries with this tag. Repeat to require several.", autocompletion=complete_tags),
]
FrameworkOption = Annotated[
    list[str] | None,
    typer.Option(
        "--framework",
        help="Only entries about this package or framework. Repeat to match any of several.",
        autocompletion=complete_frameworks,
    ),
]
StatusOption = Annotated[
    list[str] | None,
    typer.Option(
        "--status",
        help="Only entries of this status: confirmed, reported, disputed; withdrawn in lists. "
        "Repeat to match any of several.",
        autocompletion=complete_statuses,
    ),
]
AreaOption = Annotated[
    list[str] | None,
    typer.Option(
        "--area",
        help=f"Only entries of this area: {', '.join(Area)}. Repeat to match any of several.",
        autocompletion=complete_areas,
    ),
]
