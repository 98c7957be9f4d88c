"""The golden nets and what the official code answered on them, loaded once; and how recorded inputs are driven.

A recording: two sequences in one batch; P tokens each at once, then one token each a step.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv4cli.engine.checkpoint.source import FolderSource
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.weights.load import load_model
from dsv4cli.kernels import alike
from dsv4cli.kernels.block_scale import ref as block_scale_ref
from dsv4cli.kernels.experts import one_tile
from dsv4cli.kernels.indexer import ref as indexer_ref
from tests.support.arithmetic import same_arithmetic
from tests.support.drafting import mtp_logits

FOLDER = Path(__file__).parents[1] / "golden"
NETS = ("tiny-flash", "tiny-pro")
# prompts whose block outputs are recorded
BLOCK_PROMPTS = (5, 133)
PROMPTS = (1, 4, 5, 31, 128, 133, 300)
# times the distance between the recording and its fp64 variant that rounding explains (README of the recordings)
EXPLAINED = 2
# the same for one case on another kind of CPU: one code rounded the other way may move a case of five tokens. Seven
# kinds of arithmetic (MKL on Intel and AMD, with AVX-512, AVX2, SSE4.2 and without) came to 1.9 at most
EXPLAINED_ELSEWHERE = 3


@dataclass(frozen=True)
class Golden:
    """A net with its recording: tokens int64 [2, n]; cases (P, steps); recorded tensors by name."""

    name: str
    model: Transformer
    tokens: torch.Tensor
    cases: tuple[tuple[int, int], ...]
    recorded: dict[str, torch.Tensor]

    def inputs(self, prompt: int) -> list[torch.Tensor]:
        """The streams bf16 [rows, 4, D] that each block was given for sequence 0: its predecessor's output."""
        rows = self.outputs(prompt)[0].shape[0]
        first = self.model.embed(self.tokens[0, :rows])[:, None].expand(-1, self.model.config.hc_mult, -1)
        return [first, *self.outputs(prompt)[:-1]]

    def outputs(self, prompt: int) -> list[torch.Tensor]:
        """The streams bf16 [rows, 4, D] after each block: P rows of the prompt, then decoded ones."""
        return [self.recorded[f"p{prompt}.layers.{i}"] for i in range(self.model.config.num_hidden_layers)]


@cache
def golden(name: str) -> Golden:
    """One of NETS, in the engine's own reference numerics."""
    folder = FOLDER / name
    recorded = load_file(folder / "expected.safetensors")
    cases = [(case["prompt"], case["steps"]) for case in json.loads((folder / "expected.json").read_text())["cases"]]
    model = load_model(FolderSource(name, folder), Numerics.reference())
    return Golden(name, model, recorded["tokens"].long(), tuple(cases), recorded)


def remember_weights(patch: pytest.MonkeyPatch) -> None:
    """Dequantises each weight once, not once a step; weights that were used live as long as the process."""
    patch.setattr(block_scale_ref, "dequantise", _dequantised)


def _dequantised(
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    dequantise: Callable[..., torch.Tensor] = block_scale_ref.dequantise,
    known: dict[tuple[int, torch.Size], tuple[torch.Tensor, torch.Tensor]] = {},  # noqa: B006 - kept on purpose
) -> torch.Tensor:
    key = (weight.data_ptr(), weight.shape)
    if key not in known:
        # what is held is nobody else's place; a parameter itself would move to its fp32 values
        known[key] = weight.detach(), dequantise(weight, scale)
    return known[key][1]


def official_sums(patch: pytest.MonkeyPatch) -> None:
    """Sums and functions as PyTorch takes them for all rows of a step at once, as the official code does.

    Of one row, two and eight they round in three ways: no code whose rows do not depend on each other gives every
    recorded bit.
    """
    linear = torch.nn.functional.linear
    patch.setattr(alike, "product", linear)
    patch.setattr(alike, "products", lambda x, weights: [linear(x, weight) for weight in weights])
    patch.setattr(
        alike,
        "grouped_product",
        lambda x, weights: torch.stack([linear(*pair) for pair in zip(x.unbind(1), weights, strict=True)], 1),
    )
    patch.setattr(alike, "each", lambda function, x: function(x))
    patch.setattr(one_tile, "suits", lambda *_: False)  # it multiplies tiles


