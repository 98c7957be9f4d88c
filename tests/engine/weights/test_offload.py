"""Experts that do not fit on the device: not a bit of a result depends on how many do."""

import gc
from dataclasses import replace
from mmap import PAGESIZE
from types import SimpleNamespace

import pytest
import torch

from dsv4cli.engine.checkpoint.layout import expected_tensors
from dsv4cli.engine.checkpoint.names import BUILT_IN
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.parallel.world import SINGLE
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.graphs.decode_graphs import GraphRunner
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from dsv4cli.engine.system.pinned import host_block
from dsv4cli.engine.weights import load, offload, placement
from dsv4cli.engine.weights.fill import total_bytes
from dsv4cli.engine.weights.load import load_model
from dsv4cli.engine.weights.offload import expert_bytes, offload_of
from dsv4cli.engine.weights.placement import FreeMemory, MemoryLimits, decide
from dsv4cli.engine.weights.reserve import Reserve
from dsv4cli.engine.weights.sizes import measure
from dsv4cli.errors import NotEnoughMemory
from tests.support.small_model import drawn, requests

TINY = "random:tiny"
NAMES = (TINY, BUILT_IN)
EXPERTS, PER_TOKEN = 8, 2  # of both models
NOTHING = (Reserve(4096, 0, 0),)  # beside weights
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def as_stored(monkeypatch):
    """Weights stay in their storage formats on a CPU too."""
    monkeypatch.setattr(placement, "DEQUANTIZED_PART", 2**60)


def loaded(name, device="cpu", rows=None):
    """A model with so many experts of each layer on its device, or all."""
    source = resolve_model(name)
    limits = MemoryLimits(gpu=rows and budget(name, rows))
    return load_model(source, Numerics.reference(), device=device, limits=limits)


def tables(name):
    source = resolve_model(name)
    config, formats = (source.config, Formats()) if name == TINY else (source.identity.config, source.identity.formats)
    return expected_tensors(config.without_drafter(), formats), config


def budget(name, rows):
    """The least bytes with which a layer has so many rows: the embedding is there beside all of them only."""
    specs, config = tables(name)
    sizes = measure(specs.values(), config.num_experts_per_tok, 1)
    assert sizes.total == total_bytes(specs, SINGLE)
    if rows == EXPERTS:
        return sizes.total
    return sizes.total - sizes.embedding - (sizes.layers - 1) * (EXPERTS - rows) * sizes.expert


@torch.no_grad()
def history(model, decodes):
    """The logits after a prompt of two sequences, and after steps of one token of each, captured where they can be."""
    device = model.norm.weight.device  # the embedding may lie in host memory
    cache, generator = Cache(model.config, model.numerics, slots=3, device=device), torch.Generator().manual_seed(1)
    work = [(cache.allocate(), torch.randint(3, 100, (count,), generator=generator).tolist()) for count in (9, 4)]
    found = [model.logits(model(make_batch(cache, work), cache.layers).streams)]
    for sequence, ids in work:
        cache.advance(sequence, len(ids))
    decoder = GraphRunner(model, cache, 60) if decodes else None
    for step in range(6):
        live = work[: 1 + step % 2]
        tokens = [(sequence, [3 + (7 * step + 13 * number) % 90]) for number, (sequence, _) in enumerate(live)]
        if decoder is not None:
            found.append(decoder.filled(tokens).run().logits[: len(tokens)].clone())
        else:
            batch = make_batch(cache, tokens)
            found.append(model.logits(model(batch, cache.layers).streams))
        for sequence, _ in tokens:
            cache.advance(sequence, 1)
    return torch.cat(found)


@pytest.mark.parametrize(
    ("name", "decodes", "device"),
    # on a CPU the decoder computes as any step does
    [pytest.param(TINY, False, "cpu", marks=pytest.mark.slow), (BUILT_IN, True, "cpu")]
    + [pytest.param(name, decodes, "cuda", marks=pytest.mark.gpu) for name in NAMES for decodes in (False, True)],
)
def test_every_budget_gives_the_same_logits(name, decodes, device):
    expected = history(loaded(name, device), decodes)
    for rows in (PER_TOKEN, EXPERTS - 1) if device == "cpu" else (PER_TOKEN, 5, EXPERTS - 1):
        model = loaded(name, device, rows)
        assert offload_of(model).plan.division.rows == rows
        assert torch.equal(history(model, decodes), expected), rows
        traffic = offload_of(model).traffic()
        assert 0 < traffic.found < traffic.chosen
        assert traffic.nbytes == (traffic.chosen - traffic.found) * expert_bytes(offload_of(model).plan.parts)
        if not decodes:  # rows that nobody fills are tokens, too
            assert traffic.tokens == 9 + 4 + 3 + 6
    everything = loaded(name, device, EXPERTS)
    assert offload_of(everything) is None


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_every_budget_gives_the_same_tokens(device):
    prompts = [[5, 9, 30, 7], [8, 4], [60] * 30]

    def answers(rows):
        model = loaded(BUILT_IN, device, rows)
        asked = requests(prompts, Sampling(1.0, 0.9, 3), Limits(12, None, 7, 0, ()))
        return [(number, token.id, token.logprob) for number, token in drawn(Engine.of(model, asked, device))]

    assert answers(3) == answers(None)


@pytest.mark.gpu
def test_a_gpu_that_is_too_small_divides_the_experts_by_itself(monkeypatch):
    monkeypatch.setattr(load, "reserves", lambda *given, **named: NOTHING)
    monkeypatch.setattr(load, "free_memory", lambda device: budget(TINY, 5) if device.type == "cuda" else 10**9)
    assert offload_of(loaded(TINY, "cuda")).plan.division.rows == 5


