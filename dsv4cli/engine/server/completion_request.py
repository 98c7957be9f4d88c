"""The validated body of /v1/completions: raw prompts, and the options of their continuations."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.server.answer_format import AnswerFormat, openai_form
from dsv4cli.engine.server.fields import Fields
from dsv4cli.engine.server.neutral_fields import refuse_unsupported
from dsv4cli.engine.server.plan import MOST_CHOICES, MOST_STOPS, AnswerPlan, limits_of, sampling_of
from dsv4cli.engine.server.refusals import Refusal, bad_field
from dsv4cli.engine.server.service import Service
from dsv4cli.engine.settings import Sampling
from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.reply_grammar import ToolChoice

# defaults of OpenAI's API
USUAL_TOKENS = 16
MOST_LOGPROBS = 20
IDLE = ("model", "user", "metadata", "guided_decoding_backend")


@dataclass(frozen=True)
class CompletionRequest:
    """A validated request to /v1/completions.

    Attributes:
        plans: one per prompt.
        echo: whether the returned text begins with the prompt.
        logprobs: number of alternatives to report per token, None for no log-probabilities.
        follows: whether the prompts are continued (`max_tokens` is not 0).
    """

    plans: list[AnswerPlan]
    stream: bool
    include_usage: bool
    echo: bool
    logprobs: int | None
    follows: bool

    @property
    def scored(self) -> bool:
        """Whether the log-probabilities of the prompts' own tokens are reported."""
        return self.echo and self.logprobs is not None

    @property
    def draws(self) -> bool:
        """Whether separate requests sample the continuations."""
        return self.follows and not self.one_greedy

    @property
    def count(self) -> int:
        """Number of engine requests that this request needs."""
        return sum(self.scored + plan.count * self.draws for plan in self.plans)

    @property
    def one_greedy(self) -> bool:
        """Whether each continuation is the single likeliest token, which scoring the prompt finds already."""
        one = self.plans[0]  # the plans differ only in their prompts
        own = one.sampling
        greedy = own.temperature == 0 and not own.logit_bias and not own.penalizes and not one.ignore_eos
        greedy = greedy and not one.shape.needs_grammar
        return self.scored and greedy and one.limits.max_tokens == 1 and one.count == 1

    def scoring(self) -> list[Request]:
        """Return the requests that score the prompts' own tokens, one per prompt; none if they are not reported."""
        if not self.scored:
            return []
        limits = replace(self.plans[0].limits, logprobs=max(1, self.logprobs or 0))
        return [Request(plan.ids, Sampling(), limits, scored=True) for plan in self.plans]

    async def drawing(self, service: Service) -> list[list[Request]]:
        """Return the requests that sample the continuations, for each prompt."""
        return [await plan.requests(service) if self.draws else [] for plan in self.plans]


def read_completion(body: dict[str, Any], service: Service) -> CompletionRequest:
    """Validate a request body.

    Raises:
        Refusal: a field is invalid; the message names it.
    """
    fields = Fields(body)
    begin = service.dialogue.tokenizer.encode(tokens.BOS) if fields.flag("add_special_tokens") else []
    prompts = [begin + ids for ids in _prompts(fields, service)]
    most = fields.whole("max_tokens", 0)
    logprobs = fields.whole("logprobs", 0, MOST_LOGPROBS)
    echo, stream = fields.flag("echo"), fields.flag("stream")
    most = USUAL_TOKENS if most is None else most
    if not most and not echo:
        raise bad_field("max_tokens", "0 requires echo: true, because the response would be empty")
    limits = limits_of(fields, service, most or 1, fields.texts("stop", MOST_STOPS), logprobs or 0)
    sampling, count = sampling_of(fields, service), fields.whole("n", 1, MOST_CHOICES) or 1
    ignore_eos = fields.flag("ignore_eos")
    form, field = openai_form(fields)
    shape = AnswerFormat(form, ToolChoice("auto"), [], field)
    plans = [AnswerPlan(ids, sampling, limits, shape, count=count, ignore_eos=ignore_eos) for ids in prompts]
    for plan in plans:
        service.tokens_left(plan.ids[:-1] if not most else plan.ids)
    options = fields.mapping("stream_options")
    include_usage = options is not None and options.flag("include_usage")
    if fields.text("suffix"):
        raise bad_field("suffix", "not supported: the model continues text, it does not insert text")
    request = CompletionRequest(plans, stream, include_usage, echo, logprobs, most > 0)
    if request.count > service.engine.most:
        reason = f"with {len(plans)} prompts this makes {request.count:,} requests"
        raise bad_field("n", f"{reason}, and the server accepts {service.engine.most:,} at a time")
    refuse_unsupported(fields, {"best_of": count} | ({"min_tokens": fields.value("min_tokens")} if ignore_eos else {}))
    fields.ignored(*IDLE)
    service.say_ignored(fields.unknown)
    return request


def _prompts(fields: Fields, service: Service) -> list[list[int]]:
    """Return the token ids of each prompt in `prompt`: a text, a list of texts, token ids, or a list of those.

    The text of a special token is encoded as that token.
    """
    given = fields.value("prompt")
    several = isinstance(given, list) and not all(type(one) is int for one in given)
    prompts = given if several else [given]
    if not prompts or len(prompts) > MOST_CHOICES:
        raise bad_field("prompt", f"expected 1 to {MOST_CHOICES} prompts")
    return [_ids(one, f"prompt[{nth}]" if several else "prompt", service) for nth, one in enumerate(prompts)]


def _ids(given: object, where: str, service: Service) -> list[int]:
    if isinstance(given, str):
        ids = service.encode(given)
    elif isinstance(given, list) and all(type(one) is int for one in given):
        ids = check_ids(given, where, service)
    else:
        raise bad_field(where, "expected a text or a list of token ids")
    if not ids:
        raise bad_field(where, "empty: at least one token is required")
    service.say_prompt(given)
    return ids


def check_ids(given: Sequence[int], where: str, service: Service) -> list[int]:
    """Return a client's token ids as a list. Raises `Refusal` if one is outside the vocabulary."""
    size = service.dialogue.config.vocab_size
    strange = next((one for one in given if not 0 <= one < size), None)
    if strange is not None:
        raise Refusal(400, f"{where}: the token id {strange} is not in the vocabulary, 0 to {size - 1:,}", where)
    return list(given)
