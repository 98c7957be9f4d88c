"""Files of questions: our lines, strictly, and the public forms by their content."""

import gzip
import json

import pytest

from dsv4cli.engine.evaluation.forms import BUILT_IN, read_set
from dsv4cli.errors import UsageError

GOOD = [
    {"id": 70, "prompt": "a", "score": "exact", "answer": "b", "task": "t"},
    {"messages": [{"role": "user", "content": "a"}], "score": "numeric", "answer": 4.5, "think": True},
    {"prompt": "a", "score": "regex", "answer": "^[[a]+$"},
    {"prompt": "a", "score": "choice", "choices": ["x", "y"], "answer": 1},
    {"prompt": "a", "score": "choice", "choices": ["x", "y"], "answer": "x"},
    {"prompt": "a", "score": "continuation", "answer": " b"},
    {"prompt": "a"},
    {"prompt": "a", "score": "exact", "answer": [{"name": "f", "arguments": {"x": 1}}]},
]


@pytest.fixture
def read(tmp_path):
    def reader(content, name="q.jsonl", *, by_answer=False):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else "\n".join(map(json.dumps, content)), encoding="utf-8")
        return read_set(str(path), by_answer)

    return reader


def test_our_own_lines(read):
    found = read(GOOD)
    assert found.form == "dsv4"
    assert [one.id for one in found.items] == ["70", *map(str, range(2, 9))]
    assert [one.score for one in found.items] == [
        "exact", "numeric", "regex", "choice", "choice", "continuation", None, "exact",
    ]  # fmt: skip
    assert [one.answer for one in found.items[:6]] == ["b", "4.5", "^[[a]+$", "y", "x", " b"]
    assert (found.items[0].task, found.items[1].think, found.items[0].think) == ("t", True, None)
    assert len(found.first(3).items) == 3
    assert found.digest == read(GOOD).digest != found.first(3).digest
    assert found.digest != read([{**GOOD[0], "answer": "c"}, *GOOD[1:]]).digest


@pytest.mark.parametrize(
    ("number", "text"), [(1e-05, "0.00001"), (1e16, "10000000000000000"), (-2.5e-7, "-0.00000025"), (3, "3")]
)
def test_a_number_is_none_with_an_exponent(read, number, text):
    [own] = read([{"prompt": "a", "score": "numeric", "answer": number}]).items
    [public] = read([{"problem": "a", "answer": number}]).items
    assert (own.answer, public.answer) == (text, text)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ({"prompt": "a", "anser": "b"}, "unknown key 'anser'"),
        ({"answer": "b", "score": "exact"}, "none of the keys prompt, messages"),
        ({"prompt": "a", "score": "fuzzy", "answer": "b"}, "\"score\" cannot be 'fuzzy'"),
        ({"prompt": "a", "score": "exact"}, '"exact" needs an "answer"'),
        ({"prompt": "a", "answer": "b"}, '"answer" without "score"'),
        ({"prompt": "a", "score": "exact", "answer": ""}, '"answer" must be a non-empty string'),
        ({"prompt": "a", "score": "exact", "answer": 4}, '"answer" must be a non-empty string'),
        ({"prompt": "a", "score": "exact", "answer": [{"name": "f"}]}, "not a list of calls"),
        ({"prompt": "a", "score": "numeric", "answer": "many"}, '"answer" has no number'),
        ({"prompt": "a", "score": "numeric", "answer": float("nan")}, '"answer" has no number'),
        ({"prompt": "a", "score": "numeric", "answer": True}, '"answer" must be a non-empty string'),
        ({"prompt": "a", "score": "regex", "answer": "(a"}, "not a pattern: missing )"),
        ({"prompt": "a", "score": "choice", "answer": "x"}, "must be a list of at least two strings"),
        ({"prompt": "a", "score": "choice", "choices": ["x", "y"], "answer": "z"}, "neither one of the choices"),
        ({"prompt": "a", "score": "choice", "choices": ["x", "y"], "answer": 2}, "neither one of the choices"),
        ({"prompt": "a", "score": "choice", "choices": ["New", "New York"], "answer": 0}, "begins with another"),
        ({"prompt": "a", "score": "choice", "choices": ["x", "x"], "answer": 0}, "begins with another"),
        ({"prompt": "a", "score": "exact", "answer": "b", "choices": ["x", "y"]}, '"choices" with the score "exact"'),
        ({"prompt": "a", "think": "high"}, '"think" is neither true nor false'),
        ({"prompt": "a", "id": []}, '"id" is neither'),
        ({"prompt": "a", "id": 70}, "the id '70' is already used in line 1"),
    ],
)
def test_a_bad_line_is_named(read, line, complaint):
    with pytest.raises(UsageError) as error:
        read([GOOD[0], line])
    assert "q.jsonl, line 2: " in error.value.message
    assert complaint in error.value.message


