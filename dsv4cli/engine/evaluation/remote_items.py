"""Evaluation items as requests to a server, and the outcomes of its responses. Does not import torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dsv4cli.engine.chat.api_client import ApiClient
from dsv4cli.engine.chat.remote import RemoteConversation
from dsv4cli.engine.chat.remote_answer import RemoteAnswer
from dsv4cli.engine.chat.remote_pool import RemotePool, ask
from dsv4cli.engine.evaluation.items import EvalItem
from dsv4cli.engine.evaluation.judge import judge
from dsv4cli.engine.evaluation.outcome import Outcome
from dsv4cli.engine.settings import Sampling
from dsv4cli.engine.text.prompt import answerable, encode_messages
from dsv4cli.errors import ServerError, UsageError

TEXTS = "/v1/completions"
NO_SCORES = "use a server that does, such as dsv4 serve; or ask for answers: --choices answer"


@dataclass(frozen=True)
class TextScore:
    """The scores of a text after its prompt, by token.

    Attributes:
        tokens: the texts of its tokens.
        likeliest: whether each token is the model's likeliest.
        prompt_tokens: number of tokens before it.
    """

    tokens: list[str]
    logprobs: list[float]
    likeliest: list[bool]
    prompt_tokens: int


Response = RemoteAnswer | TextScore


@dataclass(frozen=True)
class RemoteItem:
    """An item and its requests: one for an answer, or one for each text to score.

    Attributes:
        index: the item's position in the set.
        seed: of the answer; None if texts are scored.
    """

    index: int
    item: EvalItem
    seed: int | None
    tasks: tuple[Callable[[ApiClient], Response], ...]

    def outcome(self, found: Sequence[Response]) -> Outcome:
        """Return the outcome of the responses to its requests. Call it in the main thread only, as `judge`."""
        if isinstance(found[0], RemoteAnswer):
            return self._answered(found[0])
        return self._scored([one for one in found if isinstance(one, TextScore)])

    def _answered(self, answer: RemoteAnswer) -> Outcome:
        reply, item = answer.record(), self.item
        judged = judge(item, reply)
        return Outcome(
            *(self.index, item.id, item.task, item.score, judged.ruling, judged.given),
            *(answer.prompt_tokens, answer.sampled),
            content=reply["content"],
            reasoning_content=reply["reasoning_content"],
            finish_reason=reply["finish_reason"],
            seed=self.seed,
            note=judged.note or None,
        )

    def _scored(self, found: Sequence[TextScore]) -> Outcome:
        item, start, count = self.item, found[0].prompt_tokens, sum(len(one.tokens) for one in found)
        totals = [sum(one.logprobs) for one in found]
        if item.score == "choice":
            best, right = max(range(len(totals)), key=totals.__getitem__), item.choices.index(str(item.answer))
            ruling, nll = best == right, -totals[right] / len(found[right].tokens)
            return Outcome(
                *(self.index, item.id, item.task, item.score, "correct" if ruling else "wrong", item.choices[best]),
                *(start, count),
                logprobs=totals,
                nll=nll,
            )
        [text] = found
        prefix = next((number for number, same in enumerate(text.likeliest) if not same), len(text.likeliest))
        given = "".join(text.tokens[:prefix])
        return Outcome(
            *(self.index, item.id, item.task, item.score, "correct" if prefix else "wrong", given, start, count),
            nll=-totals[0] / count,
            common_prefix=prefix,
        )


def remote_item(
    index: int, item: EvalItem, conversation: RemoteConversation, sampling: Sampling, by_answer: bool
) -> RemoteItem:
    """Turn an item into requests.

    Args:
        by_answer: ask for an answer to multiple-choice items instead of scoring each choice.

    Raises:
        UsageError: a server cannot be asked for the item.
    """
    if item.score == "continuation" or (item.score == "choice" and not by_answer):
        return RemoteItem(index, item, None, tuple(_scoring(item, conversation.model)))
    level = None
    if item.think is not None and item.think != (conversation.effort is not None):
        level = "low" if item.think else "off"  # a server maps low to the lowest level of its release
    own = sampling.plus(index)
    body = conversation.body(item.messages, own, conversation.limits, level)
    return RemoteItem(index, item, own.seed, (partial(ask, body=body),))


def _scoring(item: EvalItem, model: str) -> Iterator[Callable[[ApiClient], TextScore]]:
    if item.think:
        raise UsageError(f'"think" is true, but the score "{item.score}" does not allow thinking', "remove it")
    if item.tokens:
        raise UsageError("the continuation is given as tokens, which a server cannot score", "evaluate without --url")
    # without thinking, the prompts of all releases are the same
    prompt = "".join(encode_messages(answerable(item.messages), release="v4", thinking=False))
    for text in item.choices if item.score == "choice" else (str(item.answer),):
        body = {"model": model, "prompt": prompt + text, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        yield partial(_score, body=body, start=len(prompt), end=len(prompt) + len(text))


def _score(client: ApiClient, body: Mapping[str, Any], start: int, end: int) -> TextScore:
    """Request the scores of a text.

    Args:
        start, end: where it begins and ends in the prompt, in characters.
    """
    response = client.post(TEXTS, body, patient=True)
    try:
        found = response["choices"][0]["logprobs"]
        rows = zip(*(found[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")), strict=True)
        known = [(token, logprob, top, offset) for token, logprob, top, offset in rows if offset < end]
        scored = [(token, float(logprob), top) for token, logprob, top, offset in known if offset >= start]
        if not scored or known[-len(scored)][3] != start:
            raise ValueError(start)
        likeliest = [logprob >= max(top.values()) for _, logprob, top in scored]
    except (TypeError, ValueError, LookupError, AttributeError):
        raise ServerError(
            f"{client.url} does not score the tokens of a prompt (echo with logprobs)", NO_SCORES
        ) from None
    tokens, logprobs, _ = zip(*scored, strict=True)
    return TextScore(list(tokens), list(logprobs), likeliest, len(known) - len(scored))


def remote_outcomes(pool: "RemotePool[Response]", items: Sequence[RemoteItem]) -> Iterator[Outcome]:
    """Carry out the requests of all items and yield each outcome as soon as it is complete.

    Raises:
        ServerError: a request was given up or rejected.
    """
    owners = [(one, nth) for one in items for nth in range(len(one.tasks))]
    left: dict[int, dict[int, Response]] = {one.index: {} for one in items}
    for number, found in pool.carry_out([one.tasks[nth] for one, nth in owners]):
        one, nth = owners[number]
        if isinstance(found, ServerError):
            raise ServerError(f"{one.item.id}: {found.message}", found.remedy)
        left[one.index][nth] = found
        if len(left[one.index]) == len(one.tasks):
            responses = left.pop(one.index)
            yield one.outcome([responses[nth] for nth in sorted(responses)])
