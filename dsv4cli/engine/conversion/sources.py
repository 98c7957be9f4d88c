"""Sources of a conversion: a checkpoint of any layout, or a preset's random weights, which have no file."""

from dataclasses import dataclass
from pathlib import Path

from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity
from dsv4cli.engine.checkpoint.headers import Checkpoint, TensorInfo
from dsv4cli.engine.checkpoint.identify import FolderIdentity
from dsv4cli.engine.checkpoint.layout import TensorSpec, expected_tensors
from dsv4cli.engine.checkpoint.layouts import recognise_stored
from dsv4cli.engine.checkpoint.naming import OfficialNaming
from dsv4cli.engine.checkpoint.opening import open_stored
from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource
from dsv4cli.engine.checkpoint.stored import Raw, StoredModel
from dsv4cli.engine.conversion.recode import numpy_bits
from dsv4cli.engine.weights.random_weights import RandomRows


@dataclass(frozen=True)
class RandomIdentity(FolderIdentity):
    """A preset's random weights, presented as a folder with the preset's name."""

    seed: int = 0


def source_identity(source: FolderSource | RandomSource) -> FolderIdentity:
    """Return what a source holds. Raises what `recognise_stored` raises, and for GGUF types that cannot be read."""
    if isinstance(source, FolderSource):
        found = recognise_stored(source.folder)
        if isinstance(found, GgufIdentity):
            found.check_readable()
        return found
    identity, path = source.identity, Path(source.name)
    specs = expected_tensors(identity.config, identity.formats).values()
    tensors = {spec.name: TensorInfo(spec.name, spec.dtype, spec.shape, path, 0, 0) for spec in specs}
    checkpoint = Checkpoint(path, tensors, (), {}, {})
    return RandomIdentity(
        identity.size, identity.config, identity.formats, checkpoint, OfficialNaming(), seed=source.seed
    )


def open_source(identity: FolderIdentity) -> StoredModel:
    """Open the tensors of a source for reading."""
    return _RandomModel(identity) if isinstance(identity, RandomIdentity) else open_stored(identity)


class _RandomModel(StoredModel):
    """The tensors of random weights, equal to those that a run of the preset uses."""

    def __init__(self, identity: RandomIdentity) -> None:
        super().__init__(identity)
        self._random = RandomRows(identity.seed, identity.config.n_routed_experts)

    def read(self, spec: TensorSpec, rows: slice = slice(None), copy: int = 0) -> Raw:
        """Return rows of a tensor in its storage format. Nothing is read from disk."""
        return numpy_bits(self._random.rows(spec, rows))
