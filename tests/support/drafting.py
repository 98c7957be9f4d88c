"""What the MTP block says of every position of a step, as the official code computes it."""

import torch

from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.mtp import MTP
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.state.cache import Cache


def mtp_logits(
    model: Transformer, streams: torch.Tensor, next_ids: torch.Tensor, batch: Batch, cache: Cache, rows: torch.Tensor
) -> torch.Tensor:
    """For `rows` int64 [R], the distribution two tokens on, fp32 [R, V].

    streams: HiddenStates.streams of the step; next_ids: int64 [T], the token after each position.
    """
    stage = model.mtp[0]
    assert isinstance(stage, MTP)
    layer = cache.layers[model.config.num_hidden_layers]
    drafted = stage.draft(streams, model.embed(next_ids), batch, layer)
    return model.vocabulary(stage.normed(drafted[rows]))
