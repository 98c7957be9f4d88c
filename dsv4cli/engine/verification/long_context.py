"""Checks of long contexts: needles at all depths, the exact limit, and other requests next to a prompt of that length.

No torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dsv4cli.engine.verification.calls import ApiCall
from dsv4cli.engine.verification.check import Check, CheckStep, Problem, Replies, fixed
from dsv4cli.engine.verification.checked_server import CheckedServer
from dsv4cli.engine.verification.limits import judge_refusal
from dsv4cli.engine.verification.replies import readable, unreadable

# parts of the limit, and depths of the needle in the prompt
PARTS, DEPTHS = (0.125, 0.25, 0.5, 0.95), (0.05, 0.5, 0.95)
# the share of needles that may be missed: the model itself misses some
MISSED = 0.25
# tokens of the answer, and of what surrounds the text
ANSWER, BESIDE = 24, 96
# the words of the sentences, which nano knows too, and the values to find, one for each needle
NAMES = ("Nadia", "Oscar", "Petra", "Felix", "Rosa", "Simon", "Nora")
COLORS = ("red", "blue", "green", "yellow", "black")
THINGS = ("lamp", "chair", "bottle", "book", "clock", "ladder", "boat", "coat")
PLACES = ("garden", "kitchen", "park", "school", "street", "market", "hotel", "forest", "museum")
VALUES = (
    "anchor", "arrow", "basket", "candle", "carpet", "engine",
    "feather", "guitar", "helmet", "jacket", "kettle", "hammer",
)  # fmt: skip
# a short request beside a prompt of the limit may take this much longer than the prompt, and no more
STARVED = 1.2
SKIP = "the server announces no context length (max_model_len)"


@dataclass(frozen=True)
class _Needle:
    call: ApiCall
    code: str


def long_checks(server: CheckedServer) -> list[Check]:
    """Return the checks of long contexts."""
    if server.limit is None:
        return [Check(f"long.{name}", "", "", [], lambda replies: (), SKIP) for name in ("needles", "edge", "fairness")]
    return [_needles(server, server.limit), _edge(server, server.limit), _fairness(server, server.limit)]


def _text(server: CheckedServer, count: int, needle: str, depth: float) -> str:
    """Return a text of about `count` tokens with a sentence at a depth."""
    lines, size, number = list[str](), 0, 0
    while size < count:
        name, color, thing, place = (
            listed[(number * step + number // 11) % len(listed)]
            for listed, step in ((NAMES, 3), (COLORS, 2), (THINGS, 5), (PLACES, 4))
        )
        line = f"{name} saw a {color} {thing} in the {place}."
        size += _size(server, line)
        lines.append(line)
        number += 1
    lines.insert(int(depth * len(lines)), needle)
    return " ".join(lines)


def _size(server: CheckedServer, text: str) -> int:
    return len(text) // 3 if server.tokenizer is None else len(server.tokenizer.encode(text)) + 1


def _needles(server: CheckedServer, limit: int) -> Check:
    needles = list[_Needle]()
    for part in PARTS:
        for depth in DEPTHS:
            count = int(part * limit) - ANSWER - BESIDE
            code = VALUES[len(needles) % len(VALUES)]
            text = _text(server, count, f"The password of Lena is {code}.", depth)
            question = f"{text} What is the password of Lena?"
            name = f"long.needles/{round(part * limit)}-{round(100 * depth)}"
            needles.append(_Needle(server.chat(name, question, most=ANSWER), code))
    calls = [one.call for one in needles]

    def judge(replies: Replies) -> Iterator[Problem]:
        yield from unreadable(calls, replies)
        codes = {one.call.key: one.code for one in needles}
        missed = [
            (call, answer.content or "")
            for call, answer in readable(calls, replies)
            if codes[call.key] not in (answer.content or "") + answer.reasoning
        ]
        if missed:
            lines = [f"{call.key}: expected {codes[call.key]}, got {text[:80]!r}" for call, text in missed]
            what = f"{len(missed)} of {len(calls)} sentences are not found in long prompts"
            yield Problem(what, lines, missed[0][0], wrong=len(missed) > MISSED * len(calls))

    return Check(
        "long.needles",
        "Windows, compressed entries and position scaling each begin to matter at another length.",
        "Long documents and conversations are read only in part.",
        [fixed(calls, 1)],
        judge,
    )


def _exact(server: CheckedServer, tokens: int) -> str:
    """Return a message whose prompt has exactly this number of tokens, if there is a tokenizer."""
    text = " a" * tokens
    for _ in range(8):
        over = server.estimate([{"role": "user", "content": text}], (), "off") - tokens
        if over == 0:
            break
        text = text[: -2 * over] if over > 0 else text + " a" * -over
    return text


def _edge(server: CheckedServer, limit: int) -> Check:
    fits = server.chat("long.edge/limit", _exact(server, limit - 1), most=1)
    beyond = server.chat("long.edge/limit-and-one", _exact(server, limit), most=1)
    skip = "" if server.tokenizer is not None else "the model's tokenizer is not on this machine"

    def judge(replies: Replies) -> Iterator[Problem]:
        for problem in unreadable([fits], replies):
            what = f"a prompt of {limit - 1:,} tokens and an answer of 1 are refused, and the limit is {limit:,}"
            yield Problem(what, problem.evidence, fits)
        for _, answer in readable([fits], replies):
            count = answer.count("prompt_tokens")
            if count is not None and count != limit - 1:
                shown = f"usage.prompt_tokens {count:,}, sent {limit - 1:,}"
                yield Problem("a prompt of the limit is cut", [shown], fits)
        yield from judge_refusal(beyond, replies)

    return Check(
        "long.edge",
        "The limit holds for prompt and answer together; being one off loses the last token or crashes a kernel.",
        "Requests that fit are refused, or requests that do not fit are cut.",
        [] if skip else [fixed([fits, beyond], 1)],
        judge,
        skip,
    )


def _fairness(server: CheckedServer, limit: int) -> Check:
    long = server.chat("long.fairness/long", _exact(server, limit - 8), most=4)
    short = [server.chat(f"long.fairness/{n}", f"What is {17 + n} + 25?", most=8) for n in range(4)]

    def judge(replies: Replies) -> Iterator[Problem]:
        yield from unreadable([long, *short], replies)
        whole = replies[long.key].seconds
        slow = [call for call in short if replies[call.key].seconds > STARVED * whole]
        # a long prompt that was refused took no time
        if slow and any(readable([long], replies)):
            shown = [f"{call.key}: {replies[call.key].seconds:.1f} s, the long prompt {whole:.1f} s" for call in slow]
            yield Problem(
                "short requests wait for longer than a prompt of the limit takes", shown, slow[0], others=slow[1:]
            )

    def calls(replies: Replies) -> Sequence[ApiCall]:
        return [long, *short]

    return Check(
        "long.fairness",
        "A prompt of the limit takes many prefill steps, and a scheduler may run nothing else until it ends.",
        "One long prompt stops the service for all users.",
        [CheckStep(calls)],
        judge,
        ordered=True,
    )
