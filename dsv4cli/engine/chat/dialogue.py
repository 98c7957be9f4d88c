"""Between a conversation and the model's tokens: prompts written, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.presets import Release
from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.prompt import Message, answerable, encode_messages, think_options
from dsv4cli.engine.text.tokenizer import Tokenizer
from dsv4cli.engine.text.tokens import Given
from dsv4cli.errors import CheckpointError


@dataclass(frozen=True)
class Prompt:
    """The exact text that the model reads and its tokens; `lookalikes` are the special tokens' texts that messages
    hold, which are read as text."""

    text: str
    ids: list[int]
    lookalikes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Dialogue:
    """A model's prompt format: its release, its vocabulary, and whether and how hard it is asked to think.

    special_tokens: a special token's text in a message is that token, as in the official encoder.
    """

    config: ModelConfig
    release: Release
    tokenizer: Tokenizer
    thinking: bool
    effort: str | None
    special_tokens: bool = False

    def prompt(self, messages: Sequence[Message], most: int | None = None) -> Prompt:
        """Return the prompt of a checked conversation, behind which an answer begins.

        Raises TooManyTokens where it has more than `most` tokens.
        """
        return self.transcript(answerable(messages), most)

    def transcript(self, messages: Sequence[Message], most: int | None = None) -> Prompt:
        """Return a checked conversation as it stands, as a text to score. Raises as `prompt`."""
        parts = encode_messages(list(messages), release=self.release, thinking=self.thinking, effort=self.effort)
        text = "".join(parts)
        ids, lookalikes = self.tokenizer.encode_parts([text] if self.special_tokens else parts, most)
        return Prompt(text, ids, lookalikes)

    def thinks(self, ids: Sequence[int]) -> bool:
        """Whether what follows a prompt begins with thinking: not the answer to a task, nor one that goes on."""
        return self.thinking and ids[-1] == self.tokenizer.token_id(tokens.THINK_START)

    def text_ids(self, text: str) -> list[int]:
        """The tokens of a text in a message."""
        return self.tokenizer.encode_parts([text if self.special_tokens else Given(text)])[0]


def open_dialogue(source: FolderSource | RandomSource, think: str, special_tokens: bool = False) -> Dialogue:
    """The prompt format of a model.

    Raises what `identify` raises, CheckpointError for a tokenizer that is missing, damaged or another model's,
    UsageError for an effort that the release does not have.
    """
    identity = source.identity
    thinking, effort = think_options(identity.release, think)
    tokenizer = _tokenizer(source, identity.config)
    return Dialogue(identity.config, identity.release, tokenizer, thinking, effort, special_tokens)


def _tokenizer(source: FolderSource | RandomSource, config: ModelConfig) -> Tokenizer:
    if isinstance(source, RandomSource):
        return Tokenizer.byte_level()
    path = source.folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(path)
    if tokenizer.eos_id not in config.eos_token_ids:
        named = ", ".join(map(str, config.eos_token_ids))
        raise CheckpointError(
            f"{path} has the end token at id {tokenizer.eos_id}, config.json at {named}",
            "download both files from one revision",
        )
    return tokenizer
