"""What is left beside weights, held against the tensors that steps make on a GPU that is not there."""

import json
from dataclasses import replace

import pytest

from dsv4cli.engine.checkpoint.layout import loaded_tensors
from dsv4cli.engine.config.capacity import captured_rows, columns_of
from dsv4cli.engine.config.presets import FLASH, PRESETS, PRO
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.inspection.fit.forms import forms_of
from dsv4cli.engine.runtime.limits import workload_of
from dsv4cli.engine.settings import Limits
from dsv4cli.engine.weights.reserve import (
    CHUNKS,
    FAR,
    GAPS,
    NCCL,
    Workload,
    cache_bytes,
    prefill_graph_bytes,
    reserves,
    ring_bytes,
)
from dsv4cli.engine.weights.sizes import measure
from tests.support.forked import output_of

CONFIGS = {"flash": parse_config(FLASH, "flash").without_drafter(), "pro": parse_config(PRO, "pro").without_drafter()}


# preset, tokens of the step, tokens before it, ranks, type of a GGUF file's matrices
CASES = [
    ("flash", 4096, 0, 1),
    ("flash", 8192, 122_880, 1),
    ("flash", 1024, 1_000_000, 1),
    ("flash", 4096, 28_672, 2),
    ("flash", 8192, 0, 8),
    ("flash", 4096, 1_000_000, 4),
    ("pro", 4096, 0, 1),
    ("pro", 4096, 126_976, 4),
    ("flash", 1024, 0, 1, "Q4_K"),
    ("flash", 8192, 0, 1, "Q4_K"),
]
# preset, rows of a captured step, tokens of the longest sequence, ranks
CAPTURED = [("flash", 2048, 8192, 1), ("flash", 4096, FAR, 2), ("flash-0731", 4096, 8192, 4), ("pro", 4096, FAR, 8)]


# by default each preset, with one rank and several, the longest context, and captured steps of both kinds
FEW = [CASES[0], CASES[5], CASES[7], CASES[8], CAPTURED[1], CAPTURED[2]]


def few_of(cases):
    return [pytest.param(case, marks=() if case in FEW else pytest.mark.slow) for case in cases]


@pytest.fixture(scope="module")
def peaks(request):
    """The most that the tensors of each case take; of a captured step also what its output keeps."""
    named = {item.callspec.params["case"] for item in request.session.items if "peaks" in item.fixturenames}
    cases = [case for case in [*CASES, *CAPTURED] if case in named]
    words = [",".join(map(str, (*case, "captured") if case in CAPTURED else case)) for case in cases]
    found = json.loads(output_of("-m", "tests.support.dry_peaks", *words, TRITON_INTERPRET=None))
    return dict(zip(cases, found, strict=True))


@pytest.mark.parametrize("case", few_of(CASES), ids=str)
def test_the_tensors_of_a_step(peaks, case):
    name, chunk, place, ranks, *kind = case
    (found,) = reserves(CONFIGS[name], Formats(), Workload(place + chunk, 1, chunk), ranks, gguf=bool(kind))
    estimate = found.step * GAPS // (GAPS + 1)
    # never less than the tensors, and at most a sixth more
    assert peaks[case] <= estimate <= 1.16 * peaks[case]


@pytest.mark.parametrize("case", few_of(CAPTURED), ids=str)
def test_the_tensors_of_captured_steps(peaks, case):
    """Those of the largest, with its output, and the outputs of the others."""
    name, rows, longest, ranks = case
    config, load = parse_config(PRESETS[name], name), Workload(longest, 64, serves=True)
    sizes = captured_rows(columns_of(longest), ranks)
    estimate = prefill_graph_bytes(config, load, ranks, divides=True) * GAPS // (GAPS + 1)
    most, kept = peaks[case]
    needed = most + kept * (sum(sizes) - rows) // rows
    assert rows == sizes[-1]
    assert needed <= estimate <= 1.08 * needed


