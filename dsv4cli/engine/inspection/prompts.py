"""Whether a checkpoint has what prompts and answers need besides weights: a tokenizer, sampling defaults; no torch."""

from collections.abc import Callable, Iterator

from dsv4cli.engine.checkpoint.source import FolderSource
from dsv4cli.errors import CheckpointError


def prompt_problems(source: FolderSource) -> Iterator[str]:
    """Yield why `dsv4 run` would fail on a checkpoint whose tensors are complete."""
    from dsv4cli.engine.chat.dialogue import open_dialogue

    needs: list[Callable[[], object]] = [lambda: source.sampling, lambda: open_dialogue(source, "off")]
    for read in needs:
        try:
            read()
        except CheckpointError as error:
            yield f"run, chat, serve and eval fail: {error.message}; {error.remedy}"
