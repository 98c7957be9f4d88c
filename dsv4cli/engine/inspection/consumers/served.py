"""From a model's name to what an engine serves: by inspection, or without files for a release; no torch."""

from pathlib import PurePath
from typing import Any

from dsv4cli.engine.checkpoint.identify import FolderIdentity
from dsv4cli.engine.checkpoint.names import ALIASES, folder_text
from dsv4cli.engine.checkpoint.source import FolderSource
from dsv4cli.engine.config.presets import PRESETS
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.deployment.flags import EngineName
from dsv4cli.engine.deployment.served_model import ServedModel
from dsv4cli.engine.inspection.consumers.examine import judge
from dsv4cli.engine.inspection.consumers.judge import ConsumerVerdict
from dsv4cli.engine.inspection.report import Inspection, inspect_model
from dsv4cli.engine.inspection.sources import RemoteSource, resolve_inspectable
from dsv4cli.errors import UnsupportedCheckpoint, UsageError


def served_model(name: str, engine: EngineName) -> tuple[ServedModel, ConsumerVerdict | None]:
    """Return the model that a name stands for, and whether the engine loads it.

    A release that is not on this machine is known without its files, and has no verdict.

    Raises:
        UsageError: the name is invalid, or stands for something that no engine serves.
        HubError: another repository's headers cannot be read.
        UnsupportedCheckpoint: the engine does not load the model.
    """
    source = resolve_inspectable(name)
    if isinstance(source, RemoteSource) and name in ALIASES:
        return _release(name), None
    result = inspect_model(source)
    verdict = judge(result, engine, **remote_files(result))
    if verdict.loads is False:
        raise UnsupportedCheckpoint(
            f"{verdict.version} would not load {name}: {verdict.reasons[0]}", verdict.remedy, verdict.reasons[1:]
        )
    return inspected_model(result), verdict


def inspected_model(result: Inspection) -> ServedModel:
    """Return the model of an inspection. Raises UsageError if it was not identified, or is not a whole checkpoint."""
    identity, source = result.identity, result.source
    if not isinstance(identity, FolderIdentity) or not isinstance(source, FolderSource | RemoteSource):
        raise UsageError(f"{source.name} is not a checkpoint that an engine can serve", "use a folder or a repository")
    if isinstance(source, RemoteSource):
        repository, _, revision = source.repository.partition("@")
        return ServedModel(repository, repository, identity.config, identity.formats, revision)
    folder = folder_text(source.folder)
    label = source.name if source.name in ALIASES else PurePath(source.name).name
    name = f"./{folder}" if folder.startswith("-") else folder
    return ServedModel(name, label, identity.config, identity.formats, local=True)


def remote_files(result: Inspection) -> dict[str, Any]:
    """Return the arguments of `judge` for a repository: its configuration's folder, and its files."""
    if not isinstance(result.source, RemoteSource) or result.identity is None:
        return {}
    headers = result.source.headers
    return {"folder": headers.folder, "files": [file.name for file in headers.listing.files]}


def _release(name: str) -> ServedModel:
    """Return a release by its short name, from its preset."""
    config = parse_config(PRESETS[name], name)
    return ServedModel(ALIASES[name], name, config, Formats())
