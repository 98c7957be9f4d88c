"""The two sides of `dsv4 trace bisect`: how they differ, and how each is computed and recorded."""

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dsv4cli.commands.job import Job, open_job
from dsv4cli.commands.trace.side import chunk_of, finished, in_ranks, loaded, manifest_for, record_plan, walk_of
from dsv4cli.commands.trace.texts import FIRST, TextOptions, read_texts, recorded_alone
from dsv4cli.errors import UsageError
from dsv4cli.options import ModelOptions
from dsv4cli.output import Output

if TYPE_CHECKING:
    from dsv4cli.engine.model.transformer import Transformer
    from dsv4cli.engine.tracing.judge import Noise
    from dsv4cli.engine.tracing.manifest import Text, TraceManifest
    from dsv4cli.engine.tracing.recording import Recording
    from dsv4cli.engine.tracing.report import TraceComparison
    from dsv4cli.engine.tracing.walk import Company

# draft tokens per step with --drafts
DRAFTS = "3"
# prompt lengths of the other texts of --slots, shorter and longer than a sliding window and a group of ratio 128;
# tokens decoded after each
BESIDE, LATER = (7, 45, 333), 24


@dataclass(frozen=True)
class SideOptions:
    """The options that change the other side."""

    against: str | None = None
    backend: Literal["triton", "torch"] | None = None
    numerics: Literal["plain"] | None = None
    device: str | None = None
    tp: int | None = None
    chunk: int | None = None
    drafts: bool = False

    @property
    def words(self) -> str:
        """The options as they are written on the command line."""
        given = {
            "--backend": self.backend, "--numerics": self.numerics, "--device": self.device, "--tp": self.tp,
            "--prefill-chunk": self.chunk,
        }  # fmt: skip
        words = [f"{name} {value}" for name, value in given.items() if value is not None]
        return " ".join([*words, "--drafts"] if self.drafts else words)

    @property
    def same_model(self) -> bool:
        """Whether both sides can use one loaded model."""
        return not any((self.against, self.numerics, self.device, self.tp))

    def of(self, options: ModelOptions) -> ModelOptions:
        """Return the options of the other side."""
        return replace(
            options,
            model=self.against or options.model,
            backend=self.backend or options.backend,
            dtype="float32" if self.numerics else options.dtype,
            device=self.device or options.device,
            prefill_chunk=self.chunk or options.prefill_chunk,
            draft=DRAFTS if self.drafts else options.draft,
        )


@contextmanager
def kept(folder: Path | None) -> Iterator[Path]:
    """Yield the folder for recordings: the given one, which must be empty, or a temporary one. Raises UsageError."""
    if folder is not None:
        from dsv4cli.engine.tracing.recording import make_folder

        make_folder(folder)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="dsv4-trace-") as temporary:
        yield Path(temporary)


