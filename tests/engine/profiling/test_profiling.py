"""Which operations are measured and how: shapes of a rank, inputs, bytes, bounds."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from dsv4cli.engine.checkpoint.layout import expected_tensors
from dsv4cli.engine.config.presets import PRESETS, TINY
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.profiling import clock, kernels
from dsv4cli.engine.profiling.bounds import EXACT, ONE_ROUNDING, deviation
from dsv4cli.engine.profiling.case import Case, Work
from dsv4cli.engine.profiling.ceilings import measure_ceilings
from dsv4cli.engine.profiling.inputs import BenchmarkInputs, Shapes
from dsv4cli.engine.profiling.kernels import measure, profile_kernels, read_shapes, read_tokens, select_cases
from dsv4cli.kernels import gemm
from dsv4cli.kernels.dispatch import KernelUnsupported
from tests.support.slow import slow, slow_rows

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _few_samples(monkeypatch):
    """What is measured is tested, not how well."""
    monkeypatch.setattr(clock, "CPU_SECONDS", 0)


# Pro has 145,116 tensors
shapes_of = cache(read_shapes)


def bench(model="tiny", tokens=2, context=300, tp=1):
    return BenchmarkInputs(shapes_of(model, tp), tokens, context, CPU)


def case(of, name):
    (found,) = select_cases(of, [name])
    return found


@pytest.mark.parametrize("model", [*slow("flash", "pro"), "tiny"])
def test_every_preset_has_every_operation(model):
    cases = select_cases(bench(model), [])
    assert len({one.name for one in cases}) == len(cases) == 47 - (0 not in PRESETS[model]["compress_ratios"][:-1])


def test_a_number_of_tokens_that_comes_again_is_measured_once():
    assert read_tokens("16, 1,16") == [16, 1]


def measured(run, reference, x, *, exact=False, needs=0):
    """What is found of an operation on x."""
    work = Work((x,), run, reference, 0)
    return measure(Case("x", "family", "", needs, 0, ONE_ROUNDING, lambda bench: work, exact=exact), bench(), "torch")


@pytest.mark.parametrize("exact", [False, True])
def test_a_reference_computes_in_fp32_unless_it_is_to_be_exact(exact):
    seen = []

    def reference(x):
        seen.append(x.dtype)
        return x

    assert not measured(torch.clone, reference, torch.ones(8, dtype=torch.bfloat16), exact=exact).wrong
    assert seen == [torch.bfloat16 if exact else torch.float32]


def test_what_cannot_be_compared_is_wrong():
    assert measured(torch.clone, lambda x: x * float("nan"), torch.ones(8)).wrong
    assert not measured(torch.clone, torch.clone, torch.ones(8)).wrong


def test_what_finds_no_room_is_skipped(monkeypatch):
    monkeypatch.setattr(kernels, "free_memory", lambda device: 1000)
    assert "are free" in measured(torch.clone, torch.clone, torch.ones(8), needs=501).skipped
    assert not measured(torch.clone, torch.clone, torch.ones(8), needs=500).skipped


@pytest.mark.parametrize(
    ("name", "whole", "half"),
    [("wq_b", "32768x1024", "16384x1024"), ("wo_b", "4096x8192", "4096x4096"),
     *slow_rows(("head", "129280x4096", "64640x4096"), ("noise", "129280", "129280")),
     ("wo_a", "8 groups of 1024x4096", "4 groups of 1024x4096"), ("routed_experts", "4096-2048", "4096-1024"),
     ("wq_a", "1024x4096", "1024x4096"), ("attention_csa", "64 heads", "32 heads"),
     ("index_scores", "64 heads", "64 heads"), ("normed_wq_b_index", "40960x1024", "24576x1024"),
     ("inputs_csa", "4160x4096", "4160x4096")],
)  # fmt: skip
def test_shapes_of_a_rank(name, whole, half):
    assert whole in case(bench("flash"), name).shape
    assert half in case(bench("flash", tp=2), name).shape


@pytest.mark.slow  # tests/commands/profile/test_profile.py has all operations of a whole one
@pytest.mark.parametrize("tokens", [1, *slow(65)])
def test_all_operations_of_half_a_model_are_right(tokens):
    config = replace(parse_config(TINY, "tiny"), moe_intermediate_size=256)
    shapes = Shapes(config, expected_tensors(config, Formats()), 2)
    for one in profile_kernels(shapes, [tokens], 140, [], CPU, "torch"):
        assert one.timing, (one.case.name, one.wrong, one.skipped)


@pytest.mark.slow
@pytest.mark.parametrize(
    "formats", [Formats("bf16", "bf16"), pytest.param(Formats("f32", "fp8", "f32"), marks=pytest.mark.slow)]
)
def test_all_operations_are_right_in_other_formats(formats):
    config = parse_config(TINY, "tiny")
    for one in profile_kernels(Shapes(config, expected_tensors(config, formats), 1), [3], 140, [], CPU, "torch"):
        assert one.timing, (one.case.name, one.wrong, one.skipped)


def test_bytes_and_flop_of_a_linear():
    found = measure(case(bench(tokens=3), "wq_b"), bench(tokens=3), "torch")
    # bf16 in and out, one byte a weight, one scale for 128 x 128
    assert found.nbytes == 3 * 128 * 2 + 512 * 128 + 4 + 3 * 512 * 2
    assert found.flops == 2 * 3 * 512 * 128


def test_bytes_of_experts_are_those_of_the_chosen():
    found = measure(case(bench(tokens=1), "routed_experts"), bench(tokens=1), "torch")
    expert = 3 * 256 * 256 // 2 + 3 * 256 * 256 // 32
    assert found.nbytes == 2 * expert + 256 * 2 + 2 * (8 + 4) + 256 * 4


def test_a_rival_is_timed_beside_it():
    one = measure(case(bench(), "head"), bench(), "torch")
    record = one.record(measure_ceilings(CPU))
    assert record["rival"]["name"] == "torch.mm bf16"
    assert 0 < record["rival"]["seconds"]["median"] < 1
    assert record["reference_seconds"] is None  # plain PyTorch was measured


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize(
    "name",
    [
        "rms_norm",
        *slow("places", "compress_both", "noise", "queries_keys_index", "best_entries", "choose_entries"),
    ],
)
def test_the_reference_is_timed_beside_a_kernel(name):
    here = BenchmarkInputs(shapes_of("tiny", 1), 1, 300, torch.get_default_device())
    found = measure(case(here, name), here, "triton")
    assert found.reference is not None, (found.wrong, found.skipped)
    assert found.reference.median > 0


def test_experts_differ():
    weight, scale, _ = bench().experts("layers.0.ffn.experts.0.w1")
    assert len({bytes(one.view(torch.uint8).flatten().tolist()) for one in weight}) == 8
    assert scale.dtype == torch.float8_e8m0fnu


def test_many_tokens_are_one_prompt():
    assert (bench(tokens=64).sequences, bench(tokens=65).sequences) == (64, 1)
    one = bench(tokens=65, context=10)
    assert one.context == 65
    assert one.batch.positions.tolist() == list(range(65))
    several = bench(tokens=3, context=200)
    assert several.batch.positions.tolist() == [199] * 3
    assert int(several.batch.entries[4].cells.max()) < several.cells(4)


@pytest.mark.parametrize(("tokens", "context"), [(1, 300), (64, 300), (65, 65), (65, 300)])
def test_an_opening_is_the_same_batch_unless_a_prompt_has_a_past(tokens, context):
    one = bench(tokens=tokens, context=context)
    assert (one.opening is one.batch) == (tokens != 65 or context == 65)
    assert one.opening.positions.tolist() == ([context - 1] * tokens if tokens < 65 else list(range(65)))


@pytest.mark.parametrize("tokens", [1, 3, 64, 65, 127, 128, 129, 512])
@pytest.mark.parametrize(("name", "ratio"), [("compress_both", 4), ("compress_hca", 128)])
def test_groups_of_a_compressor_are_those_of_its_plan(tokens, name, ratio):
    one = bench(tokens=tokens)
    assert case(one, name).shape.startswith(f"{len(one.opening.entries[ratio].cells)} groups of ")


@pytest.mark.parametrize(("tp", "dtype"), [(1, torch.bfloat16), (2, torch.float32)])
def test_a_rank_of_several_leaves_its_part_of_a_mixture_unrounded(tp, dtype):
    config = replace(parse_config(TINY, "tiny"), moe_intermediate_size=256)
    one = BenchmarkInputs(Shapes(config, expected_tensors(config, Formats()), tp), 2, 300, CPU)
    work = case(one, "mixture").build(one)
    assert work.run(*work.arguments).dtype == dtype


@pytest.mark.parametrize(("tokens", "context"), [(3, 300), (65, 300)])
def test_places_are_those_of_the_engine(tokens, context):
    one = bench(tokens=tokens, context=context)
    made, batch = case(one, "places").build(one), one.batch
    positions, sequence, last, *window, every_entry = made.run(*made.arguments)[:7]
    for ours, theirs in zip(
        (positions, sequence, last, *window),
        (batch.positions, batch.sequence, batch.last, batch.window_index, batch.window_columns, batch.window_cells),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    # the tables are as wide as the blocks, the engine's as a sequence is long
    assert every_entry.shape[1] == 128 + -(-context // 128)
    assert torch.equal(every_entry[:, : batch.every_entry.shape[1]], batch.every_entry)


@pytest.mark.parametrize("tokens", [1, 65])
def test_lists_of_a_case_are_the_best_entries_behind_the_window(tokens):
    one = bench(tokens=tokens, context=300)
    made, batch = case(one, "choose_entries").build(one), one.batch
    lists, visible = made.run(*made.arguments), batch.entries[4].visible
    topk = min(one.config.index_topk, one.visible(4))
    assert lists.shape == (tokens, 128 + topk)
    assert ((lists >= batch.window_rows).sum(1) == visible.clamp_max(topk)).all()
    # of the table only the cells that are listed
    other = sum(tensor.nbytes for number, tensor in enumerate(made.arguments) if number != 2)
    assert made.read == other + 8 * tokens * topk


@pytest.mark.parametrize("tokens", [1, 65])
def test_cases_are_chosen_before_anything_is_made(tokens, monkeypatch):
    monkeypatch.setattr(BenchmarkInputs, "_step", lambda *_: pytest.fail("made"))
    assert select_cases(bench(tokens=tokens), ["gemm"])


@pytest.mark.slow
def test_a_large_case_allocates_nothing(monkeypatch):
    monkeypatch.setattr(BenchmarkInputs, "weight", lambda *_: pytest.fail("drawn"))
    big = bench("pro", tokens=1)
    assert "GB" in measure(case(big, "routed_experts"), big, "torch").skipped
    assert "GFLOP" in measure(case(bench("flash", tokens=4096), "wq_a"), bench("flash", tokens=4096), "torch").skipped


def test_an_operation_that_refuses_its_input_is_skipped(monkeypatch):
    def refuse(*inputs):
        raise KernelUnsupported("not these")

    monkeypatch.setattr(gemm, "rounded_linear", refuse)
    assert measure(case(bench(), "wq_a"), bench(), "torch").skipped == "not these"


def test_deviation():
    x = torch.tensor([3.0, 4.0])
    assert deviation([x], [x], EXACT) == 0
    assert deviation([x + 1e-6], [x], EXACT) == float("inf")
    assert deviation([x + torch.tensor([0.05, 0.0])], [x], ONE_ROUNDING) == pytest.approx(0.01, rel=1e-3)
    assert deviation([x, x * float("nan")], [x, x], ONE_ROUNDING) == float("inf")
    assert deviation([x[:1]], [x], ONE_ROUNDING) == float("inf")
    far = torch.tensor([10**9])
    assert deviation([far], [far], ONE_ROUNDING) == 0
    assert deviation([far + 1], [far], ONE_ROUNDING) == float("inf")


@pytest.mark.gpu
def test_every_operation_on_a_gpu():
    device = torch.device("cuda")
    ceilings = measure_ceilings(device)
    for one in profile_kernels(read_shapes("flash", 1), [1, 65], 4096, [], device, "triton"):
        assert one.timing, (one.case.name, one.wrong, one.skipped)
        assert one.timing.method == "graph", one.case.name  # no kernel waits for the host
        # a bound of the time would fail beside other tests, which slow the ceilings and not the operation
        assert one.record(ceilings)["of_bandwidth"] > 0, one.case.name
