"""The packages: reproducible and whole, with every library declared; and what an editable installation is for mypy."""

import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import package

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# imported where they are installed, and done without elsewhere
OPTIONAL = {"gguf", "hf-xet"}
IMPORT = re.compile(r"^ *(?:import (\w+)|from (\w+)[\w.]* import )", re.MULTILINE)


def test_every_library_that_is_imported_is_declared():
    extras = PROJECT["optional-dependencies"]
    words = [*PROJECT["dependencies"], *extras["serve"], *extras["grammar"], *extras["plot"]]
    declared = {canonicalize_name(Requirement(word).name) for word in words}
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "dsv4cli").rglob("*.py")]
    names = {name for text in texts for found in IMPORT.findall(text) for name in found if name}
    homes = importlib.metadata.packages_distributions()
    libraries = {canonicalize_name(home) for name in names for home in homes.get(name, ())}
    assert {"torch", "uvicorn", "h11", "huggingface-hub"} <= libraries
    assert libraries - declared - OPTIONAL - {"dsv4"} == set()


def test_a_private_class_comes_from_a_version_that_was_tried():
    """uvicorn's H11Protocol may change with any release."""
    [uvicorn] = [one for one in map(Requirement, PROJECT["optional-dependencies"]["serve"]) if one.name == "uvicorn"]
    installed = importlib.metadata.version("uvicorn")
    following = re.sub(r"^0\.(\d+).*", lambda found: f"0.{int(found[1]) + 1}.0", installed)
    assert installed in uvicorn.specifier
    assert following not in uvicorn.specifier


def sdist(path, owner, mode, date, names):
    """An sdist as one machine would make it."""
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(f"dsv4/{name}")
            member.size, member.mode, member.mtime, member.uname, member.uid = 4, mode, date, owner, date % 1000
            tar.addfile(member, io.BytesIO(b"text"))
    return path


def test_an_sdist_tells_nothing_of_the_machine(tmp_path):
    one = sdist(tmp_path / "one.tar.gz", "anna", 0o664, 1_700_000_000, ["b", "a"])
    other = sdist(tmp_path / "other.tar.gz", "ben", 0o600, 1_600_000_123, ["a", "b"])
    for each in (one, other):
        package.settle(each, 1_500_000_000)
    assert one.read_bytes() == other.read_bytes()
    with tarfile.open(one) as tar:
        members = tar.getmembers()
        assert [tar.extractfile(member).read() for member in members] == [b"text", b"text"]
    assert {(member.mtime, member.mode, member.uname) for member in members} == {(1_500_000_000, 0o644, "")}


@pytest.mark.slow
def test_the_packages_of_a_commit_are_reproducible_and_whole(tmp_path, capsys):
    assert package.main(tmp_path) == 0
    hashes, _ = capsys.readouterr()
    assert len(hashes.splitlines()) == 2
    [source], [wheel] = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    with tarfile.open(source) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    tracked = {*package.git("ls-tree", "-r", "--name-only", "HEAD").splitlines()}
    assert {name for name in tracked - packed if not name.startswith(".git")} == set()
    with zipfile.ZipFile(wheel) as archive:
        files = archive.infolist()
    year = int(package.git("show", "-s", "--format=%cd", "--date=format:%Y", "HEAD"))
    assert {file.date_time[0] for file in files} == {year}
    assert {file.filename.split("/")[0].split("-")[0] for file in files} == {"dsv4", "dsv4cli"}
    assert {f"dsv4cli/{name}" for name in ("py.typed", "nano/model.safetensors", "engine/server/page.html")} <= {
        file.filename for file in files
    }


@pytest.fixture
def editable(tmp_path):
    """The Python of an environment that `make` would make, of a copy of the sources."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "dsv4cli", source / "dsv4cli", ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    package.run_hook("build_editable", source, tmp_path, 1_500_000_000)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=120)
    [wheel], [site] = tmp_path.glob("*.whl"), (tmp_path / "venv").glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    # the libraries of the Python that runs this test, and not the sources that it runs on
    (site / "libraries.pth").write_text(str(Path(pytest.__file__).parents[1]))
    return tmp_path / "venv" / "bin" / "python"


@pytest.mark.slow
def test_a_type_checker_finds_the_package(editable, tmp_path):
    page = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    (tmp_path / "user.py").write_text(f"{example}\nreveal_type(answer)\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(editable), "user.py"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert "Success" in done.stdout, done.stdout + done.stderr
    assert 'Revealed type is "dict[str, Any]"' in done.stdout
