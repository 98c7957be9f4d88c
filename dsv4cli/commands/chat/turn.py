"""A turn of `dsv4 chat`: send the question, stream the answer, run its tool calls, and save all of it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from dsv4cli.commands.chat.backend import ChatBackend, PartialAnswer
from dsv4cli.commands.chat.input import Input
from dsv4cli.commands.chat.interrupts import Interrupts
from dsv4cli.commands.chat.journal import SessionChoices
from dsv4cli.commands.chat.prompt_window import PromptWindow
from dsv4cli.commands.chat.renderer import Renderer
from dsv4cli.commands.chat.session import FileChanged, Session
from dsv4cli.commands.chat.session_stats import SessionStats
from dsv4cli.commands.chat.tools import Tools, next_round
from dsv4cli.commands.clock import Clock
from dsv4cli.commands.reading import Reading
from dsv4cli.commands.terminal import keys_wait
from dsv4cli.errors import AnswerLost, Dsv4Error, UsageError
from dsv4cli.output import Output, counted

if TYPE_CHECKING:
    from dsv4cli.engine.chat.answer import Pieces
    from dsv4cli.engine.settings import Sampling
    from dsv4cli.engine.text.prompt import Message

# fraction of the context above which a warning says that it is nearly full
NEARLY_FULL = 0.8
# seconds: a server that sends all tokens within this time had buffered them, so no speed is reported
BURST = 0.01

# status text by the reason why the engine ended the reasoning
ENDED = {
    "budget": " · thinking reached its budget",
    "limit": " · thinking stopped to leave space for an answer",
    "end": " · no answer after thinking: one was requested",
}


class ChatModels(Protocol):
    """The models that a chat can use, with one selected."""

    @property
    def name(self) -> str:
        """Name of the selected model."""

    def change(self, chat: "Chat", name: str) -> None:
        """Select another model for the chat. Raises Dsv4Error."""


@dataclass
class ChatView:
    """How a chat is shown.

    Attributes:
        on_terminal: Both stdin and stdout are a terminal.
        copies: The terminal may support copying to its clipboard.
        markdown: Render Markdown.
        show_thinking: Stream the reasoning.
    """

    on_terminal: bool
    copies: bool
    markdown: bool
    show_thinking: bool


@dataclass
class Chat:
    """A running conversation, shared by the slash commands and the turns.

    Attributes:
        source: Where messages are read from.
        think_budget: Maximum number of reasoning tokens per answer; None for no limit.
    """

    out: Output
    models: ChatModels
    conversation: ChatBackend
    session: Session
    sampling: "Sampling"
    think_budget: int | None
    source: Input
    tools: Tools
    view: ChatView
    interrupts: Interrupts
    window: PromptWindow
    stats: SessionStats = field(default_factory=SessionStats)

    def ask(self, question: str, before: "list[Message]") -> None:
        """Run one turn: send the question, stream the answer, and run the tool calls in it.

        If no answer comes, the messages are reset to `before`, unless tool calls ran: those and their results are kept.

        Raises:
            Dsv4Error: if the question is not valid Unicode, the session's file was changed, or the backend fails.
            KeyboardInterrupt: on the second Ctrl-C. The partial answer is kept, as it is after AnswerLost.
        """
        from dsv4cli.engine.text.tokenizer import check_unicode

        try:
            check_unicode(question, "the question")  # otherwise the session's file could not be read again
            self.session.check_file()
        except UsageError:
            self.session.messages = before
            raise
        self.session.messages.append({"role": "user", "content": question})
        self._take_turn(before)

    def answer_again(self) -> None:
        """Regenerate the answer to the last tool results, without running the calls again. Raises as `ask` does."""
        self.session.check_file()
        before = list(self.session.messages)
        self.session.take_back_answer()
        self._take_turn(before)

    def _take_turn(self, before: "list[Message]") -> None:
        begun = list(self.session.messages)
        with self.interrupts.stopping(lambda: self.conversation.stop()):
            try:
                while self._answer():
                    self.save()  # so that a failure cannot run the calls again
            except AnswerLost:
                raise
            except Dsv4Error:
                if all(message["role"] != "tool" for message in self.session.messages[len(begun) :]):
                    self.session.messages[:] = before
                if self.session.has_results():
                    self.out.status("the calls and their results are kept; to ask for the answer again, use /retry")
                raise
            finally:
                if self.session.messages == begun:  # stopped before the first token
                    self.session.messages = before
                self.save()
        if self.interrupts.leaving:
            raise KeyboardInterrupt

    def save(self) -> None:
        """Save the session, or print a warning if that fails."""
        try:
            self.session.save()
        except FileChanged as error:
            self.out.warning(f"the session was not saved to its file: {error.message}; {error.remedy}")
        except OSError as error:
            where = f" in {Path(error.filename).parent}" if isinstance(error.filename, str) else ""
            what = f"the session was not saved{where}: {error.strerror or error}"
            self.out.warning(f"{what}; to save it elsewhere, use /save FILE")

    def choose(self, choices: SessionChoices) -> None:
        """Set the session's choices and save them, so that resuming the session restores them."""
        self.session.choices = choices
        if self.session.messages:
            self.save()

    def _answer(self) -> bool:
        """Generate one answer. Return True if tool calls ran and the model must now answer to their results."""
        from dsv4cli.engine.text.reply import name_calls

        prompt = self.window.messages(self.conversation)
        steps = self.conversation.reply(prompt, self.sampling, think_budget=self.think_budget)
        self.sampling = self.sampling.plus(1)  # a new seed, so that /retry samples another answer
        self.window.report_lookalikes(self.conversation.lookalikes)
        answer, lost = self._follow(steps)
        if answer is None:
            self.out.status("stopped; no answer yet")
            return False
        message, repairs = answer.message()
        for repair in repairs if not self.interrupts.stopped else ():
            self.out.warning(repair)
        calls = message.get("tool_calls") or []
        name_calls(message, len(self.session.messages))
        self.session.messages.append({key: value for key, value in message.items() if value or key == "content"})
        self._report(answer)
        if lost is not None:
            raise lost
        if not calls or self.interrupts.stopped:
            return False
        return self._carry_out(calls)

    def _carry_out(self, calls: list[dict[str, Any]]) -> bool:
        """Run tool calls and add their results to the session. Return whether every call has a result."""
        before = len(self.session.messages)
        self.interrupts.breakable = True
        try:
            for result in self.tools.run(calls, next_round(self.session, self.conversation, len(calls))):
                self.session.messages.append(result)
        except KeyboardInterrupt:
            self.out.status("stopped; the call has no result")
            return False
        finally:
            self.interrupts.breakable = False
        return len(self.session.messages) - before == len(calls)

    def _follow(
        self, steps: "Iterator[tuple[PartialAnswer, Pieces]]"
    ) -> tuple[PartialAnswer | None, AnswerLost | None]:
        """Stream an answer until it ends, is lost or is stopped by Ctrl-C.

        Returns:
            The answer, None if it has no token yet; and why it is incomplete, if it was lost.
        """
        view = self.view
        renderer = Renderer(self.out, view.markdown, view.show_thinking, tokens=self.session.choices.url is None)
        self.stats.last = clock = Clock()
        clock.start = perf_counter()
        if self.interrupts.stopped:  # stopped before the reply began
            self.conversation.stop()
        answer, lost, reading = None, None, Reading(self.out)
        try:
            with keys_wait():
                for answer, pieces in steps:
                    self.source.collect()
                    # a decode step is short; a prefill step may take minutes
                    self.interrupts.breakable = self.conversation.breakable
                    if self.view.on_terminal:
                        read = self.conversation.prefilled
                        reading.show(read, read + self.conversation.unread)
                    while clock.tokens < answer.sampled:  # a server reports the count at the end
                        clock.tick(answer.prepared)
                    for kind, text in pieces:
                        renderer.push(kind, text, answer.thoughts)
        except KeyboardInterrupt:
            return None, None
        except AnswerLost as error:
            lost = error
        finally:
            self.interrupts.breakable = False
            reading.show(0, 0)
            renderer.end()
        return (answer if answer is not None and answer.sampled else None), lost

    def _report(self, answer: PartialAnswer) -> None:
        """Print the status line below a turn, and a warning if the context is nearly full."""
        sampled, conversation, clock = answer.sampled, self.conversation, self.stats.last
        self.stats.add(conversation, sampled)
        used = conversation.prompt_tokens + sampled
        rate = f" · {clock.speed}" if clock.rate and clock.last - clock.first > BURST else ""
        per_step = None if conversation.drafts is None else conversation.drafts.tokens_per_step
        rate += f", {per_step:.1f} per step" if rate and per_step else ""
        first = f" · first token after {clock.first:.2f} s"
        ended = ENDED[answer.closed] if answer.closed else ""
        ended += (
            " · stopped"
            if self.interrupts.stopped
            else " · cut off at the token limit"
            if answer.finish == "length"
            else ""
        )
        self.out.status(f"{self.models.name}{self._used(used)}{rate}{first}{ended}")
        context = conversation.context
        if context is not None and used > NEARLY_FULL * context:
            left = counted(max(context - used, 0), "token")
            self.out.warning(f"{left} of context left; the oldest messages will soon be dropped from the prompt")

    def _used(self, tokens: int) -> str:
        """Return the context usage as text; empty if the server reports no prompt tokens."""
        if not self.conversation.prompt_tokens:
            return ""
        context = self.conversation.context
        return f" · {counted(tokens, 'token')}" if context is None else f" · {tokens:,} of {context:,} tokens"
