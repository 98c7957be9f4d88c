"""Answers to many prompts at once: the generation loop with each sequence's text beside it."""

from collections.abc import Iterator, Sequence

import torch

from dsv4cli.engine.answer import Answer
from dsv4cli.engine.dialogue import Dialogue
from dsv4cli.engine.generate import Generator
from dsv4cli.engine.model import Transformer
from dsv4cli.engine.reply import Kind
from dsv4cli.engine.settings import Limits, Sampling

# the text that one token made certain, by kind
Pieces = list[tuple[Kind, str]]


def generate_answers(
    model: Transformer,
    dialogue: Dialogue,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    limits: Limits,
    device: torch.device | str,
) -> Iterator[tuple[int, Answer, Pieces]]:
    """After each drawn token: the prompt's number, its answer so far and what the token added. An answer whose `finish`
    is set is complete. Raises UsageError for a prompt that the model cannot take."""
    generator = Generator(model, prompts, sampling, limits, device)
    answers = [Answer(dialogue.tokenizer, dialogue.thinking, limits.stops) for _ in prompts]
    for step in generator.steps():
        answer = answers[step.number]
        pieces = answer.push(step)
        if answer.finish:
            generator.stop(step.number)
        yield step.number, answer, pieces
