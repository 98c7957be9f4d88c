"""Model names and their resolution: built in, a folder, the Hugging Face cache, random; no torch, no network."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dsv4cli.engine.checkpoint.generation_config import own_sampling
from dsv4cli.engine.checkpoint.gguf.files import SUFFIX
from dsv4cli.engine.checkpoint.gguf.variants import ChoiceNeeded, choose_one, choose_variant, variants_of
from dsv4cli.engine.checkpoint.identify import FolderIdentity, Identity, describe
from dsv4cli.engine.checkpoint.layouts import identify_runnable, recognise_stored
from dsv4cli.engine.checkpoint.names import ALIASES, IN_PACKAGE, RANDOM, folder_word, hidden_folder
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.presets import PRESETS, shortened
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.settings import Drafting, Sampling
from dsv4cli.errors import CheckpointError, ModelNotFound, UsageError
from dsv4cli.harmless import shell_word

REPOSITORY = re.compile(
    r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?(:(?P<variant>[\w.+-][\w.+/-]*))?", re.ASCII
)
# suffixes of a checkpoint's files: a name that ends with one is a file, missing or not
FILE_SUFFIXES = (SUFFIX, ".safetensors", ".json")
# names of other files in an error
NAMES_LISTED = 3
RANDOM_OPTIONS = ("layers", "experts", "seed")
RANDOM_FORM = f"random:PRESET[,layers=N][,experts=N][,seed=N] with PRESET one of {', '.join(PRESETS)}"
KNOWN = f"{', '.join(IN_PACKAGE)}, {', '.join(ALIASES)}, org/name[@revision][:NAME], {RANDOM_FORM}"
MAX_SEED = 2**63 - 1
_OTHER_MODELS = "check the path, or use a known model: " + KNOWN


@dataclass(frozen=True)
class FolderSource:
    """A local checkpoint folder or GGUF file; `name` is the path as the user typed it."""

    name: str
    folder: Path

    @cached_property
    def identity(self) -> FolderIdentity:
        """The identity of the folder, read once. Raises as `identify_runnable`."""
        return identify_runnable(self.folder)

    @cached_property
    def recognised(self) -> FolderIdentity:
        """The identity in any layout that `dsv4 convert` reads. Raises as `recognise_stored`."""
        return recognise_stored(self.folder)

    @property
    def sampling(self) -> Sampling:
        """The sampling defaults of the model. Raises as `own_sampling`."""
        return own_sampling(self.folder)


@dataclass(frozen=True)
class RandomSource:
    """A model with random weights, which needs no file."""

    name: str
    config: ModelConfig
    seed: int

    @cached_property
    def identity(self) -> Identity:
        """The identity of the preset, in the official storage formats."""
        return describe(self.config, Formats())

    @property
    def sampling(self) -> Sampling:
        """Sampling from the model's unmodified probabilities."""
        return Sampling()


def check_drafter(source: FolderSource | RandomSource, drafting: Drafting) -> None:
    """Raise UsageError if a number of drafts is requested from a model without a drafter."""
    if drafting.required and source.identity.config.drafter == "none":
        raise UsageError(
            f"{source.name} has no drafter, and --draft {drafting.most} needs one",
            "leave out --draft, or use a model that has one: --model nano",
        )


def resolve_model(text: str) -> FolderSource | RandomSource:
    """Return the model that `text` names.

    Raises UsageError for an invalid model name or an invalid part of `random:…`, ModelNotFound for a folder or a
    repository that is not on this machine.
    """
    if text.startswith(RANDOM):
        return _random(text)
    if text in ALIASES:
        return resolve_repository(text)
    if text in IN_PACKAGE:
        return FolderSource(text, Path(__file__).parents[2] / text)
    # os.path answers False where Path raises: a name too long, a user without a home
    path = Path(os.path.expanduser(text))
    if text.strip() and os.path.isdir(path):
        return FolderSource(text, path)
    if os.path.isfile(path):
        if path.suffix == SUFFIX:
            return FolderSource(text, path)
        remedy = f"use the folder of the checkpoint: {folder_word(path.parent)}"
        raise UsageError(f"{text} is a file; a model is a folder", remedy)
    if names_missing_file(text):
        raise ModelNotFound(f"there is no file {text}", _other_files(path) or _OTHER_MODELS)
    if REPOSITORY.fullmatch(text):
        return resolve_repository(text)
    if "/" in text or text.startswith(("~", ".")):
        raise ModelNotFound(f"there is no folder {text}", _OTHER_MODELS)
    raise UsageError(f"{text!r} is neither a folder nor a known model", "known names: " + KNOWN)


