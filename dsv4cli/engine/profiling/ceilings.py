"""Measures the fastest copy, read and matmul of this device, to compare other measurements with."""

from dataclasses import dataclass
from typing import Any

import torch

from dsv4cli.engine.profiling.clock import Call, time_calls
from dsv4cli.kernels import gemm
from dsv4cli.kernels.card import FP8, is_from
from dsv4cli.kernels.stored_matrix import StoredMatrix

# bytes: far larger than any cache; then the side of matrices that fill the device
GPU_BYTES, CPU_BYTES = 2**30, 2**26
GPU_SIDE, CPU_SIDE = 8192, 768
GPU_WIDTH = 4096


@dataclass(frozen=True)
class Ceilings:
    """The measured limits of a device.

    Attributes:
        copy: bytes read and written per second by a copy.
        read: bytes per second of a read.
        matmul: FLOP per second by operand format.
    """

    copy: float
    read: float
    matmul: dict[str, float]

    @property
    def bandwidth(self) -> float:
        """The larger of the copy and read rates, so that no operation exceeds 100 % of it."""
        return max(self.copy, self.read)

    def rate(self, quantised: bool) -> float:
        """Return the matmul rate for FP8 and FP4 weights (`quantised`), or for wider ones."""
        wide = next(rate for name, rate in self.matmul.items() if name != "fp8")
        return self.matmul.get("fp8", wide) if quantised else wide

    def record(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {"copy_bytes_per_second": self.copy, "read_bytes_per_second": self.read, "matmul_flops": self.matmul}


def measure_ceilings(device: torch.device) -> Ceilings:
    """Copy and read 1 GiB (64 MiB on a CPU), and multiply square matrices."""
    count = (GPU_BYTES if device.type == "cuda" else CPU_BYTES) // 4
    source = torch.ones(count, device=device)
    target = torch.empty_like(source)
    # an addition: a copy in a CUDA graph is slower
    copy = _seconds(lambda: torch.add(source, 1.0, out=target), device)
    return Ceilings(2 * source.nbytes / copy, _read_rate(source), _matmul_rates(device))


def _read_rate(source: torch.Tensor) -> float:
    """Return the faster of a sum and, on a GPU, one row times a matrix of a model's width, as in its LM head."""
    calls: list[Call] = [source.sum]
    if source.is_cuda:
        matrix = source.view(torch.bfloat16).view(-1, GPU_WIDTH)
        calls.append(lambda: gemm.linear(matrix[:1], StoredMatrix(matrix)))
    return source.nbytes / min(_seconds(call, source.device) for call in calls)


def _matmul_rates(device: torch.device) -> dict[str, float]:
    on_gpu = device.type == "cuda"
    side = GPU_SIDE if on_gpu else CPU_SIDE
    work = 2.0 * side**3
    # on a CPU, the reference backend multiplies in fp32
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    rates = {"bf16" if on_gpu else "fp32": work / _seconds(lambda: a @ a, device)}
    if on_gpu and is_from(device, FP8):
        left, one = a.to(torch.float8_e4m3fn), torch.ones((), device=device)

        def multiply() -> torch.Tensor:
            return torch._scaled_mm(
                left, left.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        rates["fp8"] = work / _seconds(multiply, device)
    return rates


def _seconds(call: Call, device: torch.device) -> float:
    call()
    return time_calls([call], device).median