def test_every_tensor_has_its_place(as_stored):
    every_expert, model = loaded(TINY), loaded(TINY, rows=5)
    whole = dict(every_expert.named_parameters())
    assert (
        model.layers[0].ffn.experts.bytes_per_expert
        == every_expert.layers[0].ffn.experts.bytes_per_expert
        == expert_bytes(offload_of(model).plan.parts)
    )
    offload = offload_of(model)
    division = offload.plan.division
    assert (division.resident, division.slots, division.offloaded, division.staging) == (2, 3, 6, 3)
    for number, module in enumerate(offload.plan.layers):
        for part, stack in offload.stacks.items():
            every = whole[f"{module}.{part}"].view(torch.uint8)
            on_device = stack.view(torch.uint8)[number * 5 : number * 5 + 5]
            assert torch.equal(on_device, every[:5])
            assert torch.equal(offload.host[number][part].view(torch.uint8), every[2:])
            assert offload.host[number][part].data_ptr() % PAGESIZE == 0
    assert model.embed.weight is offload.embedding
    assert torch.equal(model.embed.weight, whole["embed.weight"])
    assert offload.plan.host_bytes == (
        len(offload.plan.layers) * 6 * expert_bytes(offload.plan.parts) + whole["embed.weight"].nbytes
    )
    # the drafter is left out
    others = {name for name in whole if ".ffn.experts." not in name and not name.startswith("mtp.")}
    assert dict(model.named_parameters()).keys() == others


def test_a_drafter_that_is_asked_for_lies_on_the_device_beside_some_experts(as_stored):
    drafting, rows = Drafting(2), PER_TOKEN
    every, source = loaded(BUILT_IN), resolve_model(BUILT_IN)
    drafter = sum(parameter.nbytes for parameter in every.mtp.parameters())
    limits = MemoryLimits(gpu=budget(BUILT_IN, rows) + drafter)
    model = load_model(source, Numerics.reference(), limits=limits, drafting=drafting)
    plan = offload_of(model).plan
    assert (plan.division.rows, plan.layers) == (rows, offload_of(loaded(BUILT_IN, rows=rows)).plan.layers)
    for name, parameter in every.mtp.named_parameters():
        same = model.get_parameter(f"mtp.{name}").view(torch.uint8)
        assert torch.equal(same, parameter.view(torch.uint8))
    assert torch.equal(history(model, False), history(every, False))
    limits = replace(limits, gpu=limits.gpu - 1)
    with pytest.raises(NotEnoughMemory, match="the drafter takes"):
        load_model(source, Numerics.reference(), limits=limits, drafting=drafting)


def test_a_budget_too_small_for_the_experts_of_a_token_is_refused():
    least = budget(TINY, PER_TOKEN)
    specs, config = tables(TINY)
    sizes = measure(specs.values(), config.num_experts_per_tok, 1)
    assert decide(sizes, FreeMemory(None, None, 1, MemoryLimits(gpu=least)), NOTHING).division.rows == PER_TOKEN
    with pytest.raises(NotEnoughMemory, match="not enough for the weights") as refused:
        loaded(TINY, rows=PER_TOKEN - 1)
    assert f"--gpu-memory {-(-least // 10**6)}MB" in refused.value.remedy
    with pytest.raises(NotEnoughMemory, match="not enough"):
        decide(sizes, FreeMemory(None, None, 1, MemoryLimits(gpu=least - 1)), NOTHING)


def test_a_host_without_room_is_refused(monkeypatch):
    monkeypatch.setattr(load, "free_memory", lambda device: 10**6)
    with pytest.raises(NotEnoughMemory, match=r"need at least .* GB of host memory, but only 0\.000875 GB"):
        loaded(TINY, rows=5)


@pytest.mark.slow
def test_host_memory_says_how_much_there_is(monkeypatch):
    expected = history(loaded(TINY, rows=5), False)
    monkeypatch.setattr(load, "free_memory", lambda device: 10**6)
    source, limits = resolve_model(TINY), MemoryLimits(gpu=budget(TINY, 5), host=10**9)
    plan = offload_of(load_model(source, Numerics.reference(), limits=limits)).plan
    assert (plan.division.rows, plan.division.slots) == (5, 3)
    # an expert of each layer less in host memory: a slot less, and one more stays on the device
    limits = replace(limits, host=plan.host_bytes - 1)
    fewer = load_model(source, Numerics.reference(), limits=limits)
    assert (offload_of(fewer).plan.division.rows, offload_of(fewer).plan.division.slots) == (5, PER_TOKEN)
    assert torch.equal(history(fewer, False), expected)
    with pytest.raises(NotEnoughMemory, match="need at least"):
        load_model(source, Numerics.reference(), limits=replace(limits, host=offload_of(fewer).plan.host_bytes - 1))


def test_memory_that_the_system_does_not_give():
    with pytest.raises(NotEnoughMemory, match="cannot allocate"):
        host_block(2**60, "experts of a layer", "use more GPUs")


def test_blocks_that_were_pinned_are_unpinned_where_one_cannot_be(monkeypatch):
    pinned, unpinned = [], []

    def pin(block, remedy):
        if len(pinned) == 2:
            raise NotEnoughMemory("the system does not pin it", remedy)
        pinned.append(block.data_ptr())
        return block.data_ptr()

    monkeypatch.setattr(offload, "pin", pin)
    monkeypatch.setattr(offload, "unpin", unpinned.extend)
    found = offload_of(loaded(TINY, rows=5))
    # a device that pins
    found._row_of_expert = SimpleNamespace(is_cuda=True)
    with pytest.raises(NotEnoughMemory):
        found.finish_loading()
    assert unpinned == []
    del found
    gc.collect()
    assert unpinned == pinned
    assert len(pinned) == 2
