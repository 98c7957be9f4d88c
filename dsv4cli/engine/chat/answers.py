"""Answers to many prompts at once: the generation loop with each sequence's text beside it."""

from collections.abc import Iterator, Sequence

import torch

from dsv4cli.engine.chat.answer import Answer
from dsv4cli.engine.chat.dialogue import Dialogue
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.generate import Generator
from dsv4cli.engine.runtime.preparing import Waits, ignored
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.text.reply import Kind

# the text that one token made certain, by kind
Pieces = list[tuple[Kind, str]]


def generate_answers(
    model: Transformer,
    dialogue: Dialogue,
    requests: Sequence[Request],
    device: torch.device | str,
    waits: Waits = ignored,
) -> Iterator[tuple[int, Answer, Pieces]]:
    """After each drawn token: the request's number, its answer so far and what the token added. An answer whose
    `finish` is set is complete. Raises UsageError for a prompt that the model cannot take.

    waits: as `Preparing` has it.
    """
    generator = Generator(model, requests, device)
    generator.schedule.preparing.waits = waits
    answers = [Answer(dialogue.tokenizer, dialogue.thinking, one.limits.stops) for one in requests]
    for step in generator.steps():
        answer = answers[step.number]
        pieces = answer.push(step)
        if answer.finish:
            generator.stop(step.number)
        yield step.number, answer, pieces
