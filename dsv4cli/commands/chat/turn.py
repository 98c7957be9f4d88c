"""A turn of `dsv4 chat`: the question put to the model, its answer shown, kept and counted; and how it is stopped."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Any

from dsv4cli.commands.chat.backend import Backend, PartialAnswer
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

# a second Ctrl-C within so many seconds quits
TWICE = 2.0
# used up to this share, the context is said to be nearly full
NEARLY_FULL = 0.8
# seconds: tokens that come within so few were held back by a server, and say nothing of its speed
BURST = 0.01

# why the engine has ended a thinking
ENDED = {
    "budget": " · thinking reached its budget",
    "room": " · thinking stopped to leave space for an answer",
    "end": " · no answer after thinking: one was requested",
}


@dataclass
class Interrupts:
    """When Ctrl-C was pressed last."""

    _last: float = float("-inf")

    def again(self) -> bool:
        """Notes that it is pressed now; whether it is the second time in `TWICE` seconds."""
        before, self._last = self._last, monotonic()
        return self._last - before < TWICE


@dataclass
class Count:
    """What the session has cost: turns, and tokens that were prefilled, reused, drawn."""

    turns: int = 0
    prefilled: int = 0
    reused: int = 0
    drawn: int = 0


# calls in, the messages with their results out, one by one; fewer where the user wants no more of them carried out
RunCalls = Callable[[list[dict[str, Any]], Round], "Iterator[Message]"]


@dataclass
class Chat:
    """A conversation with a model under way: what the commands of the user change and the turns use."""

    out: Output
    model: str
    conversation: Backend
    session: Session
    sampling: "Sampling"
    interrupts: Interrupts
    run_calls: RunCalls = lambda calls, now: iter(())
    change_model: Callable[[str], None] = lambda name: None
    collect_keys: Callable[[], None] = lambda: None
    think_budget: int | None = None
    on_terminal: bool = False
    edits: bool = False  # the input takes up a draft
    copies: bool = False  # the terminal may be asked to fill its clipboard
    markdown: bool = False
    show_thinking: bool = False
    draft: str | None = None  # the last question, which the next input changes
    last: Clock = field(default_factory=Clock)
    count: Count = field(default_factory=Count)
    stopped: bool = False  # the last turn was, by Ctrl-C
    leaving: bool = False  # by the second Ctrl-C
    _lost: AnswerLost | None = None  # why there is no more of the last answer
    _breakable: bool = False  # the prompt is read or calls are carried out, which Ctrl-C ends at once
    lookalikes: set[str] = field(default_factory=set)  # those that were reported
    left_out: int = 0  # messages after the system message that the context has no room for

    def ask(self, question: str, before: "list[Message]") -> None:
        """Take a turn: ask, answer, and carry out the calls of tools in it.

        Without an answer the conversation is as `before`. Calls that were carried out stay in it, with their results.

        Raises:
            Dsv4Error: at once where the question is not valid Unicode, or the file of the session was changed.
            KeyboardInterrupt: for the second Ctrl-C, after which the text so far is kept, as after AnswerLost.
        """
        from dsv4cli.engine.text.tokenizer import check_unicode

        try:
            check_unicode(question, "the question")  # a file of a session could not be read again
            self.session.check_file()
        except UsageError:
            self.session.messages = before
            raise
        self.session.messages.append({"role": "user", "content": question})
        self._take_turn(before)

    def answer_again(self) -> None:
        """Replace the answer to the results of the last calls, which are not carried out again; raises as `ask`."""
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
                    self.save()  # the calls are not carried out again, whatever happens
            except AnswerLost:
                raise
            except Dsv4Error:
                if all(message["role"] != "tool" for message in self.session.messages[len(begun) :]):
                    self.session.messages[:] = before
                if self.session.has_results():
                    self.out.status("the calls and their results are kept; to ask for the answer again, use /retry")
                raise
            finally:
                if self.session.messages == begun:  # it was stopped before a word
                    self.session.messages = before
                self.save()
        if self.leaving:
            raise KeyboardInterrupt

    def save(self) -> None:
        """Makes the session durable, or says that it is not."""
        try:
            self.session.save()
        except FileChanged as error:
            self.out.warning(f"the session was not saved to its file: {error.message}; {error.remedy}")
        except OSError as error:
            self.out.warning(f"the session was not saved: {error}; to save it elsewhere, use /save FILE")

    def choose(self, choices: SessionChoices) -> None:
        """Notes what the session is led with from now on, for who goes on with it."""
        self.session.choices = choices
        if self.session.messages:
            self.save()

    def _answer(self) -> bool:
        """One answer of the model; whether it goes on after the results of its calls."""
        from dsv4cli.engine.text.reply import name_calls

        steps = self.conversation.reply(self.prompt(), self.sampling, think_budget=self.think_budget)
        self.sampling = self.sampling.plus(1)  # /retry draws anew
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
        """Add the results of calls to the session; whether each has one."""
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
        """Show an answer until it ends, is lost or Ctrl-C comes. Return None where that was before the first token."""
        renderer = Renderer(self.out, self.markdown, self.show_thinking, tokens=self.session.choices.url is None)
        self.last = clock = Clock()
        clock.start = perf_counter()
        if self.stopped:  # before there was a reply to stop
            self.conversation.stop()
        answer, self._lost, reading = None, None, Reading(self.out)
        try:
            with keys_wait():
                for answer, pieces in steps:
                    self.collect_keys()
                    # a step with a token is short; one of the prompt may take minutes
                    self._breakable = self.conversation.breakable
                    if self.on_terminal:
                        read = self.conversation.prefilled
                        reading.show(read, read + self.conversation.unread)
                    while clock.tokens < answer.drawn:  # a server counts them at the end
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
        """Have Ctrl-C end an answer before its next step, or a call or a breakable prefill at once; twice it leaves."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self.interrupts.again():  # perhaps inside the handler of the first: never back to False
                self.leaving = True
            self.stopped = True
            self.conversation.stop()
            if self._breakable:
                self._breakable = False  # once: what follows puts things in order
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def prompt(self) -> "list[Message]":
        """The conversation as far as the context has room for it: the oldest questions, with their answers, go first.

        What has gone stays away while the whole does not fit, so that the cache serves for many turns.
        """
        messages = self.session.prompt()
        start = 0
        while start < len(messages) and messages[start]["role"] == "system":
            start += 1
        if self.conversation.messages_to_drop(messages) == 0:
            self.left_out = 0
            return messages
        if [message["role"] for message in messages[start + self.left_out :]][:1] != ["user"]:
            self.left_out = 0  # the conversation is another one by now
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
        """The line below a turn."""
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
        """How much of the context is used, as far as a server says so."""
        if not self.conversation.prompt_tokens:
            return ""
        context = self.conversation.context
        return f" · {counted(tokens, 'token')}" if context is None else f" · {tokens:,} of {context:,} tokens"
