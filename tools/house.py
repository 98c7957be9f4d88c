"""Print the size and the layering of the code: `python -m tools.house`.

A unit is a package of `dsv4cli/engine/`, `kernels`, `commands` or a file directly under `dsv4cli/`. Its floor is the
length of the longest chain of imports below it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "dsv4cli"
RUNTIME = PACKAGE / "engine/runtime"


def unit_of(module: str) -> str:
    """Return the unit that a module belongs to: `dsv4cli.engine.text.prompt` belongs to `engine.text`."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["engine"] else 1]) or "__init__"


def imported_by(path: Path) -> Iterator[str]:
    """Yield the modules of the package that a file imports, inside functions and for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("dsv4cli"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dsv4cli"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = (PACKAGE.parent / whole.replace(".", "/")).with_suffix(".py").exists()
                is_package = (PACKAGE.parent / whole.replace(".", "/")).is_dir()
                yield whole if is_module or is_package else str(node.module)


def floors() -> dict[str, int]:
    """Return the floor of each unit, the lowest first; 1 is a unit that imports no other."""
    graph: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        graph.setdefault(unit_of(module), set()).update(unit_of(name) for name in imported_by(path))
    found: dict[str, int] = {}

    def floor(unit: str) -> int:
        if unit not in found:
            found[unit] = 1 + max((floor(other) for other in graph[unit] if other != unit), default=0)
        return found[unit]

    for unit in graph:
        floor(unit)
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
