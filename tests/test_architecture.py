"""The rules of the house (CONTRIBUTING.md) as tests: who imports whom, how long things are, what start-up loads."""

import ast
import gc
import graphlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tools.house import imports_in, parsed

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dsv4cli"

# layer → the layers that it may import, itself aside; "root" is dsv4cli/__init__.py
MAY_IMPORT = {
    "root": {"api", "version"},
    "api": {"engine", "errors"},
    "__main__": {"cli", "errors", "output"},
    "cli": {"version", "commands", "command", "environment", "options", "output", "errors", "harmless"},
    "commands": {
        "version",
        "command",
        "environment",
        "model_names",
        "options",
        "output",
        "errors",
        "harmless",
        "engine",
    },
    "options": {"output", "errors", "model_names"},
    "command": {"help_page", "model_names"},
    "environment": {"output"},
    "help_page": set(),
    "model_names": {"engine"},
    "output": {"options", "errors", "folding", "harmless", "progress"},
    "folding": set(),
    "progress": {"harmless"},
    "engine": {"version", "kernels", "errors", "harmless"},
    "kernels": {"errors"},
    "errors": set(),
    "version": set(),
    "harmless": set(),
}
# the packages of the engine, each of which imports from those before it only
ENGINE = (
    "settings", "system", "config", "parallel", "checkpoint", "text", "model", "weights", "runtime", "compiling",
    "chat", "server", "evaluation", "verification", "hub", "deployment",
    "inspection", "conversion", "profiling", "tracing",
)  # fmt: skip
TERMINAL = {"typer", "click", "rich"}
SLOW = {"torch", "triton", "transformers", "huggingface_hub", "numpy", "safetensors", "tokenizers", "rich"}
REFERENCE_MAY_IMPORT = r"(torch|math|functools|dataclasses|typing|collections\.abc|dsv4cli\.kernels)(\.|$)"
# classes that mean the same in two layers: what the engine asks of followers, and what those are
SAME_NAME = {"Followers"}
MAX_FILE, MAX_FUNCTION, MAX_MODEL = 300, 50, 1100
# files and functions for Triton's compiler: an algorithm is not cut in two, and arguments stand line by line
MAX_KERNEL_FILE, MAX_KERNEL = 400, 120


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """Spare the garbage collector a million nodes, which other tests of the house read too."""
    yield
    gc.freeze()


