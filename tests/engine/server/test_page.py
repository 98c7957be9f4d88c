"""The page at `/`, in a browser: asking, stopping, editing, what goes wrong, and that nothing of a model is obeyed."""

import base64
import hashlib
import json
import random
import re

import pytest

from dsv4cli.engine.server.page import MATH_PATH, math_library, page
from dsv4cli.engine.text.inputs import read_messages
from tests.support.browser import CHROMIUM, SHIFT, browser
from tests.support.chat_server import ChatServer, Says
from tests.support.waiting import comes

in_browser = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="needs chromium")]
STILL = "!document.body.hasAttribute('data-answering')"
MARKDOWN = """\
# Head *one*

A **bold *and* more** line of `code`,
its second line, [a link](https://example.org/a_(b)) and https://example.org/x_y.

1. one
   - inner `a|b`
     more

   ```python
   def f(x):

       return x
   ```
2. two
- [x] done
- [ ] not done

A paragraph
```
code
```
and one more
1. item
and text
- item
# Heading

| a | b |
|:-:|--:|
| 1 | x \\| y |
| 2 |

> quoted
lazily
> > deeper

~~~
fence ``` inside
~~~
***
4*8*2, __init__, f(*args, **kwargs), \\(x_1*y_1\\), 2 \\* 3, **重点**是, `` a ` b ``, a_b_c
last"""
# what each of these must not become
HOSTILE = """\
<script>document.title = "taken"</script><img src=x onerror="document.title = 'taken'">
![picture](https://evil.example/x.png) ![](javascript:alert(1)) [click](javascript:alert(1)) [data](data:text/html,x)
<a href="javascript:alert(1)">x</a> <https://evil.example/"onmouseover="x>
```"><script>alert(1)</script>
</code></pre><script>alert(1)</script>
```
| <img src=x> | [a](javascript:1) |
|--|--|
| <svg onload=alert(1)> | `<b>` |
"""


def test_the_policy_allows_the_page_alone():
    body, policy = page()
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    own = {tag: body.split(f"<{tag}>".encode())[1].split(f"</{tag}>".encode())[0] for tag in ("style", "script")}
    hashes = {
        name: f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
        for name, content in (*own.items(), ("math", math_library()))
    }
    assert rules["style-src"] == hashes["style"]
    assert rules["script-src"] == f"{hashes['script']} {hashes['math']}"
    assert f'"{hashes["math"][1:-1]}"'.encode() in body
    assert rules["default-src"] == rules["form-action"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert rules["connect-src"] == "'self'"


def test_no_text_becomes_markup_and_nothing_is_foreign():
    text = page()[0].decode()
    for script in (text, math_library().decode()):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser", script
        )
        assert not re.search(r"XMLHttpRequest|importScripts|\bimport\(|window\.fetch", script)
    assert not re.search(r"""(src|href|action)=["']?(https?:)?//""", text)
    assert not re.search(r"@import|url\(|\bstyle=\"|\bon\w+=\"", text)


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture
def server():
    with ChatServer().running() as one:
        yield one


@pytest.fixture
def opened(tab, server):
    """The page of a server whose storage is empty, for its address is new."""
    tab.complaints.clear()
    tab.fetched.clear()
    tab.resize(1000, 800)
    tab.prefer("light")
    tab.open(server.url)
    tab.until("document.getElementById('model').textContent")
    return tab


def ask(tab, text):
    tab.value("document.getElementById('question').focus()")
    tab.type(text)
    tab.press("Enter")


def answered(tab):
    tab.until(STILL)
    return tab.text("#turns > li:last-child .text")


def said(body):
    return [(one["role"], one["content"]) for one in body["messages"]]


def shown(tab, text, what, then="it", pieces=None):
    """What becomes of a text of Markdown, which comes in pieces."""
    return tab.value(f"""(() => {{
        const root = document.createElement("div"), one = new Markdown(root);
        {json.dumps(pieces or [text])}.forEach(piece => one.push(piece));
        one.end();
        const it = root.{what};
        return {then};
    }})()""")


