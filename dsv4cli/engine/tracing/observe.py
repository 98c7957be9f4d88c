"""Attaches an observer to a model by hooks; the model's own code does not change, and there is no cost without one."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from torch import nn

from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.state import LayerCache
from dsv4cli.engine.model.transformer import HiddenStates, Transformer
from dsv4cli.engine.tracing.block import BlockObserver
from dsv4cli.engine.tracing.observer import Observer


@contextmanager
def observed(model: Transformer, observer: Observer) -> Iterator[None]:
    """Show an observer everything that the model computes in the block.

    Sharding of stream rows is off meanwhile, so that every rank has all rows.
    """

    def begin(_: nn.Module, args: tuple[Batch, Sequence[LayerCache]]) -> None:
        observer.begin(args[0])

    def end(_: nn.Module, __: object, hidden: HiddenStates) -> HiddenStates:
        return observer.end(model, hidden)

    world = model.world
    with ExitStack() as stack:
        model.world = replace(world, divides_from=None)
        stack.callback(setattr, model, "world", world)
        hooks = [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]
        for layer, block in enumerate(model.layers):
            see = BlockObserver(observer, layer, block)
            hooks += see.hooks()
            stack.enter_context(see.methods())
        for hook in hooks:
            stack.callback(hook.remove)
        yield