@cache
def trees() -> dict[str, ast.Module]:
    """Every file of the package, parsed, by its path from the repository's root."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): parsed(path) for path in files}


@cache
def nodes(file: str) -> list[ast.AST]:
    return list(ast.walk(trees()[file]))


def module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def layer_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "root"


@cache
def imports(file: str) -> list[tuple[int, str]]:
    """Line and full name of everything that the file imports, inside functions and for type checkers too."""
    return list(imports_in(nodes(file)))


@cache
def source(node: ast.AST) -> str:
    """The node as Python would write it."""
    return ast.unparse(node)


def found(pattern: str, *kinds: type[ast.AST], outside: str = "") -> list[str]:
    """Places whose source, as Python would write it, matches the pattern, in every file but one."""
    return [
        f"{file}:{node.lineno} {source(node)}"
        for file in trees()
        if file != outside
        for node in nodes(file)
        if isinstance(node, kinds) and re.match(pattern, source(node))
    ]


def test_imports_point_down():
    upward = [
        f"{file}:{line} imports {name}"
        for file in trees()
        for line, name in imports(file)
        if name.split(".")[0] == "dsv4cli"
        and layer_of(name) not in MAY_IMPORT[layer_of(module_name(file))] | {layer_of(module_name(file))}
    ]
    assert upward == []


def package_of(module: str) -> str:
    return module.split(".")[2]


def test_packages_of_the_engine_import_from_those_before_them():
    files = [file for file in trees() if file.startswith("dsv4cli/engine/") and file != "dsv4cli/engine/__init__.py"]
    assert {package_of(module_name(file)) for file in files} == {*ENGINE}
    upward = [
        f"{file}:{line} imports {name}"
        for file in files
        for line, name in imports(file)
        if name.startswith("dsv4cli.engine.")
        and ENGINE.index(package_of(name)) > ENGINE.index(package_of(module_name(file)))
    ]
    assert upward == []


def test_the_model_is_one_page_about_what_it_computes():
    files = [file for file in trees() if file.startswith("dsv4cli/engine/model/")]
    assert sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files) <= MAX_MODEL
    known = {package_of(name) for file in files for _, name in imports(file) if name.startswith("dsv4cli.engine.")}
    assert known == {"config", "parallel", "checkpoint", "model"}


CONSTRUCTORS = r"torch\.(tensor|as_tensor|arange|linspace|zeros|ones|full|empty|eye|rand|randn|randint|randperm)\("


def test_every_new_tensor_names_its_device():
    # without one it lands on the caller's default device (torch.set_default_device), where host code cannot use it
    missing = [call for call in found(CONSTRUCTORS, ast.Call) if "device=" not in call and "**" not in call]
    assert missing == []


def packages_of(name: str) -> set[str]:
    """A module and all packages that are loaded before it."""
    parts = name.split(".")
    return {".".join(parts[: end + 1]) for end in range(len(parts))}


def test_modules_do_not_load_in_a_circle():
    modules = {module_name(file): file for file in trees()}
    graph = {}
    for module, file in modules.items():
        hidden = {
            node
            for branch in nodes(file)
            if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
            for node in ast.walk(branch)
        }
        seen = imports_in(node for node in nodes(file) if node not in hidden)
        graph[module] = {above for _, name in seen for above in packages_of(name)} & modules.keys() - packages_of(
            module
        )
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_engine_and_kernels_do_not_know_the_terminal():
    below = [file for file in trees() if layer_of(module_name(file)) in {"engine", "kernels", "errors"}]
    assert [
        f"{file}:{line} {name}" for file in below for line, name in imports(file) if name.split(".")[0] in TERMINAL
    ] == []


def test_a_reference_needs_nothing_but_torch():
    assert [
        f"{file}:{line} imports {name}"
        for file in trees()
        if re.fullmatch(r"dsv4cli/kernels/\w+/ref\.py", file)
        for line, name in imports(file)
        if not re.match(REFERENCE_MAY_IMPORT, name)
    ] == []


def test_only_parallel_and_ranks_talk_to_other_ranks():
    talkers = {"dsv4cli/engine/parallel/world.py", "dsv4cli/engine/parallel/processes.py"}
    names = {file for file in trees() for _, name in imports(file) if name.startswith("torch.distributed")}
    assert names | {place.partition(":")[0] for place in found(r"torch\.distributed$", ast.Attribute)} == talkers


def test_only_output_prints():
    assert found(r"print\(", ast.Call, outside="dsv4cli/output.py") == []


def test_only_cli_reads_the_environment():
    pattern = r"os\.(environb?|getenvb?|putenv)$|from os import .*\b(environ|getenv)"
    assert found(pattern, ast.Attribute, ast.ImportFrom, outside="dsv4cli/cli.py") == []


def longest(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """A function for Triton's compiler has its arguments line by line, each with its shape."""
    return MAX_KERNEL if compiled_by(function) else MAX_FUNCTION


def compiled_by(function: ast.AST) -> str:
    """The decorator of a function for Triton's compiler."""
    words = [
        re.match(r"(triton|gluon)\.jit|(gluon_)?launched", ast.unparse(one))
        for one in getattr(function, "decorator_list", ())
    ]
    return next((word.group() for word in words if word), "")


def launches(file: str) -> Iterator[str]:
    """Full names of what the file calls as `name[grid](...)`."""
    known = {name.rsplit(".", 1)[-1]: name for _, name in imports(file)}
    for node in nodes(file):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            first, *rest = ast.unparse(node.func.value).split(".")
            yield ".".join([known.get(first, f"{module_name(file)}.{first}"), *rest])


def test_what_is_launched_is_launched_by_one_door():
    """A kernel by the decorator of kernels/launch.py, a function that kernels call by Triton's."""
    files = [file for file in trees() if file.startswith("dsv4cli/kernels/")]
    plain = {
        f"{module_name(file)}.{one.name}" for file in files for one in nodes(file) if compiled_by(one).endswith(".jit")
    }
    assert plain
    assert {name for file in files for name in launches(file)} & plain == set()


