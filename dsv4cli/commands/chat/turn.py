"""A turn of `dsv4 chat`: send the question, stream the answer, save it, and handle Ctrl-C."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Any

from dsv4cli.commands.chat.backend import ChatBackend, PartialAnswer
from dsv4cli.commands.chat.journal import SessionChoices
from dsv4cli.commands.chat.renderer import Renderer
from dsv4cli.commands.chat.session import FileChanged, Session
from dsv4cli.commands.chat.tools import Round, next_round
from dsv4cli.commands.clock import Clock
from dsv4cli.commands.job import report_lookalikes
from dsv4cli.commands.reading import Reading
from dsv4cli.commands.terminal import keys_wait
from dsv4cli.errors import AnswerLost, Dsv4Error, UsageError
from dsv4cli.output import Output, counted

if TYPE_CHECKING:
    from dsv4cli.engine.chat.answer import Pieces
    from dsv4cli.engine.settings import Sampling
    from dsv4cli.engine.text.prompt import Message

# seconds in which a second Ctrl-C quits
TWICE = 2.0
# fraction of the context above which a warning says that it is nearly full
NEARLY_FULL = 0.8
# seconds: a server that sends all tokens within this time had buffered them, so no speed is reported
BURST = 0.01

# status text by the reason why the engine ended the reasoning
ENDED = {
    "budget": " · thinking reached its budget",
    "room": " · thinking stopped to leave space for an answer",
    "end": " · no answer after thinking: one was requested",
}


@dataclass
class Interrupts:
    """Time of the last Ctrl-C, to recognize a double press."""

    _last: float = float("-inf")

    def again(self) -> bool:
        """Record a Ctrl-C. Return whether it is the second one within `TWICE` seconds."""
        before, self._last = self._last, monotonic()
        return self._last - before < TWICE


@dataclass
class Count:
    """Totals of the session: turns; prompt tokens prefilled and reused from the cache; sampled tokens."""

    turns: int = 0
    prefilled: int = 0
    reused: int = 0
    drawn: int = 0


# runs tool calls and yields a message with the result of each; ends early if the user declines to run more
RunCalls = Callable[[list[dict[str, Any]], Round], "Iterator[Message]"]


@dataclass
class Chat:
    """State of a running conversation, shared by the slash commands and the turns."""

    out: Output
    model: str
    conversation: ChatBackend
    session: Session
    sampling: "Sampling"
    interrupts: Interrupts
    run_calls: RunCalls = lambda calls, now: iter(())
    change_model: Callable[[str], None] = lambda name: None
    collect_keys: Callable[[], None] = lambda: None
    think_budget: int | None = None
    on_terminal: bool = False
    edits: bool = False  # the input can start with a draft text
    copies: bool = False  # the terminal may support copying to its clipboard
    markdown: bool = False
    show_thinking: bool = False
    draft: str | None = None  # text that the next input starts with: the last question
    last: Clock = field(default_factory=Clock)
    count: Count = field(default_factory=Count)
    stopped: bool = False  # by Ctrl-C, in the last turn
    leaving: bool = False  # by the second Ctrl-C
    _lost: AnswerLost | None = None  # why the last answer is incomplete
    _breakable: bool = False  # Ctrl-C raises at once: prefill or tool calls are running
    lookalikes: set[str] = field(default_factory=set)  # already reported
    left_out: int = 0  # oldest messages dropped from the prompt, not counting the system message

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
        self.stopped = self.leaving = False
        with self._signals():
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
        if self.leaving:
            raise KeyboardInterrupt

    def save(self) -> None:
        """Save the session, or print a warning if that fails."""
        try:
            self.session.save()
        except FileChanged as error:
            self.out.warning(f"the session was not saved to its file: {error.message}; {error.remedy}")
        except OSError as error:
            self.out.warning(f"the session was not saved: {error}; to save it elsewhere, use /save FILE")

    def choose(self, choices: SessionChoices) -> None:
        """Set the session's choices and save them, so that resuming the session restores them."""
        self.session.choices = choices
        if self.session.messages:
            self.save()

    def _answer(self) -> bool:
        """Generate one answer. Return True if tool calls ran and the model must now answer to their results."""
        from dsv4cli.engine.text.reply import name_calls

        steps = self.conversation.reply(self.prompt(), self.sampling, think_budget=self.think_budget)
        self.sampling = self.sampling.plus(1)  # a new seed, so that /retry samples another answer
        report_lookalikes(self.out, [text for text in self.conversation.lookalikes if text not in self.lookalikes])
        self.lookalikes.update(self.conversation.lookalikes)
        answer = self._follow(steps)
        if answer is None:
            self.out.status("stopped; no answer yet")
            return False
        message, repairs = answer.message()
        for repair in repairs if not self.stopped else ():
            self.out.warning(repair)
        calls = message.get("tool_calls") or []
        name_calls(message, len(self.session.messages))
        self.session.messages.append({key: value for key, value in message.items() if value or key == "content"})
        self._report(answer)
        if self._lost is not None:
            raise self._lost
        if not calls or self.stopped:
            return False
        return self._carry_out(calls)

    def _carry_out(self, calls: list[dict[str, Any]]) -> bool:
        """Run tool calls and add their results to the session. Return whether every call has a result."""
        before = len(self.session.messages)
        self._breakable = True
        try:
            for result in self.run_calls(calls, next_round(self.session, self.conversation, len(calls))):
                self.session.messages.append(result)
        except KeyboardInterrupt:
            self.out.status("stopped; the call has no result")
            return False
        finally:
            self._breakable = False
        return len(self.session.messages) - before == len(calls)

    def _follow(self, steps: "Iterator[tuple[PartialAnswer, Pieces]]") -> PartialAnswer | None:
        """Stream an answer until it ends, is lost or is stopped by Ctrl-C. Return None if it has no token yet."""
        renderer = Renderer(self.out, self.markdown, self.show_thinking, tokens=self.session.choices.url is None)
        self.last = clock = Clock()
        clock.start = perf_counter()
        if self.stopped:  # stopped before the reply began
            self.conversation.stop()
        answer, self._lost, reading = None, None, Reading(self.out)
        try:
            with keys_wait():
                for answer, pieces in steps:
                    self.collect_keys()
                    # a decode step is short; a prefill step may take minutes
                    self._breakable = self.conversation.breakable
                    if self.on_terminal:
                        read = self.conversation.prefilled
                        reading.show(read, read + self.conversation.unread)
                    while clock.tokens < answer.drawn:  # a server reports the count at the end
                        clock.tick(answer.prepared)
                    for kind, text in pieces:
                        renderer.push(kind, text, answer.thoughts)
        except KeyboardInterrupt:
            return None
        except AnswerLost as error:
            self._lost = error
        finally:
            self._breakable = False
            reading.show(0, 0)
            renderer.end()
        return answer if answer is not None and answer.drawn else None

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle Ctrl-C: stop before the next step, or at once in tool calls and interruptible prefill. Twice quits."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self.interrupts.again():  # may run inside the handler of the first: never reset to False
                self.leaving = True
            self.stopped = True
            self.conversation.stop()
            if self._breakable:
                self._breakable = False  # only once: the cleanup must not be interrupted
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def prompt(self) -> "list[Message]":
        """Return the messages that fit into the context. The oldest questions are dropped first, with their answers.

        Dropped messages stay dropped until the whole conversation fits again, so that the prefix cache keeps hitting.
        """
        messages = self.session.prompt()
        start = 0
        while start < len(messages) and messages[start]["role"] == "system":
            start += 1
        if self.conversation.messages_to_drop(messages) == 0:
            self.left_out = 0
            return messages
        if [message["role"] for message in messages[start + self.left_out :]][:1] != ["user"]:
            self.left_out = 0  # the conversation has been replaced
        shorter = messages[:start] + messages[start + self.left_out :]
        dropped = max(self.conversation.messages_to_drop(shorter), 0)
        if dropped:
            self.left_out += dropped
            left = counted(self.left_out, "message")
            self.out.warning(
                f"the oldest {left} are dropped from the prompt to leave space for an answer; the session keeps them"
            )
        return messages[:start] + messages[start + self.left_out :]

    def _report(self, answer: PartialAnswer) -> None:
        """Print the status line below a turn, and a warning if the context is nearly full."""
        drawn, conversation, clock = answer.drawn, self.conversation, self.last
        self.count.turns += 1
        self.count.prefilled += conversation.prefilled
        self.count.reused += conversation.reused
        self.count.drawn += drawn
        used = conversation.prompt_tokens + drawn
        rate = f" · {clock.speed}" if clock.rate and clock.last - clock.first > BURST else ""
        per_step = None if conversation.drafts is None else conversation.drafts.tokens_per_step
        rate += f", {per_step:.1f} per step" if rate and per_step else ""
        first = f" · first token after {clock.first:.2f} s"
        ended = ENDED[answer.closed] if answer.closed else ""
        ended += " · stopped" if self.stopped else " · cut off at the token limit" if answer.finish == "length" else ""
        self.out.status(f"{self.model}{self._used(used)}{rate}{first}{ended}")
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
