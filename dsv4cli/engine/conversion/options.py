"""Turns the options of `dsv4 convert` into a conversion."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity
from dsv4cli.engine.checkpoint.identify import FolderIdentity
from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource, resolve_model
from dsv4cli.engine.config.formats import FormatName
from dsv4cli.engine.conversion.finish import Against
from dsv4cli.engine.conversion.gguf.metadata import TOKENIZER
from dsv4cli.engine.conversion.job import Conversion
from dsv4cli.engine.conversion.selection import LayerSelection, parse_layers, select
from dsv4cli.engine.conversion.sources import source_identity
from dsv4cli.engine.conversion.target import TargetName, choose_target
from dsv4cli.engine.settings import Part, parse_part, parse_size
from dsv4cli.engine.system.device import resolve_device
from dsv4cli.engine.system.threads import Progress
from dsv4cli.engine.text.gguf_vocabulary import tokenizer_text
from dsv4cli.engine.text.tokenizer import Tokenizer

# more threads than this only wait for the disk and for each other
MAX_WORKERS = 16
NO_DRAFTER = "the drafter is left out: llama.cpp stores it in a separate file, ds4 under other names"


@dataclass(frozen=True)
class ConversionOptions:
    """The options of `dsv4 convert` as typed; None for options that were not set."""

    to: TargetName
    ranks: int | None
    layers: str | None
    drafter: bool
    experts: FormatName | None
    attention: FormatName | None
    max_shard_size: str
    shard: str | None
    workers: int | None
    device: str


def prepare(source: str, output: Path, choices: ConversionOptions) -> tuple[Conversion, int, torch.device]:
    """Return the conversion, the number of threads and the device. Raises Dsv4Error for an invalid source or option."""
    model = resolve_model(source)
    identity = source_identity(model)
    layers = None if choices.layers is None else parse_layers(choices.layers)
    selection = LayerSelection(layers, choices.drafter and choices.to != "gguf")
    target = choose_target(
        choices.to,
        select(identity.config, selection)[0],
        experts=choices.experts,
        attention=choices.attention,
        ranks=choices.ranks,
    )
    part = Part() if choices.shard is None else parse_part(choices.shard)
    largest = parse_size("--max-shard-size", choices.max_shard_size)
    drops = choices.to == "gguf" and choices.drafter and identity.config.drafter != "none"
    notes = (*((NO_DRAFTER,) if drops else ()), *(identity.assumptions if isinstance(identity, GgufIdentity) else ()))
    conversion = Conversion(identity, output, target, selection, largest, part, _texts(model, identity), notes)
    return conversion, choices.workers or default_workers(), resolve_device(choices.device)


def _texts(model: FolderSource | RandomSource, identity: FolderIdentity) -> dict[str, str]:
    """Return the files that the source does not have and the output needs.

    That is the tokenizer.json of random weights, or of a GGUF file with an embedded vocabulary.
    """
    if isinstance(model, RandomSource):
        return {TOKENIZER: Tokenizer.byte_level().text()}
    if not isinstance(identity, GgufIdentity) or (model.folder / TOKENIZER).is_file():
        return {}
    text = tokenizer_text(identity.metadata, str(identity.checkpoint.folder))
    return {} if text is None else {TOKENIZER: text}


def default_workers() -> int:
    """Return the default number of threads."""
    return min(os.cpu_count() or 1, MAX_WORKERS)


def prepare_comparison(source: str, check: Literal["sample", "full"], workers: int, progress: Progress) -> Against:
    """Return the source to compare an output with, and how. Raises Dsv4Error for an invalid source."""
    return Against(source_identity(resolve_model(source)), check, workers, progress)
