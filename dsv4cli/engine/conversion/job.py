"""A conversion: its source and target, whether it can be done, and what distinguishes its plan from others. No
torch.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dsv4cli.engine.checkpoint.coverage import check_coverage
from dsv4cli.engine.checkpoint.files import check_unchanged
from dsv4cli.engine.checkpoint.gguf.naming import GgufNaming
from dsv4cli.engine.checkpoint.headers import UNFINISHED, Checkpoint
from dsv4cli.engine.checkpoint.identify import FolderIdentity
from dsv4cli.engine.checkpoint.layout import TensorSpec, matrices
from dsv4cli.engine.checkpoint.naming import MpNaming, Naming, TransformersNaming, stored_table
from dsv4cli.engine.checkpoint.sizes import stored_bytes
from dsv4cli.engine.config.formats import Role
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.conversion.copies import Copy, copies_of
from dsv4cli.engine.conversion.disk_space import distinct_sizes, free_bytes
from dsv4cli.engine.conversion.gguf.metadata import gguf_metadata, stem
from dsv4cli.engine.conversion.gguf.plan import plan_gguf
from dsv4cli.engine.conversion.journal import Times
from dsv4cli.engine.conversion.metadata import is_dead, metadata_files
from dsv4cli.engine.conversion.plan import ORDER, FilePlan, plan_files
from dsv4cli.engine.conversion.selection import LayerSelection, select, stored_part
from dsv4cli.engine.conversion.target import Target
from dsv4cli.engine.settings import WHOLE, Part
from dsv4cli.engine.system.regular_files import Stamp
from dsv4cli.errors import CheckpointError, NotEnoughDisk, UsageError
from dsv4cli.harmless import shell_word
from dsv4cli.version import __version__


@dataclass(frozen=True)
class Conversion:
    """A conversion to run.

    max_file: maximum bytes per file. texts: additional files. notes: what the output lacks, or the source does not say.
    """

    source: FolderIdentity
    output: Path
    target: Target
    selection: LayerSelection
    max_file: int
    part: Part = WHOLE
    texts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @cached_property
    def _selected(self) -> tuple[ModelConfig, Callable[[str], str]]:
        return select(self.source.config, self.selection)

    @property
    def config(self) -> ModelConfig:
        """The configuration of the output."""
        return self._selected[0]

    def source_name(self, name: str) -> str:
        """Return the official name in the source of what has this name in the output."""
        return self._selected[1](name)

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """The tensor table of the output."""
        return self.target.table(self.config)

    @cached_property
    def matrices(self) -> dict[str, dict[Role, TensorSpec]]:
        """The tensor table of the output, by matrix."""
        return matrices(self.specs.values())

    @cached_property
    def needed(self) -> dict[str, TensorSpec]:
        """The stored tensors of the source that the output is made from, by key."""
        every = matrices(self.source.specs.values())
        wanted = [spec for matrix in self.matrices for spec in every[self.source_name(matrix)].values()]
        return stored_table(self.source.naming, wanted)

    @cached_property
    def files(self) -> tuple[FilePlan, ...]:
        """All files of the output, other parts' files included."""
        naming = self.target.naming
        if not isinstance(naming, GgufNaming):
            return plan_files(self.specs, naming, self.max_file)
        formats = self.target.formats
        metadata = gguf_metadata(self.source, self.config, formats, self.texts)
        return plan_gguf(self.specs, naming, metadata, stem(self.source, formats), self.max_file)

    @property
    def own_files(self) -> tuple[FilePlan, ...]:
        """The files that this part writes."""
        return self.files[self.part.index - 1 :: self.part.count]

    @property
    def bytes_in(self) -> int:
        """Bytes of the source that the whole job reads. A cut or shared tensor counts once."""
        return sum(map(stored_bytes, self.needed.values()))

    @property
    def bytes_out(self) -> int:
        """Bytes of the files that this part writes."""
        return sum(file.nbytes for file in self.own_files)

    @cached_property
    def own_copies(self) -> dict[str, list[int]]:
        """The matrices that this part's files hold completely, and which of their copies."""
        own = {file.name.removesuffix(".safetensors") + "/" for file in self.own_files}
        names = {key for file in self.own_files for key in file.keys}
        naming = self.target.naming

        def is_here(key: str) -> bool:
            stem, slash, _ = key.rpartition("/")
            return stem + slash in own if isinstance(naming, MpNaming) else key in names

        return whole_copies(self.matrices, naming, is_here)

    @property
    def own_cut(self) -> int:
        """The number of matrices that this part holds partly, which cannot be compared without other parts."""
        items = (item.matrix for file in self.own_files for batch in file.batches for item in batch)
        return len({*items} - self.own_copies.keys())

    def check_source(self) -> None:
        """Raise CheckpointError unless every needed tensor exists and a whole model has no tensor left over."""
        checkpoint = self.source.checkpoint
        if self.config != self.source.config:
            checkpoint = _only(checkpoint, self.needed)
        try:
            check_coverage(checkpoint, self.needed).raise_if_incomplete()
        except CheckpointError as error:
            raise CheckpointError(error.message, self._remedy(error.remedy)) from None

    def _remedy(self, usual: str) -> str:
        """Return what to do about an incomplete source."""
        part = stored_part(self.source) if self.selection == LayerSelection() else ""
        if part:
            return f"repeat the command with `{part}`, which are there; or {usual}"
        if isinstance(self.source.naming, TransformersNaming):
            return f"{usual}; or save it again: the whole model, adapters merged, with `model.save_pretrained(FOLDER)`"
        return usual

    def check_output(self) -> None:
        """Raise UsageError for an output that is the source, is inside it, or holds something other than this job."""
        # a loop of links has no end, and is not resolved
        source, output = (Path(os.path.realpath(path)) for path in (self.source.checkpoint.folder, self.output))
        dead = next(filter(is_dead, (self.output, *self.output.parents)), None)
        if dead is not None:
            raise UsageError(f"{dead} is a broken symbolic link", "remove it, or use another folder")
        if output == source or source in output.parents or output in source.parents:
            raise UsageError(f"{self.output} and the source overlap", "use a folder outside the source")
        existing = next(path for path in (self.output.absolute(), *self.output.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise UsageError(f"{existing} is a file", "use a folder that is empty or does not exist yet")
        if self.output.is_dir() and any(self.output.iterdir()) and not (self.output / UNFINISHED).is_dir():
            raise UsageError(
                f"{self.output} is not empty, and does not contain a conversion of this source with these options",
                "use a folder that is empty or does not exist yet",
            )

    def check_writable(self) -> None:
        """Raise UsageError if the output's folder cannot be written."""
        existing = next(path for path in (self.output.absolute(), *self.output.absolute().parents) if path.exists())
        if not os.access(existing, os.W_OK | os.X_OK):
            reason = "Permission denied"
            with suppress(AttributeError, OSError):
                reason = "Read-only file system" if os.statvfs(existing).f_flag & os.ST_RDONLY else reason
            raise UsageError(f"{existing} cannot be written to: {reason}", "use a folder that you can write to")

    def check_space(self) -> None:
        """Raise NotEnoughDisk unless the rest of the output fits the disk."""
        missing, free = self.bytes_missing, free_bytes(self.output)
        if missing > free:
            needed, there, short = distinct_sizes(missing, free, missing - free)
            raise NotEnoughDisk(
                f"{self.output} needs {needed} more and its disk has {there} free",
                f"free {short}, or use another disk",
            )

    @property
    def bytes_missing(self) -> int:
        """Bytes of this part's files and copies that are not on disk yet."""
        weights = self.bytes_out - sum(self._there(file) for file in self.own_files)
        return weights + sum(copy.nbytes for copy in self.copies if not copy.is_done)

    def _there(self, file: FilePlan) -> int:
        """Return the bytes that are already allocated to a file."""
        for path in (self.output / file.name, self.output / UNFINISHED / file.name):
            if path.exists():
                return min(path.stat().st_blocks * 512, file.nbytes)
        return 0

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        """The files to copy: tokenizer and others, in each part. Raises CheckpointError for a dangling link."""
        return copies_of(self.source.checkpoint.folder, self.output)

    def index(self) -> dict[str, Any] | None:
        """The index of the output. Official `mp` shards and GGUF have none."""
        if isinstance(self.target.naming, MpNaming | GgufNaming):
            return None
        weight_map = {key: file.name for file in self.files for key in file.keys}
        total = sum(file.nbytes - len(file.header) for file in self.files)
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}

    @cached_property
    def description(self) -> dict[str, Any]:
        """The plan as JSON: equal for equal conversions only, and enough to finish without the source."""
        files = {
            file.name: {"nbytes": file.nbytes, "header": hashlib.sha256(file.header).hexdigest()}
            | {"header_bytes": len(file.header)}
            for file in self.files
        }
        target, folder = self.target, self.source.checkpoint.folder
        metadata = metadata_files(folder, self.config, target.formats, target.name)
        return {
            "dsv4": __version__,
            "source": self._fingerprint(),
            "parts": self.part.count,
            "order": ORDER,
            "files": files,
            "metadata": metadata | dict(self.texts),
            "index": self.index(),
            "to": target.name,
            "layer": self.selection.first,
        }

    def _fingerprint(self) -> str:
        """Return a hash that identifies the source: every needed tensor with its offset."""
        tensors = self.source.checkpoint.tensors
        headers = [(key, tensors[key].dtype, tensors[key].file.name, tensors[key].begin) for key in sorted(self.needed)]
        return hashlib.sha256(json.dumps([asdict(self.source.config), headers]).encode()).hexdigest()

    @cached_property
    def _stamps(self) -> dict[Path, Stamp]:
        """The needed files of the source, as they were before their headers were read."""
        files = {self.source.checkpoint.tensors[key].file for key in self.needed}
        known = self.source.checkpoint.stamps
        return {path: known[path] for path in sorted(files) if path in known}

    def source_times(self) -> Times:
        """Size and modification time (ns) of each file of the source."""
        return {path.name: [size, changed] for path, (size, changed, _) in self._stamps.items()}

    def check_source_unchanged(self) -> None:
        """Raise CheckpointError if a file of the source was changed since it was opened."""
        try:
            for path, before in self._stamps.items():
                check_unchanged(path, before)
        except CheckpointError as error:
            remedy = f"wait until nothing writes to it, then `rm -r {shell_word(self.output)}` and convert again"
            raise CheckpointError(error.message, remedy) from None

    @property
    def job(self) -> str:
        """Hash of plan and source. It is equal for all parts of this conversion."""
        return job_of(self.description, self.source_times())


def job_of(plan: Mapping[str, Any], times: Times) -> str:
    """Return a hash of a plan and its source's times. It is equal for all parts of a job, however they are run."""
    shared = {key: value for key, value in plan.items() if key not in ("parts", "dsv4", "order")}
    return hashlib.sha256(json.dumps([shared, times], sort_keys=True).encode()).hexdigest()


def whole_copies(
    matrices: Mapping[str, Mapping[Role, TensorSpec]], naming: Naming, is_here: Callable[[str], bool]
) -> dict[str, list[int]]:
    """Return the complete copies of each matrix here, by number: of a sharded one at most 1, otherwise 1 per rank."""
    found: dict[str, list[int]] = {}
    for matrix, roles in matrices.items():
        locations = [naming.locations(spec) for spec in roles.values()]
        # a sharded tensor needs all of its parts; of a replicated one, every location is a copy
        copies = (
            [[location for part in locations for location in part]]
            if locations[0][0].cut
            else zip(*locations, strict=True)
        )
        here = [number for number, copy in enumerate(copies) if all(is_here(location.name) for location in copy)]
        if here:
            found[matrix] = here
    return found


def _only(checkpoint: Checkpoint, wanted: Mapping[str, TensorSpec]) -> Checkpoint:
    """Return the checkpoint as if it contained only these tensors."""
    return replace(
        checkpoint,
        tensors={key: info for key, info in checkpoint.tensors.items() if key in wanted},
        index_problems={key: text for key, text in checkpoint.index_problems.items() if key in wanted},
    )
