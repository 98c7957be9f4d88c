"""The model of `dsv4 chat`: which one to use, how to load it, and how to switch to another one."""

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from dsv4cli.commands.chat.ranks import open_conversation
from dsv4cli.commands.chat.turn import Chat
from dsv4cli.commands.job import Job
from dsv4cli.commands.obtain import obtain_model
from dsv4cli.commands.starting import import_torch
from dsv4cli.commands.terminal import keys_wait
from dsv4cli.errors import Dsv4Error, UsageError
from dsv4cli.harmless import shell_word
from dsv4cli.output import Output

if TYPE_CHECKING:
    from dsv4cli.engine.chat.conversation import Conversation
    from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource
    from dsv4cli.engine.settings import Sampling


def find_model(out: Output, name: str, kept: bool) -> "FolderSource | RandomSource":
    """Return the model with a name. kept: the name was saved with the session, not typed now. Raises Dsv4Error."""
    try:
        return obtain_model(out, name)
    except Dsv4Error as error:
        if kept:
            error.remedy += "; to continue with another model, use --model NAME"
        raise


def model_name(source: "FolderSource | RandomSource") -> str:
    """Return a name that finds the model from any working directory."""
    from dsv4cli.engine.checkpoint.source import FolderSource

    named = Path(os.path.expanduser(source.name))
    is_folder = isinstance(source, FolderSource) and source.folder == named
    return str(named.resolve()) if is_folder else source.name


class Models:
    """The one model that is loaded at a time, in this process or on several ranks. Exiting the context frees it."""

    def __init__(self, job: Job, ranks: int) -> None:
        self.job = job
        self._ranks = ranks
        self._opened = ExitStack()

    def __enter__(self) -> "Models":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.job.source.name

    @property
    def sampling(self) -> "Sampling":
        """Sampling parameters of the model."""
        return self.job.sampling

    def open(self) -> "Conversation":
        """Load the job's model and return a conversation with it. Raises Dsv4Error."""
        import_torch(self.job.out)
        conversation = self._opened.enter_context(open_conversation(self.job, self._ranks))
        conversation.report_preparing(self.job.out.compiling)
        return conversation

    def change(self, chat: Chat, name: str) -> None:
        """Free a chat's model and load another one. If that fails, reload the first one.

        Raises UsageError with several ranks, and the errors of loading.
        """
        from dsv4cli.engine.checkpoint.source import check_drafter

        if self._ranks > 1:
            raise UsageError(
                f"/model needs a single process, but this conversation uses {self._ranks} ranks",
                f"quit, then run: dsv4 chat --continue --tp {self._ranks} --model {shell_word(name)}",
            )
        before, source, choices = self.job, obtain_model(chat.out, name), chat.session.choices
        check_drafter(source, before.drafting)
        sampling = source.sampling.chosen(choices.temperature, choices.top_p, chat.sampling.seed, vars(choices))
        after = replace(before, source=source, think=choices.think, sampling=sampling, limits=chat.conversation.limits)
        _ = after.dialogue  # raises before the current model is freed
        chat.interrupts.leaving = True  # while no model is loaded, an error quits
        self._free(chat)
        error = self._failure(chat, after)
        if error is not None:
            chat.out.status(f"cannot load {name}; loading {before.source.name} again")
            self._load(chat, replace(before, think=choices.think, limits=after.limits))
        chat.interrupts.leaving = False
        if error is not None:
            raise error
        chat.choose(replace(choices, model=model_name(source)))

    def _failure(self, chat: Chat, job: Job) -> Dsv4Error | KeyboardInterrupt | None:
        """Load the job's model. Return the error if that fails, without references to what was already loaded."""
        try:
            self._load(chat, job)
        except (Dsv4Error, KeyboardInterrupt) as error:
            error.__context__ = None
            return error.with_traceback(None)
        return None

    def _free(self, chat: Chat) -> None:
        del chat.conversation  # the only reference to its model
        self._opened.close()

    def _load(self, chat: Chat, job: Job) -> None:
        from dsv4cli.engine.system.device import free_unused

        with keys_wait():
            free_unused()
            self.job = job
            chat.conversation = self.open()
        chat.sampling, chat.window.left_out = job.sampling, 0
