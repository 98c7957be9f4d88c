"""Whether a model fits a machine: each way to run it, the best one, and the missing memory; no torch.

`placement.decide` places the weights, as in loading; the KV cache and a step must fit too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.config.capacity import MAX_SLOTS
from dsv4cli.engine.config.model_config import Drafter, ModelConfig
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.inspection.fit.machine import Device, Machine
from dsv4cli.engine.inspection.fit.share import Share, SharedModel
from dsv4cli.engine.settings import require
from dsv4cli.engine.weights.placement import HOST_EIGHTHS, least_in_host
from dsv4cli.errors import UnsupportedHardware

# numbers of GPUs that are tried where those of the machine are too few
MORE_GPUS = (2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Fit:
    """The answer for `batch` concurrent sequences of `context` tokens.

    Attributes:
        shares: one GPU, then each number of GPUs that divides the model, then the CPU.
        drafter: the model's drafter.
        whole: bytes replicated on every GPU, by family.
        best: the recommended way to run the model, None if none fits.
        others: slower ways that fit.
        largest_context, largest_batch: at this batch and at this context, for the best way, else over all ways; 0 for
        none.
        shorter, fewer: the shares of these two, None at 0.
        layers: how many of the first layers the `largest` device can run, None if the whole model runs.
        more_gpus: GPUs like the machine's that would hold the model.
        more_host: the share that would run with `host_needed` bytes of free host memory.
    """

    context: int
    batch: int
    machine: Machine
    shares: tuple[Share, ...]
    drafter: Drafter
    whole: dict[str, int]
    best: Share | None
    others: tuple[Share, ...]
    largest_context: int
    largest_batch: int
    shorter: Share | None
    fewer: Share | None
    layers: int | None
    largest: Device
    more_gpus: Share | None
    more_host: Share | None
    host_needed: int

    @property
    def nearest(self) -> Share:
        """The best way to run the model, or the one whose devices lack the least memory if none fits."""
        return self.best or min(self.shares, key=lambda share: share.missing)

    @property
    def missing(self) -> int:
        """Bytes that each device lacks in the way to run that lacks the least; 0 if the model fits."""
        return self.nearest.missing


def plan_fit(
    config: ModelConfig,
    formats: Formats,
    machine: Machine,
    *,
    context: int,
    batch: int,
    table: Mapping[str, TensorSpec] | None = None,
) -> Fit:
    """Return whether the model fits and what each device would hold.

    table: the tensors that are loaded, if they are not those of the formats.

    Raises UsageError for a context or batch that the engine does not support, UnsupportedHardware for a machine of
    unknown hardware.
    """
    longest = config.max_position_embeddings
    _check(machine, context, batch, longest)
    model = SharedModel(config, formats, machine.host, table)
    shares = tuple(_shares(model, machine, context, batch))
    best = _best(shares)
    fitting = [best] if best else _fitting(tuple(_shares(model, machine, 1, 1)))
    longer, shorter = _most(fitting, longest, lambda devices, count: model.share(devices, count, batch))
    more, fewer = _most(fitting, MAX_SLOTS, lambda devices, count: model.share(devices, context, count))
    largest = max(machine.devices, key=lambda device: device.free)
    lacks_gpu = best is None or not best.on_gpu
    host, needed = _more_host(model, shares, context, batch) if lacks_gpu else (None, 0)
    return Fit(
        context=context,
        batch=batch,
        machine=machine,
        shares=shares,
        drafter=config.drafter,
        whole=model.whole(drafter=best is not None and best.drafts),
        best=best,
        others=_others(shares, best),
        largest_context=longer,
        largest_batch=more,
        shorter=shorter,
        fewer=fewer,
        layers=None if best else _layers(model, largest, context),
        largest=largest,
        more_gpus=_more_gpus(model, machine, context, batch) if lacks_gpu else None,
        more_host=host,
        host_needed=needed,
    )


def _check(machine: Machine, context: int, batch: int, longest: int) -> None:
    """Raise UsageError for a context or batch that does not exist, UnsupportedHardware for unknown hardware."""
    require(1 <= context <= longest, "--max-context", f"{context:,}", f"use a number from 1 to {longest:,}")
    require(1 <= batch <= MAX_SLOTS, "--batch", batch, f"use a number from 1 to {MAX_SLOTS}, more wait for their turn")
    if not machine.gpus and machine.cpu is None:
        raise UnsupportedHardware(
            "cannot detect how much memory this system has", "set it: --ram 64GB, and GPUs if any: --gpus 1x80GB"
        )


def best_share(model: SharedModel, machine: Machine, context: int) -> tuple[Share | None, int]:
    """Return the best way to run one sequence of `context` tokens, None if none fits, and the missing bytes."""
    shares = tuple(_shares(model, machine, context, 1))
    best = _best(shares)
    return best, 0 if best else min((share.missing for share in shares), default=0)


def most_context(model: SharedModel, share: Share) -> int:
    """Return the largest context of one sequence on the devices of a share."""
    longest = model.config.max_position_embeddings
    return _largest(longest, lambda count: model.share(share.devices, count, 1).fits)


def _shares(model: SharedModel, machine: Machine, context: int, batch: int) -> Iterator[Share]:
    """Yield a share for each use of the machine that divides the model; GPUs with the most free memory come first."""
    gpus = sorted(machine.gpus, key=lambda gpu: -gpu.free)
    for ranks in range(1, len(gpus) + 1):
        if model.divides(ranks):
            yield model.share(tuple(gpus[:ranks]), context, batch)
    if machine.cpu is not None:
        yield model.share((machine.cpu,), context, batch)


def _best(shares: Sequence[Share]) -> Share | None:
    """Return the best share that fits; None if none does.

    The best one is the fewest GPUs that hold the model, otherwise the largest number of GPUs with experts in host
    memory, otherwise the CPU.
    """
    return next(iter(_fitting(shares)), None)


def _fitting(shares: Sequence[Share]) -> list[Share]:
    """Return the shares that fit, best first, without the CPU if GPUs fit."""
    fitting = sorted((share for share in shares if share.fits), key=_rank)
    return [share for share in fitting if share.on_gpu is fitting[0].on_gpu]


def _rank(share: Share) -> tuple[bool, bool, int]:
    return not share.on_gpu, share.host > 0, -share.ranks if share.host else share.ranks


def _others(shares: Sequence[Share], best: Share | None) -> tuple[Share, ...]:
    """Return the alternatives to several GPUs or to offloading: one GPU, and the CPU."""
    if best is None or (best.ranks == 1 and not best.host):
        return ()
    return tuple(share for share in shares if share.fits and share.ranks == 1 and share is not best)


def _layers(model: SharedModel, device: Device, context: int) -> int:
    """Return how many of the first layers run on a device with one sequence."""
    return _largest(model.config.num_hidden_layers, lambda count: model.first(count).share((device,), context, 1).fits)


def _more_host(model: SharedModel, shares: Sequence[Share], context: int, batch: int) -> tuple[Share | None, int]:
    """Return how the largest number of GPUs could run the model with more free host memory, and the bytes needed."""
    gpus = [share for share in shares if share.on_gpu]
    if not gpus:
        return None, 0
    share = model.with_any_host().share(gpus[-1].devices, context, batch)
    if not share.fits or share.placement is None or share.placement.division is None:
        return None, 0
    least = least_in_host(model.sizes(share.ranks), share.placement.division.rows) * share.ranks
    return share, -(-least * 8 // HOST_EIGHTHS)


def _more_gpus(model: SharedModel, machine: Machine, context: int, batch: int) -> Share | None:
    """Return the smallest number of GPUs that would hold the model if all had the memory of the largest one here."""
    gpu = max(machine.gpus, key=lambda gpu: gpu.free, default=None)
    if gpu is None:
        return None
    counts = [count for count in MORE_GPUS if count > len(machine.gpus) and model.divides(count)]
    shares = (model.share((gpu,) * count, context, batch) for count in counts)
    return next((share for share in shares if share.fits and not share.host), None)


def _most(
    fitting: Sequence[Share], most: int, share: Callable[[tuple[Device, ...], int], Share]
) -> tuple[int, Share | None]:
    """Return the largest number up to `most` that fits some way, with its share; among equals the first way's."""

    def largest(one: Share) -> int:
        return _largest(most, lambda count: share(one.devices, count).fits)

    counts = [(largest(one), one.devices) for one in fitting]
    count, devices = max(counts, key=lambda one: one[0], default=(0, ()))
    return count, share(devices, count) if count else None


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to `most` for which the monotonic predicate `fits` holds; 0 if there is none."""
    if fits(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
