"""Checks of the thinking mode: reasoning apart from the content, off if the request says so, and efforts. No torch."""

from collections.abc import Callable, Iterator, Sequence

from dsv4cli.engine.text import tokens
from dsv4cli.engine.verification.calls import ApiCall
from dsv4cli.engine.verification.chat_answer import ChatAnswer, read_raw
from dsv4cli.engine.verification.check import Check, Problem, Replies
from dsv4cli.engine.verification.checked_server import CheckedServer
from dsv4cli.engine.verification.replies import readable, reply_check

# without thinking, the answer to the first question is short and begins in another way than the reasoning would. Small
# models calculate in the answer to the last one as they do in the reasoning
QUESTIONS = ("What is the capital of France?", "What is 17 + 25?", "What is 46 * 38?")
REASONED, ANSWERED = 160, 48
# texts of fewer characters are alike by chance
LEAST = 8
# tokens that an answer may have besides those of its text: the end token, and texts that are split in another way
UNSEEN, UNSEEN_SHARE = 3, 0.1


def thinking_checks(server: CheckedServer, *, quick: bool) -> list[Check]:
    """Return the checks of the thinking mode."""
    questions = QUESTIONS[: 1 if quick else None]
    on = [server.chat(f"replies.reasoning/{n}", text, level="high", most=REASONED) for n, text in enumerate(questions)]
    return [_reasoning(on), _thinking_off(server, questions, on), _efforts(server, on[0])]


def _reasoning(calls: Sequence[ApiCall]) -> Check:
    def judge(replies: Replies) -> Iterator[Problem]:
        found = list(readable(calls, replies))
        for call, answer in found:
            mark = next((mark for mark in (tokens.THINK_START, tokens.THINK_END) if mark in (answer.content or "")), "")
            if mark:
                yield Problem(f"the reasoning is in the content: it contains {mark}", [repr(answer.content)], call)
        if found and not any(answer.reasoning for _, answer in found):
            call, answer = found[0]
            yield Problem(
                "thinking is requested, and no answer has reasoning_content or reasoning",
                [f"content: {(answer.content or '')[:200]!r}"],
                call,
            )

    return reply_check(
        "reasoning",
        "Servers split reasoning and content with a parser that must be enabled and must match the model.",
        "Users see the model's reasoning as its answer, or applications do not receive it.",
        calls,
        judge,
    )


def _thinking_off(server: CheckedServer, questions: Sequence[str], on: Sequence[ApiCall]) -> Check:
    calls = [server.chat(f"replies.thinking-off/{n}", text, most=ANSWERED) for n, text in enumerate(questions)]
    # the model's own answer to the first question, after the official prompt without thinking
    prompt = server.prompt([{"role": "user", "content": questions[0]}], (), "off")
    raw = [server.raw("replies.thinking-off/raw", prompt, ANSWERED)] if server.completions else []

    def judge(replies: Replies) -> Iterator[Problem]:
        off = list(readable(calls, replies))
        for call, answer in off:
            why = _shows_thinking(answer) or _hides_thinking(answer, _counter(server))
            if why:
                yield Problem(why, _shown(answer), call)
        answered = {call.key: answer for call, answer in [*off, *_answered(on, replies)]}
        keys = [(call.key, other.key) for call, other in zip(calls, on, strict=True)]
        pairs = [(answered[key], answered[other]) for key, other in keys if {key, other} <= answered.keys()]
        text = read_raw(replies[raw[0].key]) if raw and raw[0].key in replies else ""
        # the other questions alone show nothing: see QUESTIONS, and the model's own answer is one to the first
        if {*keys[0]} <= answered.keys() and (
            all(_leaks(one, other) for one, other in pairs) or _always_thinks(*pairs[0], text)
        ):
            one, other = pairs[0]
            what = "the content begins with the model's reasoning, although the request turns thinking off"
            lines = [f"thinking off: content {(one.content or '')[:200]!r}"]
            lines += [f"thinking on: reasoning {other.reasoning[:200]!r}, content {(other.content or '')[:200]!r}"]
            lines += [f"the model continues the official prompt with {text[:200]!r}"] if text else []
            yield Problem(what, lines, calls[0])

    return reply_check(
        "thinking-off",
        "Templates take the thinking mode from different fields, and many ignore the one that a client sends.",
        "Each answer takes and costs the tokens of reasoning that the application did not want.",
        calls,
        judge,
        more=raw,
    )


