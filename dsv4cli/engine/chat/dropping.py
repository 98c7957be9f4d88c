"""Which messages a prompt leaves out, so that the context has room for an answer; no torch."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from dsv4cli.engine.text.prompt import Message

# an answer has room for as many tokens as it may have, up to this part of the context; where messages must go for that,
# as many go as leave the larger part free: the prompt is read anew each time
ANSWER_PART, FREED_PART = 8, 4


def answer_room(context: int, max_tokens: int) -> int:
    """How many tokens of a context an answer of so many at most is to have."""
    return max(min(max_tokens, context // ANSWER_PART), 1)


def messages_to_drop(
    messages: Sequence[Message], count: Callable[[Sequence[Message]], int], context: int, max_tokens: int
) -> int:
    """How many messages, the first after those of the system, must go for the prompt to leave room for an answer: 0 if
    it does already or nothing can go, -1 if the last question alone leaves none. What stays begins with a question.

    count: the tokens of a prompt. max_tokens: of the answer.
    """
    tokens, room = count(messages), answer_room(context, max_tokens)
    if tokens + room <= context:
        return 0
    roles = [message["role"] for message in messages]
    first = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    cuts = [i for i in range(first + 1, len(roles)) if roles[i] in ("user", "developer")]

    def left(cut: int) -> int:
        return context - count([*messages[:first], *messages[cut:]])

    for wanted in (max(room, context // FREED_PART), room):
        nth = bisect_left(cuts, wanted, key=left)
        if nth < len(cuts):
            return cuts[nth] - first
    if cuts and left(cuts[-1]) > 0:
        return cuts[-1] - first
    return 0 if not cuts and tokens < context else -1
