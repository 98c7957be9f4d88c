"""Checks of single answers: stop texts, limits, and texts that must not leak. No torch."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from dsv4cli.engine.text import tokens
from dsv4cli.engine.verification.calls import CHAT, ApiCall
from dsv4cli.engine.verification.chat_answer import ChatAnswer, UnreadableReply, read_chat
from dsv4cli.engine.verification.check import Check, CheckStep, Problem, Replies, fixed
from dsv4cli.engine.verification.checked_server import CheckedServer

QUESTION = "What is 17 * 25?"
# answers of this question are long enough for every limit that is checked
LONG = "What is 17 * 25? Show each step."
MARKUP = (*tokens.SPECIAL, f"<{tokens.DSML}", f"</{tokens.DSML}", "<tool_result>", "</tool_result>")
LIMITS = (1, 2, 7)
# tokens after which every answer has some text
FIRST_TOKENS = 4

Judge = Callable[[Replies], Iterable[Problem]]


def answers(calls: Iterable[ApiCall], replies: Replies) -> Iterator[tuple[ApiCall, ChatAnswer | UnreadableReply]]:
    """Yield each call with its answer, or with the reason why it cannot be read."""
    for call in calls:
        try:
            yield call, read_chat(replies[call.key], streamed=call.streams)
        except UnreadableReply as error:
            yield call, error


def readable(calls: Iterable[ApiCall], replies: Replies) -> Iterator[tuple[ApiCall, ChatAnswer]]:
    """Yield each call whose answer can be read, with the answer."""
    for call, answer in answers(calls, replies):
        if isinstance(answer, ChatAnswer):
            yield call, answer


def unreadable(calls: Iterable[ApiCall], replies: Replies) -> Iterator[Problem]:
    """Yield a problem for each answer that cannot be read."""
    for call, answer in answers(calls, replies):
        if not isinstance(answer, ChatAnswer):
            yield Problem("a chat request has no readable answer", [str(answer)], call)


def reply_checks(server: CheckedServer, *, quick: bool) -> list[Check]:
    """Return the checks of single answers."""
    return [_stop(server, quick=quick), _max_tokens(server, LIMITS[1:2] if quick else LIMITS)]


def reply_check(
    name: str, reason: str, meaning: str, calls: Sequence[ApiCall], judge: Judge, *, more: Sequence[ApiCall] = ()
) -> Check:
    """Return a check whose chat answers must all be readable.

    Args:
        more: further requests, whose responses only the judge reads.
    """

    def whole(replies: Replies) -> Iterator[Problem]:
        yield from unreadable(calls, replies)
        yield from judge(replies)

    return Check(f"replies.{name}", reason, meaning, [fixed([*calls, *more])], whole)


def _stop(server: CheckedServer, *, quick: bool) -> Check:
    first = server.chat("replies.stop/whole", QUESTION, most=24, logprobs=True)
    kinds = ("streamed",) if quick else ("stopped", "streamed")
    count = len(kinds)

    def stopped(replies: Replies) -> list[ApiCall]:
        stop = _stop_text(replies, first)
        return [
            server.chat(f"replies.stop/{kind}", QUESTION, most=24, stop=[stop], stream=kind == "streamed")
            for kind in kinds
            if stop
        ]

    def judge(replies: Replies) -> Iterator[Problem]:
        calls = stopped(replies)
        yield from unreadable([first, *calls], replies)
        stop = _stop_text(replies, first)
        for _, answer in readable([first], replies):
            wanted = (answer.content or "").partition(stop)[0]
            for call, cut in readable(calls, replies):
                if (cut.content or "") != wanted or cut.finish != "stop":
                    yield Problem(
                        f"the stop text {stop!r} does not end the answer where it begins",
                        [
                            f"without it: {answer.content!r}",
                            f"with it: {cut.content!r}, finish_reason {cut.finish!r}; expected {wanted!r}, 'stop'",
                        ],
                        call,
                    )

    return Check(
        "replies.stop",
        "A stop text may begin in one token and end in another, and part of it may already have been streamed.",
        "Agents that stop at a text read too much, or wait for the limit.",
        [fixed([first]), CheckStep(stopped, None, count, count * first.tokens_in, count * first.tokens_out)],
        judge,
    )


def _stop_text(replies: Replies, call: ApiCall) -> str:
    """Return two consecutive characters from different tokens of the answer; "" if it is too short."""
    for _, answer in readable([call], replies):
        text = answer.content or ""
        end, cuts = 0, []
        for token in answer.tokens:
            end += len(token.text)
            cuts.append(end)
        for at in cuts or range(4, len(text)):
            stop = text[at - 1 : at + 1]
            if at >= 4 and len(stop) == 2 and text.find(stop) == at - 1 and "\ufffd" not in stop:
                return stop
    return ""


def _max_tokens(server: CheckedServer, limits: Sequence[int]) -> Check:
    calls = [server.chat(f"replies.max-tokens/{n}", LONG, level="high", most=n, logprobs=True) for n in limits]

    def judge(replies: Replies) -> Iterator[Problem]:
        for call, answer in readable(calls, replies):
            most = call.tokens_out
            count = answer.count("completion_tokens")
            listed = len(answer.tokens)
            if answer.finish != "length" or count != most or (listed and listed != most):
                shown = f"usage.completion_tokens {count}, finish_reason {answer.finish!r}, {listed} log-probabilities"
                yield Problem(f"max_tokens {most} does not end the answer after {most} tokens", [shown], call)

    return reply_check(
        "max-tokens",
        "Drafts, chunks and reasoning are places where a limit is exceeded or counted twice.",
        "Answers are longer or shorter than requested, and so is the bill.",
        calls,
        judge,
    )


def _cut_early(call: ApiCall, answer: ChatAnswer) -> bool:
    """Return True if a limit ended an answer before its first text, or inside markup, which does not count as text."""
    offers = isinstance(call.body, Mapping) and bool(call.body.get("tools"))
    written = "".join(token.text for token in answer.tokens)
    markup = any(mark in written for mark in MARKUP)
    return answer.finish == "length" and (call.tokens_out <= FIRST_TOKENS or offers or markup)


def leak_checks(sent: Callable[[], Sequence[ApiCall]]) -> list[Check]:
    """Return the checks of all chat answers of the run, which need no requests of their own.

    Args:
        sent: returns the calls of the run so far.
    """

    def chats(replies: Replies) -> list[ApiCall]:
        return [call for call in sent() if call.path == CHAT and call.most is None and replies[call.key].status == 200]

    def markup(replies: Replies) -> Iterator[Problem]:
        for call, answer in readable(chats(replies), replies):
            for name, text in answer.texts():
                mark = next((mark for mark in MARKUP if mark in text), "")
                if mark:
                    at = text.index(mark)
                    yield Problem(f"{name} contains {mark}", [repr(text[max(at - 60, 0) : at + 100])], call)
                    break

    def content(replies: Replies) -> Iterator[Problem]:
        for call in chats(replies):
            try:
                answer = read_chat(replies[call.key], streamed=call.streams)
            except UnreadableReply as error:
                yield Problem("a response with status 200 cannot be read", [str(error)], call)
                continue
            if not (answer.content or answer.reasoning or answer.calls) and not _cut_early(call, answer):
                yield Problem(
                    "an answer is empty: no content, no reasoning and no calls",
                    [f"content {answer.content!r}, finish_reason {answer.finish!r}, usage {answer.usage}"],
                    call,
                )

    return [
        Check(
            "replies.markup",
            "Special tokens and tool markup belong to the prompt format. A parser that fails lets them through.",
            "Users see markup, and the next turn sends it back to the model as text.",
            [],
            markup,
        ),
        Check(
            "replies.content",
            "A parser that swallows text, or a failed request behind a gateway, yields 200 with content: null.",
            "Applications crash, or take nothing for an answer.",
            [],
            content,
        ),
    ]
