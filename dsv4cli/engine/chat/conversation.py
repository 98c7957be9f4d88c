"""A conversation with a model: turn after turn in one cache, of which a turn prefills only what it does not hold."""

from bisect import bisect_left
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Literal

import torch

from dsv4cli.engine.chat.answer import Answer
from dsv4cli.engine.chat.answers import Pieces
from dsv4cli.engine.chat.dialogue import Dialogue
from dsv4cli.engine.chat.thinking import Thinking
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.generate import Step, taken
from dsv4cli.engine.runtime.limits import context_of, max_new_tokens
from dsv4cli.engine.runtime.prefix_cache import SNAPSHOTS, Prefixes
from dsv4cli.engine.runtime.preparing import Waits
from dsv4cli.engine.runtime.sampler import sample
from dsv4cli.engine.runtime.scheduler import Schedule, Stream
from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.engine.system.device import step_memory
from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.prompt import Message
from dsv4cli.engine.weights.offload import offload_of
from dsv4cli.errors import NotEnoughMemory, UsageError

# what a decoder is prepared for at first, if the context is as long
FEWEST_TOKENS = 8192
# an answer has room for as many tokens as it may have, up to this part of the context; where messages must go for that,
# as many go as leave the larger part free: the prompt is read anew each time
ANSWER_PART, FREED_PART = 8, 4
# far below any logit, and finite at the lowest temperature
BARRED = -1e30

Reply = Generator[tuple[Answer, Pieces], None, None]


class ContextFull(UsageError):
    """A conversation that leaves no room for an answer; `surplus` as `Talk.surplus` says it."""

    def __init__(self, tokens: int, context: int, surplus: int) -> None:
        what = "shorten the last message" if surplus < 0 else f"leave out the first {surplus} messages"
        super().__init__(
            f"the conversation has {tokens:,} tokens: the context has room for {context - 1:,} and an answer",
            f"{what}, or raise --max-context",
        )
        self.tokens, self.context, self.surplus = tokens, context, surplus


