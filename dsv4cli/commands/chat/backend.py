"""Whom a chat talks to: a model in this process, or one that a server runs."""

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
    """An answer as it comes: `Answer` of the engine, or a server's."""

    @property
    def finish(self) -> "FinishReason | None":
        """How it has ended; None until then, and where it was stopped."""

    @property
    def drawn(self) -> int:
        """How many tokens it has so far."""

    @property
    def thoughts(self) -> int:
        """How many of them are reasoning."""

    @property
    def prepared(self) -> bool:
        """Whether the step of the newest token has prepared kernels."""

    @property
    def closed(self) -> "Closed":
        """Why its thinking was ended from outside."""

    def message(self) -> "tuple[Message, list[str]]":
        """It as a message, and what had to be repaired for that, in words."""


class Backend(Protocol):
    """Answers one conversation, as `Conversation` of the engine does, which says what each of these means."""

    limits: "Limits"
    lookalikes: list[str]
    prompt_tokens: int
    reused: int
    prefilled: int

    @property
    def context(self) -> int | None:
        """The most tokens of a prompt and its answer; None where a server does not say."""

    @property
    def unread(self) -> int:
        """How many tokens of the prompt are still to be read."""

    @property
    def breakable(self) -> bool:
        """Whether what comes next may be ended by an exception at any point."""

    @property
    def drafts(self) -> "DraftReport | None":
        """What the drafts of the last turn have come to."""

    @property
    def all_drafts(self) -> "DraftReport | None":
        """What the drafts of all turns have come to."""

    @property
    def offload(self) -> "ExpertOffload | None":
        """The experts in host memory."""

    @property
    def effort(self) -> str | None:
        """How hard to reason; None for not at all."""

    def think(self, level: str) -> None:
        """How hard to reason from the next turn on."""

    def tokens(self, messages: "Sequence[Message]") -> int:
        """How many tokens the prompt of these messages has."""

    def text_ids(self, text: str) -> list[int]:
        """The tokens of a text."""

    def most_tokens(self, text: str) -> int:
        """How many tokens a text has at most."""

    def left(self, messages: "Sequence[Message]") -> int:
        """How many tokens of the context the prompt of these messages leaves."""

    def messages_to_drop(self, messages: "Sequence[Message]") -> int:
        """How many of the oldest messages must go for the prompt to leave room for an answer."""

    def reply(
        self, messages: "Sequence[Message]", sampling: "Sampling", *, think_budget: int | None = None
    ) -> "Iterator[tuple[PartialAnswer, Pieces]]":
        """Answers the last of these messages, as it comes."""

    def stop(self) -> None:
        """Ends the running reply, from any thread."""
