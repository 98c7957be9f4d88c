"""Builds the model's input for a step: token ids, positions and block tables. Nothing here waits for the device."""

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
    """The integers that describe a step, on the device.

    For each sequence: slot, first position, token count and `Sequence.fewest_columns`, int64 [B]; its block table,
    int64 [B, L], padded with any block. For all tokens: ids, int64 [T]; routed: see `Batch`, None for each row's own.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    fewest: torch.Tensor
    ids: torch.Tensor
    blocks: torch.Tensor
    routed: torch.Tensor | None = None


@dataclass(frozen=True)
class Extent:
    """The size of a step, known on the host.

    Attributes:
        groups: for each ratio, how many compressed entries the chunks can complete, or more.
        entries: upper bound of the entries that a sequence has afterwards.
    """

    longest: int
    groups: dict[int, int]
    entries: dict[int, int]

    @classmethod
    def of(cls, config: ModelConfig, counts: Items[int], most: int) -> "Extent":
        """Return the extent of chunks of these token counts, if no sequence is longer than `most` afterwards."""
        ratios = [ratio for ratio in (CSA, HCA) if ratio in config.compress_ratios]
        groups: dict[int, int] = {ratio: sum(-(-count // ratio) for count in counts) for ratio in ratios}
        return cls(max(counts), groups, {ratio: most // ratio for ratio in ratios})

    @classmethod
    def around(cls, config: ModelConfig, tokens: int, sequences: int, most: int) -> "Extent":
        """Return an extent for any division of `tokens` among sequences, if none is longer than `most` afterwards."""
        whole = cls.of(config, [tokens], most)
        return replace(whole, groups={ratio: (tokens + (ratio - 1) * sequences) // ratio for ratio in whole.groups})


def make_batch(cache: Cache, work: Items[tuple[Sequence, Items[int]]]) -> Batch:
    """Build the batch of a step from each sequence's next tokens (at least one), and reserve their cache blocks."""
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
    """Build a batch from numbers on the device. Its shapes depend only on `extent` and on the shapes of `numbers`."""
    config, tokens, capacity = cache.config, numbers.ids.numel(), cache.config.sliding_window + cache.rollback
    # a ring buffer fits the tokens of a step and all rows that the first of them sees
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
