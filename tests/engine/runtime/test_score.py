"""Scores against the logits of one prefill, and generated tokens scored again."""

import math

import pytest
import torch

from dsv4cli.engine.runtime import engine as engine_module
from dsv4cli.engine.runtime import runner, score
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.sampling import logprobs
from dsv4cli.engine.runtime.score import Score
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.errors import UsageError
from tests.support.slow import slow
from tests.support.small_model import by_number, drawn, engine, model, prompts

# fp32 sums in another order
BOUND = 1e-4


def scores(sequences: list[list[int]], **limits) -> list[Score]:
    found = list(score.score(model(), sequences, Limits(**limits), "cpu"))
    assert sorted(one.number for one in found) == list(range(len(sequences)))
    return sorted(found, key=lambda one: one.number)


def prefilled(ids: list[int]) -> torch.Tensor:
    """Log-probabilities [n, V] after each token."""
    cache = Cache(model().config, model().numerics)
    with torch.no_grad():
        batch = make_batch(cache, [(cache.allocate(), ids)])
        return model().logits(model()(batch, cache.layers).streams).log_softmax(-1)


@pytest.mark.parametrize(("chunk", "slots", "rows"), [(2048, 64, 256), (30, 2, 7)])
def test_scores_are_those_of_one_prefill(monkeypatch, chunk, slots, rows):
    monkeypatch.setattr(runner, "MAX_SLOTS", slots)
    monkeypatch.setattr(logprobs, "LOGIT_ROWS", rows)
    for one, ids in zip(scores(prompts(), prefill_chunk=chunk, logprobs=3), prompts(), strict=True):
        expected = prefilled(ids)
        assert one.ids == ids
        assert one.logprobs[0] is None
        following = expected[torch.arange(len(ids) - 1), ids[1:]]
        torch.testing.assert_close(torch.tensor(one.logprobs[1:]), following, rtol=0, atol=BOUND)
        best = expected.topk(3).values
        ours = torch.tensor([[value for _, value in top] for top in one.top])
        torch.testing.assert_close(ours, best, rtol=0, atol=BOUND)


@pytest.mark.parametrize("chunk", [*slow(1), 50, *slow(2048)])
def test_a_generated_answer_scores_as_it_was_drawn(chunk):
    """One test for cache, positions and masks: decoding against a prefill of prompt and answer."""
    answers = by_number(drawn(engine(prompts(), Sampling(seed=2), max_tokens=10, logprobs=4)))
    whole = [[*ids, *(step.id for step in answers[number])] for number, ids in enumerate(prompts())]
    for one, ids in zip(scores(whole, prefill_chunk=chunk, logprobs=4), prompts(), strict=True):
        tokens, before = answers[one.number], prefilled(one.ids)[:-1]
        following = before.gather(-1, torch.tensor(one.ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(one.logprobs[1:]), following, rtol=0, atol=BOUND)
        assert one.logprobs[len(ids) :] == pytest.approx([step.logprob for step in tokens], abs=BOUND)
        for top, step in zip(one.top[len(ids) - 1 :], tokens, strict=False):
            assert [value for _, value in top] == pytest.approx([value for _, value in step.top], abs=BOUND)


def test_scores_come_as_they_are_complete_and_nothing_is_held(monkeypatch):
    made = []
    whole = engine_module.Runner
    monkeypatch.setattr(engine_module, "Runner", lambda *given: made.append(whole(*given)) or made[-1])
    found = score.score(model(), [[5] * 60, [6, 7]], Limits(prefill_chunk=8), "cpu")
    assert [one.number for one in found] == [1, 0]
    assert (made[0].cache.free_slots, made[0].cache.used_blocks) == (2, 0)


@pytest.mark.parametrize(
    ("logprobs", "perplexity"),
    [([None], None), ([None, 0.0], 1.0), ([None, -1.0, -3.0], math.exp(2)), ([None, -1e4], None)],
)
def test_perplexity(logprobs, perplexity):
    assert Score(0, [1] * len(logprobs), logprobs).perplexity == pytest.approx(perplexity)


@pytest.mark.parametrize(
    ("texts", "words"),
    [([[]], "no tokens"), ([[1], [512]], "text 1 has the token id 512"), ([[1] * 10], "the context limit is 9 tokens")],
)
def test_texts_that_the_model_cannot_take(texts, words):
    with pytest.raises(UsageError, match=words):
        scores(texts, max_context=9)
    assert len(scores([[1] * 9], max_context=9)) == 1
