"""The batch of a step: which tokens of which sequences, and where they lie; nothing here waits for the device."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import torch

from dsv4cli.engine.config.capacity import BLOCK_TOKENS
from dsv4cli.engine.config.layer_kind import CSA, HCA, WINDOW
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.runtime.sequence import Sequence
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.system.device import upload
from dsv4cli.kernels import step_metadata


@dataclass(frozen=True)
class Numbers:
    """What a step is made of: for each sequence its slot, its first position and its token count, int64 [B], and
    `Sequence.fewest_columns`; the ids of all tokens int64 [T]; the blocks of each sequence int64 [B, L], any block
    where it has fewer. routed: as of `Batch`, None for each row's own."""

    slots: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    fewest: torch.Tensor
    ids: torch.Tensor
    blocks: torch.Tensor
    routed: torch.Tensor | None = None


@dataclass(frozen=True)
class Extent:
    """How large a step is, which the host knows. groups: the entries of each ratio that the chunks can complete,
    wherever they begin, or more; entries: the most that a sequence has afterwards, or more."""

    longest: int
    groups: dict[int, int]
    entries: dict[int, int]

    @classmethod
    def of(cls, config: ModelConfig, counts: Items[int], most: int) -> "Extent":
        """Of chunks of so many tokens, after which no sequence has more than `most`."""
        ratios = [ratio for ratio in (CSA, HCA) if ratio in config.compress_ratios]
        groups: dict[int, int] = {ratio: sum(-(-count // ratio) for count in counts) for ratio in ratios}
        return cls(max(counts), groups, {ratio: most // ratio for ratio in ratios})

    @classmethod
    def around(cls, config: ModelConfig, tokens: int, sequences: int, most: int) -> "Extent":
        """Of so many tokens that are divided among sequences in any way, after which none has more than `most`."""
        whole = cls.of(config, [tokens], most)
        return replace(whole, groups={ratio: (tokens + (ratio - 1) * sequences) // ratio for ratio in whole.groups})


def make_batch(cache: Cache, work: Items[tuple[Sequence, Items[int]]]) -> Batch:
    """The batch of a step: for each sequence its next tokens (at least one). Reserves their blocks.

    Nothing here waits for the device.
    """
    for one, ids in work:
        cache.reserve(one, len(ids))
    counts = [len(ids) for _, ids in work]
    extent = Extent.of(cache.config, counts, max(one.length + len(ids) for one, ids in work))
    columns = [
        [token for _, ids in work for token in ids],  # first, so that it begins at 16 bytes in every step
        [one.slot for one, _ in work],
        [one.length for one, _ in work],
        counts,
        [one.fewest_columns for one, _ in work],
    ]
    longest = max(len(one.blocks) for one, _ in work)
    columns += [[*one.blocks, *([0] * (longest - len(one.blocks)))] for one, _ in work]
    flat = torch.tensor([number for column in columns for number in column], dtype=torch.int64, device="cpu")
    ids, slots, starts, sizes, fewest, blocks = upload(flat, cache.device).split(
        [sum(counts), *[len(work)] * 4, len(work) * longest]
    )
    return batch_of(cache, Numbers(slots, starts, sizes, fewest, ids, blocks.view(len(work), longest)), extent)


def batch_of(cache: Cache, numbers: Numbers, extent: Extent) -> Batch:
    """The batch of numbers that lie on the device; shapes depend on the extent and on theirs only."""
    config, tokens, capacity = cache.config, numbers.ids.numel(), cache.config.sliding_window + cache.rollback
    # a ring has room for the tokens of a step beside all rows that the first of them sees
    in_rings = extent.longest <= cache.rollback + 1
    layout = step_metadata.Layout(
        tokens=tokens,
        window=config.sliding_window,
        capacity=capacity,
        in_rings=in_rings,
        rows=cache.slots * capacity if in_rings else numbers.slots.numel() * capacity + tokens,
        block=BLOCK_TOKENS,
        groups=extent.groups,
        entries=extent.entries,
    )
    chunks = step_metadata.Chunks(numbers.slots, numbers.starts, numbers.counts, numbers.fewest, numbers.blocks)
    ratios = [ratio for ratio in sorted(set(config.compress_ratios)) if ratio in (WINDOW, *extent.groups)]
    routed = torch.arange(tokens, device=cache.device) if numbers.routed is None else numbers.routed
    found = step_metadata.step_metadata(chunks, layout, {ratio: cache.frequencies[ratio] for ratio in ratios})
    return Batch(
        **vars(found),
        ids=numbers.ids,
        slots=numbers.slots,
        in_rings=in_rings,
        window_rows=layout.rows,
        routed=routed,
    )
