"""Ranges around the model's modules, to time each part of a step and to label it for the profiler."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.model.attention import Attention
from dsv4cli.engine.model.block import Block
from dsv4cli.engine.model.linear import Embedding
from dsv4cli.engine.model.moe import MoE
from dsv4cli.engine.model.transformer import Transformer

PREFIX = "dsv4: "
ATTENTION = {0: "sliding attention", 4: "CSA attention", 128: "HCA attention"}
MIXTURE = {False: "MoE, scored", True: "MoE, hash"}
BATCH, EMBEDDING, HEAD, BLOCK = "batch", "embedding", "head", "block"
# class of everything in a block except attention and MoE
CONNECTIONS = "hyper-connections"
# class of everything in a step outside the other classes
OTHER = "between them"
CLASSES = (BATCH, EMBEDDING, *ATTENTION.values(), *MIXTURE.values(), CONNECTIONS, HEAD)

Mark = float | torch.cuda.Event
Hooks = tuple[Callable[..., None], Callable[..., None]]


class Ranges:
    """The ranges of one step (name, start, end), in the order in which they end."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spans: list[tuple[str, Mark, Mark]] = []
        self._open: list[tuple[str, Mark, Any]] = []

    def begin(self, name: str) -> None:
        """Open a nested range."""
        label = torch.profiler.record_function(PREFIX + name)
        label.__enter__()
        self._open.append((name, self._mark(), label))

    def end(self) -> None:
        """Close the innermost range."""
        name, start, label = self._open.pop()
        self.spans.append((name, start, self._mark()))
        label.__exit__(None, None, None)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Open a range around the block."""
        self.begin(name)
        yield
        self.end()

    @contextmanager
    def around(self, model: Transformer) -> Iterator[None]:
        """Add ranges to the main blocks of a model, their parts and the embedding while the block runs."""
        handles = []
        for module, name in _named(model):
            before, after = self._hooks(name)
            handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def counts(self) -> Counter[str]:
        """Return the number of ranges by name."""
        return Counter(name for name, _, _ in self.spans)

    def seconds(self) -> dict[str, float]:
        """Return seconds by class on the device's clock, gaps included. The device must have finished."""
        total: defaultdict[str, float] = defaultdict(float)
        for name, start, end in self.spans:
            total[name] += _between(start, end)
        inner = sum(total[name] for name in (*ATTENTION.values(), *MIXTURE.values()))
        total[CONNECTIONS] = total.pop(BLOCK, 0.0) - inner
        return {name: total[name] for name in CLASSES if name in total}

    def _hooks(self, name: str) -> Hooks:
        return lambda *_: self.begin(name), lambda *_: self.end()

    def _mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def expected_counts(config: ModelConfig) -> Counter[str]:
    """Return how many ranges of each name a step of this model has, according to its layer schedule."""
    layers = range(config.num_hidden_layers)
    names = [ATTENTION[ratio] for ratio in config.layer_ratios]
    names += [MIXTURE[config.is_hash_layer(layer)] for layer in layers]
    return Counter([*names, *[BLOCK] * len(layers), BATCH, EMBEDDING, HEAD])


def _named(model: Transformer) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules and their range names, derived from each module itself to verify the layer schedule."""
    for module in (model.embed, *model.layers.modules()):
        if isinstance(module, Embedding):
            yield module, EMBEDDING
        elif isinstance(module, Block):
            yield module, BLOCK
        elif isinstance(module, Attention):
            yield module, ATTENTION[(4 if hasattr(module, "indexer") else 128) if hasattr(module, "compressor") else 0]
        elif isinstance(module, MoE):
            yield module, MIXTURE[module.gate.tid2eid is not None]


def _between(start: Mark, end: Mark) -> float:
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    return start.elapsed_time(end) / 1e3
