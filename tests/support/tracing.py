"""Recordings of the small nets for the tests of `trace`: the sound side once, the other side as it now is."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from dsv4cli.engine.checkpoint.source import FolderSource
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.tracing.judge import Noise
from dsv4cli.engine.tracing.manifest import Text, TraceManifest
from dsv4cli.engine.tracing.passes import Pass, Plan
from dsv4cli.engine.tracing.record import keep_noise, manifest_of, walked, with_fed_twin
from dsv4cli.engine.tracing.recording import RecordedFolder, Recording, Writer, make_folder
from dsv4cli.engine.tracing.report import TraceComparison, compared
from dsv4cli.engine.tracing.stages import LOGITS, STREAMS
from dsv4cli.engine.tracing.walk import Walk
from dsv4cli.engine.weights.load import load_model
from tests.support.golden_data import FOLDER, golden

CPU = torch.device("cpu")


def source(net: str) -> FolderSource:
    return FolderSource(net, FOLDER / net)


def model(net: str) -> Transformer:
    """Loaded anew: some parts of a model keep the functions that they were built with."""
    return load_model(source(net), Numerics.reference())


sound_model = cache(model)


def text(prompt: int, later: int = 2) -> Text:
    """Tokens of the small vocabularies."""
    drawn = torch.randint(3, 500, (prompt + later,), generator=torch.Generator().manual_seed(1))
    return Text(tuple(drawn.tolist()), prompt)


def recorded(walk: Walk, plan: Plan) -> list[RecordedFolder]:
    return plan.finish(walked(walk, plan))


def sound(net: str, texts: Sequence[Text], folder: Path, short_sums: int = 0) -> tuple[RecordedFolder, Noise]:
    """The right model, and what rounding makes of each half of its blocks; short_sums: as of a manifest."""
    manifest = replace(manifest_of(source(net), Numerics.reference(), texts), short_sums=short_sums)
    plan = with_fed_twin(folder / "sound", manifest, None, manifest)
    recording, twin = recorded(Walk(sound_model(net), CPU), plan)
    return recording, keep_noise(recording, twin, fed=True)


def beside(one: Recording, noise: Noise, walk: Walk, folder: Path, fed: Path) -> TraceComparison:
    """A walk that is fed with a recording, beside that."""
    manifest: TraceManifest = replace(one.manifest, ranks=1, how={})
    [other] = recorded(walk, Plan(manifest, (Pass(folder, fed),)))
    return compared(one, other, noise, fed=True)


def official(net: str, prompt: int, folder: Path) -> RecordedFolder:
    """The official code's recording of a net as one of ours: the streams behind each block, and logits."""
    recorded = golden(net)
    count, rows = recorded.model.config.num_hidden_layers, len(recorded.outputs(prompt)[0])
    known = Text(tuple(recorded.tokens[0, :rows].tolist()), prompt)
    manifest = manifest_of(source(net), Numerics.reference(), [known])
    make_folder(folder)
    writer = Writer(folder, manifest)
    for layer, streams in enumerate([recorded.inputs(prompt)[0], *recorded.outputs(prompt)]):
        writer.take(layer, STREAMS, 0, streams)
        if layer == count:
            writer.take(layer, LOGITS, 0, recorded.recorded[f"p{prompt}.logits"][0, : known.logits])
        writer.end_layer(layer)
    manifest.write(folder)
    return RecordedFolder(folder)
