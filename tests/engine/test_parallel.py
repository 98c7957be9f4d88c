"""Tensor parallel over gloo: two processes, each with its part of every cut tensor, give the logits of one."""

import socket

import pytest
import torch
from torch import distributed, multiprocessing

from dsv4cli.engine.batch import make_batch
from dsv4cli.engine.cache import Cache
from dsv4cli.engine.config import parse_config
from dsv4cli.engine.layout import Formats, expected_tensors
from dsv4cli.engine.model import Transformer
from dsv4cli.engine.numerics import Numerics
from dsv4cli.engine.parallel import SINGLE, World
from dsv4cli.engine.presets import TINY
from dsv4cli.engine.random_weights import random_tensors
from dsv4cli.engine.weights import fill, local_slice
from dsv4cli.errors import UsageError

CONFIG = parse_config(TINY, "test")
RANKS = 2


def logits_of(world):
    """Logits of 150 tokens in two chunks and of the MTP block, fp32, from this rank's part of random weights."""
    specs = expected_tensors(CONFIG, Formats("f32", "f32", "f32"))
    model = Transformer(CONFIG, Numerics.plain(), world)
    tensors = random_tensors(specs.values(), 0, CONFIG.n_routed_experts)
    parts = ((spec, tensor[local_slice(spec, world)]) for spec, tensor in tensors)
    fill(model, specs, parts, device="cpu", world=world)
    cache = Cache(CONFIG, model.numerics)
    sequence = cache.allocate()
    rows = []
    for start, end in ((0, 131), (131, 150)):
        batch = make_batch(cache, [(sequence, [(5 * i) % 512 for i in range(start, end)])])
        streams = model(batch, cache).streams
        everything = torch.arange(end - start)
        rows += [model.logits(streams), model.mtp_logits(streams, batch.ids, batch, cache, everything)]
        cache.advance(sequence, end - start)
    return torch.cat(rows)


def work(rank, address, path):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    torch.save(logits_of(World(rank, RANKS)), f"{path}/{rank}")
    distributed.destroy_process_group()


def test_two_ranks_give_the_logits_of_one(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    multiprocessing.spawn(work, (address, str(tmp_path)), nprocs=RANKS)
    alone = logits_of(SINGLE)
    for rank in range(RANKS):
        ours = torch.load(tmp_path / str(rank))
        # fp32 sums cut in two
        torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-5 * float(alone.abs().max()))


@pytest.mark.parametrize("size", [3, 5, 16])
def test_a_number_of_ranks_that_does_not_divide_is_refused(size):
    with pytest.raises(UsageError, match=f"{size} ranks do not divide"):
        Transformer(CONFIG, Numerics.plain(), World(0, size))
