"""A line about a folder that has the name of a known model."""

from dsv4cli.output import Output


def note_hidden_folder(out: Output, name: str) -> None:
    """Print how to name a folder that has the name of a known model, if there is one."""
    from dsv4cli.engine.checkpoint.names import hidden_folder

    if folder := hidden_folder(name):
        out.status(f"there is also a folder {folder}: name it so to use it")
