"""The twin's attention over a dense batch: a window in blocks, all or chosen entries, and the indexer's loss.

Softmax parts are kept as (weighted sum, sum, maximum) and joined at the end; the maxima carry no gradient, since they
cancel.
"""

import torch
import torch.nn.functional as F

WINDOW = 128
# the least that the maximum of a part with nothing in it may be; exp of it is 0
NOTHING = -1e30
# weight in the indexer's loss of a query that gives no attention to entries
KL_FLOOR = 0.1

Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def window_part(q: torch.Tensor, kv: torch.Tensor, first: torch.Tensor, scale: float) -> Part:
    """Attention of each token to itself and the 127 before it, in blocks of 128 queries against 256 keys.

    q: [T, H, d]; kv: [T, d], sequences one after another, each a multiple of 128 long; first: bool [T / 128], the block
    begins a sequence. Returns the sum [T, H, d] in q's dtype, fp32 sums of weights [T, H] and maxima [T, H].
    """
    heads = q.shape[1]
    own = kv.unflatten(0, (-1, WINDOW))  # [n, 128, d]
    keys = torch.cat((torch.cat((torch.zeros_like(own[:1]), own[:-1])), own), 1)  # [n, 256, d]
    queries = q.view(len(own), WINDOW * heads, -1)
    scores = (queries @ keys.mT).view(len(own), WINDOW, heads, 2 * WINDOW).float() * scale
    query = torch.arange(WINDOW, device=q.device)[:, None]
    key = torch.arange(2 * WINDOW, device=q.device)
    inside = (key > query) & (key <= query + WINDOW)  # [128, 256]
    seen = inside & ((key >= WINDOW) | ~first[:, None, None])  # [n, 128, 256]
    scores = scores.masked_fill(~seen[:, :, None], float("-inf"))
    top = scores.detach().amax(-1, keepdim=True)
    chances = torch.exp(scores - top)
    total = chances.to(q.dtype).view(len(own), WINDOW * heads, -1) @ keys
    return total.view(q.shape), chances.sum(-1).view(q.shape[:2]), top.view(q.shape[:2])


def entry_scores(
    q: torch.Tensor, entries: torch.Tensor, visible: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(score - maximum), 0 where an entry is not visible, and the maxima: fp32 [B, S, H, E] and [B, S, H, 1].

    q: [B, S, H, d]; entries: [B, E, d]; visible: bool [S, E] or [B, S, E].
    """
    scores = (q.flatten(1, 2) @ entries.mT).view(*q.shape[:3], -1).float() * scale
    scores = scores.masked_fill(~visible[..., None, :], float("-inf"))
    top = scores.detach().amax(-1, keepdim=True).clamp_min(NOTHING)
    return torch.exp(scores - top), top


def weighted_entries(chances: torch.Tensor, top: torch.Tensor, entries: torch.Tensor) -> Part:
    """The part of entries [B, E, d] with these weights [B, S, H, E]: sum [T, H, d], weights' sum and maxima [T, H]."""
    batch, length, heads, _ = chances.shape
    total = (chances.to(entries.dtype).flatten(1, 2) @ entries).view(batch * length, heads, -1)
    return total, chances.sum(-1).view(-1, heads), top.view(-1, heads)


def every_entry_part(q: torch.Tensor, entries: torch.Tensor, visible: torch.Tensor, scale: float) -> Part:
    """Attention to all visible entries (HCA): q [B, S, H, d], entries [B, E, d], visible bool [S, E] or [B, S, E]."""
    chances, top = entry_scores(q, entries, visible, scale)
    return weighted_entries(chances, top, entries)


def chosen_entry_part(
    q: torch.Tensor,
    entries: torch.Tensor,
    visible: torch.Tensor,
    chosen: torch.Tensor | None,
    rest: torch.Tensor,
    scale: float,
) -> tuple[Part, torch.Tensor]:
    """Attention to the chosen entries (CSA), and how much each head would give every visible one.

    chosen: bool [B, S, E], None for all; rest: fp32 [T, H], the log of the weight of window and sink. The second
    result, fp32 [B, S, E] without gradient, is the attention to each entry, averaged over the heads: what the indexer
    learns.
    """
    chances, top = entry_scores(q, entries, visible, scale)
    with torch.no_grad():
        mass = torch.logaddexp(rest.view(top.shape), top + chances.sum(-1, keepdim=True).clamp_min(1e-30).log())
        target = (chances * torch.exp(top - mass)).mean(2)
    if chosen is not None:
        chances = chances * chosen[:, :, None]
    return weighted_entries(chances, top, entries), target


def joined(parts: list[Part], sink: torch.Tensor) -> torch.Tensor:
    """Softmax over all parts and the sink fp32 [H]: [T, H, d] in the parts' dtype."""
    top = torch.stack([part[2] for part in parts]).amax(0)
    factors = [torch.exp(part[2] - top) for part in parts]
    weight = torch.exp(sink - top)
    total = torch.zeros((), device=sink.device)
    for part, factor in zip(parts, factors, strict=True):
        weight = weight + part[1] * factor
        total = total + part[0].float() * factor[..., None]
    return (total / weight[..., None]).to(parts[0][0].dtype)


def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """sum over heads of relu(q . key) * weight: q [B, S, H, d], weights [B, S, H], keys [B, E, d] -> [B, S, E]."""
    dots = (q.flatten(1, 2) @ keys.mT).view(*q.shape[:3], -1)
    return torch.einsum("bshe,bsh->bse", dots.relu(), weights)


@torch.no_grad()
def choose(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """The k visible entries with the highest scores, equal scores by lower entry: bool [B, S, E].

    scores: [B, S, E] bf16 or fp32; visible: bool [S, E]. Entries are compared by score and number in one integer, so
    that no two are equal.
    """
    count = scores.shape[-1]
    bits, key = (torch.int16, torch.int32) if scores.dtype == torch.bfloat16 else (torch.int32, torch.int64)
    half = 8 * bits.itemsize
    raw = (scores + 0.0).masked_fill(~visible, float("-inf")).view(bits).to(key)  # + 0.0: no -0
    ordered = torch.where(raw < 0, raw ^ ((1 << (half - 1)) - 1), raw)
    unique = (ordered << half) + (count - 1 - torch.arange(count, device=scores.device, dtype=key))
    least = unique.topk(min(k, count), -1, sorted=True).values[..., -1:]
    return (unique >= least) & visible


def index_loss(scores: torch.Tensor, target: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """KL from the attention over the visible entries to the softmax of the scores, a mean over the queries: fp32 [].

    scores: [B, S, E]; target: fp32 [B, S, E]. A query counts with the attention that it gives to entries, and a little
    more; one that sees no entry does not count.
    """
    mass = target.sum(-1)
    share = target / mass.clamp_min(1e-20)[..., None]
    logs = F.log_softmax(scores.float().masked_fill(~visible, NOTHING), -1)
    divergence = torch.where(visible, torch.xlogy(share, share) - share * logs, 0.0).sum(-1)
    weight = (mass + KL_FLOOR) * visible.any(-1)
    return (divergence * weight).sum() / weight.sum().clamp_min(1e-20)
