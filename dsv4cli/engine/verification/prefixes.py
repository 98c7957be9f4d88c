"""The check of cached prefixes: an answer after a prefix cache hit equals that of a full prefill. No torch.

Two prompts share exactly N tokens, for N next to the sizes of cache blocks and of compressed attention. The first one
fills the cache, the second one hits it. The ground truth of the second is its text scored in one pass (`echo`),
which no server can take from a cache, because the log-probabilities of the prompt must be computed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4cli.engine.verification.calls import ApiCall
from dsv4cli.engine.verification.chat_answer import ChatAnswer
from dsv4cli.engine.verification.check import Check, CheckStep, Problem, Replies, fixed
from dsv4cli.engine.verification.checked_server import CheckedServer
from dsv4cli.engine.verification.compare import ROUNDING, UNLIKELY, difference
from dsv4cli.engine.verification.replies import readable, unreadable

# tokens that the prompts share: multiples of 128 are blocks of compressed attention and of caches
LENGTHS = (127, 128, 129, 130, 255, 256, 257, 511, 512, 513, 4096)
QUICK_LENGTHS = (129,)
REPEATED = 2
MOST = 8
TAILS = ("\nWhat is 17 + 25?", "\nName the capital of France.")
_WORDS = ("red", "blue", "one", "two", "day", "night", "cat", "dog", "sun", "rain", "north", "south", "old", "new")


@dataclass(frozen=True)
class _Prefix:
    """Two prompts with a common prefix. `again` repeats the first one."""

    length: int
    texts: Sequence[str]
    first: ApiCall
    hit: ApiCall
    again: ApiCall | None


def prefix_check(server: CheckedServer, *, quick: bool) -> Check:
    """Return the check of cached prefixes."""
    limit = server.limit or 1 << 16
    lengths = [length for length in (QUICK_LENGTHS if quick else LENGTHS) if length + 64 <= limit]
    pairs = [_pair(server, length, number < REPEATED and not quick) for number, length in enumerate(lengths)]
    chats = [call for one in pairs for call in (one.first, one.hit, one.again) if call is not None]
    scored = server.echo and server.logprobs and not quick

    most, tokens_in = len(pairs), sum(one.hit.tokens_in + MOST for one in pairs)

    def score(replies: Replies) -> list[ApiCall]:
        return [call for one in pairs if (call := _scoring(server, one, replies)) is not None]

    def judge(replies: Replies) -> Iterator[Problem]:
        yield from unreadable(chats, replies)
        for one in pairs:
            yield from _judge(server, one, replies)

    return Check(
        "batching.prefix",
        "A cached prefix ends inside a block, a sliding window or a compressed group, each of which has its own state.",
        "Second turns, agents and long system messages get answers to another prompt.",
        [fixed(chats, 1), *([CheckStep(score, 1, most, tokens_in, tokens_out=most)] if scored else [])],
        judge,
        ordered=True,
    )


def _pair(server: CheckedServer, length: int, repeated: bool) -> _Prefix:
    head = _head(server, length)
    texts = [head + tail for tail in TAILS]
    first, hit, again = (
        server.chat(f"batching.prefix/{length}-{name}", text, most=MOST, logprobs=True)
        for name, text in (("first", texts[0]), ("hit", texts[1]), ("again", texts[0]))
    )
    return _Prefix(length, texts, first, hit, again if repeated else None)


def _head(server: CheckedServer, length: int) -> str:
    """Return a text such that two prompts that begin with it share exactly `length` tokens.

    Without a tokenizer, a token is taken to be a word.
    """
    words = [_WORDS[(number * 7 + number // 14 + length) % len(_WORDS)] for number in range(length)]
    if server.tokenizer is None:
        return " ".join(words[: max(length - 4, 1)])
    count = length
    for _ in range(64):
        text = " ".join(words[:count])
        over = _shared(server, text) - length
        if over == 0:
            return text
        count -= over if over > 0 else 0
        if over < 0:  # " a" is one token in every vocabulary
            return _filled(server, text, length)
    return " ".join(words[:count])


def _filled(server: CheckedServer, text: str, length: int) -> str:
    for more in range(length):
        if _shared(server, text + " a" * more) >= length:
            return text + " a" * more
    return text


def _shared(server: CheckedServer, head: str) -> int:
    """Return the length in tokens of the prefix that the prompts with either tail share."""
    assert server.tokenizer is not None
    one, other = (server.tokenizer.encode(server.prompt([_user(head + tail)], (), "off")) for tail in TAILS)
    return next(n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _scoring(server: CheckedServer, one: _Prefix, replies: Replies) -> ApiCall | None:
    """Return the request that scores the answer after a hit, together with its whole prompt."""
    for _, answer in readable([one.hit], replies):
        if answer.content and answer.tokens and not answer.calls:
            text = server.prompt([_user(one.texts[1])], (), "off") + answer.content
            return server.raw(f"batching.prefix/{one.length}-scored", text, 1, echo=True, logprobs=5)
    return None


def _judge(server: CheckedServer, one: _Prefix, replies: Replies) -> Iterator[Problem]:
    what = f"after a cache hit of {one.length} tokens, the answer"
    keyed = {call.key: answer for call, answer in readable([one.first, one.hit], replies)}
    first, hit = keyed.get(one.first.key), keyed.get(one.hit.key)
    if hit is not None:
        yield from _judge_score(server, one, hit, replies, what)
    if one.again is not None and first is not None:
        for call, again in readable([one.again], replies):
            found = difference(first, again)
            if found is not None and found.size() > ROUNDING and first.tokens:
                yield Problem(f"{what} of the same request differs by {found.size():.3f} nats", found.text, call)
    if first is not None and hit is not None and _same_text(first, hit):
        shown = [f"both answers: {first.content!r}", *(f"question: {tail.strip()}" for tail in TAILS)]
        yield Problem(f"{what} is the one to another question with the same prefix", shown, one.hit)


def _same_text(one: ChatAnswer, other: ChatAnswer) -> bool:
    return bool(one.content) and one.content == other.content


def _judge_score(
    server: CheckedServer, one: _Prefix, hit: ChatAnswer, replies: Replies, what: str
) -> Iterator[Problem]:
    call = _scoring(server, one, replies)
    listed = _listed(replies, call) if call is not None else None
    if call is None or listed is None:
        return
    texts, logprobs, tops = listed
    # the answer, before its end token and the one token that was generated after it
    mine = [token for token in hit.tokens if token.text and "｜" not in token.text]
    start = len(texts) - 1 - len(mine)
    if start < 0 or texts[start : start + len(mine)] != [token.text for token in mine]:
        return  # the answer's text is tokenized in another way
    for token, logprob, top in zip(mine, logprobs[start:], tops[start:], strict=False):
        margin = max(top.values(), default=logprob) - logprob
        drift = abs(token.logprob - logprob) if max(token.logprob, logprob) > UNLIKELY else 0.0
        if max(margin, drift) > ROUNDING:
            shown = f"token {token.text!r}: {token.logprob:.3f} after the hit, {logprob:.3f} with the whole prompt"
            likely = f"likeliest with the whole prompt: {max(top, key=lambda text: top[text])!r}" if top else ""
            yield Problem(
                f"{what} differs from that of the whole prompt by {max(margin, drift):.3f} nats",
                [shown, likely],
                one.hit,
            )
            return


def _listed(replies: Replies, call: ApiCall) -> tuple[list[str], list[float], list[Mapping[str, float]]] | None:
    try:
        found = (replies[call.key].document or {})["choices"][0]["logprobs"]
        tops = [one or {} for one in found["top_logprobs"]]
        return found["tokens"], [value or 0.0 for value in found["token_logprobs"]], tops
    except (LookupError, TypeError):
        return None
