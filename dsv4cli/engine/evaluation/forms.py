"""Detect the format of a question file and read it: our own, or a public benchmark's. No torch."""

import csv
import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dsv4cli.engine.evaluation.items import EvalItem, EvalSet, choose, digits, numbered, read_own
from dsv4cli.engine.evaluation.vectors import is_manifest, is_vectors, read_manifest, read_vectors
from dsv4cli.engine.text.inputs import BadLine, decoded, from_prompt, name_of, parse_lines, read_content, refuse
from dsv4cli.errors import UsageError

BUILT_IN = "nano"
NANO_FILE = Path(__file__).with_name("nano.jsonl")
LETTERS = tuple("ABCD")
# MMLU-Pro has up to ten choices; shorter lists are padded with this text
_MORE_LETTERS, _NO_CHOICE = "ABCDEFGHIJ", "N/A"
_BOX = "\n\nReason step by step, and put the final answer within \\boxed{}."
# endings of multiple-choice prompts: to score each letter, or to generate an answer with reasoning
_ALONE = "Answer with the letter of the right choice alone."
_REASONED = "Reason step by step. Let the last line be the letter of the right choice, as in: Answer: A"
_CODE = "Complete this Python function. Answer with the whole function in one block of code.\n\n```python\n{}\n```"
FORMS = (
    "lines {prompt or messages, answer, score}, gsm8k, math500, humaneval, mmlu and mmlu_pro as JSON lines, mmlu "
    "and gpqa as CSV, optionally gzip-compressed, the official continuations of ds4 as .vec or manifest.tsv"
)
_AS_PUBLISHED = "use the file as it was published"
_Lines = tuple[list[tuple[int, EvalItem]], list[BadLine]]
_Table = Iterator[tuple[int, "_Lettered | UsageError"]]


def read_set(name: str, by_answer: bool) -> EvalSet:
    """Read the built-in set or a question file in any supported format.

    Args:
        name: path of the file, or the name of the built-in set.
        by_answer: ask for reasoning before the letter in public multiple-choice files.

    Raises:
        UsageError: lists every bad line, or the supported formats if the file has none of them.
    """
    path = NANO_FILE if name == BUILT_IN else Path(name)
    text = _text(path)
    called = name if name == BUILT_IN else name_of(path)
    form, read = _form(text, path, _REASONED if by_answer else _ALONE)
    lines, bad = read(text, called)
    items = numbered(lines, bad)
    refuse(Path(called), bad)
    if not items:
        raise UsageError(f"{called} has no questions", "use a file with questions")
    return EvalSet(called, form, items)


def _form(text: str, path: Path, ending: str) -> tuple[str, Callable[[str, str], _Lines]]:
    """Detect the format from the content, and return its name and reader.

    Args:
        ending: instruction at the end of multiple-choice prompts.
    """
    first = next((line for line in text.split("\n") if line.strip()), "")
    if not first:
        raise UsageError(f"{name_of(path)} is empty", f"use a file with questions; eval reads {FORMS}")
    if is_vectors(text):
        return "ds4 vectors", lambda text, name: read_vectors(text, path)
    if is_manifest(first):
        return "ds4 continuations", lambda text, name: read_manifest(text, path)
    if first.lstrip().startswith("{"):
        return _json_form(first, name_of(path), ending)
    row = _first_row(text)
    table = next((form for form, signs in _TABLES.items() if signs(row)), None)
    if table is not None:
        return table, lambda text, name: _split(_READ_TABLE[table](text), ending)
    raise UsageError(f"{name_of(path)} is not in a format that eval reads", f"it reads {FORMS}")


def _split(rows: _Table, ending: str) -> _Lines:
    good: list[tuple[int, EvalItem]] = []
    bad: list[BadLine] = []
    for number, row in rows:
        try:
            if isinstance(row, UsageError):
                raise row
            good.append((number, row.item(ending)))
        except UsageError as error:
            bad.append(BadLine(number, error))
    return good, bad


