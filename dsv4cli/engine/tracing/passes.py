"""What is recorded of a model: one or more passes of the same texts, the same on every rank."""

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
    """One recording. folder: where it goes. fed: the recording whose streams each half of a block is given, None for
    the model's own. moved: how far these are moved, relative, None for not at all. short: of how many first tokens of
    each text FP8 linears are moved as `ShortSums` does, () for none."""

    folder: Path
    fed: Path | None = None
    moved: float | None = None
    short: tuple[int, ...] = ()

    def feed(self, manifest: TraceManifest) -> Feed | None:
        """What the blocks are given; manifest: of the plan, whose earlier passes have none yet."""
        jitter = None if self.moved is None else Jitter(self.moved)
        if self.fed is not None:
            # that of an earlier pass is not finished
            finished = is_recording(self.fed)
            recording = open_recording(self.fed, manifest) if finished else RecordedFolder(self.fed, manifest)
            return RecordedStreams(recording, jitter, ShortSums(self.short) if self.short else None)
        return None if jitter is None else MovedStreams(jitter)


@dataclass(frozen=True)
class Plan:
    """The passes, one after another, each of all texts of the manifest."""

    manifest: TraceManifest
    passes: tuple[Pass, ...]

    def observed(
        self, model: Transformer, rank: int = 0, slot: Callable[[], int | None] | None = None
    ) -> AbstractContextManager[None]:
        """What a model, or its part in a rank, computes inside is recorded; slot: as of `Observer`."""
        passes = [(Writer(one.folder, self.manifest, rank), one.feed(self.manifest)) for one in self.passes]
        return observed(model, Observer(self.manifest, passes, slot))

    def finish(self, manifest: TraceManifest) -> list[RecordedFolder]:
        """The recordings, once every rank has written its part. manifest: with all tokens, now known."""
        for one in self.passes:
            replace(manifest, fed=one.fed is not None).write(one.folder)
        return [RecordedFolder(one.folder) for one in self.passes]
