"""A conversation with a model: turn after turn in one cache, of which a turn prefills only what it does not hold."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType

import torch

from dsv4cli.engine.chat.answer import Answer, Pieces
from dsv4cli.engine.chat.answer_stream import AnswerStream, Delta
from dsv4cli.engine.chat.dialogue import Dialogue
from dsv4cli.engine.chat.dropping import messages_to_drop
from dsv4cli.engine.chat.thinking import Thinking
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.drafts.draft_report import DraftReport
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.graphs.compile_watch import OnPreparing
from dsv4cli.engine.runtime.limits import context_of, max_new_tokens
from dsv4cli.engine.runtime.orders import Followers
from dsv4cli.engine.runtime.request import Request, Token
from dsv4cli.engine.runtime.state.capacity import FEWEST_TOKENS, Capacity
from dsv4cli.engine.settings import NO_DRAFTS, Drafting, Limits, Sampling
from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.prompt import Message, think_options, without_tools
from dsv4cli.engine.weights.offload import ExpertOffload, offload_of
from dsv4cli.errors import NotEnoughMemory, RankLost, UsageError

SNAPSHOTS = 16
GO_ON = "dsv4 chat --continue goes on after the last finished turn"

Reply = Generator[tuple[Answer, Pieces], None, None]


def conversation_capacity(context: int, conversations: int = 1) -> Capacity:
    """Return what an engine holds for conversations of up to `context` tokens, so many of them at once."""
    return Capacity(conversations, longest=min(FEWEST_TOKENS, context), snapshots=SNAPSHOTS)


class ContextFull(UsageError):
    """A conversation that leaves no room for an answer; messages_to_drop: as `Conversation` counts them. longest: the
    context that the model has."""

    def __init__(self, tokens: int, context: int, drop: int, longest: int) -> None:
        what = "shorten the last message" if drop < 0 else f"leave out the first {drop} messages"
        super().__init__(
            f"the conversation has {tokens:,} tokens: the context has room for {context - 1:,} and an answer",
            f"{what}, or raise --max-context" if context < longest else what,
        )
        self.tokens, self.context, self.messages_to_drop = tokens, context, drop


class Conversation:
    """Answers one conversation; its messages may be others each time. `dialogue` and `limits` may be set between turns.

    prompt_tokens: of the last turn's prompt; reused: how many of them the cache held; prefilled: how many have gone
    through the model; lookalikes: as `Prompt` has them.
    """

    def __init__(
        self,
        model: Transformer,
        dialogue: Dialogue,
        limits: Limits,
        device: torch.device | str,
        followers: Followers | None = None,
        drafting: Drafting = NO_DRAFTS,
        engine: Engine | None = None,
    ) -> None:
        """Make a conversation.

        Args:
            followers: The other ranks that compute the model.
            engine: The engine that runs its turns; if None, one of its own for this device, followers and drafting.
        """
        self.model = model
        self.dialogue = dialogue
        self.limits = limits
        self.prompt_tokens = self.reused = self.prefilled = 0
        self.lookalikes: list[str] = []
        self.engine = engine or Engine(model, conversation_capacity(self.context), device, followers, drafting)
        self._drafts_before: DraftReport | None = None
        self._reply: Reply | None = None
        self._request: Request | None = None
        self._stopping = False

    def __enter__(self) -> "Conversation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.forget()
        self.engine.__exit__(kind, error, trace)

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer."""
        return context_of(self.dialogue.config, self.limits)

    def report_preparing(self, on_preparing: OnPreparing) -> None:
        """Has it called with True where kernels are compiled or graphs captured, and with False after that step."""
        self.engine.report_preparing(on_preparing)

    @property
    def effort(self) -> str | None:
        """How hard to reason; None for not at all."""
        return self.dialogue.effort

    def think(self, level: str) -> None:
        """How hard to reason from the next turn on, in the words of `think_options`. Raises UsageError."""
        thinking, effort = think_options(self.dialogue.release, level)
        self.dialogue = replace(self.dialogue, thinking=thinking, effort=effort)

    @property
    def all_drafts(self) -> DraftReport | None:
        """What the drafts of all turns have come to."""
        return self.engine.draft_report()

    @property
    def offload(self) -> ExpertOffload | None:
        """The experts in host memory; None where none are."""
        return offload_of(self.model)

    @property
    def drafts(self) -> DraftReport | None:
        """What the drafts of the last turn have come to so far; None where none are to be made."""
        report = self.engine.draft_report()
        return None if report is None else report.since(self._drafts_before)

    @property
    def unread(self) -> int:
        """How many tokens of the running reply's prompt have not gone through the model yet."""
        return self.prompt_tokens - self.reused - self.prefilled

    @property
    def breakable(self) -> bool:
        """Whether what comes next, the rest of a prompt, may be ended by an exception at any point: on a CPU, where
        nothing but the cache changes. Launches on a GPU belong together, as do an expert's row and its copy, and
        what several ranks tell each other."""
        on_cpu = self.engine.runner.cache.device.type == "cpu"
        return self.unread > 1 and on_cpu and self.offload is None and self.model.world.size == 1

    def tokens(self, messages: Sequence[Message]) -> int:
        """Return how many tokens a prompt of these messages has, or the messages, where they end with an answer."""
        answered = bool(messages) and messages[-1]["role"] == "assistant"
        return len((self.dialogue.transcript if answered else self.dialogue.prompt)(messages).ids)

    def text_ids(self, text: str) -> list[int]:
        """The tokens of a text in a message."""
        return self.dialogue.text_ids(text)

    def most_tokens(self, text: str) -> int:
        """How many tokens a text in a message has."""
        return len(self.text_ids(text))

    def left(self, messages: Sequence[Message]) -> int:
        """How many tokens of the context the prompt of these messages leaves."""
        return self.context - self.tokens(messages)

    def messages_to_drop(self, messages: Sequence[Message]) -> int:
        """As the function of this name, for this model and its limits."""
        return messages_to_drop(messages, self.tokens, self.context, self.limits.max_tokens)

    def reply(self, messages: Sequence[Message], sampling: Sampling, *, think_budget: int | None = None) -> Reply:
        """Answers the last of these checked messages: before the prompt and after each step of it the answer, still
        empty, and after each token the answer and what that added. An earlier reply ends.

        Thinking ends after `think_budget` tokens at the latest, and where else no room would be left for an answer.
        Raises ContextFull and UsageError at once; while it runs UnsoundResult and NotEnoughMemory, after which, as
        after any interruption between steps or of one that is `breakable`, the next turn can be asked for.
        """
        self._end()
        prompt = self.dialogue.prompt(messages)
        ids, self.lookalikes = prompt.ids, prompt.lookalikes
        if len(ids) >= self.context:
            longest = self.dialogue.config.max_position_embeddings
            raise ContextFull(len(ids), self.context, self.messages_to_drop(messages), longest)
        room = max_new_tokens(ids, self.dialogue.config, self.limits)
        thinking = self._thinking(ids, room, think_budget)
        self.prompt_tokens, self.reused, self.prefilled = len(ids), 0, 0
        self._drafts_before = self.engine.draft_report()
        self._stopping = False
        answer = Answer(
            self.dialogue.tokenizer, self.dialogue.thinks(ids), self.limits.stops, without_tools(messages)[1]
        )
        self._reply = self._turn(ids, sampling, thinking, AnswerStream(answer))
        return self._reply

    def stop(self) -> None:
        """Ends the running reply before its next step, from any thread: its last item has what was held back, and the
        answer no `finish`."""
        self._stopping = True

    def forget(self) -> None:
        """Ends a running reply and gives back what the cache holds."""
        self._end()
        self.engine.forget()

    def _end(self) -> None:
        running, self._reply = self._reply, None
        if running is not None:
            running.close()
        if self._request is not None:  # an interruption may have kept the reply from ending it
            self._cancel(self._request)

    def _add(self, request: Request) -> None:
        self.engine.add(request)

    def _next_tokens(self, request: Request) -> list[Token]:
        """Run a step and return what it drew, nothing for a step of the prompt."""
        [result] = self.engine.step()
        return result.tokens

    def _cancel(self, request: Request) -> None:
        self.engine.cancel(request)

    @contextmanager
    def _advice(self) -> Iterator[None]:
        """Where memory is short: what to do about it. Ranks may have had enough each for itself: they end."""
        try:
            yield
        except NotEnoughMemory as error:
            if self.engine.followers is not None:
                raise RankLost(error.message, GO_ON) from None
            raise NotEnoughMemory(error.message, f"leave out earlier messages, or {error.remedy}") from None

    def _thinking(self, ids: list[int], room: int, budget: int | None) -> Thinking:
        end = self.dialogue.tokenizer.token_id(tokens.THINK_END)
        assert end is not None
        return Thinking(self.dialogue.thinks(ids), room, budget, end, self.dialogue.config.eos_token_ids)

    def _turn(self, ids: list[int], sampling: Sampling, thinking: Thinking, stream: AnswerStream) -> Reply:
        self._request = request = Request(ids, sampling, self.limits, thinking, keep=self._boundaries(ids))
        with self._advice():
            self._add(request)
        self.reused = request.done
        try:
            yield stream.answer, []
            yield from self._steps(request, stream, thinking)
        except GeneratorExit:
            self._cancel(request)
            raise

    def _steps(self, request: Request, stream: AnswerStream, thinking: Thinking) -> Reply:
        answer = stream.answer
        while not self._stopping:
            reading = self.unread > 0
            with self._advice():
                drawn = self._next_tokens(request)
            self.prefilled = min(request.done, self.prompt_tokens) - self.reused
            if reading:
                yield answer, []
            for token in drawn:
                if self._stopping:
                    break
                if token.id == thinking.think_end:  # the thinking has seen all tokens of the step
                    answer.closed = thinking.closed
                yield answer, _pieces(stream.push(token))
                if answer.finish:
                    self._cancel(request)
                    return
        self._cancel(request)
        yield answer, _pieces(stream.cut())

    def _boundaries(self, ids: list[int]) -> tuple[int, ...]:
        """Where to keep the state: before the last question, which another may replace, and at the end."""
        user = self.dialogue.tokenizer.token_id(tokens.USER)
        question = next((i for i in range(len(ids) - 1, -1, -1) if ids[i] == user), 0)
        return (question, len(ids))


def _pieces(deltas: Sequence[Delta]) -> Pieces:
    return [(delta.kind, delta.text or delta.name) for delta in deltas]