def _text(path: Path) -> str:
    """Return the text of a file, decompressing gzip. Raises UsageError."""
    content, name = read_content(path), name_of(path)
    if content.startswith(b"\x1f\x8b"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise UsageError(f"{name} is a damaged gzip file: {error}", "download it again") from None
    if content.startswith(b"PAR1"):
        convert = "datasets.load_dataset(NAME, split='test').to_json('questions.jsonl')"
        raise UsageError(f"{name} is a Parquet file, which eval does not read", f"write JSON lines: {convert}")
    return decoded(content, name)


def _json_form(first: str, name: str, ending: str) -> tuple[str, Callable[[str, str], _Lines]]:
    lines, _ = parse_lines(first, name, lambda value: value)
    keys = set(lines[0][1]) if lines else set()
    for form, listed in _LETTERED_FORMS.items():
        if {"question", "answer", listed} <= keys:
            return form, partial(parse_lines, convert=partial(_lettered, listed=listed, ending=ending))
    for form, (needed, convert) in _JSON_FORMS.items():
        if needed <= keys and (form != "gsm8k" or "####" in str(lines[0][1]["answer"])):
            return form, partial(parse_lines, convert=_with_keys(needed, convert))
    return "dsv4", read_own


def _with_keys(needed: set[str], convert: Callable[[dict[str, Any]], EvalItem]) -> Callable[[dict[str, Any]], EvalItem]:
    def checked(value: dict[str, Any]) -> EvalItem:
        numbers = {key: digits(item) for key, item in value.items() if isinstance(item, int | float) and key in needed}
        value = value | numbers
        for key in sorted(needed):
            if not isinstance(value.get(key), str) or not value[key].strip():
                raise UsageError(f'"{key}" must be a non-empty string', _AS_PUBLISHED)
        return convert(value)

    return checked


def _gsm8k(value: dict[str, Any]) -> EvalItem:
    _, mark, answer = value["answer"].rpartition("####")
    if not mark or not re.search(r"\d", answer):
        raise UsageError('"answer" has no number after ####', _AS_PUBLISHED)
    return EvalItem("", from_prompt(value["question"] + _BOX, None), "numeric", answer.strip(), task="gsm8k")


def _math(value: dict[str, Any]) -> EvalItem:
    id_, subject = value.get("unique_id") or value.get("id") or "", value.get("subject") or "math"
    return EvalItem(str(id_), from_prompt(value["problem"] + _BOX, None), "exact", value["answer"], task=str(subject))


def _humaneval(value: dict[str, Any]) -> EvalItem:
    return EvalItem(value["task_id"], from_prompt(_CODE.format(value["prompt"].rstrip()), None), task="humaneval")


_JSON_FORMS: Mapping[str, tuple[set[str], Callable[[dict[str, Any]], EvalItem]]] = {
    "gsm8k": ({"question", "answer"}, _gsm8k),
    "math500": ({"problem", "answer"}, _math),
    "humaneval": ({"task_id", "prompt", "entry_point"}, _humaneval),
}


def _first_row(text: str) -> list[str]:
    """Return the cells of the first CSV row, which may span several lines. Empty if the text is not CSV."""
    rows = csv.reader(io.StringIO(text, newline=""))
    try:
        return next((row for row in rows if any(cell.strip() for cell in row)), [])
    except csv.Error:  # a cell of 131,073 characters
        return []


def _rows(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the CSV rows with their line numbers. Raises UsageError if the text is not CSV."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        yield from ((reader.line_num, row) for row in reader if any(cell.strip() for cell in row))
    except csv.Error as error:
        raise UsageError(f"line {reader.line_num} is not CSV: {error}", _AS_PUBLISHED) from None


def _columns(text: str, needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str] | UsageError]]:
    """Yield the rows after the header as dicts, with their line numbers; a UsageError for each bad row."""
    rows = _rows(text)
    _, header = next(rows)
    for number, row in rows:
        value = dict(zip(header, row, strict=False))
        lacking = [name for name in needed if not value.get(name, "").strip()]
        wrong = f"{lacking[0]!r} is missing" if lacking else "more cells than the header" if row[len(header) :] else ""
        yield number, UsageError(wrong, _AS_PUBLISHED) if wrong else value


