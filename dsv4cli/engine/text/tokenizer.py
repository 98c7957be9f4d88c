"""Conversion of text to token ids and back, for complete texts or one id at a time."""

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

FIRST_BYTE = 3  # id of byte 0 in the built-in vocabularies, after BOS, EOS and PAD


def _byte_characters() -> list[str]:
    """Return the character that represents each byte in a byte-level vocabulary.

    Printable Latin-1 characters represent themselves; the other 68 bytes are U+0100 and up (GPT-2's
    `bytes_to_unicode`).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in printable)
    stand_in = {byte: 0x100 + nth for nth, byte in enumerate(hidden)}
    return [chr(stand_in.get(byte, byte)) for byte in range(256)]


BYTE_CHARACTERS = _byte_characters()
_BYTE_OF = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}


class TooManyTokens(UsageError):
    """A text has more tokens than allowed."""

    def __init__(self, most: int) -> None:
        super().__init__(f"the text has more than {most:,} tokens", "shorten it")


class Tokenizer:
    """A byte-level BPE vocabulary with the special tokens of the prompt format.

    BOS is part of the prompt's text: encoding adds no tokens. Decoding keeps special tokens, writes an id that is not
    in the vocabulary as `⟨id⟩`, and invalid UTF-8 as U+FFFD.
    """

    def __init__(self, backend: "tokenizers.Tokenizer") -> None:
        """Wrap a backend that has every token of `tokens.REQUIRED`, as `from_file` and `byte_level` ensure."""
        eos_id = backend.token_to_id(tokens.EOS)
        assert eos_id is not None
        self.eos_id: int = eos_id
        self.size: int = backend.get_vocab_size()
        self._backend = backend

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        """Load the vocabulary from a tokenizer.json.

        Raises:
            CheckpointError: the file is missing, damaged or not DeepSeek-V4's.
        """
        remedy = f"copy the official DeepSeek-V4 tokenizer.json into {path.parent}"
        if not is_there(path):
            raise CheckpointError(f"no {path.name} in {path.parent}", remedy)
        return cls.from_bytes(read_bytes(path), str(path), remedy)

    @classmethod
    def from_bytes(cls, content: bytes, where: str, remedy: str) -> "Tokenizer":
        """Load the vocabulary from the content of a tokenizer.json; `where` names it in errors.

        Raises:
            CheckpointError: it is damaged or not DeepSeek-V4's.
        """
        from tokenizers import Tokenizer as Backend

        try:
            backend = Backend.from_buffer(content)
        except Exception as error:  # tokenizers raises a bare Exception for a file it cannot parse
            raise CheckpointError(f"{where} is not a tokenizer file: {error}", remedy) from error
        missing = [text for text in tokens.REQUIRED if not _is_one_token(backend, text)]
        if missing:
            raise CheckpointError(
                f"{where} has no token {', '.join(missing)}: it is not DeepSeek-V4's tokenizer", remedy
            )
        return cls(backend)

    @classmethod
    def byte_level(cls) -> "Tokenizer":
        """Return the vocabulary of the built-in random models: one token per byte (ids 3 to 258) and special tokens."""
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend

        vocabulary = [*tokens.SPECIAL[:FIRST_BYTE], *BYTE_CHARACTERS, *tokens.SPECIAL[FIRST_BYTE:]]
        # no cache of words: a word is a whole text here, and the cache would keep 10,000 of them
        ids = {text: id for id, text in enumerate(vocabulary)}
        backend = Backend(models.BPE(vocab=ids, merges=[], cache_capacity=0))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in tokens.SPECIAL])
        return cls(backend)

    def text(self) -> str:
        """Return the tokenizer.json from which `from_file` loads this vocabulary."""
        return self._backend.to_str(pretty=True)

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Return the token ids of a text. The text of a special token becomes that token.

        Other Python threads can run during the call.

        Args:
            most: maximum number of tokens, None for no limit.

        Raises:
            UsageError: the text is not valid Unicode.
            TooManyTokens: it has more than `most` tokens.
        """
        self._check_size(text, most)
        ids: list[int] = []
        for piece in pieces(text, self._boundary):
            ids += _encoded(self._backend, piece)
            _check_count(ids, most)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens. Raises UsageError if it is not valid Unicode."""
        return self.encode_parts([tokens.Given(text)])[0]

    def encode_parts(self, parts: Sequence[str], most: int | None = None) -> tuple[list[int], list[str]]:
        """Return the token ids of the joined parts, and the texts in `Given` parts that look like special tokens.

        The text of a special token becomes that token, except in `Given` parts. Raises what `encode` raises.
        """
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
        """Split a part at its special tokens. Yield (text, id) of special tokens, (text, None) of what is between."""
        start = 0
        for found in () if _is_given(part) else self._special_text.finditer(part):
            yield part[start : found.start()], None
            yield found[0], self.token_id(found[0])
            start = found.end()
        yield part[start:], None

    def _check_size(self, text: str, most: int | None) -> None:
        """Raise UsageError for invalid Unicode, and TooManyTokens if even the longest tokens would be too many."""
        check_unicode(text, "the text")
        if most is not None and len(text) > most and len(text.encode()) > most * self.longest:
            raise TooManyTokens(most)

    @cached_property
    def longest(self) -> int:
        """Number of bytes of the longest token."""
        return max(self._longest_ordinary, *(len(text.encode()) for text in self.special.values()))

    @cached_property
    def _longest_ordinary(self) -> int:
        """Number of bytes of the longest ordinary token. The vocabulary spells each byte as one character."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=False).keys() - self.special.values()))

    @cached_property
    def _boundary(self) -> "re.Pattern[str] | None":
        """Pattern that ends where a text may be split into pieces, None if there is none."""
        special = self.special.values()
        return boundary_of_bytes(special) if self._longest_ordinary == 1 else boundary_of(self._backend, special)

    @cached_property
    def _special_text(self) -> "re.Pattern[str]":
        """Pattern that matches the texts of the special tokens."""
        return re.compile(any_of([token.content for token in self._backend.get_added_tokens_decoder().values()]))

    @cached_property
    def special(self) -> dict[int, str]:
        """The texts of the special tokens by id. They are matched in a text before all other tokens."""
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
        """Return the text of token ids, including special tokens."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """Return the UTF-8 bytes of a token, which may be an incomplete character."""
        text = self._backend.id_to_token(id)
        if text is None:
            return f"⟨{id}⟩".encode()
        # as in tokenizers' ByteLevel decoder: text with characters outside the byte alphabet is that of a special token
        if all(character in _BYTE_OF for character in text):
            return bytes(_BYTE_OF[character] for character in text)
        return text.encode()

    def token_id(self, text: str) -> int | None:
        """Return the id of the token spelled `text`, as a special token or in the vocabulary's spelling, or None."""
        return self._backend.token_to_id(text)