def test_all_bad_lines_are_named_at_once(read):
    with pytest.raises(UsageError) as error:
        read([{"prompt": "a", "x": 1}, GOOD[0], {"prompt": 3}])
    assert [one.split(":")[0] for one in error.value.details] == ["line 1", "line 3"]


GSM8K = {"question": "How many?", "answer": "2+2=<<2+2=4>>4\n#### 1,004"}
MATH = {
    "problem": "Find x.",
    "solution": "…",
    "answer": "\\frac{1}{2}",
    "subject": "Algebra",
    "level": 1,
    "unique_id": "a/1.json",
}
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "", "test": ""}
MMLU = 'Which one?,"w, x",x,y,z,B\n"Two\nlines?",1,2,3,4,D\n'
SIMPLE = ",Question,A,B,C,D,Answer,Subject\n0,Which?,w,x,y,z,C,anatomy\n"
GPQA = (
    "Record ID,Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3,High-level domain\n"
    "rec1,Which?,right,wrong 1,wrong 2,wrong 3,Physics\nrec2,What?,right,wrong 1,wrong 2,wrong 3,Physics\n"
)


def asked(item):
    return item.messages[-1]["content"]


def test_gsm8k(read):
    found = read([GSM8K, GSM8K])
    assert (found.form, [one.id for one in found.items]) == ("gsm8k", ["1", "2"])
    item = found.items[0]
    assert (item.score, item.answer) == ("numeric", "1,004")
    assert asked(item).startswith("How many?\n\n")
    assert "\\boxed{}" in asked(item)
    with pytest.raises(UsageError, match=r"line 2: .*no number after ####"):
        read([GSM8K, {"question": "a", "answer": "b"}])
    with pytest.raises(UsageError, match='line 2: "question" must be a non-empty string'):
        read([GSM8K, {"answer": "#### 3"}])


def test_math500_and_humaneval(read):
    [item] = read([MATH]).items
    assert (item.id, item.task, item.score, item.answer) == ("a/1.json", "Algebra", "exact", "\\frac{1}{2}")
    assert read([{**MATH, "answer": 204}]).items[0].answer == "204"  # as AIME has it
    found = read([HUMANEVAL])
    assert (found.form, found.items[0].id, found.items[0].score) == ("humaneval", "HumanEval/0", None)
    assert "def f():" in asked(found.items[0])


def test_mmlu(read):
    found = read(MMLU, "mmlu.csv")
    assert (found.form, [one.answer for one in found.items]) == ("mmlu", ["B", "D"])
    assert asked(found.items[0]) == (
        "Which one?\n\nA. w, x\nB. x\nC. y\nD. z\n\nAnswer with the letter of the right choice alone."
    )
    [history] = read('"This refers to:\n""A text.""\nWhich?",w,x,y,z,B\n', "history.csv").items
    assert asked(history).startswith('This refers to:\n"A text."\nWhich?\n\nA. w')
    [other] = read(SIMPLE, "mmlu.csv", by_answer=True).items
    assert (other.answer, other.task, other.choices) == ("C", "anatomy", ("A", "B", "C", "D"))
    assert asked(other).endswith("as in: Answer: A")
    with pytest.raises(UsageError, match="line 2: expected a question, four choices and a letter"):
        read("Which one?,w,x,y,z,B\nshort,row\n", "mmlu.csv")
    with pytest.raises(UsageError, match="line 2: the answer is 'E'"):
        read("Which one?,w,x,y,z,B\nWhat?,1,2,3,4,E\n", "mmlu.csv")


