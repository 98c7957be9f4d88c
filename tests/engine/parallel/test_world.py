"""Tensor parallel over gloo: processes, each with its part of every cut tensor, give the logits of one."""

import os
import socket
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, multiprocessing

from dsv4cli.engine.chat.dialogue import open_dialogue
from dsv4cli.engine.checkpoint.layout import expected_tensors
from dsv4cli.engine.checkpoint.sharding import check_ranks
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.config.presets import TINY, shortened
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.model import moe
from dsv4cli.engine.model.moe import Router
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.parallel import processes
from dsv4cli.engine.parallel.processes import check_devices, joined
from dsv4cli.engine.parallel.world import SINGLE, World
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.weights.fill import fill, local_slice, made
from dsv4cli.engine.weights.load import load_model
from dsv4cli.engine.weights.random_weights import random_tensors
from dsv4cli.errors import NotEnoughMemory, UnsupportedHardware, UsageError
from tests.support.drafting import mtp_logits
from tests.support.slow import slow
from tests.support.speculation import model_of

NANO = resolve_model("nano")
# layers of ratio 0, 0, 4, 128
CONFIG = parse_config(shortened(TINY, 4, 4) | {"o_groups": 4}, "test")
SPECS = expected_tensors(CONFIG, Formats("f32", "f32", "f32"))
# with threads of pytest's about, Python 3.12 warns of a fork
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
# two chunks of a prompt, then single tokens
CUTS = (0, 131, 148, 149, 150)


def enter(rank, size, work, path):
    distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=size)
    torch.save(work(World(rank, size)), path / str(rank))
    distributed.destroy_process_group()


def dividing(work):
    """The same in ranks that divide the rows of every step's streams."""
    return lambda world: work(replace(world, divides_from=2))


def in_ranks(size, work, path):
    """What work(world) gives in each of `size` processes."""
    # fork: torch is there already, and none of the forked touches a GPU
    multiprocessing.start_processes(enter, (size, work, path), nprocs=size, start_method="fork")
    return [torch.load(path / str(rank)) for rank in range(size)]


def from_random(tensors, world):
    """A model of this rank's part of the tensors."""
    model = Transformer(CONFIG, Numerics.plain(), world)
    parts = ((spec, tensor[local_slice(spec, world)]) for spec, tensor in tensors)
    fill(model, SPECS, made(parts), device="cpu", world=world)
    return model


def from_folder(world):
    """nano, with every rounding of the official code."""
    return load_model(NANO, Numerics.reference(), world=world)


@torch.no_grad()
def logits_of(model, ids):
    """Logits of 150 tokens and of the MTP block."""
    cache = Cache(model.config, model.numerics)
    sequence = cache.allocate()
    rows = []
    for start, end in pairwise(CUTS):
        batch = make_batch(cache, [(sequence, ids[start:end])])
        streams = model(batch, cache.layers).streams
        everything = torch.arange(end - start)
        rows += [model.logits(streams), mtp_logits(model, streams, batch.ids, batch, cache, everything)]
        cache.advance(sequence, end - start)
    return torch.cat(rows)


@pytest.mark.parametrize("divides", [*slow(False), True], ids=["all rows", "shares"])
@pytest.mark.parametrize("size", [2, *slow(4)])
def test_ranks_give_the_logits_of_one(size, divides, tmp_path):
    tensors = list(random_tensors(SPECS.values(), 0, CONFIG.n_routed_experts))

    def work(world):
        return logits_of(from_random(tensors, world), [(5 * i) % 512 for i in range(150)])

    parts, alone = in_ranks(size, dividing(work) if divides else work, tmp_path), work(SINGLE)
    for ours in parts:
        # fp32 sums cut into parts
        torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-5 * float(alone.abs().max()))
        assert torch.equal(ours, parts[0])


def test_what_a_drafter_reads_of_shared_rows_is_gathered(tmp_path):
    config = model_of("dspark").config
    specs = expected_tensors(config, Formats("f32", "f32", "f32"))
    tensors = list(random_tensors(specs.values(), 0, config.n_routed_experts))

    @torch.no_grad()
    def work(world):
        model = Transformer(config, Numerics.plain(), world)
        parts = ((spec, tensor[local_slice(spec, world)]) for spec, tensor in tensors)
        fill(model, specs, made(parts), device="cpu", world=world)
        cache = Cache(config, model.numerics)
        hidden = model(make_batch(cache, [(cache.allocate(), [5 * i % 128 for i in range(131)])]), cache.layers)
        return hidden.streams, hidden.context

    alone = work(SINGLE)
    for ours in in_ranks(2, dividing(work), tmp_path):
        for own, expected in zip(ours, alone, strict=True):
            # fp32 sums cut into parts
            torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.slow  # two ranks of a checkpoint answer in tests/commands/run/test_tp.py
def test_two_ranks_of_a_checkpoint_give_the_logits_of_one(tmp_path):
    text = "What is 17 + 25? The capital of Italy is Rome. " * 12
    ids = open_dialogue(NANO, "off").tokenizer.encode(text)[:150]
    parts = in_ranks(2, lambda world: logits_of(from_folder(world), ids), tmp_path)
    alone, moved = from_folder(SINGLE), from_folder(SINGLE)
    row = moved.embed.weight.data[ids[3]]
    near = row.bfloat16()  # a CPU may hold it in fp32
    row.copy_(torch.nextafter(near, torch.full_like(near, torch.inf)))
    expected, nearby = logits_of(alone, ids), logits_of(moved, ids)
    assert torch.equal(parts[0], parts[1])
    # sums cut in two round elsewhere: about what one ulp of bf16 in the embedding of one token does
    assert (parts[0] - expected).abs().mean() < 2 * (nearby - expected).abs().mean()


