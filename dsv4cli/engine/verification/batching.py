"""Checks that an answer does not depend on other requests: batches, cached prefixes, cancelled and long neighbors.

No torch. All answers are at temperature 0 and are compared with those of the same requests sent alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dsv4cli.engine.verification.calls import ApiCall
from dsv4cli.engine.verification.chat_answer import ChatAnswer
from dsv4cli.engine.verification.check import Check, CheckStep, Problem, Replies, fixed
from dsv4cli.engine.verification.checked_server import CheckedServer
from dsv4cli.engine.verification.compare import ROUNDING, difference
from dsv4cli.engine.verification.prefixes import prefix_check
from dsv4cli.engine.verification.replies import readable, unreadable

TOGETHER = 16
PROMPTS, PROMPTS_QUICK = 40, 4
REPEATED, REPEATED_QUICK = 8, 1
CANCELLED, CANCELLED_QUICK = 6, 1
LONG_NEIGHBORS, SHORT_NEIGHBORS = 2, 5
MOST = 12
# a cancelled request is closed after this many bytes of its stream: its first tokens have arrived
FIRST_BYTES = 600
# the band of a note, as a multiple of the largest difference between two runs of the same request alone
FACTOR = 2.0
# a spread above this, in nats, is no rounding, however often it occurs
MOST_NOISE = 1.0
# the share of answers that may differ by rounding, if no log-probabilities say by how much
UNKNOWN_SHARE = 0.25
REASON = (
    "Batches, cached prefixes and freed cache blocks share memory between requests. One wrong index mixes them, and "
    "only some answers are wrong."
)
MEANING = "Under load, users get answers that other users' requests have changed."
Wanted = Sequence[tuple[ApiCall, ApiCall]]


def batching_checks(server: CheckedServer, *, quick: bool) -> list[Check]:
    """Return the checks that other requests do not change an answer."""
    texts = prompts()[: PROMPTS_QUICK if quick else PROMPTS]
    alone = _calls(server, "batching.alone", texts)
    again = _calls(server, "batching.repeat", texts[: REPEATED_QUICK if quick else REPEATED])
    together = _calls(server, "batching.together", texts)
    repeats = list(zip(alone, again, strict=False))

    def noise(replies: Replies) -> float:
        return measured_noise(repeats, replies)

    found = [
        Check(
            "batching.repeat",
            "Without other requests, the same request must have the same answer at temperature 0.",
            "No answer can be reproduced, and no difference between two servers can be explained.",
            [fixed(alone, 1), fixed(again, 1)],
            lambda replies: _judge(repeats, replies, lambda _: 0.0),
            figures=lambda replies: _spread(repeats, replies),
        ),
        Check(
            "batching.together",
            REASON,
            MEANING,
            [fixed(together, TOGETHER)],
            lambda replies: _judge(list(zip(alone, together, strict=True)), replies, noise),
        ),
        prefix_check(server, quick=quick),
        _cancelled(server, texts, alone, noise, CANCELLED_QUICK if quick else CANCELLED),
    ]
    if not quick:
        found.append(_long_neighbors(server, texts, alone, noise))
    return found


def prompts() -> list[str]:
    """Return 40 prompts: some that every model answers with certainty, some with many possible answers."""
    found = []
    for number in range(10):
        found += [
            f"What is {17 + 3 * number} + {25 + 2 * number}?",
            ("Tell me a story about the sea and the wind.", "Write a poem about rivers.", "Name a good book.")[
                number % 3
            ]
            + f" ({number})",
            ("法国的首都是哪里？", "17加25等于多少？", "What is the opposite of hot?")[number % 3] + f" {number}",
            f"Here are some words: {_words(number, 20 + 25 * number)}. Which of them is the longest?",
        ]
    return found


_WORDS = ("apple", "river", "stone", "cloud", "green", "table", "music", "paper", "light", "bread", "tiger", "ocean")


def _words(seed: int, count: int) -> str:
    """Return words in a pseudorandom order that depends only on the seed."""
    state, found = seed * 7919 + 17, []
    for _ in range(count):
        state = (state * 1103515245 + 12345) % (1 << 31)
        found.append(_WORDS[(state >> 16) % len(_WORDS)])
    return " ".join(found)


def _calls(server: CheckedServer, name: str, texts: Sequence[str]) -> list[ApiCall]:
    return [server.chat(f"{name}/{n}", text, most=MOST, logprobs=True) for n, text in enumerate(texts)]


def measured_noise(repeats: Wanted, replies: Replies) -> float:
    """Return the server's run-to-run noise in nats: the largest difference between two runs of one request alone."""
    sizes = [found.drift for one, other in _pairs(repeats, replies) if (found := difference(one[1], other[1]))]
    return min(max(sizes, default=0.0), MOST_NOISE)


