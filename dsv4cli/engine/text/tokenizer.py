"""Text to token ids and back, at once or one id at a time."""

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4cli.engine.system.regular_files import is_there, read_bytes
from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.pieces import any_of, boundary_of, boundary_of_bytes, pieces
from dsv4cli.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    import tokenizers

FIRST_BYTE = 3  # in the built-in vocabularies, after BOS, EOS and PAD


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: printable Latin-1 ones for themselves,
    the other 68 as U+0100 and up (GPT-2's `bytes_to_unicode`)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in printable)
    stand_in = {byte: 0x100 + nth for nth, byte in enumerate(hidden)}
    return [chr(stand_in.get(byte, byte)) for byte in range(256)]


BYTE_CHARACTERS = _byte_characters()
_BYTE_OF = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}


class TooManyTokens(UsageError):
    """A text has more tokens than it may have."""

    def __init__(self, most: int) -> None:
        super().__init__(f"the text has more than {most:,} tokens", "shorten it")


class Tokenizer:
    """A byte-level BPE vocabulary that has the tokens of the prompt format.

    BOS is part of the prompt's text: encoding adds no token of its own. Decoding keeps special tokens, writes an id
    that the vocabulary lacks as `⟨id⟩` and bytes that are not UTF-8 as U+FFFD.
    """

    def __init__(self, backend: "tokenizers.Tokenizer") -> None:
        """`backend` has every token of `tokens.REQUIRED`; `from_file` and `byte_level` see to that."""
        eos_id = backend.token_to_id(tokens.EOS)
        assert eos_id is not None
        self.eos_id: int = eos_id
        self.size: int = backend.get_vocab_size()
        self._backend = backend

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        """The vocabulary in a tokenizer.json; CheckpointError if it is absent, damaged or not DeepSeek-V4's."""
        remedy = f"copy the official DeepSeek-V4 tokenizer.json into {path.parent}"
        if not is_there(path):
            raise CheckpointError(f"no {path.name} in {path.parent}", remedy)
        from tokenizers import Tokenizer as Backend

        try:
            backend = Backend.from_buffer(read_bytes(path))
        except CheckpointError:
            raise
        except Exception as error:  # tokenizers raises the bare class for a file it cannot parse
            raise CheckpointError(f"{path} is not a tokenizer file: {error}", remedy) from error
        missing = [text for text in tokens.REQUIRED if not _is_one_token(backend, text)]
        if missing:
            raise CheckpointError(f"{path} has no token {', '.join(missing)}: not DeepSeek-V4's", remedy)
        return cls(backend)

    @classmethod
    def byte_level(cls) -> "Tokenizer":
        """The vocabulary of the built-in random models: one token a byte (ids 3 to 258) and the special tokens."""
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend

        vocabulary = [*tokens.SPECIAL[:FIRST_BYTE], *BYTE_CHARACTERS, *tokens.SPECIAL[FIRST_BYTE:]]
        backend = Backend(models.BPE(vocab={text: id for id, text in enumerate(vocabulary)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in tokens.SPECIAL])
        return cls(backend)

    def text(self) -> str:
        """The tokenizer.json that `from_file` reads as this vocabulary."""
        return self._backend.to_str(pretty=True)

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Return the ids of a text, special tokens where their text stands.

        Other threads of Python run meanwhile.

        Args:
            most: Encode no more tokens than this.

        Raises:
            UsageError: The text is not valid Unicode.
            TooManyTokens: It has more than `most` tokens.
        """
        self._check_size(text, most)
        ids: list[int] = []
        for piece in pieces(text, self._boundary):
            ids += _encoded(self._backend, piece)
            _check_count(ids, most)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """The ids of `text`, without special tokens; UsageError if it is not valid Unicode."""
        return self.encode_parts([tokens.Given(text)])[0]

    def encode_parts(self, parts: Sequence[str], most: int | None = None) -> tuple[list[int], list[str]]:
        """Return the ids of the parts' text, special tokens where their text stands but not in what is `Given`, and the
        texts there that look like one. Raises as `encode`."""
        if not any(map(_is_given, parts)):
            return self.encode("".join(parts), most), []
        self._check_size("".join(parts), most)
        ids: list[int] = []
        lookalikes: dict[str, None] = {}
        runs = groupby((run for part in parts for run in self._runs(part)), key=lambda run: run[1] is None)
        for is_text, run in runs:
            texts, special = zip(*run, strict=True)
            if not is_text:
                ids += special
                continue
            for piece in pieces("".join(texts), self._boundary):
                ids += _encoded(self._plain, piece)
                _check_count(ids, most)
                lookalikes |= dict.fromkeys(self._special_text.findall(piece))
        return ids, list(lookalikes)

    def _runs(self, part: str) -> Iterator[tuple[str, int | None]]:
        """The part cut at its special tokens, each with its id, None for text."""
        start = 0
        for found in () if _is_given(part) else self._special_text.finditer(part):
            yield part[start : found.start()], None
            yield found[0], self.token_id(found[0])
            start = found.end()
        yield part[start:], None

    def _check_size(self, text: str, most: int | None) -> None:
        """Raise UsageError for invalid Unicode, and TooManyTokens where not even the longest tokens make it fit."""
        check_unicode(text, "the text")
        if most is not None and len(text) > most and len(text.encode()) > most * self.longest:
            raise TooManyTokens(most)

    @cached_property
    def longest(self) -> int:
        """The bytes of the longest token."""
        return max(self._longest_ordinary, *(len(text.encode()) for text in self.special.values()))

    @cached_property
    def _longest_ordinary(self) -> int:
        """The same without special tokens; the vocabulary spells each byte as one character."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=False).keys() - self.special.values()))

    @cached_property
    def _boundary(self) -> "re.Pattern[str] | None":
        """Where a text may be cut into pieces."""
        special = self.special.values()
        return boundary_of_bytes(special) if self._longest_ordinary == 1 else boundary_of(self._backend, special)

    @cached_property
    def _special_text(self) -> "re.Pattern[str]":
        """Finds the special tokens' texts."""
        return re.compile(any_of([token.content for token in self._backend.get_added_tokens_decoder().values()]))

    @cached_property
    def special(self) -> dict[int, str]:
        """Each token that is found in a text before all others."""
        return {id: token.content for id, token in self._backend.get_added_tokens_decoder().items()}

    @cached_property
    def _plain(self) -> "tokenizers.Tokenizer":
        """The same vocabulary without special tokens."""
        from tokenizers import Tokenizer as Backend

        plain = Backend(self._backend.model)
        plain.pre_tokenizer = self._backend.pre_tokenizer
        if self._backend.normalizer is not None:
            plain.normalizer = self._backend.normalizer
        return plain

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens included."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """The UTF-8 bytes that `id` adds to the text, which may be a part of a character."""
        text = self._backend.id_to_token(id)
        if text is None:
            return f"⟨{id}⟩".encode()
        # the rule of tokenizers' ByteLevel decoder: text outside the byte alphabet is a special token's own
        if all(character in _BYTE_OF for character in text):
            return bytes(_BYTE_OF[character] for character in text)
        return text.encode()

    def token_id(self, text: str) -> int | None:
        """The id of the one token that is written `text`, as a special token or as the vocabulary spells it."""
        return self._backend.token_to_id(text)


class StreamDecoder:
    """Text of a growing list of ids: the pushes and the flush together are `Tokenizer.decode` of all of them.

    A character is returned with its last byte. Bytes that no later one can complete come out as U+FFFD at once, those
    that one could at the flush. The work of a push depends on its own token only.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        """The text that `id` completes, often none."""
        return self._utf8.decode(self._tokenizer.token_bytes(id))

    def flush(self) -> str:
        """What is still open, as U+FFFD; afterwards a new text may begin."""
        return self._utf8.decode(b"", final=True)


def check_unicode(text: str, what: str) -> None:
    """Raises UsageError for a text that is not valid Unicode; what: how to call it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"character {error.start + 1} (U+{ord(text[error.start]):04X})"
        raise UsageError(f"{what} is not valid Unicode at {where}", "save it as UTF-8") from error


def _encoded(backend: "tokenizers.Tokenizer", piece: str) -> list[int]:
    """Encode one text; a batch of one, unlike `encode`, releases Python's lock."""
    [encoding] = backend.encode_batch_fast([piece], add_special_tokens=False)
    ids: list[int] = encoding.ids
    return ids


def _check_count(ids: list[int], most: int | None) -> None:
    if most is not None and len(ids) > most:
        raise TooManyTokens(most)


def _is_given(part: str) -> bool:
    return isinstance(part, tokens.Given)


def _is_one_token(backend: "tokenizers.Tokenizer", text: str) -> bool:
    """Whether `text` has an id and is encoded as that id alone (a token must be registered, not only listed)."""
    id = backend.token_to_id(text)
    return id is not None and backend.encode(text, add_special_tokens=False).ids == [id]
