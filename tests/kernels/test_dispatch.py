"""Who computes: the choice between Triton and plain PyTorch, what a kernel refuses, and kernels as a whole."""

import contextlib
import inspect
from importlib import import_module

import pytest
import torch

from dsv4cli.kernels import norm, rope
from dsv4cli.kernels.block_scale import fp4_round, fp8_round, hadamard
from dsv4cli.kernels.dispatch import KernelUnsupported, choose, use
from dsv4cli.kernels.norm import head_norm, rms_norm
from dsv4cli.kernels.rope import rotate
from tests.test_architecture import PACKAGE

# not those whose plain twin is a library's (peers)
FAMILIES = sorted(
    path.parent.name
    for path in (PACKAGE / "kernels").glob("*/ref.py")
    if path.with_name("kernel.py").is_file() or path.with_name("kernel").is_dir()
)


def test_a_cpu_tensor_goes_to_the_reference():
    x = torch.ones(2, 128)
    assert choose(x, norm.ref) is norm.ref
    with use("torch"):
        assert choose(x, norm.ref) is norm.ref


@pytest.mark.usefixtures("triton_backend")
def test_an_override_ends_with_its_block():
    x = torch.ones(2, 128)
    with contextlib.suppress(KeyError), use("torch"):
        assert choose(x, rope.ref) is rope.ref
        raise KeyError
    assert choose(x, rope.ref).__name__ == "dsv4cli.kernels.rope.kernel"


@pytest.mark.gpu
def test_a_cuda_tensor_goes_to_triton():
    x = torch.ones(2, 128, device="cuda")
    assert choose(x, norm.ref).__name__ == "dsv4cli.kernels.norm.kernel"
    with use("torch"):
        assert choose(x, norm.ref) is norm.ref


def test_triton_on_a_cpu_is_refused_without_the_interpreter(monkeypatch):
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with use("triton"), pytest.raises(KernelUnsupported, match="need a GPU, and a tensor is on cpu"):
        rms_norm(torch.ones(2, 128), torch.ones(128), 1e-6)


# the call, and what the reason says
REFUSED = {
    "a gradient": (lambda: rms_norm(torch.ones(2, 4, requires_grad=True), torch.ones(4), 1e-6), "no gradients"),
    "fp16": (lambda: head_norm(torch.ones(2, 3, 4, dtype=torch.float16), 1e-6), "not torch.float16"),
    "columns apart": (lambda: hadamard(torch.ones(4, 4).T), r"not strides \(1, 4\)"),
    "rows apart": (lambda: hadamard(torch.ones(4, 3, 4).transpose(0, 1)), "evenly spaced rows"),
    "a long row": (lambda: rms_norm(torch.ones(1, 16_385), torch.ones(16_385), 1e-6), "up to 16384 values, not 16385"),
    "an odd row": (lambda: rotate(torch.ones(1, 5), torch.ones(1, 1, dtype=torch.complex64)), "whole pairs"),
    "turns apart": (lambda: rotate(torch.ones(3, 8), torch.ones(2, 3, dtype=torch.complex64).T), "consecutive turns"),
    "a block of 48": (lambda: fp8_round(torch.ones(1, 96), 48), "not 48"),
    "half a block": (lambda: fp4_round(torch.ones(1, 48), 32), "divides 48 columns, not 32"),
    "no power of two": (lambda: hadamard(torch.ones(1, 48)), "not 48"),
}


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize("what", REFUSED)
def test_what_a_kernel_does_not_take_is_refused(what):
    call, reason = REFUSED[what]
    with pytest.raises(KernelUnsupported, match=reason):
        call()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kernel_has_the_functions_of_its_reference(family):
    kernel, reference = (import_module(f"dsv4cli.kernels.{family}.{part}") for part in ("kernel", "ref"))
    contract = import_module(f"dsv4cli.kernels.{family}")
    functions = inspect.getmembers(
        contract, lambda one: inspect.isfunction(one) and one.__module__ == contract.__name__
    )
    chosen = [name for name, value in functions if "choose(" in inspect.getsource(value)]
    assert chosen
    for name in chosen:
        assert names_of(getattr(kernel, name)) == names_of(getattr(reference, name)), name


def names_of(function):
    return list(inspect.signature(function).parameters)


@pytest.mark.usefixtures("triton_backend")
def test_a_place_that_a_kernel_leaves_out_is_nan(monkeypatch):
    class Idle:
        def __getitem__(self, grid):
            return lambda *arguments, **options: None

    kernels = {family: import_module(f"dsv4cli.kernels.{family}.kernel") for family in ("norm", "rope", "block_scale")}
    for kernel in kernels.values():
        for name in [name for name in vars(kernel) if name in {"_rms_norm", "_rotate", "_round_blocks", "_hadamard"}]:
            monkeypatch.setattr(kernel, name, Idle())
    x, turns = torch.ones(2, 128), torch.ones(2, 4, dtype=torch.complex64)
    for y in (rms_norm(x, x[0], 1e-6), rotate(x, turns), fp8_round(x, 64), hadamard(x)):
        assert y.isnan().all()