class Talk:
    """Answers one conversation; its messages may be others each time. `dialogue` and `limits` may be set between turns.

    prompt_tokens: of the last turn's prompt; reused: how many of them the cache held; prefilled: how many have gone
    through the model; lookalikes: as `Prompt` has them.
    """

    def __init__(self, model: Transformer, dialogue: Dialogue, limits: Limits, device: torch.device | str) -> None:
        self.model = model
        self.dialogue = dialogue
        self.limits = limits
        self.prompt_tokens = self.reused = self.prefilled = 0
        self.lookalikes: list[str] = []
        longest = min(FEWEST_TOKENS, self.context)
        self._schedule = Schedule(model, streams=1, prefill_chunk=limits.prefill_chunk, device=device, longest=longest)
        self._prefixes = Prefixes(self._schedule.cache)
        self._logits: torch.Tensor | None = None  # after the last step of a prompt
        self._reply: Reply | None = None
        self._stopping = False
        self._torn = False

    def __enter__(self) -> "Talk":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.forget()
        if kind is None:  # else a step may be under way, which graphs that go would wait for
            self._schedule.close()

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer."""
        return context_of(self.dialogue.config, self.limits)

    def tell_waits(self, waits: Waits) -> None:
        """Has it called with True where kernels are compiled or graphs captured, and with False after that step."""
        self._schedule.preparing.waits = waits

    @property
    def unread(self) -> int:
        """How many tokens of the running reply's prompt have not gone through the model yet."""
        return self.prompt_tokens - self.reused - self.prefilled

    @property
    def breakable(self) -> bool:
        """Whether what comes next, the rest of a prompt, may be ended by an exception at any point: on a CPU, where
        nothing but the cache changes. Launches on a GPU belong together, as do an expert's place and its copy, and
        what several ranks tell each other."""
        on_cpu = self._schedule.cache.device.type == "cpu"
        return self.unread > 1 and on_cpu and offload_of(self.model) is None and self.model.world.size == 1

    def tokens(self, messages: Sequence[Message]) -> int:
        """How many tokens the prompt of these messages has."""
        return len(self.dialogue.prompt(messages).ids)

    def surplus(self, messages: Sequence[Message]) -> int:
        """How many messages, the first after those of the system, must go for the prompt to leave room for an answer: 0
        if it does already or nothing can go, -1 if the last question alone leaves none. What stays begins with a
        question."""
        tokens, room = self.tokens(messages), max(min(self.limits.max_tokens, self.context // ANSWER_PART), 1)
        if tokens + room <= self.context:
            return 0
        roles = [message["role"] for message in messages]
        first = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
        cuts = [i for i in range(first + 1, len(roles)) if roles[i] in ("user", "developer")]

        def left(cut: int) -> int:
            return self.context - self.tokens([*messages[:first], *messages[cut:]])

        for wanted in (max(room, self.context // FREED_PART), room):
            nth = bisect_left(cuts, wanted, key=left)
            if nth < len(cuts):
                return cuts[nth] - first
        if cuts and left(cuts[-1]) > 0:
            return cuts[-1] - first
        return 0 if not cuts and tokens < self.context else -1

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
            raise ContextFull(len(ids), self.context, self.surplus(messages))
        room = max_new_tokens(ids, self.dialogue.config, self.limits)
        thinking = self._thinking(ids, room, think_budget)
        self.prompt_tokens, self.reused, self.prefilled = len(ids), 0, 0
        self._stopping = False
        self._reply = self._turn(ids, len(ids) + room, sampling, thinking)
        return self._reply

    def stop(self) -> None:
        """Ends the running reply before its next step, from any thread: its last item has what was held back, and the
        answer no `finish`."""
        self._stopping = True

    def forget(self) -> None:
        """Ends a running reply and gives back what the cache holds."""
        self._end()
        self._mend()
        self._schedule.clear()
        self._prefixes.forget()

    def _end(self) -> None:
        running, self._reply = self._reply, None
        if running is not None:
            running.close()

    @contextmanager
    def _step(self) -> Iterator[None]:
        """What runs inside changes the cache; where it does not come to its end, `_mend` puts that in order."""
        self._torn = True
        try:
            with step_memory(self._schedule.cache.device):
                yield
        except NotEnoughMemory as error:
            self._mend()
            self._prefixes.forget()
            raise NotEnoughMemory(error.message, f"leave out earlier messages, or {error.remedy}") from None
        self._torn = False

    def _mend(self) -> None:
        if self._torn:
            self._schedule.recover(self._prefixes.recover())
            self._torn = False

    def _thinking(self, ids: list[int], room: int, budget: int | None) -> Thinking:
        tokenizer = self.dialogue.tokenizer
        start, end = tokenizer.token_id(tokens.THINK_START), tokenizer.token_id(tokens.THINK_END)
        assert end is not None
        return Thinking(ids[-1] == start, room, budget, end, self.dialogue.config.eos_token_ids)

    def _turn(self, ids: list[int], end: int, sampling: Sampling, thinking: Thinking) -> Reply:
        """end: the most tokens of prompt and answer."""
        self._mend()
        answer = Answer(self.dialogue.tokenizer, self.dialogue.thinking, self.limits.stops)
        with self._step():
            stream = self._begin(ids, end)
        yield answer, []
        for boundary in self._boundaries(ids, stream.done):
            yield from self._prefill(stream, ids[len(stream.ids) : boundary], answer)
        while not self._ends():
            with self._step():
                logits = self._logits if stream.caught_up else self._schedule.logits()[1]
                assert logits is not None
                step = self._draw(stream, end, logits, sampling, thinking)
            stream.ids.append(step.token)
            thinking.push(step.token)
            answer.closed = thinking.closed
            yield answer, answer.push(step)
            if answer.finish:
                return
        yield answer, answer.cut()

    def _begin(self, ids: list[int], end: int) -> Stream:
        schedule = self._schedule
        schedule.clear()
        schedule.prefill_chunk = self.limits.prefill_chunk
        # a decoder is prepared anew for each doubling
        longest = min(max(FEWEST_TOKENS, 1 << (end - 1).bit_length()), self.context)
        schedule.lengthen(longest, spare=2 * SNAPSHOTS)
        stream = self._prefixes.begin(ids)
        schedule.add(stream)
        self.reused = stream.done
        return stream

    def _boundaries(self, ids: list[int], done: int) -> list[int]:
        """Where to keep the state: before the last question, which another may replace, and at the end."""
        user = self.dialogue.tokenizer.token_id(tokens.USER)
        question = next((i for i in range(len(ids) - 1, -1, -1) if ids[i] == user), 0)
        return [place for place in (question, len(ids)) if place > done]

    def _prefill(self, stream: Stream, ids: list[int], answer: Answer) -> Reply:
        """Runs the next tokens of the prompt, in as many steps as it takes, and keeps the state after them."""
        if self._ends():
            return
        stream.ids += ids
        while not stream.caught_up:
            with self._step():
                _, self._logits = self._schedule.logits()
                self.prefilled = stream.done - self.reused
                if stream.caught_up:
                    self._prefixes.mark()
            yield answer, []
            if self._ends():
                return

    def _ends(self) -> bool:
        """Whether `stop` was called, on rank 0 of several: they end a reply before the same step."""
        return self.model.world.agree(self._stopping)

    @torch.no_grad()
    def _draw(self, stream: Stream, end: int, logits: torch.Tensor, sampling: Sampling, thinking: Thinking) -> Step:
        """The next token: what the model draws, as in any generation, where the thinking asks for none itself."""
        forced, barred = thinking.forced(), thinking.barred()
        allowed = logits if not barred else logits.index_fill(-1, logits.new_tensor(barred).long(), BARRED)
        token = sample(allowed, sampling, [sampling.seed], [len(stream.ids)])
        if forced is not None:
            token = torch.full_like(token, forced)
        drawn = taken(self.model, logits, token, self.limits.logprobs)
        other = thinking.instead(drawn[0][0])
        if other is not None:
            drawn = taken(self.model, logits, torch.full_like(token, other), self.limits.logprobs)
        [(number, logprob, top)] = drawn
        finish = self._finish(number, len(stream.ids) + 1, end)
        return Step(0, number, logprob, top, finish, self._schedule.preparing.happened)

    def _finish(self, token: int, length: int, end: int) -> Literal["stop", "length"] | None:
        if token in self.dialogue.config.eos_token_ids:
            return "stop"
        return "length" if length >= end else None