class TestPage:
    pytestmark = in_browser

    def test_a_question_is_asked_and_answered_by_keyboard_alone(self, opened, server):
        server.script = [
            Says(["Hello ", "*thére*."], pause=0.05, usage={"prompt_tokens": 1200, "completion_tokens": 31})
        ]
        opened.type("One")
        opened.press("Enter", SHIFT)
        opened.type("two")
        assert server.bodies == []
        opened.press("Enter")
        assert answered(opened) == "Hello thére."
        assert server.bodies[0]["messages"] == [{"role": "user", "content": "One\ntwo"}]
        assert server.bodies[0]["stream"] is True
        assert re.fullmatch(
            r"31 tokens · [\d.]+ tokens/s · first after 0\.\d\d s · context 1,231 of 4,096", opened.text(".facts")
        )
        assert opened.value("document.activeElement.id") == "question"
        ask(opened, "Three")
        answered(opened)
        assert said(server.bodies[1]) == [("user", "One\ntwo"), ("assistant", "Hello *thére*."), ("user", "Three")]
        assert opened.complaints == []
        assert {url.removeprefix(server.url) for url in opened.fetched} == {"/", "/v1/models", "/v1/chat/completions"}

    def test_escape_and_the_button_stop_an_answer_and_the_server_hears_of_it(self, opened, server):
        server.script = [Says(["word "] * 2000, pause=0.01)]
        for stop in (lambda: opened.press("Escape"), lambda: opened.click("#send")):
            server.ended.clear()
            ask(opened, "Go")
            opened.until("document.querySelector('#turns > li:last-child .text').textContent.includes('word word')")
            assert opened.text("#send") == "Stop"
            stop()
            assert re.fullmatch(r"(word ?)+", answered(opened))
            assert opened.text("#turns > li:last-child .facts") == "Stopped"
            assert server.ended.wait(60)
        assert opened.text("#send") == "Send"

    @pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
    def test_thinking_is_folded_and_goes_back_to_the_server(self, opened, server, field):
        server.script = [Says(["Yes."], ["I ", "wonder."], pause=0.05, reasoning=field)]
        ask(opened, "Well?")
        assert answered(opened) == "Yes."
        assert opened.text(".thought summary") == "Thought for 1 s"
        assert opened.value("document.querySelector('.thought').open") is False
        opened.click(".thought summary")
        assert opened.text(".thought div") == "I wonder."
        ask(opened, "Sure?")
        answered(opened)
        assert server.bodies[1]["messages"][1]["reasoning_content"] == "I wonder."

    def test_an_earlier_question_can_be_changed_and_the_last_asked_again(self, opened, server):
        server.script = [Says([f"{number}"]) for number in range(4)]
        for text in ("one", "two"):
            ask(opened, text)
            answered(opened)
        opened.click("#turns > li:first-child .question button")
        opened.value("document.activeElement.select()")
        opened.type("uno")
        opened.press("Enter")
        assert answered(opened) == "2"
        assert said(server.bodies[2]) == [("user", "uno")]
        assert opened.value("document.querySelectorAll('#turns > li').length") == 1
        opened.click(".last-only")
        assert answered(opened) == "3"
        assert said(server.bodies[3]) == [("user", "uno")]

    def test_a_change_can_be_given_up(self, opened):
        ask(opened, "one")
        answered(opened)
        opened.click(".question button")
        opened.type("never")
        opened.press("Escape")
        assert opened.text(".said") == "one"
        assert opened.value("document.activeElement.textContent") == "Edit"

    def test_settings_go_into_the_question_and_the_key_stays_in_the_tab(self, opened, server):
        server.key = "s3cret"
        opened.click("#open-settings")
        assert opened.value("document.activeElement.id") == "system"
        opened.type("Be brief.")
        opened.value("document.getElementById('effort').value = 'high'")
        for name, text in (("temperature", "0.5"), ("key", "s3cret")):
            opened.value(f"document.getElementById('{name}').focus()")
            opened.type(text)
        opened.press("Enter")
        opened.until("key === 's3cret'")
        ask(opened, "Hi")
        assert answered(opened) == "Yes."
        body = server.bodies[0]
        assert said(body) == [("system", "Be brief."), ("user", "Hi")]
        assert (body["temperature"], body["reasoning_effort"]) == (0.5, "high")
        assert "s3cret" not in opened.value("JSON.stringify(localStorage)")
        assert "s3cret" in opened.value("JSON.stringify(sessionStorage)")

    def test_what_is_not_set_is_left_to_the_model(self, opened, server):
        ask(opened, "Hi")
        answered(opened)
        assert "temperature" not in server.bodies[0]
        assert server.bodies[0]["reasoning_effort"] == "none"

    TROUBLES = (
        (Says(status=401), "", "The server requires an API key. Enter it in the settings."),
        (Says(status=503, headers={"Retry-After": "7"}), "", "The server is busy. Try again in 7 s."),
        (Says(status=400, message="no room for 9 tokens"), "", "The server rejects the request: no room for 9 tokens"),
        (Says(status=403, message="ask as localhost"), "", "The server rejects the request: ask as localhost"),
        (Says(status=500, message="out of luck"), "", "The server has failed: out of luck"),
        (
            Says(["Half ", "an"], cut=2),
            "Half",
            "The connection closed before the answer was complete. The part that arrived is kept.",
        ),
        (Says(["Half"], damage="{nothing"), "Half", "The server's response is malformed."),
        (Says(["Half"], damage='{"error": {"message": "no memory"}}'), "Half", "The server has failed: no memory"),
    )

    @pytest.mark.parametrize(("says", "kept", "words"), TROUBLES, ids=range(len(TROUBLES)))
    def test_trouble_is_said_in_words_and_asking_again_helps(self, opened, server, says, kept, words):
        server.script = [says, Says(["Whole."])]
        ask(opened, "Hi")
        assert answered(opened) == kept
        assert words in opened.text(".trouble")
        assert opened.value("document.querySelector('.trouble').getAttribute('role')") == "alert"
        opened.click(".last-only")
        assert answered(opened) == "Whole."
        assert said(server.bodies[1]) == [("user", "Hi")]
        assert opened.text(".trouble") == ""

    def test_a_server_that_is_gone(self, opened, server):
        server.stop()
        ask(opened, "Hi")
        answered(opened)
        assert "The server cannot be reached. Check that dsv4 serve is still running" in opened.text(".trouble")

    def test_a_cut_at_the_limit_is_said(self, opened, server):
        server.script = [Says(["Ye"], finish="length")]
        ask(opened, "Hi")
        answered(opened)
        assert opened.text(".facts").startswith("Cut off at its limit · 5 tokens")

    def test_nothing_that_a_model_writes_is_obeyed(self, opened, server):
        server.script = [Says([HOSTILE[at : at + 7] for at in range(0, len(HOSTILE), 7)], [HOSTILE])]
        ask(opened, HOSTILE)
        answered(opened)
        tags = set(opened.value("[...document.querySelectorAll('#turns *')].map(node => node.localName)"))
        assert not tags & {"script", "img", "svg", "b", "iframe", "style"}
        links = opened.value("[...document.querySelectorAll('#turns a')].map(one => [one.href, one.rel, one.target])")
        assert all(href.startswith("https://") for href, *_ in links)
        assert {(rel, target) for _, rel, target in links} == {("noopener noreferrer", "_blank")}
        assert opened.value("document.title") == "fake-v4 · dsv4"
        assert opened.complaints == []
        assert all(url.startswith(server.url) for url in opened.fetched)

    def test_a_formula_is_not_obeyed(self, opened, server):
        given = (
            "href{javascript:alert(1)}{x}", "url{https://evil.example}", "includegraphics{https://evil.example/x.png}",
            "htmlStyle{position:fixed}{x}", "class{unseen}{x}", "data{onclick=alert(1)}{x}",
            "def\\x{\\x\\x}\\x", "rule{9999em}{9999em}", "begin{cases}<img src=x>",
        )  # fmt: skip
        server.script = [Says([f"\\(\\{tex}\\)\n\n" for tex in given] + ["\\(x^2\\)"])]
        opened.value("loadTemml()")
        ask(opened, "Hi")
        answered(opened)
        assert opened.value("Boolean(document.querySelector('#turns .math msup'))")
        assert opened.value("document.querySelectorAll('#turns :is(a, img, script, [onclick])').length") == 0
        assert opened.value("document.documentElement.scrollWidth") <= 1000
        assert opened.complaints == []
        assert all(url.startswith(server.url) for url in opened.fetched)

    def test_markdown_is_the_same_however_it_is_cut(self, opened):
        opened.value("loadTemml()")
        opened.value("""globalThis.rendered = pieces => {
            const root = document.createElement("div"), markdown = new Markdown(root);
            pieces.forEach(piece => markdown.push(piece));
            markdown.end();
            root.querySelectorAll("[hidden]").forEach(node => node.remove());
            return root.innerHTML;
        }""")
        whole = opened.value(f"rendered([{json.dumps(MARKDOWN)}])")
        rng = random.Random(0)
        for _ in range(60):
            cuts = sorted(rng.sample(range(len(MARKDOWN)), rng.randint(1, 80)))
            pieces = [MARKDOWN[a:b] for a, b in zip([0, *cuts], [*cuts, len(MARKDOWN)], strict=True)]
            assert opened.value(f"rendered({json.dumps(pieces)})") == whole
        assert opened.value(f"rendered({json.dumps([*MARKDOWN])})") == whole

    SHOWN = (
        ("# A *b*", "<h3>A <em>b</em></h3>"),
        ("a **b *c* d** e", "<p>a <strong>b <em>c</em> d</strong> e</p>"),
        ("a\nb", "<p>a<br>b</p>"),
        ("4*8*2 __init__ a_b_c 2 * 3 * 4", "<p>4*8*2 __init__ a_b_c 2 * 3 * 4</p>"),
        ("**重点**是 _x_", "<p><strong>重点</strong>是 <em>x</em></p>"),
        ("- a\n- b\n  - c\n\nd", "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li></ul><p>d</p>"),
        ("1. a\n  - b\n2. c", '<ol start="1"><li><p>a</p><ul><li><p>b</p></li></ul></li><li><p>c</p></li></ol>'),
        ("In 1986\n1986. was a year", "<p>In 1986<br>1986. was a year</p>"),
        ("> a\nb\n\nc", "<blockquote><p>a<br>b</p></blockquote><p>c</p>"),
        ("a\n---\nb", "<p>a</p><hr><p>b</p>"),
        ("- [x] a", "<ul><li><p>☑ a</p></li></ul>"),
        ("<b>x</b> &amp;", "<p>&lt;b&gt;x&lt;/b&gt; &amp;amp;</p>"),
    )

    @pytest.mark.parametrize(("text", "markup"), SHOWN)
    def test_what_marks_become(self, opened, text, markup):
        assert shown(opened, text, "innerHTML").replace(' dir="auto"', "") == markup

    # a text, the formulas within its lines, and those that have lines of their own
    FORMULAS = (
        ("a \\(x^2\\) b $y$, $E = mc^2$ and $n!$", ["x2", "y", "E=mc2", "n!"], []),
        ("so\n\\[\n- x\n+ 1\n\\]\nend", [], ["−x+1"]),
        ("- a: $$x$$\n  \\[ y_1 * z * w\n  \\]\n- b", [], ["x", "y1∗z∗w"]),
        ("\\begin{pmatrix}\n1 & 2 \\\\\n* & 4\n\\end{pmatrix}", [], ["(12∗4)"]),
        ("**\\(a*b\\)** and | \\(c\\)", ["a∗b", "c"], []),
        ("$5 and $6, not 7$; US$ 5 or $10-$20, $HOME/$USER, `$x$` \\$x\\$", [], []),
        ("\\(x^2 and \\[ y and $$ z", [], []),
        ("```\n\\(x\\)\n```", [], []),
    )

    @pytest.mark.parametrize(("text", "inside", "displayed"), FORMULAS, ids=range(len(FORMULAS)))
    def test_formulas(self, opened, text, inside, displayed):
        opened.value("loadTemml()")
        found = shown(opened, text, "querySelectorAll('.math')", "[...it].map(one => [one.className, one.textContent])")
        words = [[kind, re.sub(r"[\s\u2061\u200b]", "", text)] for kind, text in found]
        assert [text for kind, text in words if kind == "math"] == inside
        assert [text for kind, text in words if kind == "math shown"] == displayed

    def test_what_is_no_formula_is_shown_as_it_is_written(self, opened):
        opened.value("loadTemml()")
        for text in (r"\(\nosuchthing{x}\)", r"costs $5 and $6, not 7$"):
            assert shown(opened, text, "textContent") == text

    def test_a_formula_shows_its_source_until_the_library_is_there(self, opened, server):
        server.script = [Says(["The sum is \\(x^2\\)."])]
        ask(opened, "Hi")
        opened.until("document.querySelector('#turns .math msup')")
        assert opened.text("#turns .text").startswith("The sum is")
        assert [url.partition("?")[0] for url in opened.fetched].count(server.url + MATH_PATH) == 1
        assert opened.complaints == []

    CODE = (
        ("python", "x = 'a' # b\ndef f(): return 1.5", {"string": ["'a'"], "comment": ["# b"], "number": ["1.5"],
                                                       "keyword": ["def", "return"]}),
        ("py", '"""one\ntwo""" if', {"string": ['"""one', 'two"""'], "keyword": ["if"]}),
        ("js", "/* a\nb */ let x = `c\nd`; // e", {"comment": ["/* a", "b */", "// e"], "keyword": ["let"],
                                                    "string": ["`c", "d`"]}),
        ("sql", "SELECT 'a' FROM t -- b", {"keyword": ["SELECT", "FROM"], "string": ["'a'"], "comment": ["-- b"]}),
        ("bash", "if [ $# ]; then # a\necho x#y", {"keyword": ["if", "then", "echo"], "comment": ["# a"]}),
        ("html", "<a href=\"x\">if</a><!-- b -->", {"keyword": ["<a", ">", "</a", ">"], "string": ['"x"'],
                                                     "comment": ["<!-- b -->"]}),
        ("nosuch", "if 'x'", {}),
    )  # fmt: skip

    @pytest.mark.parametrize(("language", "code", "colours"), CODE, ids=range(len(CODE)))
    def test_code_has_colours_and_stays_one_text(self, opened, language, code, colours):
        opened.value("CSS.highlights.clear()")
        text = f"```{language}\n{code}\n```"
        assert shown(opened, text, "querySelector('code').childNodes.length", pieces=[*text]) == 1
        found = opened.value("""Object.fromEntries([...CSS.highlights].map(([kind, ranges]) => [kind, [...ranges].map(
            one => one.startContainer.data.slice(one.startOffset, one.endOffset))]))""")
        assert found == colours

    def test_text_has_its_own_direction(self, opened, server):
        server.script = [Says(["שלום 42.\n\n- אחת\n\nabc\n\n```\nשלום\n```"])]
        ask(opened, "שאלה")
        answered(opened)
        direction = "[...document.querySelectorAll('.said, .text > *')].map(one => getComputedStyle(one).direction)"
        assert opened.value(direction) == ["rtl", "rtl", "rtl", "ltr", "ltr"]

    def test_a_table_and_code(self, opened, server):
        server.script = [Says(["| a | b |\n|:-:|--:|\n| 1 | x \\| y |\n\n```py\nif x:\n    y\n```\n"])]
        ask(opened, "Hi")
        answered(opened)
        assert opened.value("[...document.querySelectorAll('th, td')].map(one => one.textContent)") == [
            "a", "b", "1", "x | y",
        ]  # fmt: skip
        assert opened.value("document.querySelector('td').style.textAlign") == "center"
        assert opened.value("document.querySelector('pre code').textContent") == "if x:\n    y"
        opened.click(".code button")
        opened.until("document.querySelector('.code button').textContent === 'Copied'")
        assert opened.complaints == []

    def test_a_long_answer_costs_the_same_a_line(self, opened):
        took = opened.value("""(() => {
            const root = document.body.appendChild(document.createElement("div")), markdown = new Markdown(root);
            const text = "Some *words* of a line.\\n- an item\\n\\n```\\ncode\\n```\\n".repeat(4000), times = [];
            let first = null;
            for (let part = 0; part < 8; part++) {
                const start = performance.now();
                for (let at = part * text.length / 8; at < (part + 1) * text.length / 8; at += 12) {
                    markdown.push(text.slice(at, at + 12));
                    if (!first && root.childElementCount > 2) first = root.firstChild;
                }
                times.push(performance.now() - start);
            }
            const same = first === root.firstChild;
            root.remove();
            return [same, times];
        })()""")
        same, times = took
        assert same  # a block that is there is not made again
        # the least of some, for the machine may be busy; a cost that grew with the length would be five times the first
        assert min(times[4:]) < 3 * min(times[:2]) + 5

    @pytest.mark.parametrize(
        "text",
        [
            "*a " * 20000,
            "[" * 50000,
            "`" * 50000,
            "> " * 2000 + "x",
            "_" * 50000,
            "|" * 20000,
            "\\(" * 20000,
            "$a " * 20000,
            "\\begin{a}\n" * 3000,
            '```js\n"' + "a\\\\" * 20000,
        ],
    )
    def test_no_text_takes_long(self, opened, text):
        made = "(() => { const one = new Markdown(document.createElement('div')), start = performance.now();"

        def milliseconds(part):
            return opened.value(
                f"{made} one.push({json.dumps(part)}); one.end(); return performance.now() - start; }})()"
            )

        # four times the text: four times as long, or 16 times where the time is quadratic
        quarter, whole = (min(milliseconds(part) for _ in range(3)) for part in (text[: len(text) // 4], text))
        assert whole < 8 * quarter + 20

    def test_a_conversation_outlives_a_reload_and_ends_with_new(self, opened, server):
        server.script = [Says(["**Yes.**"], ["Hm."])]
        ask(opened, "Hi")
        answered(opened)
        facts = opened.text(".facts")
        opened.open(server.url)
        opened.until("document.querySelector('.answer strong')")
        assert (opened.text(".said"), opened.text(".text"), opened.text(".facts")) == ("Hi", "Yes.", facts)
        assert opened.text(".thought summary") == "Thought for 1 s"
        assert opened.value("JSON.stringify(messages())") == json.dumps(
            [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "**Yes.**", "reasoning_content": "Hm."},
            ],
            separators=(",", ":"),
        )
        opened.click("#new")
        assert opened.value("document.querySelectorAll('#turns > li').length") == 0
        opened.click("#bring-back")
        assert opened.text(".said") == "Hi"
        opened.click("#new")
        opened.open(server.url)
        assert opened.text(".said") == ""
        assert "Hi" not in opened.value("JSON.stringify(sessionStorage) + JSON.stringify(localStorage)")

    def test_a_saved_conversation_can_be_gone_on_with_in_a_terminal(self, opened, tmp_path):
        ask(opened, "Hi")
        answered(opened)
        opened.browser("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        opened.click("#save")
        assert comes((tmp_path / "conversation.json").exists)
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
        assert read_messages(tmp_path / "conversation.json") == messages
        assert opened.complaints == []

    def test_colours_follow_the_system_and_the_switch(self, opened, server):
        paper = "getComputedStyle(document.body).backgroundColor"
        light = opened.value(paper)
        opened.prefer("dark")
        opened.until(f"{paper} !== {json.dumps(light)}")
        assert opened.text("#theme") == "Light"
        opened.click("#theme")
        assert opened.value(paper) == light
        opened.open(server.url)
        assert opened.value(paper) == light
        opened.click("#theme")  # as the system again, and it is followed again
        opened.prefer("light")
        opened.until(f"{paper} === {json.dumps(light)}")

    @pytest.mark.parametrize("width", [320, 390, 1400])
    def test_no_width_has_to_be_scrolled_sideways(self, opened, server, width):
        opened.resize(width, 700, mobile=width < 500)
        table, formula = f"|{'a' * 90}|b|\n|-|-|\n|{'c' * 90}|d|", f"$${' + '.join('x' * 90)}$$"
        server.script = [Says([f"{'x' * 300}\n\n```\n{'y' * 300}\n```\n\n{table}\n\n{formula}\n"])]
        opened.value("loadTemml()")
        ask(opened, "z" * 300)
        answered(opened)
        assert opened.value("document.documentElement.scrollWidth") <= width
        opened.click("#open-settings")
        assert opened.value("document.getElementById('settings').getBoundingClientRect().right") <= width

    def test_a_screen_reader_hears_of_the_answer_once_and_every_control_has_a_name(self, opened, server):
        server.script = [Says(["word "] * 50, ["Hm. "] * 5, pause=0.005)]
        opened.value("""{
            globalThis.heard = [];
            const status = document.getElementById("status");
            new MutationObserver(() => heard.push(status.textContent)).observe(status, { childList: true });
        }""")
        ask(opened, "Hi")
        opened.until("document.querySelector('.answer').getAttribute('aria-busy') === 'true'")
        answered(opened)
        opened.until("heard.length >= 3")
        assert opened.value("heard") == ["Thinking", "Answering", "The answer is complete"]
        assert opened.value("document.querySelector('.answer').getAttribute('aria-busy')") == "false"
        tree = opened.call("Accessibility.getFullAXTree")["nodes"]
        controls = ("button", "textbox", "combobox", "spinbutton", "DisclosureTriangle", "link")
        found = [node for node in tree if not node["ignored"] and node["role"]["value"] in controls]
        assert len(found) > 8
        assert [node["role"]["value"] for node in found if not node.get("name", {}).get("value")] == []
        assert {"log", "status", "main", "banner", "dialog"} - {node["role"]["value"] for node in tree} <= {"dialog"}

    def test_every_control_can_be_reached_with_tab(self, opened):
        ask(opened, "Hi")
        answered(opened)
        reached = []
        for _ in range(12):
            opened.press("Tab")
            reached.append(opened.value("document.activeElement.id || document.activeElement.innerText"))
            seen = opened.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
            # the border of the box around the question changes its colour; behind the last comes the browser
            assert seen or opened.value("document.activeElement.matches('#question, body')")
        assert {"new", "save", "open-settings", "theme", "Edit", "Copy", "Try again", "question", "send"} <= {*reached}
