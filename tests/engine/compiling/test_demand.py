"""Which steps a run can have."""

from dataclasses import replace

import pytest

from dsv4cli.engine.compiling.demand import Demand, Span, Step, decoding, demand_of, prompts
from dsv4cli.engine.config.presets import PRESETS
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.runtime.step_sizes import DECODE_BATCHES
from dsv4cli.engine.settings import NO_DRAFTS, Drafting, Limits, Sampling
from dsv4cli.engine.weights.reserve import Workload

GREEDY = Sampling(0.0)


def demand(lengths: list[int] | None, drafts: int | None = None, drawn: bool = True, **limits: int) -> Demand:
    config, samplings = parse_config(PRESETS["flash"], "flash"), [replace(GREEDY, seed=3)]
    numerics, drafting = Numerics.reference(), Drafting(drafts)
    return demand_of(config, Formats(), numerics, Limits(**limits), samplings, drafting, lengths, sampled=drawn)


def test_a_prompt_of_known_length_has_its_chunks():
    one = demand([5000], max_tokens=100)
    assert (one.longest, one.samplings, one.drafts) == ((5100,), (GREEDY,), 3)
    assert list(prompts(one)) == [Step(((5000, 0),), GREEDY, 5100, 0, 3)]
    one = replace(one, chunk=4096)
    assert list(prompts(one)) == [Step(((4096, 0),), GREEDY, 5100), Step(((904, 4096),), GREEDY, 5100, 0, 3)]


def test_what_follows_has_as_many_drafts_as_there_may_be():
    steps = list(decoding(demand([5], max_tokens=3), DECODE_BATCHES))
    assert steps == [Step(((1, 1),), GREEDY, 8, verified, 3) for verified in range(4)]
    assert list(decoding(demand([5], drafts=0, max_tokens=3), DECODE_BATCHES)) == [Step(((1, 1),), GREEDY, 8)]


def test_several_sequences_are_captured_as_the_next_power_of_two_with_fewer_drafts():
    steps = list(decoding(demand([5] * 20), DECODE_BATCHES))
    most = {len(step.chunks): step.drafts for step in steps}
    assert most == {1: 3, 2: 3, 4: 3, 8: 3, 16: 3, 32: 1}


def test_a_conversation_grows():
    one = demand(None, max_context=40_000)
    assert one.longest == (8192, 16_384, 32_768, 40_000)
    assert one.length is None


def test_many_conversations_are_captured_together():
    one = replace(demand(None), sequences=64, load=Workload(131_072, 64, None, serves=True))
    config, numerics = parse_config(PRESETS["flash"], "flash"), Numerics.reference()
    same = demand_of(config, Formats(), numerics, Limits(), [GREEDY], Drafting(None), None, sequences=64)
    assert same == one
    assert max(len(step.chunks) for step in decoding(one, DECODE_BATCHES)) == 64


def test_what_draws_and_what_computes_are_not_multiplied():
    """What draws knows how many rows there are, drafts of how many sequences: each is met with every number of them."""
    config, numerics, warm = parse_config(PRESETS["flash"], "flash"), Numerics.reference(), Sampling(0.7)
    samplings = [Sampling(), GREEDY, warm, Sampling(1.0, 0.5), Sampling(1.0, top_k=5, presence_penalty=0.5)]
    one = demand_of(config, Formats(), numerics, Limits(), samplings, Drafting(None), None, sequences=64)
    assert len(one.samplings) == 4  # of two that draw alike one
    steps = list(decoding(one, DECODE_BATCHES))
    far = {(len(step.chunks), step.longest) for step in steps if step.sampling == one.samplings[0]}
    near = {(len(step.chunks), step.sampling) for step in steps if step.longest == one.longest[0]}
    assert (len(far), len(near)) == (7 * len(one.longest), 7 * 4)
    spans = [span for span in prompts(one) if isinstance(span, Span)]
    assert max(span.last for span in spans if span.each == 2 and span.sampling == GREEDY) == 64
    assert {span.sampling for span in spans if span.each != 2} == {one.samplings[0]}
    assert {(span.first, span.each) for span in spans if span.count and span.each != 2} == {(1, 0)}
    assert {span.count for span in spans if span.each == 2} == {3}
    assert len(steps) + len(spans) < 550


@pytest.mark.parametrize(("lengths", "most"), [(None, 8192), ([9, 9], 8192)])
def test_prompts_of_unknown_length_have_every_number_of_tokens(lengths, most):
    spans = [span for span in prompts(demand(lengths)) if isinstance(span, Span) and not (span.place or span.each)]
    numbers = {number for span in spans for number in (span.first, span.last)}
    assert (min(numbers), max(numbers)) == (1, most)
    assert [span.last for span in spans[:-1]] == [span.first for span in spans[1:]]


def test_scores_draw_nothing():
    one = demand([7], drawn=False)
    assert (one.longest, one.drafts, one.config.drafter) == ((), 0, "none")
    assert list(prompts(one)) == [Step(((7, 0),), GREEDY, None)]
    assert not list(decoding(one, DECODE_BATCHES))


def test_steps_far_behind_are_captured_for_as_many_tokens():
    spans = [span for span in prompts(demand(None)) if isinstance(span, Span) and span.place]
    assert max(span.place for span in spans) > 16_384
    assert all(span.longest > span.place + span.last for span in spans)


def test_one_layer_of_each_gguf_type_is_kept_with_its_types():
    config = parse_config(PRESETS["flash"], "flash").without_drafter()
    types = {f"blk.{layer}.ffn_gate_exps.weight": "IQ2_XXS" if layer < 20 else "Q2_K" for layer in range(43)}
    one = demand_of(
        config, Formats(), Numerics.reference(), Limits(), [Sampling()], NO_DRAFTS, None,
        gguf_types=types | {"output.weight": "Q6_K"},
    )  # fmt: skip
    pytest.importorskip("triton")
    from dsv4cli.engine.compiling.dry_model import one_of_each_kind

    reduced = one_of_each_kind(one)
    last, found = reduced.config.num_hidden_layers - 1, reduced.gguf_types
    assert last < 10
    assert [name for name, kind in found.items() if kind == "Q2_K"] == [f"blk.{last}.ffn_gate_exps.weight"]
    assert found["output.weight"] == "Q6_K"
    assert len(found) == last + 2
