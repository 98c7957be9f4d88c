"""Notes on a model and its options: what the checkpoint does not have or state, and limits that do not apply."""

from typing import TYPE_CHECKING

from dsv4cli.output import Output

if TYPE_CHECKING:
    from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource


def note_context(out: Output, given: int | None, source: "FolderSource | RandomSource") -> None:
    """Print a line if --max-context is more than the model's own limit, which then applies."""
    if given is None:
        return
    limit = source.identity.config.max_position_embeddings
    if given > limit:
        out.status(f"--max-context {given:,} is above the model's limit of {limit:,} tokens, which applies")


def report_missing(out: Output, source: "FolderSource | RandomSource") -> None:
    """Print a line if the checkpoint has no drafter, and one for each thing that it does not state."""
    from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity
    from dsv4cli.engine.config.keys import RELEASE_KEY

    identity = source.identity
    is_gguf = isinstance(identity, GgufIdentity)
    for sentence in identity.assumptions if isinstance(identity, GgufIdentity) else ():
        out.status(sentence)
    if identity.config.drafter == "none":
        out.status(
            "drafts are off: the file has no drafter" if is_gguf else "the checkpoint has no drafter (no mtp.* tensors)"
        )
    if identity.config.release is None:
        change = "" if is_gguf else f'; to change it, set "{RELEASE_KEY}" in config.json'
        out.status(f"the checkpoint does not say its release; prompts use the format of {identity.release}{change}")