def test_gluon_is_imported_where_it_is_used():
    """It is experimental: a Triton without it, or with another, runs all other kernels."""
    ours = {
        "dsv4cli.kernels.gluon_launch",
        "dsv4cli.kernels.gluon_barriers",
        "dsv4cli.kernels.attention.kernel.warp_specialized",
        "dsv4cli.kernels.gemm.kernel.warp_specialized",
        "dsv4cli.kernels.hyper_connections.kernel.warp_specialized",
        "dsv4cli.kernels.experts.kernel.fp8_layouts",
        "dsv4cli.kernels.experts.kernel.fp8_stages",
        "dsv4cli.kernels.experts.kernel.fp8_units",
        "dsv4cli.kernels.experts.kernel.fp8_wgmma",
        "dsv4cli.kernels.experts.kernel.ggml_int8",
        "dsv4cli.kernels.experts.kernel.ggml_stages",
        "dsv4cli.kernels.experts.kernel.ggml_wgmma",
        "dsv4cli.kernels.experts.kernel.warp_layouts",
        "dsv4cli.kernels.experts.kernel.warp_specialized",
        "dsv4cli.kernels.gemm.kernel.ggml_int8",
        "dsv4cli.kernels.ggml.kernel.int8",
        "dsv4cli.kernels.ggml.kernel.int8_digits",
        "dsv4cli.kernels.ggml.kernel.int8_layouts",
        "dsv4cli.kernels.ggml.kernel.row_words",
    }
    at_once = {
        module_name(file)
        for file, tree in trees().items()
        for _, name in imports_in(tree.body)
        if any(name == one or name.startswith(f"{one}.") for one in {"triton.experimental", *ours})
    }
    assert at_once == ours


def test_files_and_functions_are_short():
    lengths = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in trees()}
    kernels = re.compile(r"dsv4cli/kernels/\w+/kernel(/\w+)?\.py")
    long_files = [
        f"{file}: {length} lines"
        for file, length in lengths.items()
        if length > (MAX_KERNEL_FILE if kernels.fullmatch(file) else MAX_FILE)
    ]
    long_functions = [
        f"{file}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for file in trees()
        for node in nodes(file)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= longest(node)
    ]
    assert long_files + long_functions == []


def test_a_class_name_means_one_thing():
    names = Counter(node.name for tree in trees().values() for node in tree.body if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == SAME_NAME


def test_nothing_is_left_for_later():
    left = re.compile(r"\b(TO" + r"DO|FIX" + r"ME)\b")
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    assert [str(file.relative_to(ROOT)) for file in files if left.search(file.read_text(encoding="utf-8"))] == []


def loaded_by(*arguments: str, **environment: str) -> set[str]:
    """The top-level packages that a fresh Python loads for these arguments."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    lines = done.stderr.splitlines()
    if done.returncode != 0:
        pytest.fail("\n".join(line for line in lines if not line.startswith("import time:")))
    return {line.rpartition("|")[2].strip().split(".")[0] for line in lines if line.startswith("import time:")}


@pytest.mark.parametrize("words", ["dsv4 ", "dsv4 run --", "dsv4 run -m "], ids=["command", "option", "model"])
def test_completion_loads_nothing_slow(words):
    request = {"_DSV4_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    assert loaded_by("-m", "dsv4cli", **request) & SLOW == set()


def test_what_says_that_it_needs_no_torch_loads_none():
    said = [
        module_name(file) for file, tree in trees().items() if "no torch" in (ast.get_docstring(tree) or "").lower()
    ]
    # a download chooses by the index, checks headers and writes JSON
    hub = [module_name(file) for file in trees() if file.startswith("dsv4cli/engine/hub/")]
    assert {"dsv4cli.engine.checkpoint.identify", "dsv4cli.engine.conversion.metadata"} < {*said}
    loaded = loaded_by("-c", "import " + ", ".join([*said, *hub]))
    assert loaded & {"torch", "triton", "transformers"} == set()
