"""The name of a repository on the hub, and the GGUF variant that it selects."""

from dataclasses import dataclass, replace

from dsv4cli.engine.checkpoint.gguf.variants import ChoiceNeeded, Variant, choose_one, choose_variant, variants_of
from dsv4cli.engine.checkpoint.names import ALIASES
from dsv4cli.engine.checkpoint.source import REPOSITORY
from dsv4cli.engine.hub.cached import ONLINE
from dsv4cli.engine.hub.files import Listing
from dsv4cli.engine.hub.selection import Selection, kind_of
from dsv4cli.errors import CheckpointError, HubError, UsageError


@dataclass(frozen=True)
class RepositoryName:
    """A repository on the hub, its revision (None for main), and the GGUF variant that is wanted (None for all)."""

    repository: str
    revision: str | None
    variant: str | None

    def __str__(self) -> str:
        """Return org/name[@revision][:VARIANT]."""
        revision, variant = (f"@{self.revision}" if self.revision else ""), (f":{self.variant}" if self.variant else "")
        return f"{self.repository}{revision}{variant}"


def repository_of(text: str, revision: str | None) -> RepositoryName:
    """Return the repository, revision and variant that a user names. Raises UsageError for an invalid repository."""
    match = REPOSITORY.fullmatch(ALIASES.get(text, text))
    if match is None:
        raise UsageError(
            f"{text!r} is not a repository on the hub",
            f"write it as org/name[@revision][:NAME], or use {', '.join(ALIASES)}",
        )
    if revision and match["revision"] and revision != match["revision"]:
        raise UsageError(f"{text} and --revision {revision} specify two revisions", "give only one")
    return RepositoryName(match["name"], revision or match["revision"], match["variant"])


def gguf_models(listing: Listing, name: RepositoryName) -> list[Variant]:
    """Return the GGUF models that a name allows: the named one, or all of a repository without other weights.

    Raises as `choose_variant`.
    """
    found = variants_of(file.name for file in listing.files)
    if name.variant is not None:
        return [choose_variant(found, name.variant, str(replace(name, variant=None)))]
    return found if not any(kind_of(file.name) == "weights" for file in listing.files) else []


def variant_of(listing: Listing, name: RepositoryName, selection: Selection) -> Variant | None:
    """Return the GGUF variant to download, None for a selection of files of any other kind.

    Raises UsageError for a variant that does not exist or is only in part selected, and if the repository has several
    and none is named; CheckpointError if the repository lacks one of its files, HubError if only the cache lacks it.
    """
    found, where = variants_of(file.name for file in listing.files), str(replace(name, variant=None))
    if name.variant is None:
        if selection.is_whole and len(gguf_models(listing, name)) > 1:
            everything = f"`dsv4 download {where} --only other` downloads all of them"
            raise ChoiceNeeded(f"{where} has {len(found)} GGUF models", f"{choose_one(found, where)}; {everything}")
        return None
    if not selection.is_whole:
        raise UsageError(
            "--layers, --no-mtp and --only do not select parts of a GGUF model", f"remove them, or use {where}"
        )
    try:
        return choose_variant(found, name.variant, where)
    except (CheckpointError, UsageError) as error:
        if listing.cached:
            raise HubError(
                f"huggingface_hub is in offline mode, and {name} is not completely in its cache", ONLINE
            ) from None
        raise error