# shorter and longer than what is sent at once, and the end
ORDERS = [[["step", {}]], [["take", {"tokens": list(range(5000))}]], ["x" * 1015], ["x" * 1012], ["Ünï 😀"], None]


def test_what_rank_0_says_reaches_all(tmp_path):
    def work(world):
        columns = torch.arange(6).view(3, 2) + 10 * world.rank
        gaps = torch.arange(12.0).view(3, 4)[:, 1:3] + world.rank
        return (
            [world.send_orders(one) or one if world.rank == 0 else world.receive_orders() for one in ORDERS],
            world.broadcast_object(["words", world.rank]),
            world.gather_columns(columns),
            world.sum_rounded(gaps, gaps.dtype),
            world.least([world.rank + 5, None, None if world.rank else 3]),
        )

    for orders, shared, columns, total, least in in_ranks(2, work, tmp_path):
        assert orders == ORDERS
        assert shared == ["words", 0]
        assert columns.tolist() == [[0, 1, 10, 11], [2, 3, 12, 13], [4, 5, 14, 15]]
        assert total.tolist() == [[3.0, 5.0], [11.0, 13.0], [19.0, 21.0]]
        assert least == [5, None, 3]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sums_are_rounded_once(size, tmp_path):
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(size, 50, 40, generator=generator).bfloat16()

    def work(world):
        mine = parts[world.rank]
        return world.sum_rounded(mine.clone(), mine.dtype), world.sum_rounded(mine.float(), mine.dtype)

    for from_bf16, from_fp32 in in_ranks(size, work, tmp_path):
        assert torch.equal(from_bf16, parts.float().sum(0).bfloat16())
        assert torch.equal(from_fp32, from_bf16)
    assert torch.equal(SINGLE.sum_rounded(parts[0], torch.bfloat16), parts[0])


@pytest.mark.parametrize("size", [3, 5, 16])
def test_a_number_of_ranks_that_does_not_divide_is_refused(size):
    with pytest.raises(UsageError, match=f"is not divisible by {size} ranks") as raised:
        Transformer(CONFIG, Numerics.plain(), World(0, size))
    assert raised.value.remedy == "use one of these numbers: 1, 2, 4"


def check(size, config, formats, *, rounds):
    check_ranks(config, expected_tensors(config, formats).values(), size, rounds=rounds)


def test_ranks_that_would_cut_through_a_block_are_refused():
    check(2, CONFIG, Formats(), rounds=True)
    narrow = replace(CONFIG, moe_intermediate_size=128)
    with pytest.raises(UsageError, match=r"would have 64 of the 128 columns of layers\.0\.ffn\.experts\.0\.w2"):
        check(2, narrow, Formats("bf16"), rounds=True)
    check(2, narrow, Formats("bf16"), rounds=False)
    with pytest.raises(UsageError, match=r"shared_experts\.w1\.weight .* cannot be split across 2 ranks"):
        check(2, narrow, Formats(), rounds=False)
    with pytest.raises(UsageError, match="cannot be split across 4 ranks") as refused:
        check(4, replace(CONFIG, num_attention_heads=8, head_dim=32), Formats(), rounds=False)
    assert refused.value.remedy == "use one of these numbers: 1, 2"


def test_each_rank_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices(2, torch.device("cuda"))
    check_devices(9, torch.device("cpu"))
    with pytest.raises(UnsupportedHardware, match="4 ranks need 4 GPUs, and PyTorch sees 2"):
        check_devices(4, torch.device("cuda"))
    with pytest.raises(UsageError, match="cuda:1 is one GPU"):
        check_devices(2, torch.device("cuda:1"))


def fail(rank, port, path):
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        with joined(torch.device("cpu")) as (world, _):
            if rank == 1:
                raise NotEnoughMemory(f"one of {world.ranks_here} ranks here has no room")
            world.sum_rounded(torch.ones(3), torch.float32)
    except BaseException as error:  # noqa: BLE001 - SystemExit is among what is looked at
        (path / str(rank)).write_text(repr(error))


def test_only_the_first_rank_to_fail_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.2)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = [multiprocessing.get_context("fork").Process(target=fail, args=(rank, port, tmp_path)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    said = [(tmp_path / str(rank)).read_text() for rank in (0, 1)]
    assert said == ["SystemExit(1)", "NotEnoughMemory('one of 2 ranks here has no room')"]


def test_what_ranks_add_up_is_rounded_once(monkeypatch):
    """Each rank's part of the experts is still fp32 when the ranks' parts are added."""
    parts = []
    monkeypatch.setattr(Router, "forward", lambda self, x, ids, routed: (ids, ids))
    monkeypatch.setattr(moe.experts, "mixture", lambda x, *rest: x.to(rest[-1]))
    monkeypatch.setattr(World, "sum_rounded", lambda self, x, dtype: parts.append(x.dtype) or x.to(dtype))
    for size in (1, 2):
        layer = moe.MoE(CONFIG, Numerics.reference(), False, World(0, size))
        x, batch = torch.ones(1, 4, dtype=torch.bfloat16), SimpleNamespace(ids=torch.zeros(1), routed=None)
        assert layer(x, batch).dtype == torch.bfloat16
    assert parts == [torch.bfloat16, torch.float32]