def _answered(calls: Sequence[ApiCall], replies: Replies) -> Iterator[tuple[ApiCall, ChatAnswer]]:
    return readable([call for call in calls if call.key in replies], replies)


def _counter(server: CheckedServer) -> Callable[[str], int] | None:
    tokenizer = server.tokenizer
    return None if tokenizer is None else lambda text: len(tokenizer.encode(text))


def _shown(answer: ChatAnswer) -> list[str]:
    texts = f"reasoning: {answer.reasoning[:200]!r}, content: {(answer.content or '')[:200]!r}"
    return [texts, f"usage: {answer.usage}"]


def _shows_thinking(answer: ChatAnswer) -> str:
    """Return what shows that an answer has reasoning; "" if nothing does."""
    details = answer.usage.get("completion_tokens_details")
    counted = details.get("reasoning_tokens") if isinstance(details, dict) else None
    if answer.reasoning or tokens.THINK_END in (answer.content or "") or counted:
        return "the answer has reasoning, although the request turns thinking off"
    return ""


def _hides_thinking(answer: ChatAnswer, count: Callable[[str], int] | None) -> str:
    """Return what shows that the server generated more than it returned; "" if nothing does."""
    drawn = answer.count("completion_tokens")
    if count is None or drawn is None or answer.calls:
        return ""
    seen = count(answer.content or "")
    if drawn <= seen + UNSEEN + UNSEEN_SHARE * seen:
        return ""
    return f"usage counts {drawn} tokens, and the text has {seen}: reasoning is left out, although thinking is off"


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _leaks(off: ChatAnswer, on: ChatAnswer) -> bool:
    """Return True if the content without thinking is the reasoning and the content with thinking."""
    mine, whole = _squeezed(off.content or ""), _squeezed(on.reasoning + (on.content or ""))
    if not on.reasoning or len(mine) < LEAST:
        return False
    common = min(len(mine), len(whole))
    complete = off.finish == "length" or common > len(_squeezed(on.reasoning))
    return complete and mine[:common] == whole[:common]


def _always_thinks(off: ChatAnswer, on: ChatAnswer, raw: str) -> bool:
    """Return True if thinking does not change the content, and the content is not the model's answer without thinking.

    Args:
        raw: the model's continuation of the official prompt without thinking; "" if it is not known.
    """
    mine, whole, wanted = (_squeezed(text) for text in (off.content or "", on.content or "", raw))
    common = min(len(mine), len(whole))
    same = common >= LEAST and mine[:common] == whole[:common]
    return same and not on.reasoning and len(wanted) >= LEAST and mine[:LEAST] != wanted[:LEAST]


def _efforts(server: CheckedServer, high: ApiCall) -> Check:
    calls = [high, server.chat("replies.efforts/max", QUESTIONS[0], level="max", most=1)]

    def judge(replies: Replies) -> Iterator[Problem]:
        counts = [answer.count("prompt_tokens") for _, answer in readable(calls, replies)]
        if len(counts) == len(calls) and None not in counts and counts[0] == counts[1]:
            yield Problem(
                "reasoning_effort does not change the prompt",
                [f"the prompts of efforts high and max both have {counts[0]:,} tokens"],
                calls[1],
            )

    return reply_check(
        "efforts",
        "The effort is a text in the prompt. A template that lacks it accepts the field and ignores it.",
        "The effort has no effect: answers at max are no better than at high.",
        calls,
        judge,
    )