def names_missing_file(text: str) -> bool:
    """Return whether `text` is the path of a file that does not exist, and not a repository.

    `org/name.gguf` may be a repository unless there is a folder `org`.
    """
    path = Path(os.path.expanduser(text))
    if not _is_file_name(text) or os.path.exists(path):
        return False
    match = REPOSITORY.fullmatch(text)
    return match is None or (match["name"] == text and os.path.isdir(path.parent))


def _is_file_name(text: str) -> bool:
    return text.lower().endswith(FILE_SUFFIXES)


def _other_files(path: Path) -> str:
    """Return advice that names the GGUF files next to a missing one, '' if there are none."""
    names = sorted(other.name for other in path.parent.glob("*" + SUFFIX)) if path.suffix == SUFFIX else []
    more = f" and {len(names) - NAMES_LISTED:,} more" if len(names) > NAMES_LISTED else ""
    return f"check the name: its folder has {', '.join(names[:NAMES_LISTED])}{more}" if names else ""


def resolve_repository(text: str) -> FolderSource:
    """Return the cached snapshot of a repository, named by an alias or org/name[@revision][:VARIANT].

    Raises ModelNotFound if there is none or it lacks the GGUF variant, UsageError for a name that huggingface_hub
    rejects and for a snapshot with several GGUF variants if none is chosen.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    match = REPOSITORY.fullmatch(ALIASES.get(text, text))
    assert match is not None, text
    repository, revision, variant = match["name"], match["revision"], match["variant"]
    try:
        snapshot_folder = Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except HFValidationError:
        raise UsageError(f"{text!r} is neither a folder nor a known model", "known names: " + KNOWN) from None
    except LocalEntryNotFoundError:
        snapshot = f"{repository} at {revision}" if revision else repository
        what = "file" if _is_file_name(text) else "folder"
        other = "" if text in ALIASES or variant else f" and there is no {what} {text}"
        folder = hidden_folder(text)
        remedy = f", or write the folder here as {folder}" if folder else ""
        raise ModelNotFound(
            f"{snapshot} is not in the Hugging Face cache{other}",
            f"fetch it with `dsv4 download {shell_word(text)}`{remedy}",
        ) from None
    return FolderSource(text, cached_model(snapshot_folder, variant, text))


def cached_model(folder: Path, variant: str | None, text: str) -> Path:
    """Return the model in a cached snapshot: the folder, or the first file of its GGUF variant.

    text: what the user calls it. Raises as `resolve_repository`.
    """
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*" + SUFFIX) if path.is_file()]
    found = variants_of(names)
    name = text.removesuffix(f":{variant}")
    if variant is not None:
        try:
            return folder / choose_variant(found, variant, name).files[0]
        except (UsageError, CheckpointError):
            here = f", which has {', '.join(one.name for one in found if not one.missing)}" if found else ""
            raise ModelNotFound(
                f"{text} is not complete in the Hugging Face cache{here}",
                f"fetch it with `dsv4 download {shell_word(text)}`",
            ) from None
    if not found or any(folder.glob("*.safetensors")):
        return folder
    if len(found) > 1:
        raise ChoiceNeeded(f"{name} has {len(found)} GGUF models in the Hugging Face cache", choose_one(found, name))
    return folder if "/" not in found[0].path else folder / found[0].files[0]


def _random(text: str) -> RandomSource:
    preset, *parts = text.removeprefix(RANDOM).split(",")
    if preset not in PRESETS:
        raise UsageError(f"{text}: there is no preset {preset!r}", "use " + RANDOM_FORM)
    numbers: dict[str, int] = {}
    for part in parts:
        key, _, value = part.partition("=")
        if key not in RANDOM_OPTIONS or key in numbers or not re.fullmatch(r"\d{1,19}", value, re.ASCII):
            raise UsageError(f"{text}: invalid part {part!r}", "use " + RANDOM_FORM)
        numbers[key] = int(value)
    values = PRESETS[preset]
    _check_range(text, numbers, values)
    chosen = shortened(values, numbers.get("layers"), numbers.get("experts"))
    return RandomSource(text, parse_config(chosen, text), numbers.get("seed", 0))


def _check_range(text: str, numbers: Mapping[str, int], values: Mapping[str, int]) -> None:
    limits = {
        "layers": (1, values["num_hidden_layers"]),
        "experts": (values["num_experts_per_tok"], values["n_routed_experts"]),
        "seed": (0, MAX_SEED),
    }
    for key, number in numbers.items():
        low, high = limits[key]
        if not low <= number <= high:
            raise UsageError(f"{text}: {key}={number} is out of range", f"use {key} from {low} to {high}")
