"""The twin's attention over a dense batch: blocks of the window, all or chosen entries, and the indexer's loss.

Parts of a softmax are kept as (weighted sum, sum, maximum) and joined at the end. The maxima have no gradient because
they cancel out.
"""

import torch
import torch.nn.functional as F

WINDOW = 128
# maximum of an empty part, and score of an invisible entry; exp of it is 0
NOTHING = -1e30
# weight in the indexer's loss of a query that pays no attention to entries
KL_FLOOR = 0.1

Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def window_part(q: torch.Tensor, kv: torch.Tensor, first: torch.Tensor, scale: float) -> Part:
    """Compute attention of each token to itself and the 127 before it, in blocks of 128 queries and 256 keys.

    Args:
        q: [T, H, d].
        kv: [T, d], concatenated sequences, each padded to a multiple of 128.
        first: bool [T / 128], whether the block begins a sequence.

    Returns:
        Sum [T, H, d] in q's dtype, fp32 sums of weights [T, H] and maxima [T, H].
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
    """Return exp(score - maximum), 0 for invisible entries, and the maxima: fp32 [B, S, H, E] and [B, S, H, 1].

    q: [B, S, H, d]; entries: [B, E, d]; visible: bool [S, E] or [B, S, E].
    """
    scores = (q.flatten(1, 2) @ entries.mT).view(*q.shape[:3], -1).float() * scale
    scores = scores.masked_fill(~visible[..., None, :], float("-inf"))
    top = scores.detach().amax(-1, keepdim=True).clamp_min(NOTHING)
    return torch.exp(scores - top), top


def weighted_entries(chances: torch.Tensor, top: torch.Tensor, entries: torch.Tensor) -> Part:
    """Return the part of entries [B, E, d] with weights [B, S, H, E].

    It is the sum [T, H, d], and the sums of weights and maxima [T, H].
    """
    batch, length, heads, _ = chances.shape
    total = (chances.to(entries.dtype).flatten(1, 2) @ entries).view(batch * length, heads, -1)
    return total, chances.sum(-1).view(-1, heads), top.view(-1, heads)


def every_entry_part(q: torch.Tensor, entries: torch.Tensor, visible: torch.Tensor, scale: float) -> Part:
    """Compute attention to all visible entries (HCA).

    q: [B, S, H, d]; entries: [B, E, d]; visible: bool [S, E] or [B, S, E].
    """
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
    """Compute attention to the chosen entries (CSA), and the attention that heads would pay to all visible ones.

    Args:
        chosen: bool [B, S, E], None for all.
        rest: fp32 [T, H], the log of the weight of window and sink.

    Returns:
        The part, and the attention to each entry averaged over the heads, fp32 [B, S, E] without gradient: the
        indexer's target.
    """
    chances, top = entry_scores(q, entries, visible, scale)
    with torch.no_grad():
        mass = torch.logaddexp(rest.view(top.shape), top + chances.sum(-1, keepdim=True).clamp_min(1e-30).log())
        target = (chances * torch.exp(top - mass)).mean(2)
    if chosen is not None:
        chances = chances * chosen[:, :, None]
    return weighted_entries(chances, top, entries), target


def joined(parts: list[Part], sink: torch.Tensor) -> torch.Tensor:
    """Compute the softmax over all parts and the sink fp32 [H]: [T, H, d] in the parts' dtype."""
    top = torch.stack([part[2] for part in parts]).amax(0)
    factors = [torch.exp(part[2] - top) for part in parts]
    weight = torch.exp(sink - top)
    total = torch.zeros((), device=sink.device)
    for part, factor in zip(parts, factors, strict=True):
        weight = weight + part[1] * factor
        total = total + part[0].float() * factor[..., None]
    return (total / weight[..., None]).to(parts[0][0].dtype)


def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the sum over heads of relu(q . key) * weight: [B, S, E].

    q: [B, S, H, d]; weights: [B, S, H]; keys: [B, E, d].
    """
    dots = (q.flatten(1, 2) @ keys.mT).view(*q.shape[:3], -1)
    return torch.einsum("bshe,bsh->bse", dots.relu(), weights)


@torch.no_grad()
def choose(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """Return the k visible entries with the highest scores: bool [B, S, E]. Of equal scores, the lower entry wins.

    scores: [B, S, E] bf16 or fp32; visible: bool [S, E]. Score and entry number are compared as one integer, so that no
    two are equal.
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
    """Return the KL from the attention over the visible entries to the softmax of the scores, a mean: fp32 [].

    scores: [B, S, E]; target: fp32 [B, S, E]. A query's weight in the mean is its attention to entries plus `KL_FLOOR`,
    and 0 if it sees no entry.
    """
    mass = target.sum(-1)
    share = target / mass.clamp_min(1e-20)[..., None]
    logs = F.log_softmax(scores.float().masked_fill(~visible, NOTHING), -1)
    divergence = torch.where(visible, torch.xlogy(share, share) - share * logs, 0.0).sum(-1)
    weight = (mass + KL_FLOOR) * visible.any(-1)
    return (divergence * weight).sum() / weight.sum().clamp_min(1e-20)