def run_blocks(net: Golden, prompt: int, split: Iterable[int], copies: int = 1) -> list[list[torch.Tensor]]:
    """Every block on its recorded input, in chunks of `split` rows: the outputs [rows, 4, D] by block and copy.

    copies: how many sequences of the batch are fed the same rows; each block has its own part of the cache, so that one
    batch serves all.
    """
    config, inputs = net.model.config, net.inputs(prompt)
    rows = inputs[0].shape[0]
    cache = Cache(config, net.model.numerics, slots=copies)
    sequences = [cache.allocate() for _ in range(copies)]
    parts: list[list[torch.Tensor]] = [[] for _ in inputs]
    for start, end in chunks(split, rows):
        batch = make_batch(cache, [(sequence, net.tokens[0, start:end].tolist()) for sequence in sequences])
        for number, layer in enumerate(net.model.layers):
            streams = inputs[number][start:end].repeat(copies, 1, 1)
            parts[number].append(layer(streams, batch, cache.layers[number]).connect_post().unflatten(0, (copies, -1)))
        for sequence in sequences:
            cache.advance(sequence, end - start)
    return [list(torch.cat(part, 1)) for part in parts]


def run_recorded_blocks(net: Golden, prompt: int) -> list[list[torch.Tensor]]:
    """Run every block in the recorded shapes: two sequences, the prompt at once, then token by token."""
    rows = len(net.outputs(prompt)[0])
    return run_blocks(net, prompt, [prompt] + [1] * (rows - prompt), copies=2)


def case_of(name: str, prompt: int, part: str = "logits") -> str:
    """Return the name of a golden case in `arithmetic.json`; part: `logits` or `blocks`."""
    return f"{name} {prompt} {part}"


def noise(name: str, prompt: int, kind: str, steps: int) -> float:
    """Mean |the official code summing in fp64 - recorded| of a case's logits after the prompt and `steps` tokens."""
    recorded = golden(name).recorded
    ours, other = (recorded[f"p{prompt}.{kind}{end}"][:, : 1 + steps] for end in ("", "_alt"))
    return (other - ours).abs().mean().item()


def most_distance(name: str, prompt: int, own: float, all_cases: Iterable[float]) -> float:
    """Return the largest mean distance from the recording that rounding explains on this machine.

    own: the noise of the case; all_cases: that of every case of the net, for a single one is an estimate of one sample.
    """
    if same_arithmetic(case_of(name, prompt)):
        return EXPLAINED * own
    noises = list(all_cases)
    return EXPLAINED_ELSEWHERE * max(own, sum(noises) / len(noises))


def run_case(net: Golden, prompt: int, steps: int) -> dict[str, torch.Tensor]:
    """Both sequences in one batch, as recorded: `logits` and `mtp_logits` fp32 [2, 1 + steps, V]."""
    model = net.model
    cache = Cache(model.config, model.numerics, slots=2)
    sequences = [cache.allocate() for _ in range(2)]
    logits, drafted = [], []
    for start, end in chunks([prompt, *[1] * steps], prompt + steps):
        batch = make_batch(cache, [(s, net.tokens[i, start:end].tolist()) for i, s in enumerate(sequences)])
        streams = model(batch, cache.layers).streams
        following = net.tokens[:, start + 1 : end + 1].flatten()
        logits.append(model.logits(streams[batch.last]))
        drafted.append(mtp_logits(model, streams, following, batch, cache, batch.last))
        for sequence in sequences:
            cache.advance(sequence, end - start)
    return {"logits": torch.stack(logits, 1), "mtp_logits": torch.stack(drafted, 1)}


def chunks(split: Iterable[int], rows: int) -> list[tuple[int, int]]:
    """(start, end) of consecutive chunks; a last one takes what `split` leaves of `rows`."""
    ends = [0]
    for size in split:
        ends.append(min(ends[-1] + size, rows))
    return [(start, end) for start, end in pairwise([*ends, rows]) if end > start]


def topk_entries(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """`indexer.top_entries` as in the official code: torch.topk, which takes any of the entries of equal score."""
    hidden = torch.arange(scores.shape[1]) >= visible[:, None]
    order = scores.masked_fill(hidden, float("-inf")).topk(min(k, scores.shape[1]), -1).indices
    return torch.where(order < visible[:, None], order, -1)


class TieWatch:
    """In the place of `indexer.top_entries`: chooses as it does and notes for which rows the choice was not unique."""

    def __init__(self) -> None:
        self.tied: list[torch.Tensor] = []
        self.choose = indexer_ref.top_entries

    def __call__(self, scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
        self.tied.append(tied_rows(scores, visible, k))
        return self.choose(scores, visible, k)


def tied_rows(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """Rows whose k-th and (k+1)-th best visible scores are equal: bool [T]."""
    if scores.shape[1] <= k:
        return torch.zeros(scores.shape[0], dtype=torch.bool)
    hidden = torch.arange(scores.shape[1]) >= visible[:, None]
    best = scores.float().masked_fill(hidden, float("-inf")).sort(descending=True).values
    return (best[:, k - 1] == best[:, k]) & (visible > k)