@dataclass(frozen=True)
class Sides:
    """Both sides of a comparison.

    Attributes:
        change: how the other side differs.
        given: options that select the texts.
        parts: from `parts_of`.
        folder: where recordings are written.
    """

    out: Output
    model: str
    change: SideOptions
    given: TextOptions
    parts: dict[str, Any]
    folder: Path

    @property
    def options(self) -> ModelOptions:
        """The options of the first side."""
        return ModelOptions(model=self.model, draft="off")

    def compared(self) -> "TraceComparison":
        """Compare the other side with the first. Raises Dsv4Error."""
        from dsv4cli.engine.tracing.manifest import check_same_shapes
        from dsv4cli.engine.tracing.opened import is_recording

        if self.change.against is not None and is_recording(Path(self.change.against)):
            return self._beside_recording(Path(self.change.against))
        first, second = open_job(self.out, self.options), open_job(self.out, self.change.of(self.options))
        manifest, other = self._manifest(first, read_texts(first, self.given)), self._manifest(second, [])
        check_same_shapes(manifest, other)
        self._check_differs(first, second, max(text.prompt for text in manifest.texts))
        if self.change.same_model:
            with loaded(second, manifest.texts) as model:
                return self._beside(self._first(first, model, manifest, other), second, model)
        with loaded(first, manifest.texts) as model:
            one = self._first(first, model, manifest, other)
        del model
        from dsv4cli.engine.system.device import free_unused

        free_unused()
        return self._beside(one, second)

    def _check_differs(self, first: Job, second: Job, longest: int) -> None:
        """Raise UsageError if the options change nothing on this machine, so that both sides would always agree.

        Args:
            longest: prompt tokens of the longest text.
        """
        if any((self.change.against, self.change.numerics, self.change.tp, self.change.drafts)):
            return
        one, other = ((job.device, job.kernels, min(chunk_of(job), longest)) for job in (first, second))
        if one == other:
            raise UsageError(
                f"{self.change.words} changes nothing: both sides would use {first.kernels} kernels on {first.device}, "
                f"with {one[2]:,} prompt tokens per step",
                "change something: for example --prefill-chunk 1, --drafts, --slots, --tp 2 or --numerics plain",
            )

    def slots(self) -> "list[TraceComparison]":
        """Compare each text with itself in a used cache slot, and with itself in a batch with other texts."""
        from dsv4cli.engine.tracing.manifest import Text
        from dsv4cli.engine.tracing.walk import Company

        job = open_job(self.out, self.options)
        manifest, vocabulary = self._manifest(job, read_texts(job, self.given)), job.source.identity.config.vocab_size
        draw = random.Random(1)
        others = [
            Text(tuple(draw.randrange(FIRST, vocabulary) for _ in range(count + LATER)), count) for count in BESIDE
        ]
        with loaded(job, manifest.texts) as model:
            one = self._first(job, model, manifest, manifest)
            after = self._beside(one, job, model, "in a used slot", Company(before=others[-1:]))
            return [after, self._beside(one, job, model, "in a batch with others", Company(beside=others))]

    def _manifest(self, job: Job, texts: "list[Text]") -> "TraceManifest":
        manifest = manifest_for(job, texts, self.parts)
        # the other side is fed with the streams of "block"
        return replace(manifest, what=tuple({"block": None} | dict.fromkeys(manifest.what)))

    def _first(
        self, job: Job, model: "Transformer", manifest: "TraceManifest", other: "TraceManifest"
    ) -> "tuple[Recording, Noise]":
        """Record the first side and measure its rounding noise.

        Args:
            other: manifest of the side to compare with.
        """
        from dsv4cli.engine.settings import NO_DRAFTS
        from dsv4cli.engine.system.backend import use
        from dsv4cli.engine.tracing.record import keep_noise, with_fed_twin

        plan = with_fed_twin(self.folder / "one", manifest, None, other)
        with use(job.kernels):
            manifest = record_plan(job, walk_of(job, model, NO_DRAFTS), plan)
        recording, twin = finished(job, plan, manifest, None)
        noise = keep_noise(recording, twin, fed=True)
        recording.name = job.source.name
        return recording, noise

    def _beside(
        self,
        first: "tuple[Recording, Noise]",
        job: Job,
        model: "Transformer | None" = None,
        words: str | None = None,
        company: "Company | None" = None,
    ) -> "TraceComparison":
        """Record the other side, fed with the first side's streams, and compare it with the first.

        Args:
            model: the loaded model; None to load it.
            words: name of the variant, if it is not the command's options.
            company: other texts that share the cache or the batch.
        """
        from dsv4cli.engine.system.backend import use
        from dsv4cli.engine.tracing.passes import Pass, Plan
        from dsv4cli.engine.tracing.report import compared

        one, noise = first
        name = f"other-{words}".replace(" ", "-") if words else "other"
        manifest = self._manifest(job, list(one.manifest.texts))
        plan = Plan(manifest, (Pass(self.folder / name, self.folder / "one"),))
        if model is None:
            with in_ranks(job, self.change.tp, plan) as own, loaded(own, manifest.texts) as there:
                record_plan(own, walk_of(own, there), plan)
        else:
            walk = walk_of(job, model)
            with use(job.kernels):
                record_plan(job, walk if company is None else replace(walk, company=company), plan)
        [other] = finished(job, plan, manifest, self.change.tp)
        other.name = f"{job.source.name} {words or self.change.words}".strip()
        return compared(one, other, noise, fed=True)

    def _beside_recording(self, folder: Path) -> "TraceComparison":
        """Record the model, fed with the streams of an existing recording, and compare it with that."""
        from dsv4cli.engine.tracing.manifest import check_same_shapes
        from dsv4cli.engine.tracing.opened import holds_tokens, open_recording
        from dsv4cli.engine.tracing.record import keep_noise, with_fed_twin
        from dsv4cli.engine.tracing.report import compared

        change = replace(self.change, against=None)
        job = open_job(self.out, change.of(self.options))
        if holds_tokens(folder):
            recorded_alone(self.given, f"--against {folder}")
        one = open_recording(folder, self._manifest(job, read_texts(job, self.given)))
        manifest = self._manifest(job, list(one.manifest.texts))
        check_same_shapes(one.manifest, manifest)
        plan = with_fed_twin(self.folder / "other", manifest, folder, one.manifest)
        with in_ranks(job, change.tp, plan) as own, loaded(own, manifest.texts) as model:
            record_plan(own, walk_of(own, model), plan)
        other, twin = finished(job, plan, manifest, change.tp)
        noise = keep_noise(other, twin, fed=True)
        other.name = f"{job.source.name} {change.words}".strip()
        return compared(one, other, noise, fed=True)
