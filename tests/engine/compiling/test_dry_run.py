"""The list of kernels, found without data: whatever a run launches is on it, under the name that Triton looks for."""

import json
from dataclasses import replace
from unittest.mock import patch

import pytest

from dsv4cli.engine.compiling.demand import Step, prompts
from tests.engine.compiling.test_demand import demand
from tests.support.forked import output_of
from tests.support.gguf_models import UNSLOTH, write_nano

pytest.importorskip("triton")

from dsv4cli.engine.compiling.dry_run import DryRun
from dsv4cli.engine.compiling.no_data import CUDA
from dsv4cli.kernels.card import CARDS, described
from dsv4cli.kernels.experts.kernel.fp8_hopper import WIDTHS, _is_few, chunk
from dsv4cli.kernels.indexer.kernel import tokens_per_program


def dry_run(tmp_path, *arguments: object, module: str = "dry_runs") -> dict[str, object]:
    """The lines of tests/support/dry_runs.py. Triton reads TRITON_INTERPRET when it is imported: another process."""
    words = "-m", f"tests.support.{module}", *map(str, arguments)
    found: dict[str, object] = json.loads(output_of(*words, TRITON_INTERPRET=None, TRITON_CACHE_DIR=str(tmp_path)))
    return found


def test_a_launch_finds_what_was_compiled_ahead(tmp_path):
    found = dry_run(tmp_path, "tiny", 0, 24, 1, 0)
    assert {"_step_metadata", "_rms_norm", "_scores", "up", "_race", "fused_connect"} <= set(found["names"])
    assert found["anew"] == {"ahead": [True, False], "launched": [False]}
    assert (found["again"], found["kept"], found["same_keys"]) == (True, False, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "sequences", "context", "ranks"),
    [
        ("tiny", 16, 900, 1),
        ("tiny", 4, 200, 2),
        ("flash", 1, 16_384, 1),
        ("flash-0731", 1, 4096, 1),
        ("pro", 1, 4096, 8),
    ],
)
def test_random_steps_launch_nothing_else(tmp_path, preset, sequences, context, ranks):
    found = dry_run(tmp_path, preset, sequences, context, ranks, 60)
    assert found["missed"] == []
    assert found["found"] < 400
    assert found["widths"] == ([list(widths) for _, widths in WIDTHS] if preset.startswith("flash") else [])


@pytest.mark.parametrize(("experts", "width"), [(8, 4096), (192, 4096), (256, 4096), (384, 7168), (1, 512)])
@pytest.mark.parametrize("lengths", [None, [9, 9]])
def test_the_search_finds_every_width_of_chunks_of_experts(experts, width, lengths):
    """The search compares only the ends of spans, so a width that is used within one alone would not be found."""

    def widths(tokens: int) -> tuple[int, int] | None:
        return chunk(6 * tokens, experts, width) if _is_few(6 * tokens, experts, width) else None

    found = set()
    dry = DryRun.__new__(DryRun)
    dry._demand = demand(lengths, max_context=8192)

    def step(one: Step) -> frozenset[object]:
        kernels = frozenset({widths(sum(tokens for tokens, _ in one.chunks))})
        found.update(kernels)
        return kernels

    with patch.object(dry, "_step", step):
        for task in prompts(dry._demand):
            step(task) if isinstance(task, Step) else dry._explore(task)
    assert found == {widths(tokens) for tokens in range(1, 8193)}


@pytest.mark.parametrize("chunk", [128, 512, 4096, 8192])
@pytest.mark.parametrize("lengths", [None, [9, 9]])
def test_the_search_finds_every_number_of_tokens_that_share_keys(chunk, lengths):
    found = set()
    dry = DryRun.__new__(DryRun)
    dry._demand = replace(demand(lengths, max_context=262_144, max_tokens=262_144), chunk=chunk)

    def step(one: Step) -> frozenset[object]:
        entries = max(tokens + place for tokens, place in one.chunks) // 4
        kernels = frozenset({tokens_per_program(sum(tokens for tokens, _ in one.chunks), entries, CUDA)})
        found.update(kernels)
        return kernels

    with patch.object(dry, "_step", step), described(CARDS["h200"]):
        for task in prompts(dry._demand):
            step(task) if isinstance(task, Step) else dry._explore(task)
    assert found == {8, 64}


def test_the_kernels_of_gguf_blocks_are_compiled_ahead(tmp_path):
    path, _ = write_nano(tmp_path, UNSLOTH, drafter="nextn")
    found = dry_run(tmp_path, path, 0, 24, 1, 0)
    assert {"_few", "_up_kernel", "_down_kernel"} <= set(found["names"])
    assert found["again"]


@pytest.mark.slow
def test_random_steps_of_gguf_blocks_launch_nothing_else(tmp_path):
    path, _ = write_nano(tmp_path, UNSLOTH, drafter="nextn")
    found = dry_run(tmp_path, path, 4, 900, 1, 60)
    assert found["missed"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "context", "ranks"), [("tiny", 8192, 2), ("flash", 131_072, 4)])
def test_the_captured_steps_of_ranks_launch_nothing_else(tmp_path, preset, context, ranks):
    """So what is compiled ahead for steps of as many tokens, and for smaller captured ones, suffices."""
    found = dry_run(tmp_path, preset, 4, context, ranks, module="dry_prefill_graphs")
    assert found["new"] == []
    assert found["seen"] > 20