def _spread(repeats: Wanted, replies: Replies) -> Mapping[str, Any]:
    return {"run-to-run spread in nats": round(measured_noise(repeats, replies), 6)}


def _pairs(wanted: Wanted, replies: Replies) -> Iterator[tuple[tuple[ApiCall, ChatAnswer], tuple[ApiCall, ChatAnswer]]]:
    for alone, other in wanted:
        if alone.key not in replies or other.key not in replies:
            continue
        both = list(readable([alone, other], replies))
        if len(both) == 2:
            yield both[0], both[1]


def _judge(wanted: Wanted, replies: Replies, noise: Callable[[Replies], float]) -> Iterator[Problem]:
    """Yield answers that differ from those of the same requests sent alone."""
    yield from unreadable([other for _, other in wanted], replies)
    band = max(ROUNDING, FACTOR * noise(replies))
    unknown: list[tuple[ApiCall, Sequence[str]]] = []
    close: list[tuple[ApiCall, Sequence[str]]] = []
    count = 0
    for (_, one), (call, other) in _pairs(wanted, replies):
        count += 1
        found = difference(one, other)
        if found is None:
            continue
        if found.margin is None and not one.tokens:
            unknown.append((call, found.text))
        elif found.size() <= band:
            close.append((call, found.text))
        else:
            size = f"by {found.size():.3f} nats, and rounding explains {band:.3f}"
            what = f"the answer differs from that of the same request alone, at token {found.at} {size}"
            yield Problem(what, found.text, call)
    if close:
        text = f"{len(close)} of {count} answers differ from those of the same requests alone, as rounding explains"
        yield Problem(text, close[0][1], close[0][0], wrong=False)
    if unknown:
        text = f"{len(unknown)} of {count} answers differ from those of the same requests alone"
        yield Problem(text, unknown[0][1], unknown[0][0], wrong=len(unknown) > UNKNOWN_SHARE * count)


def _cancelled(
    server: CheckedServer,
    texts: Sequence[str],
    alone: Sequence[ApiCall],
    noise: Callable[[Replies], float],
    count: int,
) -> Check:
    cut = [
        server.chat(f"batching.cancelled/cut-{n}", text, most=64, level="high", stream=True)
        for n, text in enumerate(texts[-count:])
    ]
    cut = [ApiCall(call.key, call.path, call.body, most=FIRST_BYTES, tokens_in=call.tokens_in) for call in cut]
    calls = [
        server.chat(f"batching.cancelled/{n}", text, most=MOST, logprobs=True) for n, text in enumerate(texts[:count])
    ]
    # some start with the cancelled requests, the others after them
    beside, after = calls[: count // 2], calls[count // 2 :]
    mixed = [call for pair in zip(cut, [*beside, *([None] * count)], strict=False) for call in pair if call is not None]
    return Check(
        "batching.cancelled",
        "A cancelled request frees its cache blocks while a step still writes to them.",
        MEANING,
        [fixed(mixed, TOGETHER), fixed(after, TOGETHER)],
        lambda replies: _judge(list(zip(alone, calls, strict=False)), replies, noise),
        ordered=True,
    )


def _long_neighbors(
    server: CheckedServer, texts: Sequence[str], alone: Sequence[ApiCall], noise: Callable[[Replies], float]
) -> Check:
    limit = min(2000, (server.limit or 1 << 16) // 3)
    long = [
        server.chat(f"batching.long/long-{n}", f"{_words(100 + n, limit)}. Which word is the last?", most=4)
        for n in range(LONG_NEIGHBORS)
    ]
    short = [
        server.chat(f"batching.long/{n}", text, most=MOST, logprobs=True)
        for n, text in enumerate(texts[:SHORT_NEIGHBORS])
    ]
    return Check(
        "batching.long-neighbors",
        "A long prompt is prefilled in chunks between the decode steps of other requests.",
        MEANING,
        [CheckStep(lambda replies: [*long, *short], TOGETHER)],
        lambda replies: _judge(list(zip(alone, short, strict=False)), replies, noise),
        ordered=True,
    )
