"""A conversation with a local model, whose turns share a cache: each turn prefills only tokens that are not cached."""

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
from dsv4cli.engine.text.prompt import Message, think_options, without_tools
from dsv4cli.engine.weights.offload import ExpertOffload, offload_of
from dsv4cli.errors import NotEnoughMemory, RankLost, UsageError

SNAPSHOTS = 16
GO_ON = "dsv4 chat --continue resumes after the last finished turn"

Reply = Generator[tuple[Answer, Pieces], None, None]


def conversation_capacity(context: int, conversations: int = 1) -> Capacity:
    """Return the engine capacity for `conversations` concurrent conversations of up to `context` tokens."""
    return Capacity(conversations, longest=min(FEWEST_TOKENS, context), snapshots=SNAPSHOTS)


class ContextFull(UsageError):
    """A conversation that leaves no tokens of the context for an answer.

    Attributes:
        messages_to_drop: as `Conversation.messages_to_drop` returns it.
    """

    def __init__(self, tokens: int, context: int, drop: int, longest: int) -> None:
        what = "shorten the last message" if drop < 0 else f"remove the first {drop} messages"
        super().__init__(
            f"the conversation has {tokens:,} tokens; the context limit is {context:,} tokens, including the answer",
            f"{what}, or raise --max-context" if context < longest else what,
        )
        self.tokens, self.context, self.messages_to_drop = tokens, context, drop