class StreamDecoder:
    """Decodes token ids one at a time. The pushes and the flush together return `Tokenizer.decode` of all ids.

    A character is returned with its last byte. Bytes that can no longer become a character are returned as U+FFFD at
    once, an incomplete character at the flush. The cost of a push depends only on its own token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        """Return the text that a token completes, often none."""
        return self._utf8.decode(self._tokenizer.token_bytes(id))

    def flush(self) -> str:
        """Return an incomplete character as U+FFFD, and reset the decoder."""
        return self._utf8.decode(b"", final=True)


def check_unicode(text: str, what: str) -> None:
    """Raise UsageError if a text is not valid Unicode.

    Args:
        what: the text's name in the error.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"character {error.start + 1} (U+{ord(text[error.start]):04X})"
        raise UsageError(f"{what} is not valid Unicode at {where}", "save it as UTF-8") from error


def _encoded(backend: "tokenizers.Tokenizer", piece: str) -> list[int]:
    """Encode one text. Unlike `encode`, a batch of one releases the GIL."""
    [encoding] = backend.encode_batch_fast([piece], add_special_tokens=False)
    ids: list[int] = encoding.ids
    return ids


def _check_count(ids: list[int], most: int | None) -> None:
    if most is not None and len(ids) > most:
        raise TooManyTokens(most)


def _is_given(part: str) -> bool:
    return isinstance(part, tokens.Given)


def _is_one_token(backend: "tokenizers.Tokenizer", text: str) -> bool:
    """Return True if `text` is encoded as a single id of its own (a token must be registered, not only listed)."""
    id = backend.token_to_id(text)
    return id is not None and backend.encode(text, add_special_tokens=False).ids == [id]
