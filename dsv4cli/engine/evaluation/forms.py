"""Which form has a file of questions? Our own, or one of the public ones that users have; no torch."""

import csv
import hashlib
import io
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dsv4cli.engine.evaluation.items import EvalItem, EvalSet, choose, digits, numbered, read_own
from dsv4cli.engine.evaluation.vectors import is_manifest, is_vectors, read_manifest, read_vectors
from dsv4cli.engine.text.inputs import BadLine, from_prompt, name_of, parse_lines, read_text, refuse
from dsv4cli.errors import UsageError

BUILT_IN = "nano"
NANO_FILE = Path(__file__).with_name("nano.jsonl")
LETTERS = ("A", "B", "C", "D")
_BOX = "\n\nReason step by step, and put the final answer within \\boxed{}."
# of questions with letters: judged by likelihood, or by an answer that may explain itself
_ALONE = "Answer with the letter of the right choice alone."
_REASONED = "Reason step by step. Let the last line be the letter of the right choice, as in: Answer: A"
_CODE = "Complete this Python function. Answer with the whole function in one block of code.\n\n```python\n{}\n```"
FORMS = (
    "lines {prompt or messages, answer, score}, gsm8k, math500 and humaneval as JSON lines, mmlu and gpqa as CSV, the "
    "official continuations of ds4 as .vec or manifest.tsv"
)
_AS_PUBLISHED = "give the file as it was published"
_Lines = tuple[list[tuple[int, EvalItem]], list[BadLine]]
_Table = Iterator[tuple[int, "_Lettered | UsageError"]]


def read_set(name: str, by_answer: bool) -> EvalSet:
    """The items of the set that is built in, or of a file, in whichever form; by_answer: whether choices of public
    files are to be answered in a text. Raises UsageError that names every bad line, or the forms where it has none."""
    path = NANO_FILE if name == BUILT_IN else Path(name)
    text = read_text(path)
    called = name if name == BUILT_IN else name_of(path)
    form, read = _form(text, path, _REASONED if by_answer else _ALONE)
    lines, bad = read(text, called)
    items = numbered(lines, bad)
    refuse(Path(called), bad)
    if not items:
        raise UsageError(f"{called} has no questions", "give a file that has some")
    return EvalSet(called, form, items)


def _form(text: str, path: Path, ending: str) -> tuple[str, Callable[[str, str], _Lines]]:
    """What the file holds, as its content tells, and what reads it. ending: of questions with letters."""
    first = next((line for line in text.split("\n") if line.strip()), "")
    if is_vectors(text):
        return "ds4 vectors", lambda text, name: read_vectors(text, path)
    if is_manifest(first):
        return "ds4 continuations", lambda text, name: read_manifest(text, path)
    if first.lstrip().startswith("{"):
        return _json_form(first, name_of(path))
    row = _first_row(text)
    table = next((form for form, signs in _TABLES.items() if signs(row)), None)
    if table is not None:
        return table, lambda text, name: _split(_READ_TABLE[table](text), ending)
    raise UsageError(f"{name_of(path)} is in no form that eval reads", f"it reads {FORMS}")


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


def _json_form(first: str, name: str) -> tuple[str, Callable[[str, str], _Lines]]:
    lines, _ = parse_lines(first, name, lambda value: value)
    keys = set(lines[0][1]) if lines else set()
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
                raise UsageError(f'"{key}" is not a text, or is empty', _AS_PUBLISHED)
        return convert(value)

    return checked


def _gsm8k(value: dict[str, Any]) -> EvalItem:
    _, mark, answer = value["answer"].rpartition("####")
    if not mark or not re.search(r"\d", answer):
        raise UsageError('"answer" has no number behind ####', _AS_PUBLISHED)
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
    """The cells that a table begins with, of which some have several lines; none where it is no table."""
    rows = csv.reader(io.StringIO(text, newline=""))
    try:
        return next((row for row in rows if any(cell.strip() for cell in row)), [])
    except csv.Error:  # a cell of 131,073 characters
        return []


def _rows(text: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a table with the numbers of their lines. Raises UsageError for what is none."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        yield from ((reader.line_num, row) for row in reader if any(cell.strip() for cell in row))
    except csv.Error as error:
        raise UsageError(f"line {reader.line_num} is not CSV: {error}", _AS_PUBLISHED) from None


def _columns(text: str, needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str] | UsageError]]:
    """The rows below a header, by its names."""
    rows = _rows(text)
    _, header = next(rows)
    for number, row in rows:
        value = dict(zip(header, row, strict=False))
        lacking = [name for name in needed if not value.get(name, "").strip()]
        wrong = f"there is no {lacking[0]!r}" if lacking else "more cells than the header" if row[len(header) :] else ""
        yield number, UsageError(wrong, _AS_PUBLISHED) if wrong else value


class _Lettered(NamedTuple):
    """A question with four choices, and the letter of the right one."""

    question: str
    texts: list[str]
    letter: str
    task: str
    id: str = ""

    def item(self, ending: str) -> EvalItem:
        """What is asked. Raises UsageError for a letter that there is not."""
        if self.letter not in LETTERS:
            raise UsageError(f"the answer is {self.letter!r}, not a letter from A to D", _AS_PUBLISHED)
        listed = "\n".join(f"{one}. {text.strip()}" for one, text in zip(LETTERS, self.texts, strict=True))
        asked = from_prompt(f"{self.question.strip()}\n\n{listed}\n\n{ending}", None)
        return choose(EvalItem(self.id, asked, task=self.task), LETTERS, self.letter)


def _mmlu_rows(text: str) -> _Table:
    """question, A, B, C, D, answer without a header, as the authors published it; or with one that has Subject too."""
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
            yield number, UsageError("not a question, four choices and a letter", _AS_PUBLISHED)


def _gpqa_rows(text: str) -> _Table:
    names = ("Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3)))
    for number, row in _columns(text, ("Question", *names)):
        if isinstance(row, UsageError):
            yield number, row
            continue
        question, right = row["Question"], row["Correct Answer"]
        # the file has the right one first: an order that follows from the texts alone
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
