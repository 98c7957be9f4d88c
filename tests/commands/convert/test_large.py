"""`dsv4 convert` on more than 2 GB with the shapes of Flash: every value comes back, in memory of a few pieces."""

import re
import subprocess
import sys
import time

import pytest
from safetensors import safe_open

from dsv4cli.kernels.block_scale import dequantise
from tests.support import synthetic
from tests.support.conversions import same

pytestmark = pytest.mark.slow
TARGETS = ("bf16", "fp8", "nvfp4", "mp --ranks 2", "transformers")
# what a process of `dsv4 convert` may hold: 235 MB are the interpreter with PyTorch, the rest steps of two threads
PEAK = 350 * 10**6
PROGRAM = """
import sys
from pathlib import Path
from dsv4cli import cli
try:
    cli.main()
except SystemExit as left:
    status = Path("/proc/self/status").read_text()
    print(int(status.partition("VmHWM:")[2].split()[0]) * 1024)
    sys.exit(left.code)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = synthetic.write_checkpoint(tmp_path_factory.mktemp("large") / "flash", synthetic.LARGE)
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) > 2e9
    return folder


def convert(source, output, target):
    """Runs the command; returns its peak memory in bytes and the seconds it took."""
    command = [sys.executable, "-c", PROGRAM, "convert", source, output, "--to", *target.split(), "--device", "cpu"]
    started = time.monotonic()
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "all are exact" in done.stdout
    return int(done.stdout.split()[-1]), time.monotonic() - started


def opened(folder):
    """Every tensor of a folder in the official layout: name -> the open file that holds it."""
    files = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118 - no mapping


def value(tensors, name):
    stored, scale = tensors[name].get_tensor(name), re.sub("weight$", "scale", name)
    return dequantise(stored, tensors[scale].get_tensor(scale)) if scale in tensors and scale != name else stored


@pytest.mark.parametrize("target", TARGETS)
def test_there_and_back(source, tmp_path, target):
    there, back = tmp_path / "there", tmp_path / "back"
    for first, second, to in ((source, there, target), (there, back, "official")):
        peak, seconds = convert(first, second, to)
        size = sum(path.stat().st_size for path in second.glob("*.safetensors"))
        print(f"{first.name} -> {to}: {size / 1e9:.2f} GB in {seconds:.1f} s, peak {peak / 1e6:.0f} MB")  # noqa: T201 - the numbers of the closing table
        assert peak < PEAK
    ours, theirs = opened(source), opened(back)
    assert ours.keys() == theirs.keys()
    names = [name for name in ours if not name.endswith(".scale")]
    assert [name for name in names if not same(value(ours, name), value(theirs, name))] == []
    print(f"{target}: {len(names)} of {len(names)} matrices and plain tensors came back with the same values")  # noqa: T201 - the numbers of the closing table
