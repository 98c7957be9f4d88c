"""The body of /v1/completions, checked: texts or token ids, as they are, and what is wanted of what follows them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.server.fields import Fields
from dsv4cli.engine.server.plan import MOST_CHOICES, MOST_STOPS, AnswerPlan, limits_of, sampling_of
from dsv4cli.engine.server.refusals import Refusal, bad_field
from dsv4cli.engine.server.service import Service
from dsv4cli.engine.settings import Sampling
from dsv4cli.engine.text import tokens

# as in OpenAI's API
USUAL_TOKENS = 16
MOST_LOGPROBS = 20
IDLE = ("model", "user", "metadata")


@dataclass(frozen=True)
class CompletionRequest:
    """plans: one a prompt. echo: the prompt is part of the text. logprobs: how many alternatives are reported, None
    for nothing. follows: whether anything does, behind the prompts."""

    plans: list[AnswerPlan]
    stream: bool
    include_usage: bool
    echo: bool
    logprobs: int | None
    follows: bool

    @property
    def scored(self) -> bool:
        """Whether the prompts' own tokens are reported."""
        return self.echo and self.logprobs is not None

    @property
    def draws(self) -> bool:
        """Whether requests of their own draw what follows the prompts."""
        return self.follows and not self.one_greedy

    @property
    def count(self) -> int:
        """How many requests of the engine it is."""
        return sum(self.scored + plan.count * self.draws for plan in self.plans)

    @property
    def one_greedy(self) -> bool:
        """Whether all that follows is the likeliest token, which scoring finds too."""
        one = self.plans[0]  # only their prompts differ
        greedy = one.sampling.temperature == 0 and not one.sampling.logit_bias and not one.ignore_eos
        return self.scored and greedy and one.limits.max_tokens == 1 and one.count == 1

    def scoring(self) -> list[Request]:
        """What reports the prompts' own tokens."""
        if not self.scored:
            return []
        limits = replace(self.plans[0].limits, logprobs=max(1, self.logprobs or 0))
        return [Request(plan.ids, Sampling(), limits, scored=True) for plan in self.plans]

    async def drawing(self, service: Service) -> list[list[Request]]:
        """What follows each prompt."""
        return [await plan.requests(service) if self.draws else [] for plan in self.plans]


def read_completion(body: dict[str, Any], service: Service) -> CompletionRequest:
    """What a body asks for. Raises `Refusal` naming the field."""
    fields = Fields(body)
    begin = service.dialogue.tokenizer.encode(tokens.BOS) if fields.flag("add_special_tokens") else []
    prompts = [begin + ids for ids in _prompts(fields, service)]
    most = fields.whole("max_tokens", 0)
    logprobs = fields.whole("logprobs", 0, MOST_LOGPROBS)
    echo, stream = fields.flag("echo"), fields.flag("stream")
    most = USUAL_TOKENS if most is None else most
    if not most and not echo:
        raise bad_field("max_tokens", "0 needs echo: true, or there is nothing to give")
    limits = limits_of(fields, service, most or 1, fields.texts("stop", MOST_STOPS), logprobs or 0)
    sampling, count = sampling_of(fields, service), fields.whole("n", 1, MOST_CHOICES) or 1
    ignore_eos = fields.flag("ignore_eos")
    plans = [AnswerPlan(ids, sampling, limits, count=count, ignore_eos=ignore_eos) for ids in prompts]
    for plan in plans:
        service.room(plan.ids[:-1] if not most else plan.ids)
    options = fields.mapping("stream_options")
    include_usage = options is not None and options.flag("include_usage")
    if fields.text("suffix"):
        raise bad_field("suffix", "the model goes on with a text, it does not fill one in")
    request = CompletionRequest(plans, stream, include_usage, echo, logprobs, most > 0)
    if request.count > service.engine.most:
        reason = f"with {len(plans)} prompts these are {request.count:,} requests"
        raise bad_field("n", f"{reason}, the server takes {service.engine.most:,} at once")
    fields.ignored(*IDLE)
    service.say_ignored(fields.unknown)
    return request


def _prompts(fields: Fields, service: Service) -> list[list[int]]:
    """The ids of `prompt`: a text, a list of texts, token ids, or a list of those. Special tokens are tokens."""
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
        raise bad_field(where, "it is empty: give at least one token")
    service.say_prompt(given)
    return ids


def check_ids(given: Sequence[int], where: str, service: Service) -> list[int]:
    """Token ids of a client. Raises `Refusal` for one that the model has not."""
    size = service.dialogue.config.vocab_size
    strange = next((one for one in given if not 0 <= one < size), None)
    if strange is not None:
        raise Refusal(400, f"{where}: the token id {strange} is none of the model's, 0 to {size - 1:,}", where)
    return list(given)
