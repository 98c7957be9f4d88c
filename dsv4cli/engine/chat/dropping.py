"""Selection of old messages to drop, so that the context has tokens left for an answer. Does not import torch."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from dsv4cli.engine.text.prompt import Message

# Up to 1/8 of the context is reserved for an answer. If messages must be dropped, enough are dropped to free 1/4 of the
# context, because each time the whole prompt is prefilled again.
ANSWER_PART, FREED_PART = 8, 4


def answer_tokens(context: int, max_tokens: int) -> int:
    """Return how many tokens of the context to reserve for an answer of at most `max_tokens` tokens."""
    return max(min(max_tokens, context // ANSWER_PART), 1)


def messages_to_drop(
    messages: Sequence[Message], count: Callable[[Sequence[Message]], int], context: int, max_tokens: int
) -> int:
    """Return how many of the first messages, after the system messages, to drop so that an answer fits.

    The remaining messages begin with a question.

    Args:
        count: returns the number of tokens of a prompt.
        max_tokens: maximum number of tokens of the answer.

    Returns:
        0 if the answer fits already or nothing can be dropped, -1 if even the last question alone is too long.
    """
    tokens, reserved = count(messages), answer_tokens(context, max_tokens)
    if tokens + reserved <= context:
        return 0
    roles = [message["role"] for message in messages]
    first = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    cuts = [i for i in range(first + 1, len(roles)) if roles[i] in ("user", "developer")]

    def left(cut: int) -> int:
        return context - count([*messages[:first], *messages[cut:]])

    for wanted in (max(reserved, context // FREED_PART), reserved):
        nth = bisect_left(cuts, wanted, key=left)
        if nth < len(cuts):
            return cuts[nth] - first
    if cuts and left(cuts[-1]) > 0:
        return cuts[-1] - first
    return 0 if not cuts and tokens < context else -1
