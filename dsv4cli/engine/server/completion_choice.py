"""One text of /v1/completions on its way to a client: the prompt's tokens and their continuation."""

from collections.abc import Iterable
from typing import Any

from dsv4cli.engine.chat.answer import Answer
from dsv4cli.engine.runtime.request import Alternatives, Request, RowScores, Token
from dsv4cli.engine.server.plan import AnswerPlan
from dsv4cli.engine.text.tokenizer import Tokenizer


class CompletionChoice:
    """A text of /v1/completions, as it is generated.

    Attributes:
        request: generates the continuation; None if no tokens are sampled.
        text: the continuation so far.
        scores: log-probability of each prompt token given those before it, None for the first.
        tops: the likeliest tokens at each position of the prompt, in the order of `scores`.
        offset: characters before the next token that `logprobs` lists.
    """

    reasoning_tokens = 0  # raw text has no thinking

    def __init__(self, index: int, plan: AnswerPlan, request: Request | None, tokenizer: Tokenizer) -> None:
        self.index, self.plan, self.request = index, plan, request
        self.answer = Answer(tokenizer, False, plan.limits.stops)
        self.text = ""  # the continuation
        self.ended = request is None
        self.scores: list[float | None] = [None]
        self.tops: list[Alternatives] = [[]]
        self.offset = 0
        self._tokenizer = tokenizer

    @property
    def sampled(self) -> int:
        """Number of tokens in the continuation."""
        return len(self.answer.tokens)

    @property
    def cached(self) -> int:
        """Number of prompt tokens found in the prefix cache."""
        return 0 if self.request is None else self.request.cached

    @property
    def finish(self) -> str:
        """The finish reason."""
        return "length" if self.answer.finish is None else self.answer.finish.replace("tool_calls", "stop")

    def push(self, tokens: Iterable[Token]) -> tuple[str, list[Token]]:
        """Add tokens. Return the text and the tokens that are now certain to be part of the continuation."""
        added, shown = "", self.answer.shown
        for token in tokens:
            if not self.ended:
                added += "".join(text for _, text in self.answer.push(token))
                self.ended = self.answer.finish is not None
        self.text += added
        return added, self.answer.tokens[shown : self.answer.shown]

    def take_scores(self, rows: RowScores) -> None:
        """Add the scores of the prompt's next tokens. The last row's alternatives are for the token that follows."""
        self.scores += rows.logprobs
        self.tops += rows.top

    def likeliest(self, eos: Iterable[int]) -> Token:
        """Return the likeliest token after the prompt, which scoring has already found.

        Args:
            eos: end-of-sequence token ids.
        """
        token, logprob = self.tops[-1][0]
        top = self.tops[-1][: self.plan.limits.logprobs]
        return Token(token, logprob, top, "stop" if token in eos else "length")

    def logprobs(self, echo: bool, taken: Iterable[Token]) -> dict[str, Any]:
        """Return the log-probabilities of tokens in OpenAI's shape.

        Args:
            echo: list the prompt's tokens first.
            taken: the tokens of the continuation since the last call.
        """
        ids = self.plan.ids if echo else []
        most = self.plan.limits.logprobs
        rows = [(id_, score, top[:most]) for id_, score, top in zip(ids, self.scores, self.tops, strict=False)]
        rows += [(token.id, token.logprob, token.top) for token in taken if token.finish != "stop"]
        names = [self._name(id_) for id_, _, _ in rows]
        offsets = []
        for id_, _, _ in rows:
            offsets.append(self.offset)
            # in UTF-8, every byte except 10xxxxxx begins a character
            self.offset += sum(byte & 0xC0 != 0x80 for byte in self._tokenizer.token_bytes(id_))
        tops = [
            None if score is None else {self._name(other): value for other, value in top} | {name: score}
            for name, (_, score, top) in zip(names, rows, strict=True)
        ]
        return {
            "tokens": names,
            "token_logprobs": [score for _, score, _ in rows],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        r"""Return a token's text, or its bytes as `bytes:\xe2\x82` if they are not valid UTF-8."""
        content = self._tokenizer.token_bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
