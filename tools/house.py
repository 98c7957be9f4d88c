"""Print the size and the layering of the code: `python -m tools.house`.

A unit is a package of `dsv4cli/engine/`, `kernels`, `commands` or a file directly under `dsv4cli/`. Its floor is the
length of the longest chain of imports below it.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "dsv4cli"
RUNTIME = PACKAGE / "engine/runtime"
FACE = "__init__"  # the unit of names that the package itself exports


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file. Files must not change while the process runs."""
    return ast.parse(path.read_text(encoding="utf-8"))


def unit_of(module: str) -> str:
    """Return the unit that a module belongs to: `dsv4cli.engine.text.prompt` belongs to `engine.text`."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["engine"] else 1]) or FACE


def imports_in(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the line and the full name of everything that import statements among the nodes import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def floors() -> dict[str, int]:
    """Return the floor of each unit, the lowest first; 1 is a unit that imports no other.

    Raises graphlib.CycleError if units import each other in a circle.
    """
    graph: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        names = imports_in(ast.walk(parsed(path)))
        graph.setdefault(unit_of(module), set()).update(
            unit_of(name) for _, name in names if name.startswith("dsv4cli.")
        )
    below = {unit: {other if other in graph else FACE for other in others} - {unit} for unit, others in graph.items()}
    found: dict[str, int] = {}
    for unit in TopologicalSorter(below).static_order():
        found[unit] = 1 + max((found[other] for other in below[unit]), default=0)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def rooms(package: Path) -> list[str]:
    """Return the files and packages directly inside a package."""
    return sorted(
        path.name
        for path in package.iterdir()
        if path.name != "__init__.py" and (path.suffix == ".py" or (path / "__init__.py").exists())
    )


def lines(folder: Path) -> int:
    """Return the number of lines of all Python files under a folder."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def main() -> None:
    """Print the floors, the rooms of `engine/runtime` and the lines of each part."""
    for unit, floor in floors().items():
        print(f"floor {floor:2d}  {unit}")
    print(f"engine/runtime: {len(rooms(RUNTIME))} files and packages: {', '.join(rooms(RUNTIME))}")
    for part in ("dsv4cli", "tests", "tools"):
        print(f"{part}: {lines(PACKAGE.parent / part):,} lines")


if __name__ == "__main__":
    main()
