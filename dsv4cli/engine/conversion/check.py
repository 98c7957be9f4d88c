"""Checks a finished output: its files against their hashes, its values against their source."""

from dataclasses import dataclass
from pathlib import Path

from dsv4cli.engine.checkpoint.headers import UNFINISHED
from dsv4cli.engine.checkpoint.layouts import recognise_stored
from dsv4cli.engine.conversion.finish import Against, compare
from dsv4cli.engine.conversion.manifest import MANIFEST, Manifest, hash_files, read_manifest
from dsv4cli.engine.conversion.verify import Verification
from dsv4cli.engine.system.threads import Progress
from dsv4cli.errors import DiskError, UsageError
from dsv4cli.harmless import shell_word


@dataclass(frozen=True)
class Checked:
    """The result of checking an output.

    Attributes:
        files, nbytes: what was hashed.
        missing, changed: paths relative to the folder.
    """

    files: int
    nbytes: int
    missing: tuple[str, ...]
    changed: tuple[str, ...]
    found: Verification | None

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong with the output."""
        return not (self.missing or self.changed or (self.found and self.found.wrong))


def check(output: Path, against: Against | None, workers: int, progress: Progress | None = None) -> Checked:
    """Compare the files of an output with its hashes, then its values with a source, if one is given.

    Raises UsageError for a folder without hashes if there is no source either, and for an unfinished output.
    """
    if not output.is_dir():
        raise UsageError(f"there is no folder {output}", "use the output folder of a finished `dsv4 convert`")
    folder = shell_word(output)
    if (output / UNFINISHED).exists():
        raise UsageError(
            f"{output} is not finished",
            f"run its `dsv4 convert` again, or `dsv4 convert --finish {folder}` if all parts are there",
        )
    manifest = read_manifest(output)
    if against is None and not (manifest and manifest.hashes):
        why = f"{output} has no {MANIFEST}" if manifest is None else f"{output / MANIFEST} lists no file"
        raise UsageError(why, f"compare it with its source: `dsv4 convert --check {folder} --against SRC`")
    checked = _hashed(output, manifest or Manifest({}, None), workers, progress)
    if against is None or not checked.sound:
        return checked
    layer = manifest.origin.layer if manifest and manifest.origin else 0
    found = compare(recognise_stored(output), layer, against, full=against.check == "full")
    return Checked(checked.files, checked.nbytes, (), (), found)


def _hashed(output: Path, manifest: Manifest, workers: int, progress: Progress | None) -> Checked:
    there = [name for name in manifest.hashes if (output / name).is_file()]
    missing = tuple(name for name in manifest.hashes if name not in {*there})
    nbytes = sum((output / name).stat().st_size for name in there)
    try:
        found = list(hash_files([output / name for name in there], workers, progress))
    except OSError as error:
        raise DiskError(f"{error.filename or output} cannot be read: {error.strerror}", "check the disk") from None
    changed = tuple(name for name, value in zip(there, found, strict=True) if value != manifest.hashes[name])
    return Checked(len(there), nbytes, missing, changed, None)
