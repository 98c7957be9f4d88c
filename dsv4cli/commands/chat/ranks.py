"""`dsv4 chat --tp N`: the model of a conversation in this process, or led by it in several."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from dsv4cli.commands.job import Job
from dsv4cli.commands.ranks import leading_ranks, left_by

if TYPE_CHECKING:
    from dsv4cli.engine.chat.conversation import Conversation


@contextmanager
def open_conversation(job: Job, size: int) -> "Iterator[Conversation]":
    """A conversation with the job's model, loaded in this process or in `size` of this machine."""
    from dsv4cli.engine.chat.conversation import GO_ON, Conversation

    dialogue = job.dialogue  # refused before the model is loaded
    if size == 1:
        with (
            job.model() as model,
            Conversation(model, dialogue, job.limits, job.device, drafting=job.drafting) as conversation,
        ):
            yield conversation
        return
    from dsv4cli.engine.system.ending import ends_soon

    with ExitStack() as stack:
        starting = stack.enter_context(ExitStack())
        # only until the conversation has handlers of its own
        starting.enter_context(ends_soon(left_by(job.out)))
        led = stack.enter_context(leading_ranks(job, size, GO_ON))
        model = stack.enter_context(led.model())
        conversation = stack.enter_context(
            Conversation(model, dialogue, job.limits, led.device, led.followers, job.drafting)
        )
        starting.close()
        yield conversation