def test_only_a_server_on_a_gpu_captures_prefill_steps():
    config, serves = CONFIGS["flash"], Workload(FAR, 64, 4096, serves=True, cache=10**9)

    def overhead(load: Workload, ranks: int = 1, **where: bool) -> int:
        (found,) = reserves(config, Formats(), load, ranks, **where)
        return found.overhead

    rest = overhead(replace(serves, serves=False))
    assert overhead(serves) == rest + prefill_graph_bytes(config, serves, 1, divides=False)
    assert overhead(serves, triton=False) == rest
    assert overhead(serves, on_gpu=False) == 0
    # ranks that divide no rows hold more, and only several ranks capture the largest steps
    whole, divided = (prefill_graph_bytes(config, serves, 2, divides=divides) for divides in (False, True))
    assert overhead(serves, 2) == rest + NCCL + divided
    assert overhead(serves, 2, divides=False) == rest + NCCL + whole
    assert divided < whole
    assert prefill_graph_bytes(config, serves, 1, divides=False) < divided


def test_what_is_left_for_each_chunk():
    config, load = CONFIGS["flash"], Workload(FAR)
    found = reserves(config, Formats(), load, 1)
    assert [one.chunk for one in found] == list(CHUNKS)
    assert [one.total for one in found] == sorted((one.total for one in found), reverse=True)
    assert {one.cache for one in found} == {cache_bytes(config, load)}
    # a fixed chunk is the only one; several ranks have NCCL too; references take more, a CPU has no gaps
    (fixed,) = reserves(config, Formats(), replace(load, chunk=4096), 1)
    assert fixed == found[1]
    assert reserves(config, Formats(), load, 2)[0].overhead > found[0].overhead
    assert reserves(config, Formats(), load, 1, triton=False)[1].step > 3 * fixed.step
    assert reserves(config, Formats(), load, 1, on_gpu=False)[1].overhead == 0


def test_a_server_leaves_half_of_the_rest_to_its_cache():
    config = CONFIGS["flash"]
    load = workload_of(config, Limits(prefill_chunk=4096), None, sequences=64)
    assert load == Workload(FAR, 64, 4096, serves=True)
    (one,), rings = reserves(config, Formats(), load, 1), 64 * ring_bytes(config)
    assert one.cache - rings == one.total // 2
    (bounded,) = reserves(config, Formats(), replace(load, cache=5 * 10**9), 1)
    assert bounded.cache == rings + 5 * 10**9


def test_what_prompts_ask_of_a_model():
    config, limits = CONFIGS["flash"], Limits(max_tokens=100, max_context=5000)
    assert workload_of(config, limits, None) == Workload(5000)
    assert workload_of(config, Limits(), None) == Workload(FAR)
    assert workload_of(config, limits, [10, 4800]) == Workload(4900, 2)
    assert workload_of(config, limits, [10, 4950]) == Workload(5000, 2)
    assert workload_of(config, limits, [10, 4950], sampled=False) == Workload(4950, 2)
    assert workload_of(config, limits, [10] * 99).batch == 64


def test_a_cpu_keeps_memory_for_the_values_of_blocks():
    config, wide, load = CONFIGS["flash"], Formats("f32", "f32", "f32"), Workload(64, 1, 64)
    [blocks] = [form.table for form in forms_of("flash", config) if form.name == "4-bit GGUF"]
    assert not measure(loaded_tensors(config, wide).values(), config.num_experts_per_tok, 1).gguf
    assert measure(blocks.values(), config.num_experts_per_tok, 1).gguf
    (of_values,) = reserves(config, wide, load, 1, on_gpu=False)
    (of_blocks,) = reserves(config, wide, load, 1, on_gpu=False, gguf=True)
    # at least one matrix of an expert, in fp32
    assert of_blocks.step - of_values.step >= 4 * config.hidden_size * config.moe_intermediate_size
