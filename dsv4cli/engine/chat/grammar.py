"""Constraint of an answer's tokens to a grammar, with llguidance (extra dsv4[grammar]). Does not import torch."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from time import thread_time
from typing import Any

from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.reply_grammar import AnswerForm, ToolChoice, json_grammar, parameter_schemas, reply_grammar
from dsv4cli.engine.text.schema_checks import parts_of
from dsv4cli.engine.text.schema_references import DEFINITIONS, Schema
from dsv4cli.engine.text.tokenizer import Tokenizer, check_unicode
from dsv4cli.errors import UsageError, extra_remedy

# CPU seconds that the masks of one answer may take: in addition to those for each mask. All requests of an engine wait
# for them. Measured with the official vocabulary on an AMD EPYC: 0.03 to 0.6 ms a mask for JSON schemas and usual
# grammars, 6 ms at most; 300 ms and growing after 36 tokens of `s: s s s | s s | "a" | "b"`
ANSWER_SECONDS, MASK_SECONDS = 1.0, 0.02
# errors of llguidance that refer to its own options and internals, reworded for clients
_REWORDED = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"oneOf constraints are not supported\..*", "oneOf is not supported in a Lark grammar, use anyOf"),
        (
            r"Resource '(?:json-schema:///)?(.*?)' is not present.*",
            r"\1 is not in the schema, and external references are not loaded",
        ),
        (r"lookarounds not supported yet; \w+ in regex", r"\\b and other look-around are not supported in regex"),
        (
            r"circular references with sibling keys are not supported: .*",
            "allOf refers to a schema that contains it",
        ),
        (r"(; following special tokens are available:).*", ""),
        (r"Expected f64 for", "Expected a number for"),
    )
)


class Grammars:
    """Compiles the grammars of a model's answers. The vocabulary is loaded once, for the first grammar."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos: Sequence[int]) -> None:
        """Store the parameters of the vocabulary.

        Args:
            size: number of tokens of the model, which may exceed the tokenizer's.
            eos: the tokens that may end an answer.
        """
        self._tokenizer, self._size, self._eos = tokenizer, size, list(eos)

    def reply(
        self,
        *,
        thinking: bool,
        form: AnswerForm | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        choice: ToolChoice = ToolChoice(),  # noqa: B008 - frozen
    ) -> "Grammar":
        """Return the grammar of one answer, as `reply_grammar` defines it. It applies after the thinking, if any.

        Either a form or a choice that requires a call must be given.

        Raises:
            UsageError: the grammar or a schema is invalid (the error names the place), it allows no answer, or
                llguidance is not installed.
        """
        if find_spec("llguidance") is None:
            raise UsageError("grammars require llguidance, which is not installed", extra_remedy("grammar"))
        think_end = self._tokenizer.token_id(tokens.THINK_END)
        try:
            matcher = self._compiled(form, tools, choice)
        except RecursionError:
            raise UsageError("the grammar is nested too deeply", "reduce its nesting") from None
        if not _without(matcher.compute_bitmask(), self._eos):
            raise UsageError("the grammar allows no answer", "change it so that it matches some text")
        return Grammar(matcher, self._eos, think_end if thinking else None)

    @cached_property
    def _vocabulary(self) -> Any:
        library = import_module("llguidance")
        own = library.TokenizerWrapper(_Vocabulary(self._tokenizer, self._size))
        return library.LLTokenizer(own, n_vocab=self._size, eos_token=self._eos)

    def _compiled(self, form: AnswerForm | None, tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> Any:
        dsml = self._tokenizer.token_id(tokens.DSML)
        assert dsml is not None
        grammar = reply_grammar(form, tools, choice, dsml)
        check_unicode(grammar, "the grammar")
        matcher = self._matcher(grammar)
        if matcher.is_error():
            raise self._refusal(matcher.get_error(), form, tools)
        return matcher

    def _matcher(self, grammar: str) -> Any:
        return import_module("llguidance").LLMatcher(self._vocabulary, grammar, log_level=0)

    def _refusal(self, reason: str, form: AnswerForm | None, tools: Sequence[Mapping[str, Any]]) -> UsageError:
        """Return the error for a grammar that llguidance rejected, with the innermost schema that causes it."""
        schemas: list[tuple[str, Schema, bool]] = []
        if form is not None and isinstance(form.value, Mapping):
            schemas.append(("the schema", form.value, False))
        for function in (tool["function"] for tool in tools):
            parameters = parameter_schemas(function).items()
            schemas += [(f"the schema of {function['name']}'s {key}", schema, True) for key, schema in parameters]
        for what, schema, lenient in schemas:

            def refused(part: Schema, lenient: bool = lenient) -> str:
                return self._matcher(json_grammar(part, lenient)).get_error()

            if refused(schema):
                definitions = {key: schema[key] for key in DEFINITIONS if isinstance(schema.get(key), dict)}
                place, why = _place(schema, "#", definitions, refused)
                return UsageError(f"{what} at {place}: {_line(why)}", "correct or remove this part")
        return UsageError(f"invalid grammar: {_line(reason)}", "correct it")


class Grammar:
    """A `Constraint` that allows only tokens that follow a grammar; at its end, only end tokens are allowed."""

    def __init__(self, matcher: Any, eos: Sequence[int], begin: int | None) -> None:
        """Wrap a matcher of llguidance.

        Args:
            begin: the token after which the grammar applies, None for the whole answer.
        """
        self._matcher, self._eos, self._begin = matcher, frozenset(eos), begin
        self._seconds_left = ANSWER_SECONDS
        self._end_mask: bytes | None = None  # of the end tokens, once the masks have taken too long

    @property
    def failure(self) -> str:
        """Why the grammar failed, which ends the answer; "" if it did not."""
        if self._end_mask is not None:
            return "it is too ambiguous: the tokens that may come next take too long to find"
        return _line(self._matcher.get_error())

    def copy(self) -> "Grammar":
        """Return a copy in the same state, for another answer."""
        return Grammar(self._matcher.deep_copy(), tuple(self._eos), self._begin)

    def forced(self) -> int | None:
        """Return None: masks alone enforce the grammar."""
        return None

    def banned(self) -> tuple[()]:
        """Return no tokens: masks alone enforce the grammar."""
        return ()

    def masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        """Return bit masks, as `Constraint.masks` does; no masks after a draft token that is not allowed.

        After a failure, only end tokens are allowed.
        """
        if self._end_mask is not None:
            return [self._end_mask]
        began = thread_time()
        made = self._masks(drafts)
        self._seconds_left += MASK_SECONDS * len(made) - (thread_time() - began)
        width = max((len(mask) for mask in made if mask is not None), default=0)
        if self._seconds_left < 0 and width:
            self._end_mask = sum(1 << token for token in self._eos).to_bytes(width, "little")
        return made

    def _masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        made: list[bytes | None] = []
        begin, taken = self._begin, 0
        for token in (*drafts, None):
            mask = None if begin is not None else self._matcher.compute_bitmask()
            made.append(mask)
            if mask is None:
                begin = None if token == begin else begin
            elif token is None or token in self._eos or not _has(mask, token):
                break
            else:
                self._matcher.consume_token(token)
                taken += 1
        self._matcher.rollback(taken)
        return made

    def instead(self, token: int) -> int | None:
        """Return None: masks alone enforce the grammar, so no token is replaced."""
        return None

    def push(self, token: int) -> None:
        """Record the next token."""
        if self._begin is None:
            self._matcher.consume_token(token)
        elif token == self._begin:
            self._begin = None


class _Vocabulary:
    """A vocabulary in the form that llguidance requires: the bytes of each token, and the ids of special tokens."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.eos_token_id, self.bos_token_id = tokenizer.eos_id, None
        self.tokens = [tokenizer.token_bytes(id) for id in range(size)]
        self.special_token_ids = sorted({*tokenizer.special, *range(tokenizer.size, size)})
        self._encode = tokenizer.encode_plain

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode(errors="replace"))


def _has(mask: bytes, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


def _without(mask: bytes, tokens: Iterable[int]) -> int:
    """Return the bits of a mask without those of some tokens."""
    return int.from_bytes(mask, "little") & ~sum(1 << token for token in set(tokens))


def _place(schema: Schema, path: str, definitions: Schema, refused: Callable[[Schema], str]) -> tuple[str, str]:
    """Return the JSON pointer of the innermost subschema that is rejected on its own, and the reason.

    Args:
        path: the JSON pointer of this schema.
        definitions: the definitions that the schema refers to.
        refused: returns why a schema is rejected, "" if it is accepted.
    """
    for place, part in parts_of(schema):
        within = path.startswith(str(part.get("$ref")))  # it refers to a schema that contains it
        if not within and refused({**part, **definitions}):
            return _place(part, path + place, definitions, refused)
    target = str(schema.get("$ref", ""))
    _, kind, name = [*target.split("/", 2), "", ""][:3]
    named = definitions.get(kind, {}).get(name)
    if isinstance(named, dict):
        return _place(named, target, definitions, refused)
    return path, refused({**schema, **definitions})


def _line(reason: str) -> str:
    """Return the essential line of llguidance's error, without advice that applies only to its own callers."""
    _, shown, error = reason.partition("\nerror: ")
    line = (error if shown else reason).partition("\n")[0]
    for pattern, words in _REWORDED:
        line = pattern.sub(words, line)
    return line
