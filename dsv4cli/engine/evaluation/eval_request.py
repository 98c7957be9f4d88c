"""Runs evaluation items through an engine and turns the answers or scores into outcomes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from dsv4cli.engine.chat.answer import Answer
from dsv4cli.engine.chat.dialogue import Dialogue
from dsv4cli.engine.evaluation.items import EvalItem
from dsv4cli.engine.evaluation.judge import judge
from dsv4cli.engine.evaluation.outcome import Outcome
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.graphs.compile_watch import OnPreparing
from dsv4cli.engine.runtime.limits import check_text, end_of, max_new_tokens
from dsv4cli.engine.runtime.orders import Followers
from dsv4cli.engine.runtime.request import Alternatives, Request, Result, Token
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.settings import NO_DRAFTS, Drafting, Limits, Sampling
from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.prompt import EFFORTS, think_options
from dsv4cli.engine.text.tokenizer import BYTE_CHARACTERS, Tokenizer
from dsv4cli.errors import UsageError


@dataclass(eq=False)
class EvalRequest:
    """An evaluation item and its engine requests: one to generate an answer, or one for each text to score.

    Attributes:
        index: the item's position in the set.
        prompt: token ids of the prompt; a scored text is appended to them.
        sampled: whether an answer is generated; otherwise texts are scored.
        rows: log-probability and likeliest token of each row of a scored request, from the prompt's last row on.
        seen: how many rows of each scored request have arrived, including those before the prompt's last row.
    """

    index: int
    item: EvalItem
    dialogue: Dialogue
    prompt: list[int]
    lookalikes: list[str]
    sampled: bool
    requests: list[Request]
    answer: Answer = field(init=False)
    rows: dict[Request, list[tuple[float, Alternatives]]] = field(default_factory=dict)
    seen: dict[Request, int] = field(default_factory=dict)

    def begin(self) -> None:
        """Create the empty answer. Call it before the first step of the item's requests."""
        self.answer = Answer(self.dialogue.tokenizer, self.dialogue.thinks(self.prompt), self.requests[0].limits.stops)

    def take(self, engine: Engine, result: Result, on_token: Callable[[Token, bool], None]) -> bool:
        """Add what a request got in a step. Return True if the item is complete."""
        if not self.sampled:
            self._score(result)
            return all(self.seen.get(request) == len(request.prompt) for request in self.requests)
        for token in result.tokens:
            self.answer.push(token)
            on_token(token, len(self.answer.tokens) > 1)
            if self.answer.finish:
                engine.cancel(result.request)
                return True
        return False

    def _score(self, result: Result) -> None:
        assert result.scores is not None
        request, rows = result.request, list(zip(result.scores.logprobs, result.scores.top, strict=True))
        # row i scores token i + 1, so the continuation's first score is in the prompt's last row
        behind = max(len(self.prompt) - 1 - self.seen.get(request, 0), 0)
        self.seen[request] = self.seen.get(request, 0) + len(rows)
        self.rows.setdefault(request, []).extend(rows[behind:])

    def outcome(self) -> Outcome:
        """Return the outcome of a complete item, and free its answer, rows and requests."""
        found = _answered(self) if self.sampled else _scored(self)
        del self.answer
        self.rows.clear()
        self.requests.clear()
        return found


def build_request(
    index: int, item: EvalItem, defaults: Dialogue, sampling: Sampling, limits: Limits, by_answer: bool
) -> EvalRequest:
    """Turn an item into engine requests.

    Args:
        defaults: prompt format of items that do not set `think`. Texts are always scored without thinking.
        by_answer: generate an answer to multiple-choice items instead of scoring each choice.

    Raises:
        UsageError: the model cannot process the item.
    """
    scored = item.score == "continuation" or (item.score == "choice" and not by_answer)
    if scored and item.think:
        remedy = "remove it, or use --choices answer" if item.score == "choice" else "remove it"
        raise UsageError(f'"think" is true, but the score "{item.score}" does not allow thinking', remedy)
    dialogue = _dialogue(defaults, False if scored else item.think)
    prompt = dialogue.prompt(item.messages)
    built = EvalRequest(index, item, dialogue, prompt.ids, prompt.lookalikes, not scored, [])
    if scored:
        limits = replace(limits, logprobs=1)
        for text in _texts(item, dialogue):
            ids = prompt.ids + text
            check_text(ids, dialogue.config, limits, "the prompt plus the scored text")
            built.requests.append(Request(ids, Sampling(), limits, scored=True))
        return built
    max_new_tokens(prompt.ids, dialogue.config, limits)
    built.requests.append(Request(prompt.ids, sampling.plus(index), limits))
    return built


