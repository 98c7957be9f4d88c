"""`dsv4 chat --tp N`: open a conversation with a model in this process, or in several ranks led by it."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from dsv4cli.commands.job import Job
from dsv4cli.commands.ranks import opened_in_ranks

if TYPE_CHECKING:
    from dsv4cli.engine.chat.conversation import Conversation
    from dsv4cli.engine.model.transformer import Transformer


def open_conversation(job: Job, size: int) -> "AbstractContextManager[Conversation]":
    """Open a conversation with the job's model, loaded in this process or in `size` ranks of this machine."""
    from dsv4cli.engine.chat.conversation import GO_ON, Conversation

    dialogue = job.dialogue  # raises before the model is loaded

    def conversation(led: Job, model: "Transformer") -> Conversation:
        return Conversation(model, dialogue, led.limits, led.device, led.process.followers, led.drafting)

    return opened_in_ranks(job, size, GO_ON, conversation)
