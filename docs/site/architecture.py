"""Draw docs/architecture.svg: the packages in the layers of pyproject.toml, and their actual imports.

python docs/site/architecture.py        writes the picture; a test compares it with the imports

Arrows that a chain of other arrows implies are left out, as are arrows to `errors`, `installation`, `paths` and
`printable`, which every package may import. Long arrows bend around boxes: each row that an arrow crosses has a
place for it (Sugiyama's layered drawing).
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PICTURE = CHECKOUT / "docs" / "architecture.svg"
FOUNDATION = {"errors", "installation", "paths", "printable"}
SHELLS = ["cli", "api"]
WIDTH, ROW, HEIGHT, GAP, LANE = 760, 58, 30, 22, 14
SWEEPS = 24
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1f2328; text-anchor: middle }
rect { fill: #f6f8fa; stroke: #8c959f }
path { fill: none; stroke: #8c959f; stroke-width: 1.2; marker-end: url(#head) }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } rect { fill: #161b22; stroke: #656c76 } path { stroke: #656c76 }
}"""

Edges = set[tuple[str, str]]
Node = str | tuple[str, str, int]  # a package, or the place of an arrow in a row that the arrow crosses


def layers() -> list[list[str]]:
    """The rows of the picture from the top: the shells, then the layers of the import contract."""
    contracts = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [SHELLS, *([name.strip() for name in row.split("|")] for row in rows)]


def modules() -> dict[str, list[Path]]:
    """The source files of every package of the core and of every shell."""
    files: dict[str, list[Path]] = {}
    for path in sorted((CHECKOUT / "kb").rglob("*.py")):
        package = path.relative_to(CHECKOUT / "kb").parts[0].removesuffix(".py")
        files.setdefault(package, []).append(path)
    del files["__init__"]
    return files | {shell: sorted((CHECKOUT / shell).rglob("*.py")) for shell in SHELLS}


def imports(path: Path) -> Iterator[str]:
    """Packages of the core that a file imports, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module] if node.module != "kb" else [f"kb.{alias.name}" for alias in node.names]
            yield from (name.split(".")[1] for name in names if name.startswith("kb."))


def edges(files: Mapping[str, Iterable[Path]]) -> Edges:
    """Pairs of importer and imported package, except within a package, to the foundation, or implied by others."""
    direct = {
        (package, imported)
        for package, paths in files.items()
        for path in paths
        for imported in imports(path)
        if imported in files and imported != package and imported not in FOUNDATION
    }
    return {edge for edge in direct if not _is_implied(edge, direct)}


def _is_implied(edge: tuple[str, str], direct: Edges) -> bool:
    start, end = edge
    seen, waiting = set(), [target for source, target in direct if source == start and target != end]
    while waiting:
        package = waiting.pop()
        if package == end:
            return True
        if package not in seen:
            seen.add(package)
            waiting += [target for source, target in direct if source == package]
    return False


def draw() -> str:
    """The picture as SVG."""
    files, rows = modules(), [list[Node](row) for row in layers()]
    arrows = edges(files)
    chains = [_chain(edge, rows) for edge in sorted(arrows)]
    _order(rows, [link for chain in chains for link in pairwise(chain)])
    places = _places(rows)
    parts = [f"<path d='{_curve([places[node] for node in chain])}'/>" for chain in chains]
    for package in sorted(files):
        x, y = places[package]
        width = _width(package)
        parts.append(f"<rect x='{x - width / 2:g}' y='{y:g}' width='{width}' height='{HEIGHT}' rx='5'/>")
        parts.append(f"<text x='{x:g}' y='{y + 20:g}'>{package}</text>")
    height = len(rows) * ROW
    head = "<marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
    return "\n".join(
        (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' role='img'>",
            "<title>The packages of kb and their imports</title>",
            f"<style>\n{STYLE}\n</style>",
            f"<defs>{head}<path d='M0 0 8 4 0 8z' style='fill:#8c959f;stroke:none'/></marker></defs>",
            *parts,
            "</svg>\n",
        )
    )


def _chain(edge: tuple[str, str], rows: list[list[Node]]) -> list[Node]:
    """The nodes along an arrow, including a new place in every row between its ends."""
    start, end = (next(number for number, row in enumerate(rows) if package in row) for package in edge)
    crossed: list[Node] = []
    for number in range(start + 1, end):
        crossed.append((*edge, number))
        rows[number].append((*edge, number))
    return [edge[0], *crossed, edge[1]]


def _order(rows: list[list[Node]], links: list[tuple[Node, Node]]) -> None:
    """Sort each row by the mean position of its neighbours, downwards and upwards, so that few arrows cross."""
    neighbours: dict[Node, list[Node]] = {}
    for upper, lower in links:
        neighbours.setdefault(upper, []).append(lower)
        neighbours.setdefault(lower, []).append(upper)
    for sweep in range(SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            places = {node: x for node, (x, _) in _places(rows).items()}
            means = {
                node: sum(places[other] for other in neighbours[node]) / len(neighbours[node])
                for node in row
                if node in neighbours
            }
            row.sort(key=lambda node: means.get(node, places[node]))


def _places(rows: list[list[Node]]) -> dict[Node, tuple[float, float]]:
    """The middle of the upper edge of each node, in pixels."""
    places: dict[Node, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        free = WIDTH - sum(_width(node) for node in row)
        gap = max(GAP, free / (len(row) + 1)) if any(isinstance(node, str) for node in row) else GAP
        x = (WIDTH - sum(_width(node) + gap for node in row) + gap) / 2
        for node in row:
            places[node] = (round(x + _width(node) / 2, 1), number * ROW + 12)
            x += _width(node) + gap
    return places


def _width(node: Node) -> int:
    return 28 + 8 * len(node) if isinstance(node, str) else LANE


def _curve(points: list[tuple[float, float]]) -> str:
    """A curve from the lower edge of the first box to the upper edge of the last, vertical where it crosses a row."""
    x, y = points[0][0], points[0][1] + HEIGHT
    path = f"M{x:g} {y:g}"
    for number, (next_x, next_y) in enumerate(points[1:], 2):
        path += f"C{x:g} {y + 14:g} {next_x:g} {next_y - 14:g} {next_x:g} {next_y:g}"
        if number < len(points):
            next_y += HEIGHT
            path += f"V{next_y:g}"
        x, y = next_x, next_y
    return path


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
