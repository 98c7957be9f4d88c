"""A client's prompt with sampling options and output format, and the engine requests that answer it."""

import asyncio
from dataclasses import dataclass, replace

from dsv4cli.engine.chat.constraints import Constraints
from dsv4cli.engine.chat.grammar import Grammar
from dsv4cli.engine.runtime.request import Constraint, Request, Token
from dsv4cli.engine.server.answer_format import ANY_SHAPE, AnswerFormat
from dsv4cli.engine.server.fields import Fields
from dsv4cli.engine.server.refusals import bad_field
from dsv4cli.engine.server.service import Service
from dsv4cli.engine.settings import (
    LEAST_REPETITION,
    MIN_TEMPERATURE,
    MOST_BIAS,
    MOST_PENALTY,
    MOST_REPETITION,
    Limits,
    Sampling,
)
from dsv4cli.errors import UsageError

MOST_CHOICES = 64
MOST_STOPS = 16
MOST_TEMPERATURE = 100.0


@dataclass(frozen=True)
class AnswerPlan:
    """A prompt and the options of its answers.

    Attributes:
        ids: the prompt's token ids.
        shape: the required form of the answers.
        budget: maximum number of thinking tokens, None for no limit.
        count: number of answers.
        ignore_eos: whether answers end only at their token limit.
    """

    ids: list[int]
    sampling: Sampling
    limits: Limits
    shape: AnswerFormat = ANY_SHAPE
    budget: int | None = None
    count: int = 1
    ignore_eos: bool = False

    async def requests(self, service: Service) -> list[Request]:
        """Return one engine request per answer, each with its own seed.

        Raises:
            Refusal: the prompt leaves no tokens for an answer, or the shape is invalid.
        """
        limits = replace(self.limits, max_tokens=min(self.limits.max_tokens, service.tokens_left(self.ids)))
        constraints = [self._thinking(limits.max_tokens, service) for _ in range(self.count)]
        if self.shape.needs_grammar:
            # compiling can take long and must not block other answers
            grammar = await asyncio.to_thread(self._grammar, service)
            constraints = [Constraints(*_parts(one), grammar.copy()) for one in constraints]
        elif self.shape.choice.kind == "none":
            constraints = [Constraints(*_parts(one), service.no_calls()) for one in constraints]
        return [
            Request(
                self.ids,
                self.sampling.plus(number),
                limits,
                constraint,
                stop_ids=() if self.ignore_eos else None,
                keep=service.dialogue.boundaries(self.ids),
            )
            for number, constraint in enumerate(constraints)
        ]

    def _thinking(self, max_tokens: int, service: Service) -> Constraint | None:
        if not service.dialogue.thinks(self.ids):
            return None
        return service.dialogue.thinking_limit(self.ids, max_tokens, self.budget)

    def _grammar(self, service: Service) -> Grammar:
        shape = self.shape
        try:
            return service.grammars.reply(
                thinking=service.dialogue.thinks(self.ids), form=shape.form, tools=shape.tools, choice=shape.choice
            )
        except UsageError as error:
            raise bad_field(shape.field, f"{error.message}; {error.remedy}") from None


def _parts(constraint: Constraint | None) -> list[Constraint]:
    return [] if constraint is None else [constraint]


def check_followed(request: Request, last: Token, field: str) -> None:
    """Raise `Refusal` if an answer has ended because its grammar failed.

    Args:
        last: the answer's last token.
        field: the body's field that requests the grammar.
    """
    constraint = request.constraint
    if last.finish == "stop" and isinstance(constraint, Constraints) and constraint.failure:
        raise bad_field(field, f"the grammar failed within the answer: {constraint.failure}")


def sampling_of(fields: Fields, service: Service) -> Sampling:
    """Return the sampling parameters of a body. Raises `Refusal` if one is invalid."""
    temperature = fields.number("temperature", 0, MOST_TEMPERATURE)
    top_p = fields.number("top_p", 0, 1)
    if temperature is not None and 0 < temperature < MIN_TEMPERATURE:
        temperature = 0.0
    seed = fields.integer("seed")
    if top_p == 0:
        temperature, top_p = 0.0, 1.0  # greedy
    top_k = fields.whole("top_k", -1)
    more = {
        "top_k": 0 if top_k == -1 else top_k,  # as vLLM
        "min_p": fields.number("min_p", 0, 1),
        "presence_penalty": fields.number("presence_penalty", -MOST_PENALTY, MOST_PENALTY),
        "frequency_penalty": fields.number("frequency_penalty", -MOST_PENALTY, MOST_PENALTY),
        "repetition_penalty": fields.number("repetition_penalty", LEAST_REPETITION, MOST_REPETITION),
    }
    sampling = service.defaults.sampling.chosen(temperature, top_p, service.seed(seed), more)
    return replace(sampling, logit_bias=_biases(fields, service))


def _biases(fields: Fields, service: Service) -> tuple[tuple[int, float], ...]:
    """Return the logit biases as (token id, bias) pairs."""
    given, size = fields.mapping("logit_bias"), service.dialogue.config.vocab_size
    if given is None:
        return ()
    biases: dict[int, float] = {}
    for name in given.names:
        token = int(name) if name.isascii() and name.isdigit() and len(name) < 10 else size
        if token >= size:
            raise bad_field(given.name(name), f"expected a token id in the vocabulary, 0 to {size - 1:,}")
        biases[token] = given.number(name, -MOST_BIAS, MOST_BIAS) or 0.0
    return tuple(biases.items())


def limits_of(fields: Fields, service: Service, most: int | None, stops: tuple[str, ...], logprobs: int) -> Limits:
    """Return the limits of an answer: token limit, stop texts and number of reported log-probabilities."""
    defaults = service.defaults.limits
    return replace(defaults, max_tokens=most or defaults.max_tokens, stops=defaults.stops + stops, logprobs=logprobs)
