"""One text of /v1/completions on its way to a client: the prompt's own tokens and what follows them."""

from collections.abc import Iterable
from typing import Any

from dsv4cli.engine.chat.answer import Answer
from dsv4cli.engine.runtime.request import Alternatives, Request, RowScores, Token
from dsv4cli.engine.server.plan import AnswerPlan
from dsv4cli.engine.text.tokenizer import Tokenizer


class CompletionChoice:
    """request: what follows the prompt; None where nothing is drawn. scores: of the prompt's tokens given those before;
    the first has none. offset: characters before the next token that is listed."""

    reasoning_tokens = 0  # the text is raw

    def __init__(self, index: int, plan: AnswerPlan, request: Request | None, tokenizer: Tokenizer) -> None:
        self.index, self.plan, self.request = index, plan, request
        self.answer = Answer(tokenizer, False, plan.limits.stops)
        self.text = ""  # what follows the prompt
        self.ended = request is None
        self.scores: list[float | None] = [None]
        self.tops: list[Alternatives] = [[]]
        self.offset = 0
        self._tokenizer = tokenizer

    @property
    def drawn(self) -> int:
        """How many tokens follow the prompt."""
        return len(self.answer.tokens)

    @property
    def cached(self) -> int:
        """How many tokens of the prompt a cache held."""
        return 0 if self.request is None else self.request.cached

    @property
    def finish(self) -> str:
        """Why it has ended."""
        return "length" if self.answer.finish is None else self.answer.finish.replace("tool_calls", "stop")

    def push(self, tokens: Iterable[Token]) -> tuple[str, list[Token]]:
        """Add tokens. Return the text that became certain, and the tokens that are certain to be part of the text."""
        added, shown = "", self.answer.shown
        for token in tokens:
            if not self.ended:
                added += "".join(text for _, text in self.answer.push(token))
                self.ended = self.answer.finish is not None
        self.text += added
        return added, self.answer.tokens[shown : self.answer.shown]

    def take_scores(self, rows: RowScores) -> None:
        """The next rows of the prompt; the last one's alternatives are of what follows it."""
        self.scores += rows.logprobs
        self.tops += rows.top

    def likeliest(self, eos: Iterable[int]) -> Token:
        """What scoring has found to be the likeliest after the prompt."""
        token, logprob = self.tops[-1][0]
        top = self.tops[-1][: self.plan.limits.logprobs]
        return Token(token, logprob, top, "stop" if token in eos else "length")

    def logprobs(self, echo: bool, taken: Iterable[Token]) -> dict[str, Any]:
        """The tokens of the prompt, with `echo`, and those taken, as OpenAI lists them; they follow those of the last
        time."""
        ids = self.plan.ids if echo else []
        most = self.plan.limits.logprobs
        rows = [(id_, score, top[:most]) for id_, score, top in zip(ids, self.scores, self.tops, strict=False)]
        rows += [(token.id, token.logprob, token.top) for token in taken if token.finish != "stop"]
        names = [self._name(id_) for id_, _, _ in rows]
        offsets = []
        for id_, _, _ in rows:
            offsets.append(self.offset)
            # a character begins with each byte of UTF-8 that goes on with none
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
        r"""A token's text, or its bytes as in `bytes:\xe2\x82` where they are none."""
        content = self._tokenizer.token_bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