def _dialogue(defaults: Dialogue, think: bool | None) -> Dialogue:
    """Return the prompt format with thinking set as the item asks.

    An item that turns thinking on by itself thinks at the lowest effort.
    """
    if think is None or think == defaults.thinking:
        return defaults
    thinking, effort = think_options(defaults.release, EFFORTS[defaults.release][0] if think else "off")
    return replace(defaults, thinking=thinking, effort=effort)


def _texts(item: EvalItem, dialogue: Dialogue) -> list[list[int]]:
    """Return the token ids to score after the prompt: of each choice, or of the continuation."""
    if item.score == "choice":
        return [dialogue.text_ids(choice) for choice in item.choices]
    if item.tokens:
        return [[_token_id(dialogue.tokenizer, one) for one in item.tokens]]
    assert isinstance(item.answer, str)
    return [dialogue.text_ids(item.answer)]


def _token_id(tokenizer: Tokenizer, spelt: bytes) -> int:
    """Return the id of the token with these bytes, which may be part of a character or the text of a special token.

    Raises:
        UsageError: the vocabulary has no such token.
    """
    found, text = tokenizer.token_id("".join(BYTE_CHARACTERS[byte] for byte in spelt)), spelt.decode(errors="replace")
    if found is None and text in tokens.SPECIAL:
        found = tokenizer.token_id(text)
    if found is None:
        raise UsageError(f"the model has no token {spelt!r}", "use continuations of a model with the same vocabulary")
    return found


def carry_out(
    model: Transformer,
    requests: Sequence[EvalRequest],
    device: torch.device | str,
    *,
    on_token: Callable[[Token, bool], None],
    on_preparing: OnPreparing,
    followers: Followers | None = None,
    drafting: Drafting = NO_DRAFTS,
    on_end: Callable[[Engine], None],
) -> Iterator[Outcome]:
    """Run all items in one engine and yield each outcome as soon as it is complete.

    Items with a generated answer are added to the engine before scored items.

    Args:
        on_token: called with each generated token, and whether its answer already had one.
        on_end: called with the engine after the last outcome.

    The other arguments are those of `generate_answers`.

    Raises:
        UnsoundResult: logits are not finite.
        NotEnoughMemory: a step needs more memory than there is.
    """
    ordered = sorted(requests, key=lambda one: not one.sampled)
    owners = {request: one for one in ordered for request in one.requests}
    lengths = [end_of(request, model.config) for request, one in owners.items() if one.sampled]
    capacity = Capacity(len(owners), max(lengths, default=None))
    with Engine(model, capacity, device, followers, drafting if lengths else NO_DRAFTS) as engine:
        engine.report_preparing(on_preparing)
        for one in ordered:
            one.begin()
        for request in list(owners):
            engine.add(request)
        while engine.busy:
            for result in engine.step():
                one = owners[result.request]
                if one.take(engine, result, on_token):
                    for request in one.requests:
                        del owners[request]
                    yield one.outcome()
        on_end(engine)


def _answered(request: EvalRequest) -> Outcome:
    reply, item = request.answer.record(), request.item
    judged = judge(item, reply)
    return Outcome(
        *(request.index, item.id, item.task, item.score, judged.ruling, judged.given),
        *(len(request.prompt), len(request.answer.tokens)),
        content=reply["content"],
        reasoning_content=reply["reasoning_content"],
        finish_reason=reply["finish_reason"],
        seed=request.requests[0].sampling.seed,
        note=judged.note or request.answer.complaint or None,
    )


def _scored(request: EvalRequest) -> Outcome:
    item, start = request.item, len(request.prompt)
    known = [request.rows[text][:-1] for text in request.requests]  # nothing follows the last token
    totals = [sum(logprob for logprob, _ in rows) for rows in known]
    count = sum(map(len, known))
    if item.score == "choice":
        best, right = max(range(len(totals)), key=totals.__getitem__), item.choices.index(str(item.answer))
        ruling, given, nll = best == right, item.choices[best], -totals[right] / len(known[right])
        return Outcome(
            *(request.index, item.id, item.task, item.score, "correct" if ruling else "wrong", given, start, count),
            logprobs=totals,
            nll=nll,
        )
    ids = request.requests[0].prompt[start:]
    agrees = [top[0][0] == id_ for (_, top), id_ in zip(known[0], ids, strict=True)]
    prefix = next((number for number, same in enumerate(agrees) if not same), len(agrees))
    given = request.dialogue.tokenizer.decode(ids[:prefix])
    return Outcome(
        *(request.index, item.id, item.task, item.score, "correct" if prefix else "wrong", given, start, count),
        nll=-totals[0] / len(ids),
        common_prefix=prefix,
    )
