"""Answers to several prompts in one batch, token by token."""

from collections.abc import Callable, Iterator, Sequence

import torch

from dsv4cli.engine.chat.answer import Answer, Pieces
from dsv4cli.engine.chat.dialogue import Dialogue
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.graphs.compile_watch import OnPreparing, do_nothing
from dsv4cli.engine.runtime.orders import Followers
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.settings import NO_DRAFTS, Drafting


def generate_answers(
    model: Transformer,
    dialogue: Dialogue,
    requests: Sequence[Request],
    device: torch.device | str,
    *,
    on_preparing: OnPreparing = do_nothing,
    followers: Followers | None = None,
    drafting: Drafting = NO_DRAFTS,
    on_end: Callable[[Engine], None] = lambda engine: None,
) -> Iterator[tuple[int, Answer, Pieces]]:
    """Generate answers, and yield progress after each prefill step and each sampled token of a prompt.

    An answer whose `finish` is set is complete.

    Args:
        on_preparing: callback for `CompileWatch`.
        followers: the other tensor-parallel ranks of the model.
        on_end: called with the engine after the last answer, for example to read its draft statistics.

    Yields:
        The request's number, its answer so far, and the text that the token added.

    Raises:
        UsageError: a prompt is empty, too long, or has token ids outside the vocabulary.
    """
    with Engine.of(model, list(requests), device, followers, drafting) as engine:
        engine.report_preparing(on_preparing)
        answers = {one: Answer(dialogue.tokenizer, dialogue.thinks(one.prompt), one.limits.stops) for one in requests}
        while engine.busy:
            for result in engine.step():
                answer = answers[result.request]
                if not result.tokens:
                    yield result.request.number, answer, []
                for token in result.tokens:
                    pieces = answer.push(token)
                    if answer.finish:
                        engine.cancel(result.request)
                    yield result.request.number, answer, pieces
                    if answer.finish:
                        break
        on_end(engine)
