"""A checkpoint in any layout, opened to be read under official names; numpy, no torch."""

from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity
from dsv4cli.engine.checkpoint.gguf.stored import GgufStoredModel
from dsv4cli.engine.checkpoint.identify import FolderIdentity
from dsv4cli.engine.checkpoint.packed import PackedIdentity
from dsv4cli.engine.checkpoint.packed_stored import PackedStoredModel
from dsv4cli.engine.checkpoint.stored import StoredModel


def open_stored(identity: FolderIdentity) -> StoredModel:
    """The tensors of a checkpoint, to be read. Raises UnsupportedCheckpoint for types of GGUF that cannot be."""
    if isinstance(identity, GgufIdentity):
        return GgufStoredModel(identity)
    return PackedStoredModel(identity) if isinstance(identity, PackedIdentity) else StoredModel(identity)
