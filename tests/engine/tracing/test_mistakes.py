"""Real mistakes of this field, put back into the engine: bisecting names the stage of each.

Behind each stands where it was made; numbers are issues and pull requests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.runtime.state.ring_snapshots import RingSnapshots
from dsv4cli.engine.settings import Drafting
from dsv4cli.engine.tracing.walk import Company, Walk
from dsv4cli.kernels.attention import ref as attention
from dsv4cli.kernels.formats import FP8_BLOCK
from dsv4cli.kernels.qk_norm_rope import ref as keys
from dsv4cli.kernels.routing import ref as routing
from tests.engine.model.test_mutations import MUTATIONS, ROUNDING_MUTATIONS, Mutation
from tests.support import tracing

KNOWN = MUTATIONS | ROUNDING_MUTATIONS
FLASH, PRO = "tiny-flash", "tiny-pro"
# tokens of a prompt: enough for a window and every ratio, and where fewer show it
MANY, FEW = 133, 40


@dataclass(frozen=True)
class Mistake:
    """What is wrong, in the code or in the loaded weights, in which net and how it shows: chunk tokens in a step of a
    prompt of so many, behind another text or not, with drafts or without. where: the stage that is named."""

    where: str
    wrong: Mutation | Callable[[Transformer], None]
    net: str = FLASH
    prompt: int = MANY
    chunk: int = 4096
    after_another: bool = False
    drafts: int = 0
    always: bool = False

    @property
    def later(self) -> int:
        """Tokens behind the prompt."""
        return 12 if self.drafts else 2

    def other_side(self, patch: pytest.MonkeyPatch) -> Walk:
        """The engine with the mistake."""
        if isinstance(self.wrong, Mutation):
            self.wrong.put_in(patch)
        model = tracing.model(self.net)
        if self.wrong is ring_without_spare_rows:
            ring_without_spare_rows(patch)
        elif not isinstance(self.wrong, Mutation):
            self.wrong(model)
        company = Company(before=[tracing.text(150)] if self.after_another else [])
        return Walk(model, tracing.CPU, self.chunk, Drafting(self.drafts, always=True), company=company)


def scale_of_ones(model: Transformer) -> None:
    linear = model.layers[1].attn.wo_b
    if linear.weight.dtype == torch.float32:  # loading has applied the scale, and nothing reads it any more
        applied = linear.scale.float().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
        linear.weight.div_(applied[: linear.weight.shape[0], : linear.weight.shape[1]])
    linear.scale.view(torch.uint8).fill_(127)


def fp32_in_bf16(model: Transformer) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float32 and "hc_" in name:
            parameter.copy_(parameter.bfloat16())


def gate_and_up_swapped(model: Transformer) -> None:
    experts = model.layers[0].ffn.experts
    experts.w1, experts.w3 = experts.w3, experts.w1


def ring_without_spare_rows(patch: pytest.MonkeyPatch) -> None:
    def roll_back(self, sequence, tokens):
        sequence.length -= tokens

    patch.setitem(Cache.__init__.__kwdefaults__, "rollback", 0)
    patch.setattr(Cache, "roll_back", roll_back)


def route_scale_twice(right):
    return lambda score, chosen, scale: right(score, chosen, scale * scale)


def hash_layer_by_score(right):
    def route_by_id(x, weight, table, ids, scale, routed):
        return routing.route(x, weight, torch.zeros(len(weight)), table.shape[1], scale)

    return route_by_id


def half_split(right):
    def rotate(x, turn):
        order = torch.arange(x.shape[-1])
        size = 2 * turn.shape[-1]
        split = order[-size:].view(2, -1).T.flatten()
        order[-size:] = split
        return right(x[..., order], turn)[..., order.argsort()]

    return rotate


def softmax_scale(right):
    return lambda q, window, entries, index, sink, scale, *rest: right(
        q, window, entries, index, sink, scale * 1.2772588722, *rest
    )


MISTAKES: dict[str, Mistake] = {
    # --- loading
    # vLLM 51946, 43416: a tensor that the index lacks gets a scale of ones
    "scale of ones": Mistake("layer 1, attention, after the output projection", scale_of_ones),
    # transformers 46167, NeMo Automodel 2143: saved in bf16
    "fp32 tensors in bf16": Mistake("layer 0, hyper-connection of attention, post weights", fp32_in_bf16),
    # mlx-vlm 2277
    "gate and up swapped": Mistake("layer 0, experts, their sum", gate_and_up_swapped),
    # ds4, several converters
    "nibbles swapped": Mistake("layer 0, experts, their sum", KNOWN["nibbles swapped"], prompt=FEW),
    # --- rope and positions
    # transformers 45910, sglang 34788, mlx-lm 1189: one theta for all
    "compressed theta in SWA layers": Mistake("layer 0, attention, queries", KNOWN["compressed theta in SWA layers"]),
    "no YaRN": Mistake("layer 0, attention, queries", KNOWN["no YaRN"], PRO, 300),
    # Primus 928, 930
    "mscale in the softmax": Mistake(
        "layer 0, attention, after the sink", Mutation(attention, "sparse_attention", softmax_scale)
    ),
    # ds4 c9dd949, ATOM's first pull requests
    "entries rotated at g": Mistake(
        "layer 2, attention, compressed entries", KNOWN["entries rotated at g"], prompt=FEW
    ),
    "entries rotated at the last token": Mistake(
        "layer 2, attention, compressed entries", KNOWN["entries rotated at the group's last token"]
    ),
    # Primus 930, ATOM
    "no inverse rope": Mistake("layer 0, attention, after the sink", KNOWN["no inverse rope"]),
    # several ports
    "half-split rope": Mistake("layer 0, attention, queries", Mutation(keys, "rotate", half_split)),
    # --- numerics
    # ATOM cd61e44e8: rounded to nearest instead of up
    "scale rounded to nearest": Mistake(
        "layer 0, attention, latent queries before their norm", KNOWN["scale rounded to nearest"]
    ),
    # the first release of kernel.py
    "keys not rounded": Mistake(
        "layer 0, attention, keys of the window", KNOWN["keys not rounded"], prompt=FEW, always=True
    ),
    # sglang 23752, transformers 46018, mlx-vlm 1469, ds4 5bc1e6d
    "shared expert unclamped": Mistake("layer 0, experts, their sum", KNOWN["shared expert unclamped"], PRO),
    # ATOM
    "gate clamped below": Mistake("layer 0, experts, their sum", KNOWN["gate clamped below"], PRO),
    "up clamped only above": Mistake("layer 0, experts, their sum", KNOWN["up clamped only above"], PRO),
    # transformers
    "routing weight after w2": Mistake("layer 0, experts, their sum", KNOWN["routing weight after w2"]),
    "input of w2 not rounded": Mistake("layer 0, experts, their sum", KNOWN["input of w2 not rounded"]),
    # vLLM 55459, ATOM 1507
    "Hadamard of queries only": Mistake("layer 2, indexer, compressed keys", KNOWN["Hadamard of queries only"]),
    "no FP4 in the indexer": Mistake("layer 2, indexer, queries", KNOWN["no FP4 in the indexer"]),
    "e2m1 ties to the lower code": Mistake("layer 2, indexer, queries", KNOWN["e2m1 ties to the lower code"]),
    # gpt-oss, several ports
    "sink ignored": Mistake("layer 0, attention, after the sink", KNOWN["sink ignored"]),
    "no q-head norm": Mistake("layer 0, attention, queries", KNOWN["no q-head norm"]),
    # --- router
    # ATOM cd61e44e8
    "route scale missing": Mistake("layer 0, router, weights of the chosen experts", KNOWN["route scale missing"]),
    # tokenspeed 1231
    "route scale twice": Mistake(
        "layer 0, router, weights of the chosen experts",
        Mutation(routing, "weigh", route_scale_twice),
        prompt=FEW,
    ),
    # ATOM's first pull requests: the table of a hash layer is loaded and not used
    "hash layer by score": Mistake(
        "layer 0, router, chosen experts", Mutation(routing, "route_by_id", hash_layer_by_score)
    ),
    # ATOM's first pull requests
    "bias leaks into weights": Mistake(
        "layer 1, router, weights of the chosen experts", KNOWN["bias leaks into weights"]
    ),
    # --- hyper-connections
    # NeMo Automodel 2159, Megatron 4957. At layer 0 all streams are one until its second half
    "HC matrix transposed": Mistake("layer 0, its output", KNOWN["HC matrix transposed"]),
    "3 Sinkhorn iterations": Mistake(
        "layer 0, hyper-connection of attention, comb weights", KNOWN["3 Sinkhorn iterations"]
    ),
    # --- compression, cache, masks
    # ATOM e161bb31d
    "visibility per call": Mistake("layer 2, indexer, chosen entries", KNOWN["visibility per call"]),
    # tpu-inference 3536
    "open group visible": Mistake("layer 2, indexer, chosen entries", KNOWN["open group visible"], prompt=FEW),
    "own completed group hidden": Mistake("layer 2, indexer, chosen entries", KNOWN["own completed group hidden"]),
    # omlx 2271, mlx-lm 1189
    "overlap halves swapped": Mistake("layer 2, attention, compressed entries", KNOWN["overlap halves swapped"]),
    "overlap lost at a chunk's border": Mistake(
        "layer 2, attention, compressed entries",
        KNOWN["overlap dropped at chunk borders"],
        prompt=FEW,
        chunk=18,
    ),
    "ape missing": Mistake("layer 2, attention, compressed entries", KNOWN["ape missing"]),
    # ATOM 0bb75144e: GSM8K 0.88 -> 0.32
    "ring written before read": Mistake(
        "layer 0, attention, after the sink", KNOWN["ring written before read"], prompt=300, chunk=40
    ),
    # ATOM 0bb75144e: drafts that were wrong have taken the place of rows that are still needed
    "ring without spare rows": Mistake("layer 0, attention, after the sink", ring_without_spare_rows, drafts=3),
    "window one short": Mistake("layer 0, attention, after the sink", KNOWN["window one short"]),
    # the official code, ATOM's first pull requests: a slot keeps the state of the one before
    "state not reset": Mistake(
        "layer 2, attention, compressed entries",
        Mutation(RingSnapshots, "reset", lambda _: lambda self, slot: None),
        after_another=True,
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """sound(net, prompt, later): the right side, recorded once."""
    known: dict[tuple[str, int, int], Any] = {}

    def record(net: str, prompt: int, later: int = 2):
        if (net, prompt, later) not in known:
            folder = tmp_path_factory.mktemp("trace")
            known[net, prompt, later] = (*tracing.sound(net, [tracing.text(prompt, later)], folder), folder)
        return known[net, prompt, later]

    return record


@pytest.mark.parametrize(
    ("net", "prompt"),
    [(FLASH, FEW), *(pytest.param(net, MANY, marks=pytest.mark.slow) for net in (FLASH, PRO))],
)
def test_nothing_is_wrong(sound, net, prompt, tmp_path):
    one, noise, folder = sound(net, prompt)
    walk = Walk(tracing.sound_model(net), tracing.CPU, chunk=18)
    found = tracing.beside(one, noise, walk, tmp_path / "other", folder / "sound")
    assert found.beyond == []


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(one, id=name, marks=() if one.always else pytest.mark.slow) for name, one in MISTAKES.items()],
)
def test_its_stage_is_named(sound, monkeypatch, mistake, tmp_path):
    one, noise, folder = sound(mistake.net, mistake.prompt, mistake.later)
    walk = mistake.other_side(monkeypatch)
    first = tracing.beside(one, noise, walk, tmp_path / "other", folder / "sound").first
    assert first is not None
    assert first.place == mistake.where
