"""One answer on its way to a client: its tokens parsed into reasoning, content and tool calls."""

from collections.abc import Iterable

from dsv4cli.engine.chat.answer import Answer, FinishReason
from dsv4cli.engine.chat.answer_stream import AnswerStream, Delta
from dsv4cli.engine.runtime.request import Request, Token
from dsv4cli.engine.server.async_engine import EngineCall
from dsv4cli.engine.server.engine_thread import Update
from dsv4cli.engine.server.plan import AnswerPlan, check_followed
from dsv4cli.engine.server.service import Service
from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.prompt import Message


class Choice:
    """An answer to a prompt, as it is generated.

    Attributes:
        index: its position among the answers to the prompt.
        reasoning_tokens: number of tokens of its thinking, including the end-of-thinking token.
    """

    def __init__(self, index: int, request: Request, plan: AnswerPlan, service: Service) -> None:
        self.index, self.request = index, request
        self._metrics, self._field = service.metrics, plan.shape.field
        self._thinks = service.dialogue.thinks(plan.ids)
        answer = Answer(service.dialogue.tokenizer, self._thinks, request.limits.stops, plan.shape.tools)
        self._stream = AnswerStream(answer, calls=plan.shape.choice.kind != "none")
        self._most_calls = None if plan.shape.choice.parallel else 1
        self._say_repaired = service.say_repaired
        self.reasoning_tokens = 0
        self._think_end = service.dialogue.tokenizer.token_id(tokens.THINK_END)

    @property
    def finish(self) -> FinishReason | None:
        """The finish reason, None while the answer is being generated."""
        return self._stream.finish

    @property
    def ended(self) -> bool:
        """Whether the answer is complete."""
        return self._stream.answer.finish is not None

    @property
    def stopped_by(self) -> str | None:
        """The stop text that ended the answer, None if none did."""
        return self._stream.answer.stopped_by

    @property
    def open_call(self) -> int | None:
        """After the end, the index of a call that was started but is not part of the answer; None otherwise."""
        return self._stream.open_call

    @property
    def sampled(self) -> int:
        """Number of tokens generated so far, including the end token."""
        return len(self._stream.answer.tokens)

    @property
    def cached(self) -> int:
        """Number of prompt tokens found in the prefix cache."""
        return self.request.cached

    @property
    def message(self) -> Message:
        """The complete answer as a message. Use it only after the answer has ended."""
        message = self._stream.message()
        return message | {"tool_calls": message["tool_calls"][: self._most_calls]}

    def push(self, given: Iterable[Token], call: EngineCall) -> tuple[list[Delta], list[Token]]:
        """Add tokens. If a stop text appears, the request ends too.

        Returns:
            The deltas that the tokens add to the answer, and the tokens that are now certain to be part of its text.

        Raises:
            Refusal: the answer has ended because its grammar failed.
        """
        answer, deltas = self._stream.answer, list[Delta]()
        sampled, shown = answer.sampled, answer.shown
        for token in given:
            if self.ended:
                break
            self.reasoning_tokens += self._thinks
            self._thinks = self._thinks and token.id != self._think_end
            deltas += self._stream.push(token)
        if self._most_calls is not None:  # without a grammar, the model may call more tools
            deltas = [delta for delta in deltas if delta.index < self._most_calls]
        if self.ended:
            call.finish(self.request)
            if sampled < answer.sampled:
                self._say_repaired(self._stream.repairs)
        self._metrics.count_generated(answer.sampled - sampled)
        if self.ended:
            check_followed(self.request, answer.tokens[-1], self._field)
        return deltas, answer.tokens[shown : answer.shown]


def choices_of(plan: AnswerPlan, requests: list[Request], service: Service) -> dict[Request, Choice]:
    """Return the answers of a plan by request."""
    return {one: Choice(index, one, plan, service) for index, one in enumerate(requests)}


def pushed(
    updates: list[Update], choices: dict[Request, Choice], call: EngineCall
) -> dict[Choice, tuple[list[Delta], list[Token]]]:
    """Add updates to their answers. Return the result of `Choice.push` for each answer that got tokens."""
    tokens_of: dict[Choice, list[Token]] = {}
    for update in updates:
        tokens_of.setdefault(choices[update.request], []).extend(update.tokens)
    return {choice: choice.push(given, call) for choice, given in tokens_of.items() if given}
