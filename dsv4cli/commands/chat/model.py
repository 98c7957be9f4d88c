"""The model of `dsv4 chat`: which one a session is led with, how it is loaded, and how another takes its place."""

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from dsv4cli.commands.chat.ranks import open_conversation
from dsv4cli.commands.chat.turn import Chat
from dsv4cli.commands.job import Job
from dsv4cli.commands.terminal import keys_wait
from dsv4cli.errors import Dsv4Error, UsageError
from dsv4cli.harmless import shell_word

if TYPE_CHECKING:
    from dsv4cli.engine.chat.conversation import Conversation
    from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource
    from dsv4cli.engine.settings import Sampling


def find_model(name: str, kept: bool) -> "FolderSource | RandomSource":
    """The model of a session, kept: it was named when the session was begun, not now. Raises Dsv4Error."""
    from dsv4cli.engine.checkpoint.source import resolve_model

    try:
        return resolve_model(name)
    except Dsv4Error as error:
        if kept:
            error.remedy += "; to continue with another model, use --model NAME"
        raise


def model_name(source: "FolderSource | RandomSource") -> str:
    """What finds the model again from any folder."""
    from dsv4cli.engine.checkpoint.source import FolderSource

    named = Path(os.path.expanduser(source.name))
    is_folder = isinstance(source, FolderSource) and source.folder == named
    return str(named.resolve()) if is_folder else source.name


class Models:
    """The one model that is loaded at a time, in this process or in `ranks`; leaving it frees that."""

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
        """Of the model."""
        return self.job.source.name

    @property
    def sampling(self) -> "Sampling":
        """How it draws."""
        return self.job.sampling

    def open(self) -> "Conversation":
        """Loads the job's model, for a conversation. Raises Dsv4Error."""
        conversation = self._opened.enter_context(open_conversation(self.job, self._ranks))
        conversation.report_preparing(self.job.out.compiling)
        return conversation

    def change(self, chat: Chat, name: str) -> None:
        """Frees the model of a chat, then loads another one; where that fails, the first one again.

        Raises UsageError with several ranks, and what loading raises.
        """
        from dsv4cli.engine.checkpoint.source import check_drafter, resolve_model

        if self._ranks > 1:
            raise UsageError(
                f"/model needs a single process, but this conversation uses {self._ranks} ranks",
                f"quit, then run: dsv4 chat --continue --tp {self._ranks} --model {shell_word(name)}",
            )
        before, source, choices = self.job, resolve_model(name), chat.session.choices
        check_drafter(source, before.drafting)
        sampling = source.sampling.chosen(choices.temperature, choices.top_p, chat.sampling.seed)
        after = replace(before, source=source, think=choices.think, sampling=sampling, limits=chat.conversation.limits)
        _ = after.dialogue  # refused before the first model goes
        chat.leaving = True  # an error is the end, as long as there is no model
        self._free(chat)
        error = self._failure(chat, after)
        if error is not None:
            chat.out.status(f"cannot load {name}; loading {before.source.name} again")
            self._load(chat, replace(before, think=choices.think, limits=after.limits))
        chat.leaving = False
        if error is not None:
            raise error
        chat.choose(replace(choices, model=model_name(source)))

    def _failure(self, chat: Chat, job: Job) -> Dsv4Error | KeyboardInterrupt | None:
        """Loads the job's model; why that was not possible, without what was loaded until then."""
        try:
            self._load(chat, job)
        except (Dsv4Error, KeyboardInterrupt) as error:
            error.__context__ = None
            return error.with_traceback(None)
        return None

    def _free(self, chat: Chat) -> None:
        del chat.conversation  # no other name holds its model
        self._opened.close()

    def _load(self, chat: Chat, job: Job) -> None:
        from dsv4cli.engine.system.device import free_unused

        with keys_wait():
            free_unused()
            self.job = job
            chat.conversation = self.open()
        chat.model, chat.sampling, chat.left_out = job.source.name, job.sampling, 0
