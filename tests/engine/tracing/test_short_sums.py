"""FP8 tensor cores with short sums beside sums in fp32: what `trace` takes for rounding, and what it still names."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dsv4cli.commands.trace.side import manifest_for
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.settings import Limits
from dsv4cli.engine.tracing.feed import Jitter
from dsv4cli.engine.tracing.manifest import Text, TraceManifest
from dsv4cli.engine.tracing.observer import Watched
from dsv4cli.engine.tracing.record import sums_shortly
from dsv4cli.engine.tracing.short_sums import ShortSums, short_sums_between
from dsv4cli.engine.tracing.walk import Walk
from dsv4cli.kernels import card
from dsv4cli.kernels.block_scale.ref import dequantise
from dsv4cli.kernels.experts import ref as experts
from dsv4cli.kernels.formats import FP8_BLOCK
from dsv4cli.kernels.gemm import SHORT_SUM
from dsv4cli.kernels.gemm import ref as gemm
from dsv4cli.kernels.rows import ROWS_ALIKE
from tests.engine.model.test_mutations import MUTATIONS, ROUNDING_MUTATIONS
from tests.kernels.test_experts_many_tokens import fp4, routed, stacked
from tests.support import tracing
from tests.support.slow import slow_rows

NET, PROMPT = "tiny-flash", 133
# error of a product of FP8 experts, relative to its norm (H200)
FP8_EXPERTS_ERROR = 2.3e-5
CUDA = torch.device("cuda")
MANIFEST = TraceManifest("m", (), (0, 2), 2, (0, 4), 64, 4, "bfloat16", simulate=True)


def truncated(x):
    """x with 13 bits behind the first."""
    return (x.view(torch.int32) & ~(2**10 - 1)).view(torch.float32)


def short_product(x, weight):
    """x @ weight.T as Hopper's FP8 tensor cores sum it up: 32 columns at once, 128 in one short sum, those in fp32."""
    total = torch.zeros(len(x), len(weight))
    for block in range(0, x.shape[1], 128):
        short = torch.zeros_like(total)
        for k in range(block, min(block + 128, x.shape[1]), 32):
            short = truncated(short + x[:, k : k + 32] @ weight[:, k : k + 32].T)
        total += short
    return total


@pytest.fixture
def tensor_cores(monkeypatch):
    """Puts them in the place of fp32 sums, for more rows than are alike."""
    right = gemm.linear

    def linear(x, matrix):
        weight, scale, _ = matrix
        # whether the weight was stored as FP8, dequantized or not: its scales are of 128 columns
        fp8 = scale is not None and scale.shape[-1] == -(-x.shape[1] // FP8_BLOCK)
        if not fp8 or len(x) <= ROWS_ALIKE:
            return right(x, matrix)
        return short_product(x.float(), dequantise(weight, scale).float()).to(x.dtype)

    def linears(inputs, matrices, like):
        return [linear(inputs, one).type_as(like) for one in matrices]

    def replace_both():
        monkeypatch.setattr(gemm, "linear", linear)
        monkeypatch.setattr(gemm, "_linears", linears)

    return replace_both


def test_a_short_sum_lies_as_far_away_as_is_said():
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(count, 1024, generator=draw).to(torch.float8_e4m3fn).float() for count in (80, 64))
    exact = x @ weight.T
    error = (short_product(x, weight) - exact).norm() / exact.norm()
    assert SHORT_SUM / 2 < error < 2 * SHORT_SUM


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    """The right side and its noise, by the most prompt tokens of a step whose sums are short."""
    folders = {short: tmp_path_factory.mktemp("trace") for short in (0, 4096)}
    return {
        short: (*tracing.sound(NET, [tracing.text(PROMPT)], folder, short), folder / "sound")
        for short, folder in folders.items()
    }


# "ffn.output" follows from the shared expert, and is named by itself: the halves of a block are fed
@pytest.mark.parametrize(
    ("short_sums", "named"), [*slow_rows((0, {"attn.q", "indexer.q", "ffn.output"})), (4096, set())]
)
def test_short_sums_are_rounding_where_they_are_known(sides, tensor_cores, tmp_path, short_sums, named):
    one, noise, fed = sides[short_sums]
    tensor_cores()
    found = tracing.beside(one, noise, Walk(tracing.sound_model(NET), tracing.CPU), tmp_path / "other", fed)
    assert {each.difference.stage for each in found.beyond} >= named
    # the noise is of their size, neither far below nor far above
    assert max(each.excess for each in found.verdicts) > 0.25
    assert bool(found.beyond) == bool(named)


def test_the_streams_are_moved_as_they_are_without(sides):
    """Only what follows from linears has other noise."""
    noise, with_short = sides[0][1], sides[4096][1]
    same = {stage for (layer, stage), moved in noise.items() if torch.equal(moved.rows, with_short[layer, stage].rows)}
    assert {"hc_attn.post", "attn.input", "attn.entries", "ffn.input", "gate.weights"} <= same
    assert not {"attn.wq_a", "attn.q", "attn.kv", "indexer.q", "ffn.output"} & same