class _Lettered(NamedTuple):
    """A multiple-choice question, its choices and the letter of the right one."""

    question: str
    texts: list[str]
    letter: str
    task: str
    id: str = ""

    def item(self, ending: str) -> EvalItem:
        """Return the evaluation item. Raises UsageError if no choice has the letter of the answer."""
        letters = tuple(_MORE_LETTERS[: len(self.texts)])
        if self.letter not in letters:
            raise UsageError(f"the answer is {self.letter!r}, not a letter from A to {letters[-1]}", _AS_PUBLISHED)
        listed = "\n".join(f"{one}. {text.strip()}" for one, text in zip(letters, self.texts, strict=True))
        asked = from_prompt(f"{self.question.strip()}\n\n{listed}\n\n{ending}", None)
        return choose(EvalItem(self.id, asked, task=self.task), letters, self.letter)


def _lettered(value: dict[str, Any], listed: str, ending: str) -> EvalItem:
    """Convert a line of the hub's mmlu or mmlu_pro to an item. Raises UsageError.

    Args:
        value: the line: `question`, the choices, and `answer` as a letter or an index.
        listed: key of the choices.
        ending: instruction after the choices in the prompt.
    """
    question, texts, answer = value.get("question"), value.get(listed), value.get("answer")
    if not isinstance(question, str) or not question.strip():
        raise UsageError('"question" must be a non-empty string', _AS_PUBLISHED)
    if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
        raise UsageError(f'"{listed}" is not a list of strings', _AS_PUBLISHED)
    while texts and texts[-1].strip() == _NO_CHOICE:
        texts = texts[:-1]
    if not 2 <= len(texts) <= len(_MORE_LETTERS):
        raise UsageError(f'"{listed}" has {len(texts)} entries, expected 2 to {len(_MORE_LETTERS)}', _AS_PUBLISHED)
    if type(answer) is int and 0 <= answer < len(texts):
        answer = _MORE_LETTERS[answer]
    task = value.get("subject") or value.get("category")
    id_ = str(value.get("question_id", ""))
    return _Lettered(question, texts, str(answer).strip(), str(task or "mmlu"), id_).item(ending)


# format -> key of the choices: cais/mmlu and TIGER-Lab/MMLU-Pro, as `datasets` writes them
_LETTERED_FORMS = {"mmlu": "choices", "mmlu_pro": "options"}


def _mmlu_rows(text: str) -> _Table:
    """Yield the questions of an MMLU CSV file.

    The authors published question, A, B, C, D, answer without a header. Files with a header may have a Subject as well.
    """
    if "Question" in next(_rows(text))[1]:
        for number, row in _columns(text, ("Question", *LETTERS, "Answer")):
            if isinstance(row, UsageError):
                yield number, row
                continue
            texts, letter = [row[one] for one in LETTERS], row["Answer"].strip()
            yield number, _Lettered(row["Question"], texts, letter, row.get("Subject") or "mmlu")
        return
    for number, cells in _rows(text):
        if len(cells) == 6:
            yield number, _Lettered(cells[0], cells[1:5], cells[5].strip(), "mmlu")
        else:
            yield number, UsageError("expected a question, four choices and a letter", _AS_PUBLISHED)


def _gpqa_rows(text: str) -> _Table:
    names = ("Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3)))
    for number, row in _columns(text, ("Question", *names)):
        if isinstance(row, UsageError):
            yield number, row
            continue
        question, right = row["Question"], row["Correct Answer"]
        # the file lists the right answer first: sort by hash, so that the order depends on the texts alone
        hashes = {hashlib.sha256(f"{question}\n{row[name]}".encode()).digest(): row[name] for name in names}
        texts = [hashes[one] for one in sorted(hashes)]
        if len(texts) < len(names):
            yield number, UsageError("two answers are the same", _AS_PUBLISHED)
            continue
        domain = row.get("High-level domain") or "gpqa"
        yield number, _Lettered(question, texts, LETTERS[texts.index(right)], domain, row.get("Record ID") or "")


_TABLES: Mapping[str, Callable[[list[str]], bool]] = {
    "gpqa": lambda cells: {"Question", "Correct Answer"} <= set(cells),
    "mmlu": lambda cells: {"Question", "Answer", *LETTERS} <= set(cells) or (len(cells) == 6 and cells[5] in LETTERS),
}
_READ_TABLE = {"gpqa": _gpqa_rows, "mmlu": _mmlu_rows}
