"""A small model in plain fp32, prompts for it and what it generates, for the tests of generation and of scoring."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache

import torch

from dsv4cli.engine.config.presets import TINY
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request, Token
from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.engine.weights.load import build_random

# little to compute in a step, and weights that need no decoding
NARROW = {
    "hidden_size": 64, "head_dim": 96, "qk_rope_head_dim": 32, "q_lora_rank": 32, "o_lora_rank": 32,
    "index_head_dim": 32, "moe_intermediate_size": 32, "hc_sinkhorn_iters": 2,
}  # fmt: skip
FP32 = Formats("f32", "f32", "f32")
# every kind of layer and router once
RATIOS = (0, 4, 128)
# awkward lengths, an open window of each compressor among them
LENGTHS = (1, 131, 4, 7)
SEEDED = Sampling(seed=1)


@cache
def model(ratios: tuple[int, ...] = RATIOS) -> Transformer:
    """Layers of these ratios, the first of which routes by token."""
    layers = {"num_hidden_layers": len(ratios), "compress_ratios": [*ratios, 0]}
    return build_random(parse_config(TINY | NARROW | layers, "small"), Numerics.plain(), formats=FP32)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 500, (length,), generator=generator).tolist() for length in LENGTHS]


def requests(texts: list[list[int]], sampling: Sampling, limits: Limits) -> list[Request]:
    """Text n is gone on with by the seed that is n larger."""
    return [Request(ids, sampling.plus(number), limits) for number, ids in enumerate(texts)]


def engine(texts: list[list[int]], sampling: Sampling = SEEDED, **limits) -> Engine:
    return Engine.of(model(), requests(texts, sampling, Limits(**limits)), "cpu")


def drawn(one: Engine) -> Iterator[tuple[int, Token]]:
    """The tokens of all requests to their ends, each with its request's number."""
    while one.busy:
        for result in one.step():
            yield from ((result.request.number, token) for token in result.tokens)


def by_number(tokens: Iterable[tuple[int, Token]]) -> dict[int, list[Token]]:
    found = defaultdict(list)
    for number, token in tokens:
        found[number].append(token)
    return found
