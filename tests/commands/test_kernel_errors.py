"""What Triton's compiler or launcher says against a kernel is a sentence; everything else keeps its traceback."""

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4cli import cli
from dsv4cli.errors import compiler_refusal

pytest.importorskip("triton")
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

KERNEL = SimpleNamespace(__module__="dsv4cli.kernels.experts.kernel.grouped_gemm", __name__="down")


def in_module(name: str, source: str) -> dict[str, Any]:
    """The names of a module of Triton's, as far as a traceback shows them."""
    names = {"__name__": name}
    exec(source, names)
    return names


def launched(error: Exception, where: str) -> Exception:
    """The error, raised in a module while a kernel is launched."""
    inner = in_module(where, "def compile(error): raise error")["compile"]
    run = in_module("triton.runtime.jit", "def run(self, call, error): call(error)")["run"]
    try:
        run(KERNEL, inner, error)
    except type(error) as raised:
        return raised


COMPILER, DRIVER = "triton.compiler.compiler", "triton.backends.nvidia.driver"
IMAGE = "Triton Error [CUDA]: device kernel image is invalid"
MEMORY = "Triton Error [CUDA]: an illegal memory access was encountered"


@pytest.mark.parametrize(
    ("error", "where", "words"),
    [
        (OutOfResources(115712, 101376, "shared memory"), COMPILER, "shared memory, Required: 115712, Hardware limit"),
        (PTXASError("fatal\nlog\n"), "triton.backends.nvidia.compiler", "PTXAS error: fatal"),
        (CompilationError("x = tl.dot(a, b)", None, "fp8 is not supported"), COMPILER, "fp8 is not supported"),
        (RuntimeError("PassManager::run failed\nmodule {"), "triton.backends.amd.compiler", "PassManager::run failed"),
        (RuntimeError(IMAGE), COMPILER, "device kernel image is invalid"),
        (RuntimeError("Failed to find C compiler."), "triton.runtime.build", "Failed to find C compiler"),
        (subprocess.CalledProcessError(1, ["gcc"]), "triton.runtime.build", "returned non-zero exit status 1"),
    ],
    ids=["memory", "ptxas", "source", "passes", "image", "no-gcc", "gcc"],
)  # fmt: skip
def test_a_kernel_that_does_not_compile_or_fit_is_a_sentence(error, where, words, dsv4, monkeypatch):
    refusal = compiler_refusal(launched(error, where))
    assert refusal is not None
    assert refusal.message.startswith("the Triton kernel experts.grouped_gemm.down does not run on this machine: ")
    assert words in refusal.message
    assert len(refusal.message.splitlines()) == 1
    monkeypatch.setattr(cli, "app", lambda **_: (_ for _ in ()).throw(error))
    done = dsv4("run", "Hi")
    assert (done.code, done.out) == (4, "")
    assert words in done.err
    assert "use --backend torch" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (RuntimeError(MEMORY), COMPILER),
        (RuntimeError(MEMORY), DRIVER),
        (TypeError("missing a required argument: 'x'"), "triton.runtime.jit"),
        (ValueError("ours"), "dsv4cli.kernels.rows"),
    ],
    ids=["found-by-the-loader", "found-by-a-launch", "arguments", "ours"],
)  # fmt: skip
def test_a_bug_keeps_its_traceback(error, where, dsv4, monkeypatch):
    assert compiler_refusal(launched(error, where)) is None


def test_the_card_is_named(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA GeForce RTX 4090", major=8, minor=9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    refusal = compiler_refusal(launched(OutOfResources(2, 1, "shared memory"), COMPILER))
    assert refusal is not None
    assert "does not run on NVIDIA GeForce RTX 4090 (compute capability 8.9): " in refusal.message


def test_an_error_outside_of_a_launch_keeps_its_traceback():
    assert compiler_refusal(OutOfResources(2, 1, "shared memory")) is None
