"""Opening a checkpoint of any layout for reads under official names; numpy, no torch."""

from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity
from dsv4cli.engine.checkpoint.gguf.stored import GgufStoredModel
from dsv4cli.engine.checkpoint.identify import FolderIdentity
from dsv4cli.engine.checkpoint.packed import PackedIdentity
from dsv4cli.engine.checkpoint.packed_stored import PackedStoredModel
from dsv4cli.engine.checkpoint.stored import StoredModel


def open_stored(identity: FolderIdentity) -> StoredModel:
    """Open the tensors of a checkpoint for reading. Raises UnsupportedCheckpoint for GGUF types that cannot be read."""
    if isinstance(identity, GgufIdentity):
        return GgufStoredModel(identity)
    return PackedStoredModel(identity) if isinstance(identity, PackedIdentity) else StoredModel(identity)
