"""Fill a model's parameters from GGUF files.

Blocks and matrices of 16 or 32 bits keep their bytes: blocks in tiles, those of MXFP4 experts as FP4. Other tensors are
decoded.
"""

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from math import prod

import numpy as np
import torch

from dsv4cli.engine.checkpoint.compare import row_chunks
from dsv4cli.engine.checkpoint.gguf.loading import ByteNaming, blocks_of, byte_checkpoint, is_stored
from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity
from dsv4cli.engine.checkpoint.gguf.naming import gguf_name
from dsv4cli.engine.checkpoint.gguf.stored import GgufStoredModel
from dsv4cli.engine.checkpoint.layout import TensorSpec, matrices
from dsv4cli.engine.parallel.world import World
from dsv4cli.engine.system.threads import as_done
from dsv4cli.engine.weights.fill import TORCH_DTYPES, Arrived, Destinations, Supply, in_tiles, local_slice
from dsv4cli.engine.weights.read import stored
from dsv4cli.kernels.ggml.types import BLOCK_DTYPES

# threads that decode; each holds 1 MiB of rows and their values
DECODERS = 8


def stored_gguf(identity: GgufIdentity, specs: Iterable[TensorSpec], world: World) -> Supply:
    """Return a supply for `fill` of this rank's shard of the table that `loaded_table` returned.

    Raises as `read.stored` and `GgufStoredModel.read`.
    """
    whole, decoded, fp4 = list[TensorSpec](), list[TensorSpec](), dict[str, tuple[TensorSpec, TensorSpec]]()
    for roles in matrices(specs).values():
        weight = roles["weight"]
        if weight.form == "fp4":  # both tensors are made of the same blocks
            whole.append(blocks_of(weight, "MXFP4"))
            fp4[weight.name] = weight, roles["scale"]
        else:
            is_whole = is_stored(weight, identity.checkpoint.tensors.get(gguf_name(weight)))
            (whole if is_whole else decoded).append(weight)
    as_bytes = stored(byte_checkpoint(identity), whole, world, naming=ByteNaming(identity.stored_naming), fp4=fp4)
    return partial(_fill, as_bytes, identity, decoded, world)


def _fill(
    as_bytes: Supply, identity: GgufIdentity, decoded: list[TensorSpec], world: World, destinations: Destinations
) -> Generator[Arrived, None, None]:
    yield from as_bytes(destinations)
    model = GgufStoredModel(identity)
    with model:
        jobs = [job for spec in decoded for job in _jobs(model, spec, world, destinations[spec.name])]
        with closing(as_done(jobs, DECODERS, threading.Event())) as arrived:
            yield from arrived


def _jobs(
    model: GgufStoredModel, spec: TensorSpec, world: World, destination: torch.Tensor
) -> Iterator[Callable[[], Arrived]]:
    """Yield the jobs that read one tensor, a few rows each."""
    if spec.dtype in BLOCK_DTYPES:
        assert spec.shard is None, spec.name
        yield partial(_copy_blocks, model, spec, destination)
        return
    own = local_slice(spec, world)
    start, stop, _ = own[0].indices(spec.shape[0])
    for rows in row_chunks(stop - start, prod(spec.shape[1:])):
        held = (slice(start + rows.start, start + rows.stop), *own[1:])
        yield partial(_decode, model, spec, held, destination[rows])


def _copy_blocks(model: GgufStoredModel, spec: TensorSpec, destination: torch.Tensor) -> Arrived:
    blocks = torch.from_numpy(in_tiles(spec, model.read_blocks(spec)))
    destination.copy_(blocks)
    return spec.name, blocks.nbytes


def _decode(model: GgufStoredModel, spec: TensorSpec, held: tuple[slice, ...], destination: torch.Tensor) -> Arrived:
    """Decode rows of one tensor, and copy the part of them that this rank holds."""
    raw = model.read(spec, held[0])[(slice(None), *held[1:])]
    bits = np.ascontiguousarray(raw)
    tensor = torch.from_numpy(bits.view(np.int16) if bits.dtype == np.uint16 else bits).view(TORCH_DTYPES[spec.dtype])
    destination.copy_(tensor)
    return spec.name, tensor.nbytes
