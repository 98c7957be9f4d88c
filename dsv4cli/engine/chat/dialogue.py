"""A model's prompt format: encoding of conversations to token ids. Does not import torch."""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from dsv4cli.engine.chat.thinking import Thinking
from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity
from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.presets import Release
from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.gguf_vocabulary import DEEPSEEK, PRE, REMEDY, tokenizer_text
from dsv4cli.engine.text.prompt import Message, answerable, encode_messages, think_options
from dsv4cli.engine.text.tokenizer import Tokenizer
from dsv4cli.engine.text.tokens import Given
from dsv4cli.errors import CheckpointError

# questions, from the last one back, before which a prompt's state is stored
KEPT_QUESTIONS = 2


@dataclass(frozen=True)
class Prompt:
    """The exact text of a prompt and its token ids.

    Attributes:
        lookalikes: texts in the messages that look like special tokens, and are encoded as ordinary text.
    """

    text: str
    ids: list[int]
    lookalikes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Dialogue:
    """A model's prompt format: its release, its tokenizer, and whether and how much it is to think.

    Attributes:
        special_tokens: encode the text of a special token in a message as that token, as the official encoder does.
    """

    config: ModelConfig
    release: Release
    tokenizer: Tokenizer
    thinking: bool
    effort: str | None
    special_tokens: bool = False

    def prompt(self, messages: Sequence[Message], most: int | None = None) -> Prompt:
        """Return the prompt of a validated conversation, ready to be answered.

        Raises:
            TooManyTokens: it has more than `most` tokens.
        """
        return self.transcript(answerable(messages), most)

    def transcript(self, messages: Sequence[Message], most: int | None = None) -> Prompt:
        """Return a validated conversation unchanged, as a text to score. Raises as `prompt`."""
        parts = encode_messages(list(messages), release=self.release, thinking=self.thinking, effort=self.effort)
        text = "".join(parts)
        ids, lookalikes = self.tokenizer.encode_parts([text] if self.special_tokens else parts, most)
        return Prompt(text, ids, lookalikes)

    def thinks(self, ids: Sequence[int]) -> bool:
        """Return True if the answer to a prompt begins with thinking: the prompt ends with <think>."""
        return ids[-1] == self.tokenizer.token_id(tokens.THINK_START)

    def thinking_limit(self, ids: Sequence[int], max_tokens: int, budget: int | None) -> Thinking:
        """Return the constraint that ends an answer's thinking early enough to leave tokens for the answer itself.

        Args:
            ids: the prompt.
            max_tokens: maximum number of thinking and answer tokens together.
            budget: maximum number of thinking tokens, None for no limit.
        """
        end = self.tokenizer.token_id(tokens.THINK_END)
        assert end is not None
        return Thinking(self.thinks(ids), max_tokens, budget, end, self.config.eos_token_ids)

    def boundaries(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the prompt lengths at which to store the state in the prefix cache.

        There are three: before the second to last question, which some agents move behind the next answer; before the
        last question, which the user may replace; and at the end of the prompt. The last one serves the same prompt
        again, and conversations that continue without the answer's thinking.
        """
        user = self.tokenizer.token_id(tokens.USER)
        found = (i for i in range(len(ids) - 1, -1, -1) if ids[i] == user)
        questions = list(islice(found, KEPT_QUESTIONS)) or [0]
        return (*reversed(questions), len(ids))

    def text_ids(self, text: str) -> list[int]:
        """Return the token ids of a text in a message."""
        return self.tokenizer.encode_parts([text if self.special_tokens else Given(text)])[0]


def open_dialogue(source: FolderSource | RandomSource, think: str, special_tokens: bool = False) -> Dialogue:
    """Return the prompt format of a model. Also raises what `identify` raises.

    Raises:
        CheckpointError: the tokenizer is missing, damaged or another model's.
        UsageError: the release does not have this thinking level.
    """
    identity = source.identity
    thinking, effort = think_options(identity.release, think)
    tokenizer = _tokenizer(source, identity.config)
    return Dialogue(identity.config, identity.release, tokenizer, thinking, effort, special_tokens)


def _tokenizer(source: FolderSource | RandomSource, config: ModelConfig) -> Tokenizer:
    if isinstance(source, RandomSource):
        return Tokenizer.byte_level()
    if isinstance(source.identity, GgufIdentity):
        path, tokenizer, stated = source.folder, _gguf_tokenizer(source.identity), "its metadata"
    else:
        path, stated = source.folder / "tokenizer.json", "config.json"
        tokenizer = Tokenizer.from_file(path)
    if tokenizer.eos_id not in config.eos_token_ids:
        named = ", ".join(map(str, config.eos_token_ids))
        raise CheckpointError(
            f"the end token is {tokenizer.eos_id} in {path}, but {named} in {stated}",
            "download both files from the same revision",
        )
    return tokenizer


def _gguf_tokenizer(identity: GgufIdentity) -> Tokenizer:
    where = str(identity.checkpoint.files[0])
    text = tokenizer_text(identity.metadata, where)
    if text is None:
        cut = reprlib.repr(identity.metadata.get(PRE))
        raise CheckpointError(
            f"{where} has no vocabulary of DeepSeek-V4: its {PRE} is {cut}, expected {DEEPSEEK!r}", REMEDY
        )
    return Tokenizer.from_bytes(text.encode(), f"the vocabulary of {where}", REMEDY)
