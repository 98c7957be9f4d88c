"""What GPUs store where ranks gather rows: a process without TRITON_INTERPRET.

usage: python -m tests.support.gathers; prints the PTX of each kernel's stores, a line each.
"""

import re
import sys

import torch

from dsv4cli.engine.compiling.launches import compiled, driven_by, recording
from dsv4cli.engine.compiling.no_data import CUDA, NoData
from dsv4cli.kernels.all_reduce import SymmetricBuffers, all_gather, buffer_shape
from dsv4cli.kernels.card import CARDS, described
from tests.support import no_compiler as no_compiler

# of one token: what linears give for attention, experts of it and their input, a list of an odd number of entries
GATHERED = [
    [((1024,), torch.bfloat16), ((512,), torch.bfloat16), ((1024,), torch.float32)],
    [((4096,), torch.bfloat16), ((6,), torch.int64), ((6,), torch.float32)],
    [((193,), torch.int64)],
]


def main() -> None:
    with described(CARDS["h200"]), driven_by(CARDS["h200"]), NoData():
        boxes = tuple(torch.empty(buffer_shape(2), dtype=torch.int32, device=CUDA) for _ in range(2))
        buffers = SymmetricBuffers(1, boxes, torch.empty(buffer_shape(2)[0], dtype=torch.int32, device=CUDA))
        with recording() as recorder:
            for shapes in GATHERED:
                parts = [torch.empty(150, *shape, dtype=dtype, device=CUDA) for shape, dtype in shapes]
                all_gather(parts, 301, buffers)
            for launch in recorder.launches.values():
                stores = re.findall(r"st\.global\S*", compiled(launch).asm["ptx"])
                sys.stdout.write(" ".join(sorted(set(stores))) + "\n")


if __name__ == "__main__":
    main()