class Conversation:
    """Answers a conversation, whose messages may change between turns. So may `dialogue` and `limits`.

    Attributes:
        prompt_tokens: tokens of the last turn's prompt.
        reused: how many of them were found in the prefix cache.
        prefilled: how many of them have been prefilled so far.
        lookalikes: as in `Prompt`.
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
        """Create a conversation.

        Args:
            followers: the other tensor-parallel ranks of the model.
            engine: runs the turns; None to create an engine from `device`, `followers` and `drafting`.
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
        """The context length in tokens, including the answer."""
        return context_of(self.dialogue.config, self.limits)

    def report_preparing(self, on_preparing: OnPreparing) -> None:
        """Set a callback: called with True when kernels compile or graphs are captured, False after that step."""
        self.engine.report_preparing(on_preparing)

    @property
    def effort(self) -> str | None:
        """The reasoning effort; None if thinking is off."""
        return self.dialogue.effort

    def think(self, level: str) -> None:
        """Set the thinking level from the next turn on, as in `think_options`. Raises UsageError for an unknown one."""
        thinking, effort = think_options(self.dialogue.release, level)
        self.dialogue = replace(self.dialogue, thinking=thinking, effort=effort)

    @property
    def all_drafts(self) -> DraftReport | None:
        """Draft statistics of all turns."""
        return self.engine.draft_report()

    @property
    def offload(self) -> ExpertOffload | None:
        """The experts in host memory; None if there are none."""
        return offload_of(self.model)

    @property
    def drafts(self) -> DraftReport | None:
        """Draft statistics of the last turn so far; None without speculative decoding."""
        report = self.engine.draft_report()
        return None if report is None else report.since(self._drafts_before)

    @property
    def unread(self) -> int:
        """Number of tokens of the running turn's prompt that have not been prefilled yet."""
        return self.prompt_tokens - self.reused - self.prefilled

    @property
    def breakable(self) -> bool:
        """Whether an exception may interrupt the next step, a part of the prefill, at any point.

        This is safe on a CPU, where a step changes only the cache. It is not safe on a GPU, whose launches belong
        together, with offloaded experts (a row and its copy), or with several ranks, which exchange messages.
        """
        on_cpu = self.engine.runner.cache.device.type == "cpu"
        return self.unread > 1 and on_cpu and self.offload is None and self.model.world.size == 1

    def tokens(self, messages: Sequence[Message]) -> int:
        """Return the number of tokens of the prompt for these messages.

        If the last message is an answer, return the number of tokens of the conversation so far.
        """
        answered = bool(messages) and messages[-1]["role"] == "assistant"
        return len((self.dialogue.transcript if answered else self.dialogue.prompt)(messages).ids)

    def text_ids(self, text: str) -> list[int]:
        """Return the token ids of a text in a message."""
        return self.dialogue.text_ids(text)

    def most_tokens(self, text: str) -> int:
        """Return an upper bound for the number of tokens of a text in a message; here it is exact."""
        return len(self.text_ids(text))

    def left(self, messages: Sequence[Message]) -> int:
        """Return how many tokens of the context the prompt for these messages leaves."""
        return self.context - self.tokens(messages)

    def messages_to_drop(self, messages: Sequence[Message]) -> int:
        """Return what the function `messages_to_drop` does, for this model and its limits."""
        return messages_to_drop(messages, self.tokens, self.context, self.limits.max_tokens)

    def reply(self, messages: Sequence[Message], sampling: Sampling, *, think_budget: int | None = None) -> Reply:
        """Answer the last of these validated messages. A running reply ends first.

        Yields the answer, still empty, before the prefill and after each prefill step; then, after each token, the
        answer and its added text. Thinking ends after at most `think_budget` tokens, or earlier to leave tokens for the
        answer. After an error, or after an interruption between steps or of a `breakable` one, the next turn can start.

        Raises:
            ContextFull, UsageError: raised immediately.
            UnsoundResult, NotEnoughMemory: raised while the answer is generated.
        """
        self._end()
        prompt = self.dialogue.prompt(messages)
        ids, self.lookalikes = prompt.ids, prompt.lookalikes
        if len(ids) >= self.context:
            longest = self.dialogue.config.max_position_embeddings
            raise ContextFull(len(ids), self.context, self.messages_to_drop(messages), longest)
        most = max_new_tokens(ids, self.dialogue.config, self.limits)
        thinking = self.dialogue.thinking_limit(ids, most, think_budget)
        self.prompt_tokens, self.reused, self.prefilled = len(ids), 0, 0
        self._drafts_before = self.engine.draft_report()
        self._stopping = False
        answer = Answer(
            self.dialogue.tokenizer, self.dialogue.thinks(ids), self.limits.stops, without_tools(messages)[1]
        )
        self._reply = self._turn(ids, sampling, thinking, AnswerStream(answer))
        return self._reply

    def stop(self) -> None:
        """End the running reply before its next step, from any thread.

        Its last item has the text that was held back, and the answer has no `finish`.
        """
        self._stopping = True

    def forget(self) -> None:
        """End a running reply, and free the cache."""
        self._end()
        self.engine.forget()

    def _end(self) -> None:
        running, self._reply = self._reply, None
        if running is not None:
            running.close()
        if self._request is not None:  # an interrupted reply may not have cancelled it
            self._cancel(self._request)

    def _add(self, request: Request) -> None:
        self.engine.add(request)

    def _next_tokens(self, request: Request) -> list[Token]:
        """Run a step and return the tokens that it sampled, none for a prefill step."""
        [result] = self.engine.step()
        return result.tokens

    def _cancel(self, request: Request) -> None:
        self.engine.cancel(request)

    @contextmanager
    def _advice(self) -> Iterator[None]:
        """Add a remedy to memory errors. Several ranks must end: some of them may have had enough memory."""
        try:
            yield
        except NotEnoughMemory as error:
            if self.engine.followers is not None:
                raise RankLost(error.message, GO_ON) from None
            raise NotEnoughMemory(error.message, f"remove earlier messages, or {error.remedy}") from None

    def _turn(self, ids: list[int], sampling: Sampling, thinking: Thinking, stream: AnswerStream) -> Reply:
        self._request = request = Request(ids, sampling, self.limits, thinking, keep=self.dialogue.boundaries(ids))
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
                sampled = self._next_tokens(request)
            self.prefilled = min(request.done, self.prompt_tokens) - self.reused
            if reading:
                yield answer, []
            for token in sampled:
                if self._stopping:
                    break
                if token.id == thinking.think_end:  # `thinking` has processed all tokens of the step
                    answer.closed = thinking.closed
                yield answer, _pieces(stream.push(token))
                if answer.finish:
                    self._cancel(request)
                    return
        self._cancel(request)
        yield answer, _pieces(stream.cut())


def _pieces(deltas: Sequence[Delta]) -> Pieces:
    return [(delta.kind, delta.text or delta.name) for delta in deltas]
