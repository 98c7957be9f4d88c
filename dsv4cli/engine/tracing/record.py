"""Records a model on texts, and measures how much rounding alone would change the recording."""

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from dsv4cli.engine.checkpoint.identify import FolderIdentity, Identity
from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource
from dsv4cli.engine.config.formats import STORAGE
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.system.regular_files import open_file
from dsv4cli.engine.system.threads import Progress
from dsv4cli.engine.tracing.compare import differences
from dsv4cli.engine.tracing.feed import format_rounding, rounding_between
from dsv4cli.engine.tracing.judge import Noise, noise_of, save_noise
from dsv4cli.engine.tracing.manifest import Text, TraceManifest
from dsv4cli.engine.tracing.passes import Pass, Plan
from dsv4cli.engine.tracing.recording import RecordedFolder, make_folder
from dsv4cli.engine.tracing.short_sums import short_sums_between
from dsv4cli.engine.tracing.stages import Group
from dsv4cli.engine.tracing.walk import Walk
from dsv4cli.errors import UsageError
from dsv4cli.kernels import gemm

# kinds of weights, and the weight formats whose inputs are not rounded
KINDS, UNSCALED = ("linear", "experts"), ("bf16", "f32")
# bytes of each tensor that the hash of the weights includes
HEAD = 4096


def manifest_of(
    source: FolderSource | RandomSource,
    numerics: Numerics,
    texts: Sequence[Text],
    layers: range | None = None,
    what: tuple[Group, ...] | None = None,
) -> TraceManifest:
    """Return the manifest for recording these texts: by default, all layers and stages.

    Raises:
        UsageError: the model does not have these layers.
    """
    config, formats = source.identity.config, source.identity.formats
    count = config.num_hidden_layers
    if layers is not None and layers.stop > count:
        raise UsageError(
            f"--layers {layers.start}-{layers.stop - 1}: the model has {count} layers", f"choose from 0-{count - 1}"
        )
    whole = TraceManifest(
        model=source.name,
        texts=tuple(texts),
        layers=(0, count) if layers is None else (layers.start, layers.stop),
        layers_of_model=count,
        ratios=tuple(config.layer_ratios),
        hidden=config.hidden_size,
        streams=config.hc_mult,
        dtype=str(numerics.dtype).removeprefix("torch."),
        simulate=numerics.simulate,
        rounded=tuple(kind for kind in KINDS if numerics.simulate and getattr(formats, kind) not in UNSCALED),
        drafter=config.drafter != "none",
        weights=weights_of(source.identity) if isinstance(source, FolderSource) else source.name,
    )
    return whole if what is None else replace(whole, what=what)


def sums_shortly(source: FolderSource | RandomSource, numerics: Numerics, device: torch.device) -> bool:
    """Return whether Triton computes linears of many rows on FP8 tensor cores with short sums."""
    coded = STORAGE[source.identity.formats.linear].dtype == STORAGE["fp8"].dtype
    return numerics.simulate and numerics.dtype == torch.bfloat16 and coded and gemm.sums_shortly(device)


def weights_of(identity: Identity) -> str | None:
    """Return an identifier of a checkpoint's weights.

    It is a hash of all tensor headers, and of the first bytes of each tensor except those of routed experts.
    """
    if not isinstance(identity, FolderIdentity):
        return None
    found = hashlib.sha256()
    for name, info in sorted(identity.checkpoint.tensors.items()):
        found.update(f"{name} {info.dtype} {info.shape}\n".encode())
        if ".ffn.experts." not in name:
            descriptor = open_file(info.file)
            try:
                found.update(os.pread(descriptor, min(HEAD, info.nbytes), info.begin))
            finally:
                os.close(descriptor)
    return found.hexdigest()


def with_twins(folder: Path, manifest: TraceManifest) -> Plan:
    """Plan a recording and its twins.

    One twin has its streams rounded once more before each half of a block, and differences propagate. The other one is
    fed; see `with_fed_twin`. It requires the streams in the recording.
    """
    twin = Pass(twin_of(folder), moved=format_rounding(manifest))
    fed = with_fed_twin(folder, manifest, None, manifest).passes[1:] if "block" in manifest.what else ()
    return Plan(manifest, (Pass(folder), twin, *(replace(one, folder=folder / ".twin-fed") for one in fed)))


def with_fed_twin(folder: Path, manifest: TraceManifest, fed: Path | None, other: TraceManifest) -> Plan:
    """Plan a recording and a twin whose halves of blocks are fed with recorded, perturbed streams.

    Args:
        fed: the recording to feed both with; None to feed only the twin, with this recording.
        other: manifest of the side to compare with. It determines the size of the perturbation.
    """
    moved, short = rounding_between(manifest, other), short_sums_between(manifest, other)
    return Plan(manifest, (Pass(folder, fed), Pass(twin_of(folder), fed or folder, moved, short)))


def has_noise_of(own: TraceManifest, one: TraceManifest, other: TraceManifest) -> bool:
    """Return whether the fed twin of `own`, one of the two, was perturbed by the rounding between `one` and `other`."""
    return rounding_between(own, own) == rounding_between(one, other) and short_sums_between(
        own, own
    ) == short_sums_between(one, other)


def twin_of(folder: Path) -> Path:
    """Return the folder of a recording's twin, which exists until its noise is known."""
    return folder / ".twin"


def walked(walk: Walk, plan: Plan, progress: Progress = lambda done, total: None) -> TraceManifest:
    """Make the recordings of a plan (with several ranks, this rank's part), and return the manifest with all tokens.

    If it fails, what was recorded is removed. Raises what `Engine.step` raises. progress: as in `Walk.through`.
    """
    texts, each = plan.manifest.texts, plan.manifest.rows("token", 0)
    for one in plan.passes:
        make_folder(one.folder)
    try:
        with plan.observed(walk.model, slot=walk.slot if walk.followers is None else None):
            for number in range(len(plan.passes)):
                texts = tuple(walk.through(texts, partial(_progress, progress, number * each, len(plan.passes) * each)))
    except BaseException:
        # the folders were empty before; remove the partial recordings so that the same command works again
        for one in plan.passes:
            shutil.rmtree(one.folder, ignore_errors=True)
        raise
    return replace(plan.manifest, texts=texts)


def _progress(progress: Progress, before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)


def keep_noise(recording: RecordedFolder, twin: RecordedFolder, *, fed: bool) -> Noise:
    """Save how far a recording's twin differs from it, and delete the twin. Raises OSError."""
    noise = noise_of(differences(recording, twin, fed=fed))
    save_noise(noise, recording.folder, fed=fed)
    shutil.rmtree(twin.folder)
    return noise
