"""The prompt window of `dsv4 chat`: which messages of a session it holds, and the notice about the others."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsv4cli.commands.chat.backend import ChatBackend
from dsv4cli.commands.chat.session import Session
from dsv4cli.commands.job import report_lookalikes
from dsv4cli.output import Output, counted

if TYPE_CHECKING:
    from dsv4cli.engine.text.prompt import Message


@dataclass
class PromptWindow:
    """The messages of a session that fit into the context.

    Attributes:
        left_out: Oldest messages dropped from the prompt, not counting the system message.
    """

    out: Output
    session: Session
    left_out: int = 0
    _reported: set[str] = field(default_factory=set)

    def messages(self, backend: ChatBackend) -> "list[Message]":
        """Return the messages that fit into the context. The oldest questions are dropped first, with their answers.

        Dropped messages stay dropped until the whole conversation fits again, so that the prefix cache keeps hitting.
        """
        messages = self.session.prompt()
        start = 0
        while start < len(messages) and messages[start]["role"] == "system":
            start += 1
        if backend.messages_to_drop(messages) == 0:
            self.left_out = 0
            return messages
        if [message["role"] for message in messages[start + self.left_out :]][:1] != ["user"]:
            self.left_out = 0  # the conversation has been replaced
        shorter = messages[:start] + messages[start + self.left_out :]
        dropped = max(backend.messages_to_drop(shorter), 0)
        if dropped:
            self.left_out += dropped
            left = counted(self.left_out, "message")
            self.out.warning(
                f"the oldest {left} are dropped from the prompt to leave space for an answer; the session keeps them"
            )
        return messages[:start] + messages[start + self.left_out :]

    def report_lookalikes(self, lookalikes: Iterable[str]) -> None:
        """Warn of each text that looks like a special token, once."""
        report_lookalikes(self.out, [text for text in lookalikes if text not in self._reported])
        self._reported.update(lookalikes)
