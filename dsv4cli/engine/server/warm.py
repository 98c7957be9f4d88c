"""An engine for many clients, which has made its first steps: the first client waits for no kernel."""

import torch

from dsv4cli.engine.config.capacity import MAX_SLOTS
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.engine import Engine, Followers
from dsv4cli.engine.runtime.limits import context_of
from dsv4cli.engine.runtime.preparing import OnPreparing, do_nothing
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.runner import FEWEST_TOKENS, Capacity
from dsv4cli.engine.settings import Drafting, Limits, Sampling

# tokens of a prompt and its answer, any will do
PROMPT, ANSWER = 8, 8


def ready_engine(
    model: Transformer,
    limits: Limits,
    device: torch.device | str,
    followers: Followers | None,
    drafting: Drafting,
    on_preparing: OnPreparing,
) -> Engine:
    """The engine; on_preparing: as `Preparing` has it, until it is ready. Raises UnsoundResult, NotEnoughMemory."""
    context = context_of(model.config, limits)
    engine = Engine(model, Capacity(MAX_SLOTS, min(FEWEST_TOKENS, context)), device, followers, drafting)
    engine.report_preparing(on_preparing)
    prompt = list(range(min(PROMPT, context - 1)))
    engine.add(Request(prompt, Sampling(0.0), Limits(ANSWER, limits.max_context), stop_ids=()))
    while engine.busy:
        engine.step()
    engine.report_preparing(do_nothing)
    return engine
