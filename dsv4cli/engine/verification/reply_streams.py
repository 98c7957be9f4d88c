"""Checks that streaming does not change an answer: texts, characters, usage and the last event. No torch."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dsv4cli.engine.text.prompt import Tool
from dsv4cli.engine.verification.calls import ApiCall
from dsv4cli.engine.verification.chat_answer import ChatAnswer
from dsv4cli.engine.verification.check import Check, Problem, Replies, fixed
from dsv4cli.engine.verification.checked_server import CheckedServer
from dsv4cli.engine.verification.compare import ROUNDING, difference
from dsv4cli.engine.verification.conversations import WEATHER
from dsv4cli.engine.verification.replies import QUESTION, readable, unreadable

LOST = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class _Question:
    text: str
    level: str = "off"
    tools: Sequence[Tool] = ()
    most: int = 32


STREAMS = (
    _Question(QUESTION, "high", most=96),
    _Question("What is the weather in Paris?", tools=[WEATHER], most=80),
    _Question("What is 17 + 25?"),
    _Question("Name the capital of France.", most=3),
)
# one character of these answers takes several tokens in small vocabularies, and several bytes in all
CHARACTERS = ("法国的首都是哪里？请用中文回答。", "17加25等于多少？", "Repeat exactly: 你好，世界 🌍 é")


def stream_checks(server: CheckedServer, *, quick: bool) -> list[Check]:
    """Return the checks of streams, each of which sends a request with and without streaming."""
    streams = _pairs(server, "stream", STREAMS[:2] if quick else STREAMS)
    characters = _pairs(server, "utf8", [_Question(text) for text in (CHARACTERS[:1] if quick else CHARACTERS)])
    return [
        Check(
            "replies.stream",
            "A stream is parsed piece by piece, by other code than a whole answer.",
            "Chat clients, which stream, show another answer than the model's.",
            [fixed([call for pair in streams for call in pair])],
            lambda replies: _judge(streams, replies),
        ),
        Check(
            "replies.utf8",
            "A character may take several tokens. Decoding each token by itself turns it into question marks.",
            "Chinese, emoji and accents are damaged in streams.",
            [fixed([call for pair in characters for call in pair])],
            lambda replies: _judge_characters(characters, replies),
        ),
        Check(
            "replies.usage",
            "Usage is counted apart from the text, and gateways add up or drop it.",
            "Bills and limits of the context are wrong.",
            [],
            lambda replies: _judge_usage([call for pair in (*streams, *characters) for call in pair], replies),
        ),
    ]


def _pairs(server: CheckedServer, name: str, questions: Sequence[_Question]) -> list[tuple[ApiCall, ApiCall]]:
    found = []
    for number, one in enumerate(questions):
        whole, streamed = (
            server.chat(
                f"replies.{name}/{number}-{kind}",
                one.text,
                level=one.level,
                tools=one.tools,
                most=one.most,
                logprobs=not one.tools,  # llama.cpp refuses streams with both
                stream=kind == "stream",
            )
            for kind in ("whole", "stream")
        )
        found.append((whole, streamed))
    return found


def _judge(pairs: Sequence[tuple[ApiCall, ApiCall]], replies: Replies) -> Iterator[Problem]:
    for pair in pairs:
        yield from unreadable(pair, replies)
        for call, answer in readable(pair[1:], replies):
            if not answer.done or answer.finish is None:
                missing = "finish_reason" if answer.finish is None else "[DONE]"
                last = replies[call.key].text.splitlines()[-3:]
                yield Problem(f"the stream ends without {missing}", [line for line in last if line], call)
        both = [answer for _, answer in readable(pair, replies)]
        if len(both) == len(pair):
            yield from _compared(pair[1], both[0], both[1])


def _compared(call: ApiCall, whole: ChatAnswer, streamed: ChatAnswer) -> Iterator[Problem]:
    texts = [(name, a, b) for (name, a), (_, b) in zip(whole.texts(), streamed.texts(), strict=False) if a != b]
    counts = len(whole.calls), len(streamed.calls)
    found = difference(whole, streamed)
    if not texts and counts[0] == counts[1] and whole.finish == streamed.finish:
        return
    lines = [f"{name}: whole {a[:160]!r}, streamed {b[:160]!r}" for name, a, b in texts]
    lines += [f"calls: whole {counts[0]}, streamed {counts[1]}"] if counts[0] != counts[1] else []
    if whole.finish != streamed.finish:
        lines.append(f"finish_reason: whole {whole.finish!r}, streamed {streamed.finish!r}")
    # two tokens that are equally likely may change places between two requests
    rounding = found is not None and found.size() <= ROUNDING
    yield Problem(
        "the streamed answer differs from the whole one",
        lines,
        call,
        wrong=not rounding and not _alike(whole, streamed),
    )


def _alike(whole: ChatAnswer, streamed: ChatAnswer) -> bool:
    """Return True if answers without log-probabilities call the same functions, with complete arguments."""
    names = [[use.name for use in one.calls] for one in (whole, streamed)]
    if whole.tokens or not names[0] or names[0] != names[1] or whole.finish != streamed.finish:
        return False
    return all(_is_object(use.arguments) for one in (whole, streamed) for use in one.calls)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _judge_characters(pairs: Sequence[tuple[ApiCall, ApiCall]], replies: Replies) -> Iterator[Problem]:
    for pair in pairs:
        yield from unreadable(pair, replies)
        for call, answer in readable(pair, replies):
            bad = next((text for text in (*answer.deltas, answer.content or "", answer.reasoning) if LOST in text), "")
            # a limit may end the last character early
            if bad and not (
                answer.finish == "length" and (answer.content or "").find(LOST) >= len(answer.content or "") - 3
            ):
                yield Problem("a text contains U+FFFD, so a character was decoded in parts", [repr(bad)], call)
        both = [answer for _, answer in readable(pair, replies)]
        if len(both) == len(pair) and not any(LOST in (one.content or "") for one in both):
            yield from _compared(pair[1], both[0], both[1])


def _judge_usage(calls: Sequence[ApiCall], replies: Replies) -> Iterator[Problem]:
    for call, answer in readable(calls, replies):
        given, drawn, total = (answer.count(f"{name}_tokens") for name in ("prompt", "completion", "total"))
        shown = [f"usage: {answer.usage}"]
        if given is None or drawn is None:
            yield Problem("usage is missing, although the request includes it", shown, call)
            continue
        if total is not None and total != given + drawn:
            yield Problem("usage.total_tokens is not the sum of prompt and completion", shown, call)
        if call.streams and not answer.usage_last:
            yield Problem("usage is not in the last event of the stream", shown, call)
        # the end token counts, but is not among the log-probabilities; drafts never add tokens
        if answer.tokens and not answer.calls and not 0 <= drawn - len(answer.tokens) <= 1 + bool(answer.reasoning):
            listed = f"log-probabilities of {len(answer.tokens)} tokens, and usage.completion_tokens is {drawn}"
            yield Problem(f"the answer has {listed}", shown, call)
        if drawn > call.tokens_out:
            yield Problem("usage.completion_tokens is more than max_tokens", shown, call)