def test_gpqa_has_the_right_answer_anywhere_but_always_there(read):
    found = read(GPQA, "gpqa.csv")
    assert (found.form, [one.id for one in found.items]) == ("gpqa", ["rec1", "rec2"])
    for item in found.items:
        assert f"{item.answer}. right" in asked(item)
        assert all(f"wrong {number}" in asked(item) for number in (1, 2, 3))
    more = read(GPQA + "".join(f"r{n},Why {n}?,right,wrong 1,wrong 2,wrong 3,P\n" for n in range(40)), "gpqa.csv")
    assert {one.answer for one in more.items} == set("ABCD")
    assert more.items[:2] == found.items
    with pytest.raises(UsageError, match="line 2: 'Incorrect Answer 3' is missing"):
        read(GPQA.splitlines()[0] + "\nrec1,Which?,right,wrong 1,wrong 2\n", "gpqa.csv")
    with pytest.raises(UsageError, match="line 2: two answers are the same"):
        read(GPQA.splitlines()[0] + "\nrec1,Which?,right,right,wrong 2,wrong 3,P\n", "gpqa.csv")


@pytest.mark.parametrize("content", ["", "\n\n \n"])
def test_an_empty_file_is_called_empty(read, content):
    with pytest.raises(UsageError, match=r" is empty$"):
        read(content)


@pytest.mark.parametrize("content", ["hello\nworld\n", "a,b\n1,2\n", "[1, 2]\n", "\n" * 300 + "x", "x" * 200_000])
def test_what_has_no_known_form_is_told_the_forms(read, content):
    with pytest.raises(UsageError) as error:
        read(content)
    assert "not in a format that eval reads" in error.value.message
    assert "gsm8k" in error.value.remedy


def test_an_empty_file_has_no_questions(read):
    with pytest.raises(UsageError):
        read("")
    with pytest.raises(UsageError, match="has no questions"):
        read("Record ID,Question,Correct Answer\n", "gpqa.csv")


def test_the_set_that_is_built_in_has_200_items():
    found = read_set(BUILT_IN, by_answer=False)
    assert len(found.items) == 200
    assert {one.score for one in found.items} == {"exact", "choice", "continuation"}


VEC = """\
# ds4-official-logprob-vectors
# case <id> <ctx> <steps> <prompt-file>

case one 4096 2 tests/prompts/one.txt
step 0 416461 2
top 416461 0
top 2a2a -9999
step 1 20c3a9 1
top 20c3a9 0
end

case two 4096 1 tests/prompts/one.txt
step 0 3cefbd9c656e64e296816f66e2968173656e74656e6365efbd9c3e 1
top 3cefbd9c656e64e296816f66e2968173656e74656e6365efbd9c3e 0
end
"""


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "tests" / "prompts").mkdir(parents=True)
    (tmp_path / "tests" / "prompts" / "one.txt").write_text("Who?\n", encoding="utf-8")
    (tmp_path / "tests" / "prompts" / "more.txt").write_text("Ada Lovelace", encoding="utf-8")
    return tmp_path / "tests"


def test_vectors_are_continuations_in_tokens(repository):
    path = repository / "official.vec"
    path.write_text(VEC, encoding="utf-8")
    found = read_set(str(path), by_answer=False)
    assert (found.form, [one.id for one in found.items]) == ("ds4 vectors", ["one", "two"])
    assert found.items[0].tokens == (b"Ada", " é".encode())
    assert found.items[1].tokens == ("<｜end▁of▁sentence｜>".encode(),)
    assert {one.score for one in found.items} == {"continuation"}
    assert asked(found.items[0]) == "Who?\n"
    path.write_text(VEC.replace("step 0 416461", "step 0 416462"), encoding="utf-8")
    assert found.digest != read_set(str(path), by_answer=False).digest


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("step 1 20c3a9 1\n", "", "line 4: case one has 1 tokens, not 2"),
        ("step 1 20c3a9 1\n", "step 1 20c3a 1\n", "line 4: case one has the line 'step 1 20c3a 1'"),
        ("step 1 20c3a9 1\n", "step 2 20c3a9 1\n", "line 4: case one has the line 'step 2"),
        (
            "prompts/one.txt\nstep 0 416461",
            "prompts/two.txt\nstep 0 416461",
            "line 4: tests/prompts/two.txt is not in",
        ),
        ("c3e 0\nend\n", "c3e 0\n", "line 12: expected a case"),
        (
            VEC[VEC.index("case two") :],
            "case two 4096 0 tests/prompts/one.txt\nend\n",
            "line 12: case two has 0 tokens",
        ),
        ("case two", "case one", "line 12: the id 'one' is already used"),
    ],
)
def test_damaged_vectors_are_named(repository, old, new, complaint):
    path = repository / "official.vec"
    path.write_text(VEC.replace(old, new), encoding="utf-8")
    with pytest.raises(UsageError) as error:
        read_set(str(path), by_answer=False)
    assert complaint in error.value.message


