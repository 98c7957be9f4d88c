"""The DSpark drafter against its formulas written out for one sequence (official model.py of Flash-0731)."""

import pytest
import torch

from dsv4cli.engine.config.presets import TINY
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.model.head import collapse
from dsv4cli.engine.model.moe import matrices
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.rope import frequencies
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.drafts.drafters import DSparkDrafter, Newest
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.weights.load import build_random
from dsv4cli.kernels import experts, hyper_connections, norm, rope
from dsv4cli.kernels.step_metadata.ref import rotation
from tests.support.slow import slow

DSPARK = TINY | {
    "compress_ratios": [0, 0, 4, 128, 4, 0, 0, 0],
    "dspark_block_size": 5,
    "dspark_noise_token_id": 300,
    "dspark_target_layer_ids": [2, 3, 4],
    "dspark_markov_rank": 32,
}
# fp32 sums in another order, through three stages
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def model():
    config = parse_config(DSPARK, "test")
    return build_random(config, Numerics.plain(), formats=Formats("f32", "f32", "f32"))


def run_target(model, cache, work):
    """A target step of each (sequence, ids); the drafter takes its context in."""
    batch = make_batch(cache, work)
    hidden = model(batch, cache.layers)
    model.mtp.absorb(hidden.context, batch, cache.layers)
    for sequence, ids in work:
        cache.advance(sequence, len(ids))
    return hidden


def drafts(model, cache, work):
    """Five drafts behind each sequence's newest token, greedy: Drafts, and the logits of each fp32 [B, 5, V]."""
    rows = []

    def choose(logits, number):
        rows.append(logits)
        return logits.argmax(-1)

    numbers = [[token, sequence.length, sequence.slot] for sequence, token in work]
    newest = Newest(*torch.tensor(numbers).unbind(1), torch.empty(len(work), 0))
    return DSparkDrafter(model, cache).draft(newest, 5, choose), torch.stack(rows, 1)


def keys_by_hand(attn, h, turn):
    return rope.rotate(attn.kv_norm(attn.wkv(h)), turn)


def stage_by_hand(stage, streams, context_keys, config, start):
    """One stage over the draft block [n, N, D]: every row attends to the last 128 context keys and the whole block."""
    positions = torch.arange(start, start + len(streams))
    turn = rotation(positions, frequencies(config, 0))
    x, post, comb = stage.connect(streams, "attn")
    h, attn = stage.attn_norm(x), stage.attn
    q = attn.wq_b(attn.q_norm(attn.wq_a(h))).unflatten(-1, (-1, config.head_dim))
    q = rope.rotate(norm.head_norm(q, config.rms_norm_eps), turn)
    keys = torch.cat((context_keys[-config.sliding_window :], keys_by_hand(attn, h, turn)))
    logits = torch.einsum("thd,kd->thk", q, keys) * config.head_dim**-0.5
    sink = attn.attn_sink[None, :, None].expand(len(streams), -1, 1)
    chances = torch.cat((logits, sink), -1).softmax(-1)[..., :-1]
    o = rope.rotate(torch.einsum("thk,kd->thd", chances, keys), turn.conj())
    streams = hyper_connections.connect_post(attn.output(o, len(o)), streams, post, comb)
    x, post, comb = stage.connect(streams, "ffn")
    ids = torch.zeros(len(streams), dtype=torch.int64)
    normed, ffn = stage.ffn_norm(x), stage.ffn
    chosen, weights = ffn.gate(normed, ids)
    y = experts.routed_experts(normed, matrices(ffn.experts), chosen, weights, ffn.limit, False)
    y = y + experts.shared_expert(normed, matrices(ffn.shared_experts), ffn.limit, False)
    return hyper_connections.connect_post(y, streams, post, comb)


def draft_by_hand(model, context, token):
    """Tokens, logits and confidence of one sequence whose context rows [n, L * D] are all of its tokens."""
    config, stages = model.config, model.mtp.stages()
    main = norm.rms_norm(stages[0].main_proj(context), stages[0].main_norm.weight, config.rms_norm_eps)
    turn = rotation(torch.arange(len(main)), frequencies(config, 0))
    ids = torch.tensor([token, 300, 300, 300, 300])
    streams = model.embed(ids)[:, None].repeat(1, config.hc_mult, 1)
    for stage in stages:
        streams = stage_by_hand(stage, streams, keys_by_hand(stage.attn, main, turn), config, len(main))
    last = stages[-1]
    x = collapse(last, config, streams)
    logits = last.norm(x) @ model.head.weight.T
    w1, w2 = last.markov_head.markov_w1.weight, last.markov_head.markov_w2.weight
    tokens, rows, confidence = [], [], []
    for position in range(5):
        memory = w1[tokens[-1] if tokens else token]
        rows.append(logits[position] + memory @ w2.T)
        tokens.append(int(rows[-1].argmax()))
        confidence.append((torch.cat((x[position], memory)) @ last.confidence_head.proj.weight.T)[0])
    return tokens, torch.stack(rows), torch.stack(confidence)


@pytest.mark.parametrize("length", [129, *slow(1, 5, 127, 128, 140, 300)])
def test_drafts_follow_the_formulas(model, length):
    ids = torch.randint(0, 512, (length,)).tolist()
    cache = Cache(model.config, model.numerics)
    sequence = cache.allocate()
    hidden = run_target(model, cache, [(sequence, ids)])
    found, rows = drafts(model, cache, [(sequence, 7)])
    tokens, logits, confidence = draft_by_hand(model, hidden.context, 7)
    assert found.tokens[0].tolist() == tokens
    torch.testing.assert_close(rows[0], logits, rtol=TOLERANCE, atol=TOLERANCE * float(logits.abs().max()))
    torch.testing.assert_close(found.chances[0], confidence.sigmoid(), rtol=TOLERANCE, atol=TOLERANCE)


def test_context_is_the_mean_of_the_streams_of_the_target_layers(model):
    cache = Cache(model.config, model.numerics)
    batch = make_batch(cache, [(cache.allocate(), [5, 6, 7])])
    outputs = []
    hooks = [
        model.layers[n].register_forward_hook(lambda _m, _i, out: outputs.append(out.connect_post())) for n in (2, 3, 4)
    ]
    context = model(batch, cache.layers).context
    for hook in hooks:
        hook.remove()
    assert torch.equal(context, torch.cat([streams.mean(1) for streams in outputs], -1))


def test_ragged_drafts_in_steps_equal_each_alone(model):
    """Contexts taken in by chunks, a draft between them, another sequence beside it: the drafts stay the same."""
    texts = [torch.randint(0, 512, (length,)).tolist() for length in (3, 150)]
    alone = []
    for ids in texts:
        cache = Cache(model.config, model.numerics)
        sequence = cache.allocate()
        run_target(model, cache, [(sequence, ids)])
        alone.append(drafts(model, cache, [(sequence, 9)]))
    cache = Cache(model.config, model.numerics, slots=2)
    first, second = cache.allocate(), cache.allocate()
    run_target(model, cache, [(first, texts[0][:1]), (second, texts[1][:131])])
    drafts(model, cache, [(first, 4), (second, 4)])
    run_target(model, cache, [(second, texts[1][131:]), (first, texts[0][1:])])
    both, rows = drafts(model, cache, [(first, 9), (second, 9)])
    for row, (one, [logits]) in enumerate(alone):
        assert both.tokens[row].tolist() == one.tokens[0].tolist()
        bound = TOLERANCE * float(logits.abs().max())
        torch.testing.assert_close(rows[row], logits, rtol=TOLERANCE, atol=bound)
