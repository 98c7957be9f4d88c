"""What the drafters are asked for: the steps that they run, and where these lie in the cache."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace

import torch

from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.dspark import Drafts, DSpark
from dsv4cli.engine.model.mtp import MTP
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.cache import Cache, Sequence
from dsv4cli.engine.runtime.prepare import make_batch


def mtp_logits(
    model: Transformer, streams: torch.Tensor, next_ids: torch.Tensor, batch: Batch, cache: Cache, rows: torch.Tensor
) -> torch.Tensor:
    """The MTP block over the step's positions: for `rows` int64 [R], the distribution two tokens on, fp32 [R, V].

    streams: HiddenStates.streams of the step; next_ids: int64 [T], the token after each position.
    """
    stage = model.mtp[0]
    assert isinstance(stage, MTP)
    layer = cache.layers[model.config.num_hidden_layers]
    drafted = stage.draft(streams, model.embed(next_ids), batch.with_ids(next_ids), layer)
    return model.vocabulary(stage.normed(drafted[rows]))


def dspark_drafts(
    model: Transformer,
    work: Items[tuple[Sequence, int]],
    cache: Cache,
    choose: Callable[[torch.Tensor], torch.Tensor],
) -> Drafts:
    """The DSpark drafts after each sequence's newest token, which is not yet in the cache.

    What the cache holds of the sequences must have gone through `model.mtp.absorb`. choose: see DSpark.draft.
    """
    assert isinstance(model.mtp, DSpark)
    batch = dspark_batch(model.mtp, cache, work)
    first = torch.tensor([token for _, token in work], dtype=torch.int64, device=cache.device)
    return model.mtp.draft(model.embed(batch.ids), first, batch, cache.layers, model.vocabulary, choose)


def dspark_batch(drafter: DSpark, cache: Cache, work: Items[tuple[Sequence, int]]) -> Batch:
    """The draft block of each sequence, of at least one token: its newest, not yet in the cache, and noise.

    Every row sees the last `sliding_window` tokens before the block and the whole block; nothing is stored.
    """
    noise = [drafter.noise] * (drafter.block_size - 1)
    batch = make_batch(cache, [(sequence, [token, *noise]) for sequence, token in work])
    window, device = drafter.config.sliding_window, cache.device
    capacity = window + cache.rollback
    starts = torch.tensor([sequence.length for sequence, _ in work], device=device)[:, None]
    owners = torch.arange(len(work), device=device)[:, None]
    # the official order: by position modulo the window, the block last
    before = starts - 1 - (starts - 1 - torch.arange(window, device=device)) % window
    ring = torch.where(before >= 0, owners * capacity + before % capacity, -1)
    block = len(work) * capacity + owners * drafter.block_size + torch.arange(drafter.block_size, device=device)
    index = torch.cat((ring, block), 1)
    return replace(
        batch,
        in_rings=False,
        window_rows=len(work) * (capacity + drafter.block_size),
        window_index=index.repeat_interleave(drafter.block_size, 0),
        window_cells=torch.full_like(batch.window_cells, -1),
    )
