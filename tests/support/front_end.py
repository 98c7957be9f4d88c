"""Kernels over GGUF blocks in Triton's front end, which checks types, and in what it needs: no code is generated.

python -m tests.support.front_end few|all: a line for each type and kernel that the front end refuses. Triton's
interpreter, in which tests run, accepts more than the compiler.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from dsv4cli.kernels.ggml.types import DECODED, TYPES, row_bytes
from tests.support.card import H200, inserted

WIDE, NARROW = 1024, 512


class Passed(Exception):
    """The front end has accepted a kernel, which is not launched."""


def front_end(source: Any, target: Any, options: dict[str, Any]) -> None:
    """Do what Triton's compiler does first."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    backend, context = make_backend(target), ir.context()
    given = backend.parse_options(options)
    ir.load_dialects(context)
    backend.load_dialects(context)
    source.make_ir(target, given, backend.get_codegen_implementation(given), backend.get_module_map(), context)
    raise Passed


def operations(kind: str, which: str) -> dict[str, Callable[[], object]]:
    """Return operations by name; the first kernel that each one launches is a different one. which: "few" or "all"."""
    from dsv4cli.kernels import embedding, experts, gemm
    from dsv4cli.kernels.experts import ExpertWeights
    from dsv4cli.kernels.experts.kernel import ggml as routed
    from dsv4cli.kernels.stored_matrix import BlockMatrix

    def matrix(*shape: int) -> BlockMatrix:
        rows = torch.empty(*shape[:-1], row_bytes(kind, shape[-1]), dtype=torch.uint8, device="cuda")
        return BlockMatrix.of(rows, kind)

    def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="cuda")

    def weights(*stack: int) -> ExpertWeights:
        return ExpertWeights(*(matrix(*stack, *one) for one in ((NARROW, WIDE), (WIDE, NARROW), (NARROW, WIDE))))

    def chosen(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return values(tokens, 2, dtype=torch.int64), values(tokens, 2, dtype=torch.float32)

    few = {
        # programs of two tiles with two warps each
        "linear of 1": lambda: gemm.linear(values(1, WIDE), matrix(9_600, WIDE)),
        "linear of 8": lambda: gemm.linear(values(8, WIDE), matrix(64, WIDE)),
        "linear of fp32": lambda: gemm.linear(values(4, WIDE, dtype=torch.float32), matrix(64, WIDE)),
    }
    more = {
        "linear of 2": lambda: gemm.linear_fp32(values(2, WIDE), matrix(64, WIDE)),
        "shifts": lambda: gemm.linear(values(32, WIDE), matrix(64, WIDE)),
        "experts of 1": lambda: experts.mixture(
            values(1, WIDE), weights(4), weights(), *chosen(1), 10.0, False, torch.bfloat16
        ),
        "experts of 4": lambda: routed.routed_outputs(values(4, WIDE), weights(4), *chosen(4), 10.0, False),
        "embedding": lambda: embedding.embed(values(3, dtype=torch.int64), matrix(64, WIDE), torch.bfloat16),
    }
    return few | (more if which == "all" else {})


def _packed(kind: str, device: str) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int32 if kind.startswith("IQ2") else torch.int16, device=device)


def refused(which: str) -> Iterator[str]:
    """Yield the kernels that the front end refuses, and why."""
    from dsv4cli.kernels.dispatch import use

    kinds, kernel = [kind for kind in DECODED if TYPES[kind].values > 1], "dsv4cli.kernels.ggml.kernel"
    # fake tensors cannot compute a table
    empty = patch(f"{kernel}.octets._codebook", lambda _: torch.empty(1, dtype=torch.int32, device="cpu"))
    packed = patch(f"{kernel}.int8_codes.packed_codebook", _packed)
    with inserted(H200), use("triton"), patch("triton.compiler.compile", front_end), empty, packed:
        for kind in kinds:
            for name, operation in operations(kind, which).items():
                try:
                    operation()
                except Passed:
                    continue
                except Exception as error:  # noqa: BLE001 - whatever it is, it is a line
                    yield f"{kind}, {name}: {error!r}"[-300:]
                else:
                    yield f"{kind}, {name}: nothing was launched"


if __name__ == "__main__":
    for line in refused(sys.argv[1]):
        sys.stdout.write(line.replace("\n", " ") + "\n")
