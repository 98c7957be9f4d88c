"""Hint about a folder that has the name of a known model."""

from dsv4cli.output import Output


def note_hidden_folder(out: Output, name: str) -> None:
    """Print how to select a folder that has the name of a known model, if there is one."""
    from dsv4cli.engine.checkpoint.names import hidden_folder

    if folder := hidden_folder(name):
        out.status(f"{name} means the known model; to use the folder of that name, write {folder}")
