"""Interface between a chat and what answers it: a model in this process, or a server."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from dsv4cli.engine.chat.answer import FinishReason, Pieces
    from dsv4cli.engine.chat.thinking import Closed
    from dsv4cli.engine.runtime.drafts.draft_report import DraftReport
    from dsv4cli.engine.settings import Limits, Sampling
    from dsv4cli.engine.text.prompt import Message
    from dsv4cli.engine.weights.offload import ExpertOffload


class PartialAnswer(Protocol):
    """An answer while it is generated: the engine's `Answer`, or a server's."""

    @property
    def finish(self) -> "FinishReason | None":
        """Finish reason; None while the answer is generated, and if it was stopped."""

    @property
    def sampled(self) -> int:
        """Number of tokens sampled so far."""

    @property
    def thoughts(self) -> int:
        """Number of those tokens that are reasoning."""

    @property
    def prepared(self) -> bool:
        """Whether the step of the newest token also prepared kernels."""

    @property
    def closed(self) -> "Closed":
        """Why the engine ended the reasoning."""

    def message(self) -> "tuple[Message, list[str]]":
        """Return the answer as a message, and a sentence for each repair that this needed."""


class ChatBackend(Protocol):
    """Answers one conversation. The engine's `Conversation` documents each member in full."""

    limits: "Limits"
    lookalikes: list[str]
    prompt_tokens: int
    reused: int
    prefilled: int

    @property
    def context(self) -> int | None:
        """Context length in tokens, for prompt and answer; None if a server does not report it."""

    @property
    def unread(self) -> int:
        """Number of prompt tokens still to prefill."""

    @property
    def breakable(self) -> bool:
        """Whether an exception may interrupt the next step at any point."""

    @property
    def drafts(self) -> "DraftReport | None":
        """Statistics of the draft tokens of the last turn."""

    @property
    def all_drafts(self) -> "DraftReport | None":
        """Statistics of the draft tokens of all turns."""

    @property
    def offload(self) -> "ExpertOffload | None":
        """The experts offloaded to host memory, if any."""

    @property
    def effort(self) -> str | None:
        """Reasoning effort; None for no reasoning."""

    def think(self, level: str) -> None:
        """Set the reasoning effort from the next turn on."""

    def tokens(self, messages: "Sequence[Message]") -> int:
        """Return the length of the prompt of these messages in tokens."""

    def text_ids(self, text: str) -> list[int]:
        """Return the token ids of a text."""

    def most_tokens(self, text: str) -> int:
        """Return an upper bound on the number of tokens of a text."""

    def left(self, messages: "Sequence[Message]") -> int:
        """Return how many tokens of the context are left after the prompt of these messages."""

    def messages_to_drop(self, messages: "Sequence[Message]") -> int:
        """Return how many of the oldest messages to drop from the prompt so that an answer fits."""

    def reply(
        self, messages: "Sequence[Message]", sampling: "Sampling", *, think_budget: int | None = None
    ) -> "Iterator[tuple[PartialAnswer, Pieces]]":
        """Answer the last of these messages, streaming partial answers and their new pieces."""

    def stop(self) -> None:
        """Stop the running reply. May be called from any thread."""