@pytest.mark.parametrize(
    ("mistake", "place"),
    [
        # beside fp32 sums it is the queries: short ones decide ties too, and are not in the keys
        ("e2m1 ties to the lower code", "layer 2, indexer, compressed keys"),
        *slow_rows(
            ("no FP4 in the indexer", "layer 2, indexer, queries"),
            ("compressed theta in SWA layers", "layer 0, attention, queries"),
            ("scale rounded to nearest", "layer 0, attention, latent queries before their norm"),
            ("keys not rounded", "layer 0, attention, keys of the window"),
        ),
    ],
)
def test_mistakes_behind_short_sums_are_named(sides, tensor_cores, monkeypatch, tmp_path, mistake, place):
    one, noise, fed = sides[4096]
    tensor_cores()
    (MUTATIONS | ROUNDING_MUTATIONS)[mistake].put_in(monkeypatch)
    walk = Walk(tracing.model(NET), tracing.CPU)
    first = tracing.beside(one, noise, walk, tmp_path / "other", fed).first
    assert first is not None
    assert first.place == place


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ((0, 0), ()),
        ((4096, 0), (300, 0, 65)),
        ((0, 4096), (300, 0, 65)),
        ((64, 1), ()),
        ((100, 0), (300, 0, 65)),
        ((120, 0), (240, 0, 65)),
        ((65, 120), (260, 0, 65)),
    ],
)
def test_tokens_in_steps_of_many_rows(chunks, expected):
    texts = tuple(Text(tuple(range(prompt + 4)), prompt) for prompt in (300, 64, 65))
    one, other = (replace(MANIFEST, texts=texts, short_sums=chunk) for chunk in chunks)
    assert short_sums_between(one, other) == expected


@pytest.mark.parametrize(("position", "moved"), [(0, 5), (4, 3), (7, 0), (9, 0)])
def test_only_their_rows_are_moved(position, moved):
    own = torch.randn(8, 4096).bfloat16()
    found = ShortSums((1, 7))(own, Watched(2, 5, position, 0, 1, torch.arange(5)))
    assert (found != own).any(1).nonzero().flatten().tolist() == list(range(2, 2 + moved))


@pytest.mark.parametrize("name", sorted(card.CARDS))
def test_whose_sums_are_short(name):
    source = tracing.source(NET)
    with card.described(card.CARDS[name]):
        hopper = name in ("h100", "h200")
        assert sums_shortly(source, Numerics.reference(), CUDA) == hopper
        assert not sums_shortly(source, Numerics.plain(torch.bfloat16), CUDA)
        assert not sums_shortly(source, Numerics.reference(), tracing.CPU)
        bf16 = replace(source.identity, formats=replace(source.identity.formats, linear="bf16"))
        assert not sums_shortly(SimpleNamespace(identity=bf16), Numerics.reference(), CUDA)


def test_the_kernels_choose_tensor_cores_for_more_rows_than_are_alike():
    from dsv4cli.kernels.gemm import kernel
    from dsv4cli.kernels.gemm.kernel import tiled, tiled_fp8

    x, weight = torch.zeros(ROWS_ALIKE + 1, 128).bfloat16(), torch.zeros(128, 128).to(torch.float8_e4m3fn)
    assert kernel._kernel_module(x, weight) is tiled
    assert tiled_fp8.multiplies(x)
    assert kernel._kernel_module(x[1:], weight) is not tiled


@pytest.mark.parametrize(("kernels", "short_sums"), [("triton", 100), ("torch", 0)])
def test_a_manifest_says_so_of_triton_only(kernels, short_sums):
    job = SimpleNamespace(
        source=tracing.source(NET), execution=SimpleNamespace(numerics=Numerics.reference()), kernels=kernels,
        device=CUDA, limits=Limits(prefill_chunk=100),
    )  # fmt: skip
    with card.described(card.CARDS["h200"]):
        assert manifest_for(job, [tracing.text(9)], {}).short_sums == short_sums


def test_rounded_inputs_move_experts_more_than_short_sums(monkeypatch):
    """So the noise of a twin, whose streams are rounded once more, also covers experts on FP8 tensor cores."""
    x, weights = torch.randn(24, 512).bfloat16(), stacked(fp4, 6, 512, 512)
    given = (weights, *routed(24, 6, 3), 7.0, True)
    right = experts.routed_experts(x, *given)

    def distance(other):
        return (other - right).norm() / right.norm()

    rounded = distance(experts.routed_experts(Jitter(2**-9)(x), *given))

    def linear(x, matrix):
        y = x.float() @ dequantise(*matrix[:2]).float().T
        return (y + FP8_EXPERTS_ERROR * y.norm(dim=-1, keepdim=True) / y.shape[-1] ** 0.5 * torch.randn(y.shape)).to(x)

    monkeypatch.setattr(gemm, "linear", linear)
    short = distance(experts.routed_experts(x, *given))
    assert 0 < 2 * short < rounded
