"""`dsv4 run`: what it prints for prompts, conversations, many prompts and texts to score."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from dsv4cli.commands.run import modes, show
from dsv4cli.engine.runtime import runner
from dsv4cli.engine.settings import Limits
from dsv4cli.engine.text.prompt_text import CALLS_OPEN
from tests.support import damage
from tests.support.golden_data import PROMPTS, golden, most_distance, official_sums
from tests.support.program import SMALL, calls_block
from tests.support.slow import slow, slow_rows

KEYS = ["index", "content", "reasoning_content", "tool_calls", "ids", "finish_reason", "usage"]
SCORE_KEYS = ["index", "ids", "logprobs", "perplexity"]
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris", "days": 2}'}}
SHORT = ("--model", SMALL, "--seed", "1", "--max-tokens", "3")


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def jsonl(path, *values) -> str:
    path.write_text("\n".join(json.dumps(value) for value in values), encoding="utf-8")
    return str(path)


def test_the_answer_goes_to_stdout_and_the_rest_to_stderr(dsv4):
    dsv4.model_says("Forty-two €.")
    done = dsv4("run", "What is 17 + 25?", "--model", SMALL, "--seed", "9")
    assert (done.code, done.out) == (0, "Forty-two €.\n")
    loaded, random, timing = done.err.splitlines()
    assert loaded.startswith(f"{SMALL} on cpu: ")
    assert random == "the weights are random, so the text is meaningless"
    assert timing.startswith("15 tokens; first token after ")
    assert timing.endswith(" tokens/s; seed 9")


@pytest.mark.parametrize(("text", "out"), [("two\n", "two\n"), ("two\n\n", "two\n\n"), ("", "")])
def test_a_line_is_ended_where_the_model_left_it_open(dsv4, text, out):
    dsv4.model_says(text)
    assert dsv4("run", "hi", *SHORT[:4], "--max-tokens", "9").out == out


def test_the_same_answer_in_little_memory(dsv4):
    given = ("run", "What is 17 + 25?", "--temperature", "0")
    few, enough = dsv4(*given, "--gpu-memory", "9MB"), dsv4(*given)
    assert few.out == enough.out == "17 + 25 = 42.\n"
    loaded, division, drafts, _, traffic, _ = few.err.splitlines()
    assert drafts == "drafts are off: they do not pay with experts in host memory"
    assert loaded.startswith("nano on cpu: ")
    lie = r"\d of each layer's 8 experts fit on the GPU; \d stay in host memory, "
    assert re.fullmatch(lie + r"\d\.\d\d MB with the embedding", division)
    words = r"[1-9]\d\.\d % of the experts used were on the GPU; \d+\.\d\d kB per token from host memory"
    assert re.fullmatch(words, traffic)
    assert "host memory" not in enough.err


def test_what_came_from_host_memory_is_reported_below_the_answer(dsv4, monkeypatch):
    monkeypatch.setattr(modes, "report_traffic", lambda out, experts: out.line("reported"))
    dsv4.model_says("two")
    assert dsv4("run", "hi", *SHORT[:4], "--max-tokens", "9").out == "two\nreported\n"


def test_one_document_and_a_silent_stderr(dsv4):
    dsv4.model_says("A\x1b[31m\x9b1mB\x7f")
    done = dsv4("run", "hi", "--model", SMALL, "--seed", "9", "--json")
    assert (done.code, done.err, done.out.count("\n")) == (0, "", 1)
    assert not set("\x1b\x9b\x7f") & set(done.out)
    document = json.loads(done.out)
    timing = ["seed", "seconds_to_first_token", "tokens_per_second", "kernels_compiled", "draft"]
    assert list(document) == ["schema", "model", "backend", *KEYS[1:], *timing]
    assert (document["schema"], document["model"], document["backend"]) == ("dsv4.run/1", SMALL, "torch")
    assert (document["content"], document["finish_reason"]) == ("A\x1b[31m\x9b1mB\x7f", "stop")
    assert (document["ids"][-1], document["seed"]) == (1, 9)
    assert document["seconds_to_first_token"] > 0
    assert document["tokens_per_second"] > 0


def test_reasoning_goes_to_stderr_on_lines_of_its_own(dsv4):
    dsv4.model_says("because</think>42")
    done = dsv4("run", "hi", "--model", SMALL, "--think", "high")
    assert done.out == "42\n"
    assert "\nbecause\n" in done.err
    dsv4.model_says("because</think>42")
    document = json.loads(dsv4("run", "hi", "--model", SMALL, "--think", "high", "--json").out)
    assert (document["reasoning_content"], document["content"]) == ("because", "42")


def test_tool_calls(dsv4):
    block = calls_block([CALL])
    dsv4.model_says("I look." + block)
    assert dsv4("run", "hi", "--model", SMALL).out == 'I look.\nweather({"city": "Paris", "days": 2})\n'
    dsv4.model_says("I look." + block)
    document = json.loads(dsv4("run", "hi", "--model", SMALL, "--json").out)
    assert (document["content"], document["tool_calls"]) == ("I look.", [CALL])
    assert document["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("ends", "reported"), [(True, "warning: "), *slow_rows((False, "→ the answer was cut off"))])
def test_calls_that_cannot_be_read_are_shown_as_text(dsv4, ends, reported):
    text = f"I look.{CALLS_OPEN}>\nnonsense"
    dsv4.model_says(text, ends=ends)
    limit = "999" if ends else str(len(text.replace("｜DSML｜", "D")))
    done = dsv4("run", "hi", "--model", SMALL, "--max-tokens", limit)
    assert (done.code, done.out) == (0, text + "\n")
    assert reported in done.err


@pytest.mark.parametrize(
    ("stops", "said", "content", "tokens"),
    [
        *slow_rows((["STOP"], "one STO two STOP three", "one STO two ", 16)),
        (["zzz", "two", "STOP"], "one STO two STOP three", "one STO ", 11),
        *slow_rows((["<"], "one", "one", 4)),  # the end token is no text
    ],
)
def test_a_stop_string_ends_the_answer(dsv4, stops, said, content, tokens):
    options = [word for stop in stops for word in ("--stop", stop)]
    dsv4.model_says(said)
    assert dsv4("run", "hi", "--model", SMALL, *options).out == content + "\n"
    dsv4.model_says(said)
    document = json.loads(dsv4("run", "hi", "--model", SMALL, *options, "--json").out)
    assert (document["content"], document["finish_reason"], len(document["ids"])) == (content, "stop", tokens)


def test_a_seed_repeats_and_its_absence_is_told(dsv4):
    def ask(*options):
        return json.loads(dsv4("run", "hi", "--model", SMALL, "--max-tokens", "2", "--json", *options).out)

    first, again, other, free = ask("--seed", "3"), ask("--seed", "3"), ask("--seed", "4"), ask()
    assert first["ids"] == again["ids"] != other["ids"]
    assert ask("--seed", str(free["seed"]))["ids"] == free["ids"]
    greedy = [ask("--temperature", "0", "--seed", seed)["ids"] for seed in "12"]
    assert greedy[0] == greedy[1] == ask("--top-p", "1e-9")["ids"]


def test_limits_and_logprobs(dsv4):
    done = dsv4("run", "hi", "--model", SMALL, "--max-context", "8", "--logprobs", "2", "--json", "--seed", "5")
    document = json.loads(done.out)
    assert (len(document["ids"]), document["finish_reason"]) == (2, "length")  # the prompt has 6
    assert [entry["id"] for entry in document["logprobs"]] == document["ids"]
    assert all(list(entry) == ["id", "logprob", "top"] and len(entry["top"]) == 2 for entry in document["logprobs"])
    assert all(entry["top"][0][1] >= entry["top"][1][1] for entry in document["logprobs"])
    one = json.loads(dsv4("run", "hi", "--model", SMALL, "--max-tokens", "1", "--json").out)
    assert "logprobs" not in one
    assert one["tokens_per_second"] is None
    told = dsv4("run", "hi", "--model", SMALL, "--max-tokens", "1", "--seed", "5").err
    assert "1 token; first" in told
    assert "→ the answer was cut off after 1 token; raise --max-tokens\n" in told
    told = dsv4("run", "hi", "--model", SMALL, "--max-context", "8", "--seed", "5").err
    assert "→ the answer was cut off at 8 tokens with its prompt; raise --max-context\n" in told


def test_a_full_context_of_the_model_is_no_matter_of_options():
    dialogue = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=8))
    for limits in (Limits(), Limits(max_context=99)):
        told = show.limit_met(SimpleNamespace(dialogue=dialogue, limits=limits), SimpleNamespace(tokens=[1, 2]))
        assert told == "at the end of the model's context; shorten the prompt"


@pytest.mark.slow  # tests of the engine split prompts by default
def test_the_split_of_a_prompt_does_not_change_the_answer(dsv4):
    def ask(chunk):
        options = ("--model", "random:tiny,layers=4", "--dtype", "float32", "--temperature", "0", "--max-tokens", "2")
        return json.loads(dsv4("run", "x" * 130, *options, "--prefill-chunk", chunk, "--json").out)["ids"]

    assert ask("2048") == ask("50") == ask("127")


@pytest.mark.parametrize(
    ("arguments", "stdin", "text"),
    [
        (["hi"], None, "<｜User｜>hi<｜Assistant｜>"),
        ([], b"\xef\xbb\xbfcaf\xc3\xa9\n", "<｜User｜>café<｜Assistant｜>"),
        (["ask"], b"text\n\n", "<｜User｜>ask\n\ntext\n<｜Assistant｜>"),
        (["ask"], b"", "<｜User｜>ask<｜Assistant｜>"),
        (["-"], b"text", "<｜User｜>text<｜Assistant｜>"),
        (["hi", "--system", "Be brief."], None, "Be brief.<｜User｜>hi<｜Assistant｜>"),
        (["a\x1b[31m\rb"], None, "<｜User｜>a\x1b[31m\rb<｜Assistant｜>"),
    ],
)
def test_show_prompt(dsv4, arguments, stdin, text):
    text = f"<｜begin▁of▁sentence｜>{text}</think>"
    done = dsv4("run", *arguments, "--show-prompt", "--json", stdin=stdin)
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    assert list(document) == ["text", "ids"]
    assert document["text"] == text
    human = dsv4("run", *arguments, "--show-prompt", stdin=stdin)
    assert (human.out, human.err) == (f"{text}\n{' '.join(map(str, document['ids']))}\n", "")


def test_a_conversation_with_tools(dsv4, tmp_path):
    messages = [
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL | {"id": "c1"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "no"},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    for number, value in enumerate((messages, {"messages": messages, "tools": tools})):
        path = tmp_path / f"{number}.json"
        path.write_text("\ufeff" + json.dumps(value))
        text = json.loads(dsv4("run", "--messages", str(path), "--show-prompt", "--json").out)["text"]
        assert ('{"name": "weather"' in text) is bool(number)
        assert text.endswith("<tool_result>no</tool_result><｜Assistant｜></think>")
    assert dsv4("run", "--messages", str(path), *SHORT).code == 0


@pytest.mark.parametrize(
    ("last", "end"),
    [
        ({"role": "system", "content": "In French."}, "Hello\n\nIn French.<｜Assistant｜></think>"),
        ({"role": "assistant", "content": "Hi"}, "Hello<｜Assistant｜></think>Hi"),
    ],
)
def test_an_answer_follows_whoever_speaks_last(dsv4, tmp_path, last, end):
    messages = [{"role": "user", "content": "Hello"}, last]
    path = tmp_path / "messages.json"
    path.write_text(json.dumps(messages), encoding="utf-8")
    asked = (("--messages", str(path)), ("--prompts", jsonl(tmp_path / "prompts.jsonl", {"messages": messages})))
    for option in asked:
        shown = dsv4("run", *option, "--model", SMALL, "--show-prompt", "--json")
        assert json.loads(shown.out)["text"].endswith(end)


def test_many_prompts_are_answered_in_their_order(dsv4, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "MAX_SLOTS", 2)
    conversation = {"messages": [{"role": "user", "content": "two\u2028lines"}]}
    path = jsonl(tmp_path / "p.jsonl", {"prompt": "long " * 30}, conversation, {"prompt": "x"}, {"prompt": "y"})
    # with chunks of 8 the first is answered last
    done = dsv4("run", "--prompts", path, *SHORT, "--prefill-chunk", "8")
    answers = lines(done.out)
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert all(list(answer) == [*KEYS, "seed"] and len(answer["ids"]) == 3 for answer in answers)
    assert [answer["seed"] for answer in answers] == [1, 2, 3, 4]
    assert answers[2]["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert "\n4 answers, 12 tokens; first token after " in done.err
    silent = dsv4("run", "--prompts", path, *SHORT, "--prefill-chunk", "8", "--json", "--logprobs", "1")
    assert silent.err == ""
    assert [list(answer) for answer in lines(silent.out)] == [[*KEYS, "logprobs", "seed"]] * 4
    assert [answer["ids"] for answer in lines(silent.out)] == [answer["ids"] for answer in answers]
    shown = lines(dsv4("run", "--prompts", path, "--show-prompt").out)
    assert "two\u2028lines" in shown[1]["text"]
    alone = jsonl(tmp_path / "one.jsonl", {"prompt": "x"})
    assert lines(dsv4("run", "--prompts", alone, "--show-prompt").out) == [shown[2]]


def test_scores(dsv4, tmp_path):
    items = [{"ids": [5, 9, 511]}, {"text": "hello"}, {"messages": [{"role": "user", "content": "hi"}]}, {"ids": [7]}]
    path = jsonl(tmp_path / "s.jsonl", *items)
    options = ("--model", "random:tiny,layers=3", "--dtype", "float32")
    done = dsv4("run", "--score", path, *options)
    scores = lines(done.out)
    assert "\n4 texts, 15 tokens in " in done.err
    assert [list(one) for one in scores] == [SCORE_KEYS] * 4
    assert [one["index"] for one in scores] == [0, 1, 2, 3]
    assert [one["ids"] for one in scores][::3] == [[5, 9, 511], [7]]
    assert scores[1]["ids"] == [ord(letter) + 3 for letter in "hello"]
    assert scores[2]["ids"] == json.loads(dsv4("run", "hi", "--show-prompt", "--json", *options[:2]).out)["ids"]
    assert scores[3]["logprobs"] == [None]
    assert scores[3]["perplexity"] is None
    for one in scores[:3]:
        assert one["logprobs"][0] is None
        mean = sum(one["logprobs"][1:]) / (len(one["ids"]) - 1)
        assert one["perplexity"] == pytest.approx(torch.tensor(-mean).exp().item())
    for chunk in ("1", "2"):
        again = dsv4("run", "--score", path, *options, "--prefill-chunk", chunk, "--logprobs", "3", "--json")
        assert again.err == ""
        for one, other in zip(scores, lines(again.out), strict=True):
            assert list(other) == [*SCORE_KEYS, "top"]
            assert other["logprobs"][1:] == pytest.approx(one["logprobs"][1:], abs=1e-4)
            assert [len(top) for top in other["top"]] == [3] * len(one["ids"])
            for top, token, value in zip(other["top"], one["ids"][1:], other["logprobs"][1:], strict=False):
                assert dict(top).get(token, value) == value  # the distribution after a token is that of the next


@pytest.mark.parametrize(("chunk", "scored"), [(5, 2), *slow_rows((1, 5), (31, 2))])
def test_scores_are_the_official_ones(dsv4, tmp_path, chunk, scored, monkeypatch):
    """A chunk of P tokens, then one: as it was recorded; and no tokenizer is in the folder."""
    official_sums(monkeypatch)
    net = golden("tiny-flash")
    ids = net.tokens[:, : chunk + scored - 1].tolist()
    path = jsonl(tmp_path / "s.jsonl", *({"ids": one} for one in ids))
    model = str(damage.GOLDEN / "tiny-flash")
    done = dsv4("run", "--score", path, "--model", model, "--prefill-chunk", str(chunk), "--logprobs", "512", "--json")
    scores = lines(done.out)
    assert [one["ids"] for one in scores] == ids

    def log_probs(prompt, end=""):
        return net.recorded[f"p{prompt}.logits{end}"][:, :scored].log_softmax(-1)

    tops = torch.tensor([one["top"][chunk - 1 :] for one in scores])  # [2, scored, V, (id, value)]
    chosen = tops[..., 0].long()
    recorded = log_probs(chunk)
    noises = {prompt: (log_probs(prompt, "_alt") - log_probs(prompt)).abs().mean() for prompt in PROMPTS}
    bound = most_distance("tiny-flash", chunk, noises[chunk], noises.values())
    assert (tops[..., 1] - recorded.gather(-1, chosen)).abs().mean() <= bound
    following = net.tokens[:, chunk : chunk + scored - 1, None]
    known = torch.tensor([one["logprobs"][chunk:] for one in scores])
    assert (known - recorded[:, :-1].gather(-1, following)[..., 0]).abs().mean() <= bound


@pytest.mark.parametrize(
    "edit",
    [{}, {"compress_ratios": [0, 0, 4, 128, 4]}, *slow({"num_nextn_predict_layers": 0})],
    ids=["unchanged", "no ratios", "no stages"],
)
def test_a_checkpoint_without_its_drafter_has_the_numbers_of_its_layers(dsv4, tmp_path, edit):
    folder = damage.copy_checkpoint(tmp_path)
    damage.drafter_lost(folder)
    damage.edit_config(folder, **edit)
    texts = jsonl(tmp_path / "ids.jsonl", {"ids": [*range(5, 13)]})
    whole = dsv4("run", "--score", texts, "--model", str(damage.GOLDEN / "tiny-flash"))
    assert "no drafter" not in whole.err
    done = dsv4("run", "--score", texts, "--model", str(folder))
    assert lines(done.out)[0]["logprobs"] == lines(whole.out)[0]["logprobs"]
    assert "the checkpoint has no drafter (no mtp.* tensors)" in done.err.splitlines()
    assert ("does not say its release" in done.err) is ("compress_ratios" in edit)


@pytest.mark.parametrize("context", [8192, 8193])
def test_a_context_above_the_models_is_noted(dsv4, context):
    told = dsv4("run", "hi", "--max-context", str(context), "--show-prompt").err
    words = f"--max-context {context:,} is above the model's limit of 8,192 tokens, which applies\n"
    assert told == (words if context > 8192 else "")


def test_answers_do_not_go_to_a_file_that_is_named_like_stdout(dsv4, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.jsonl").write_text('{"prompt": "hi"}\n')
    done = dsv4("run", "--prompts", "q.jsonl", "--out", "-", "--model", SMALL)
    assert (done.code, [path.name for path in tmp_path.iterdir()]) == (2, ["q.jsonl"])
    assert done.err.endswith(
        "error: --out - is not a file: answers go to stdout without --out\n→ omit --out, or use ./-\n"
    )
