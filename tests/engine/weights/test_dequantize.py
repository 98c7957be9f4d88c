"""Weights that a CPU dequantizes at load: when it does, and that no bit of a result changes."""

import re

import pytest
import torch

from dsv4cli.engine.checkpoint.names import BUILT_IN
from dsv4cli.engine.checkpoint.source import FolderSource, resolve_model
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.inspection.fit.machine import Device, Machine
from dsv4cli.engine.inspection.fit.plan import plan_fit
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.settings import Drafting
from dsv4cli.engine.weights import placement
from dsv4cli.engine.weights.load import load_model
from dsv4cli.engine.weights.placement import FreeMemory, MemoryLimits, decide
from dsv4cli.engine.weights.reserve import Reserve
from dsv4cli.engine.weights.sizes import RankSizes
from dsv4cli.kernels.block_scale import dequantise
from dsv4cli.kernels.dispatch import use
from tests.support.program import Program
from tests.support.slow import slow_except
from tests.support.variants import GOLDEN, write_variant

GB = 10**9
# 40 bytes stored, 10 of them the drafter's; 240 bytes as fp32, 60 of them the drafter's
SIZES = RankSizes(40, 10, 1, 2, 5, 1, dequantized=240, dequantized_drafter=60)
BESIDE = (Reserve(512, 300, 200), Reserve(64, 30, 20))
FORMATS = {
    "official": Formats(),
    "fp32 scales": Formats("fp8_f32", "fp8_f32"),
    "nvfp4": Formats(experts="nvfp4"),
    "bf16": Formats("bf16", "bf16"),
}


def load_stored(source: FolderSource) -> Transformer:
    """A model whose weights stay as stored."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "DEQUANTIZED_PART", 2**60)
        return load_model(source, Numerics.reference())


@torch.inference_mode()
def logits(model: Transformer, chunks: list[list[int]]) -> list[torch.Tensor]:
    memory = Cache(model.config, model.numerics)
    sequence, found = memory.allocate(), []
    for ids in chunks:
        batch = make_batch(memory, [(sequence, ids)])
        found.append(model.logits(model(batch, memory.layers).streams))
        memory.advance(sequence, len(ids))
    return found


@pytest.mark.parametrize("formats", slow_except(("nvfp4",), FORMATS))
def test_weights_keep_their_values_and_results_their_bits(tmp_path, formats):
    folder = GOLDEN if formats == "official" else write_variant(tmp_path, FORMATS[formats])
    source = FolderSource("test", folder)
    stored, dequantized = load_stored(source), load_model(source, Numerics.reference())
    before, after = dict(stored.named_parameters()), dict(dequantized.named_parameters())
    for name, parameter in before.items():
        if name.endswith((".scale", ".scale_2", ".tid2eid")):
            assert torch.equal(after[name].view(torch.uint8), parameter.view(torch.uint8)), name
            continue
        scale = before.get(name.removesuffix("weight") + "scale") if name.endswith(".weight") else None
        assert after[name].dtype == torch.float32, name
        assert after[name].is_contiguous(), name
        assert torch.equal(after[name], dequantise(parameter, scale)), name
    assert dequantized.stored_bytes == stored.stored_bytes == sum(one.nbytes for one in before.values())
    steps = [list(range(3, 12)), [7], [9, 4, 5]]
    assert all(map(torch.equal, logits(dequantized, steps), logits(stored, steps)))


@pytest.mark.parametrize(
    ("room", "size"),
    [
        (FreeMemory(None, 960), 240),  # a quarter
        (FreeMemory(None, 959), None),
        (FreeMemory(None, 2 * 960, 2), 240),
        (FreeMemory(None, 2 * 959, 2), None),
        (FreeMemory(None, None), None),
        (FreeMemory(960, 960), None),
        (FreeMemory(None, 960, limits=MemoryLimits(host=240)), 240),  # all that the user allows
        (FreeMemory(None, 960, limits=MemoryLimits(host=239)), None),
        (FreeMemory(None, 960, as_stored=True), None),
    ],
)
def test_a_cpu_with_memory_dequantizes(room, size):
    found = decide(SIZES, room, BESIDE)
    assert (found.dequantized, found.device) == ((True, size) if size else (False, SIZES.total))


def test_the_cache_and_a_step_keep_their_memory():
    beside = (Reserve(512, 700, 20),)
    assert decide(SIZES, FreeMemory(None, 960), beside).dequantized
    assert not decide(SIZES, FreeMemory(None, 960), (Reserve(512, 700, 21),)).dequantized


def test_a_drafter_that_is_not_loaded_takes_no_memory():
    found = decide(SIZES, FreeMemory(None, 4 * 180), BESIDE, Drafting(0))
    assert (found.drafter, found.dequantized, found.device) == (False, True, 180)


def test_inspect_counts_what_loading_makes():
    source = resolve_model(BUILT_IN)
    machine = Machine((), Device("cpu", "RAM", 8 * GB, 8 * GB), is_here=False)
    fit = plan_fit(source.identity.config, source.identity.formats, machine, context=8192, batch=1)
    held = sum(parameter.nbytes for parameter in load_model(source, Numerics.reference()).parameters())
    assert fit.best.placement.dequantized
    assert fit.best.weights == held


def test_the_interpreter_of_triton_gets_weights_as_stored():
    with use("triton"):
        model = load_model(FolderSource("test", GOLDEN), Numerics.reference())
    assert {torch.int8, torch.float8_e4m3fn} <= {parameter.dtype for parameter in model.parameters()}


def test_the_loading_line_says_so(monkeypatch, capsys):
    dsv4 = Program(monkeypatch, capsys)
    assert re.search(r"nano on cpu: 11\.91 MB \(52\.06 MB as fp32\) in ", dsv4("run", "hi", "--max-tokens", "1").err)
    limited = dsv4("run", "hi", "--max-tokens", "1", "--host-memory", "52MB")
    assert "nano on cpu: 11.91 MB in " in limited.err