def test_a_manifest_names_prompts_and_continuations(repository):
    path = repository / "manifest.tsv"
    head = "# id\tprompt_file\tcontinuation_file\tresponse_file\n"
    row = "case_0\ttests/prompts/one.txt\ttests/prompts/more.txt\tx.json\n"
    path.write_text(head + row, encoding="utf-8")
    [item] = read_set(str(path), by_answer=False).items
    assert (item.id, item.answer, item.score) == ("case_0", "Ada Lovelace", "continuation")
    path.write_text(head + row + "case_1\tlost.txt\ttests/prompts/more.txt\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"line 3: lost\.txt is not in"):
        read_set(str(path), by_answer=False)


HUB_MMLU = {"question": "Which?", "subject": "anatomy", "choices": ["w", "x", "y", "z"], "answer": 2}
MMLU_PRO = {
    "question_id": 70, "question": "Which one?", "options": [f"o{n}" for n in range(10)], "answer": "I",
    "answer_index": 8, "cot_content": "", "category": "business", "src": "ori_mmlu-business_ethics",
}  # fmt: skip


def test_mmlu_of_the_hub(read):
    found = read([HUB_MMLU, {**HUB_MMLU, "answer": "A"}])
    assert (found.form, [one.answer for one in found.items]) == ("mmlu", ["C", "A"])
    assert (found.items[0].task, found.items[0].choices) == ("anatomy", ("A", "B", "C", "D"))
    assert "A. w\nB. x\nC. y\nD. z\n\n" in found.items[0].messages[0]["content"]


def test_mmlu_pro_of_the_hub(read):
    short = {**MMLU_PRO, "question_id": 71, "options": ["a", "b", "c", "N/A", "N/A"], "answer": "C"}
    found = read([MMLU_PRO, short], by_answer=True)
    assert (found.form, [one.id for one in found.items]) == ("mmlu_pro", ["70", "71"])
    assert [(one.answer, one.task) for one in found.items] == [("I", "business"), ("C", "business")]
    assert [one.choices for one in found.items] == [tuple("ABCDEFGHIJ"), tuple("ABC")]
    assert "J. o9\n\nReason step by step." in found.items[0].messages[0]["content"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"answer": "K"}, "the answer is 'K', not a letter from A to J"),
        ({"answer": 10}, "the answer is '10', not a letter from A to J"),
        ({"answer": None}, "the answer is 'None'"),
        ({"options": "ab"}, '"options" is not a list of strings'),
        ({"options": ["a", 1]}, '"options" is not a list of strings'),
        ({"options": ["a", "N/A"]}, '"options" has 1 entries, expected 2 to 10'),
        ({"question": " "}, '"question" must be a non-empty string'),
    ],
)
def test_bad_lines_of_mmlu_pro_are_named(read, change, complaint):
    with pytest.raises(UsageError, match="line 2: ") as refused:
        read([MMLU_PRO, MMLU_PRO | {"question_id": 71} | change])
    assert complaint in refused.value.message


def test_files_may_be_compressed(tmp_path):
    line = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "", "test": ""}
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(line).encode()))
    found = read_set(str(path), False)
    assert (found.form, found.items[0].id, found.items[0].score) == ("humaneval", "HumanEval/0", None)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UsageError, match="is a damaged gzip file"):
        read_set(str(path), False)


def test_parquet_is_named(tmp_path):
    path = tmp_path / "test-00000-of-00001.parquet"
    path.write_bytes(b"PAR1\x15\x04\xff")
    with pytest.raises(UsageError, match="is a Parquet file") as refused:
        read_set(str(path), False)
    assert "to_json" in refused.value.remedy
