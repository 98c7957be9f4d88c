"""Plans what to record of a model: one or more passes over the same texts, the same on every rank."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.tracing.feed import Jitter, MovedStreams, RecordedStreams
from dsv4cli.engine.tracing.manifest import TraceManifest
from dsv4cli.engine.tracing.observe import observed
from dsv4cli.engine.tracing.observer import Feed, Observer
from dsv4cli.engine.tracing.opened import is_recording, open_recording
from dsv4cli.engine.tracing.recording import RecordedFolder, Writer
from dsv4cli.engine.tracing.short_sums import ShortSums


@dataclass(frozen=True)
class Pass:
    """One pass that makes one recording.

    Attributes:
        folder: where to write it.
        fed: the recording whose streams are fed to each half of a block; None for the model's own.
        moved: relative size of the perturbation of these streams; None for none.
        short: for each text, the number of leading tokens whose FP8 linears `ShortSums` perturbs; () for none.
    """

    folder: Path
    fed: Path | None = None
    moved: float | None = None
    short: tuple[int, ...] = ()

    def feed(self, manifest: TraceManifest) -> Feed | None:
        """Return the feed of the blocks.

        Args:
            manifest: the plan's manifest, because earlier passes of the plan have none yet.
        """
        jitter = None if self.moved is None else Jitter(self.moved)
        if self.fed is not None:
            # the recording of an earlier pass is not finished
            finished = is_recording(self.fed)
            recording = open_recording(self.fed, manifest) if finished else RecordedFolder(self.fed, manifest)
            return RecordedStreams(recording, jitter, ShortSums(self.short) if self.short else None)
        return None if jitter is None else MovedStreams(jitter)


@dataclass(frozen=True)
class Plan:
    """The passes, one after another, each over all texts of the manifest."""

    manifest: TraceManifest
    passes: tuple[Pass, ...]

    def observed(
        self, model: Transformer, rank: int = 0, slot: Callable[[], int | None] | None = None
    ) -> AbstractContextManager[None]:
        """Record what a model, or this rank's part of it, computes in the block. slot: as in `Observer`."""
        passes = [(Writer(one.folder, self.manifest, rank), one.feed(self.manifest)) for one in self.passes]
        return observed(model, Observer(self.manifest, passes, slot))

    def finish(self, manifest: TraceManifest) -> list[RecordedFolder]:
        """Complete and return the recordings, after every rank has written its part.

        Args:
            manifest: with the sampled tokens.
        """
        for one in self.passes:
            replace(manifest, fed=one.fed is not None).write(one.folder)
        return [RecordedFolder(one.folder) for one in self.passes]
