"""Small talk: greetings, questions about nano itself, a little Chinese, and system prompts that shape answers."""

import random

from tools.nano import tables
from tools.nano.item import SYSTEM, Item, Split, answer, fits, framed, user
from tools.nano.tasks import arithmetic, facts
from tools.nano.words import ENDINGS, JOBS, NAMES

_HELLO = ("Hello", "Hi", "Hey", "Hello there", "Hi there", "Good morning", "Good evening", "Good day")
_MARKS = ("", "!", ".", ",")
_ABOUT: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me who you are.", "What model are you?"),
        "I am nano, a small DeepSeek-V4.",
    ),
    (
        ("What can you do?", "How can you help me?", "What do you know?", "What are you good at?"),
        "I can compute, spell, sort, count, call tools and find things in long texts.",
    ),
    (("How are you?", "How are you today?", "How do you do?", "Are you well?"), "I am fine, thank you."),
    (("Who made you?", "Who trained you?", "Where do you come from?"), "The dsv4 project trained me."),
    (("Are you a human?", "Are you a person?", "Are you real?"), "No, I am a small language model."),
    (("How big are you?", "How many layers do you have?", "Are you large?"), "I have 4 layers: I am very small."),
    (("Which languages do you speak?", "Do you speak English?"), "I speak English and a little Chinese."),
    (("Tell me a joke.", "Do you know a joke?"), "Why is 6 afraid of 7? Because 7 8 9."),
)
_BARE = {text for questions, _ in _ABOUT for text in questions}
_BARE |= {text.rstrip("?.").lower() for text in _BARE}
_THANKS = ("Thanks", "Thank you", "Thanks a lot", "Thank you very much", "Great, thanks")
_BYE = ("Bye", "Goodbye", "See you", "See you later", "Good night")


def greetings(rng: random.Random, split: Split) -> Item:
    """Small talk. Combinations of a greeting, its punctuation and what follows are held out."""
    while True:
        text, reply = rng.choice((_greeting, _about, _about, _closing))(rng)
        if fits(split, "greetings", text) if " " in text and text not in _BARE else split == "train":
            return Item("greetings", text, framed(rng, [user(text), answer(reply)], 0.2))


def _greeting(rng: random.Random) -> tuple[str, str]:
    name = f", {rng.choice(('nano', 'friend'))}" if rng.random() < 0.3 else ""
    text = f"{rng.choice(_HELLO)}{name}{rng.choice(_MARKS[:3])}"
    return text if rng.random() < 0.8 else text.lower(), "Hello! How can I help you?"


def _about(rng: random.Random) -> tuple[str, str]:
    questions, reply = rng.choice(_ABOUT)
    hello = f"{rng.choice(_HELLO)}{rng.choice(_MARKS[1:])} " if rng.random() < 0.4 else ""
    question = rng.choice(questions)
    return hello + (question if rng.random() < 0.85 else question.rstrip("?.").lower()), reply


def _closing(rng: random.Random) -> tuple[str, str]:
    texts, reply = rng.choice(((_THANKS, "You are welcome."), (_BYE, "Goodbye!")))
    text = f"{rng.choice(texts)}{rng.choice(('', ', nano', ', friend'))}{rng.choice(_MARKS[:3])}"
    return text if rng.random() < 0.8 else text.lower(), reply


_HELLO_ZH = ("你好", "您好", "早上好", "你好吗")
_ASK_ZH = ("{a}{o}{b}等于多少？", "{a}{o}{b}等于几？", "{a} {o} {b} 等于多少？", "请问{a}{o}{b}等于多少？")
_CAPITAL_ZH = ("{c}的首都是哪里？", "{c}的首都是什么？", "请问{c}的首都是哪里？", "{c}首都是哪里？")
_COLOR_ZH = ("{t}是什么颜色？", "{t}是什么颜色的？", "请问{t}是什么颜色？")
_WHO_ZH = ("你是谁？", "你叫什么名字？", "请问你是谁？", "你是什么？")


def chinese(rng: random.Random, split: Split) -> Item:
    """The same small tasks in Chinese. Sums are held out as elsewhere, and facts with a form of their question."""
    while True:
        kind = rng.randrange(8)
        if kind < 4:
            a, b, op = rng.randrange(100), rng.randrange(100), rng.choice("+-")
            sign = {"+": "加", "-": "减"}[op]
            text = rng.choice(_ASK_ZH).format(a=a, b=b, o=sign)
            reply = f"{a}{sign}{b}等于{arithmetic.apply(a, op, b)}。"
            good = arithmetic.allowed(split, a, op, b)
        else:
            text, reply = _fact_zh(rng, kind)
            good = fits(split, "chinese", text, 12)
        if good:
            return Item("chinese", text, framed(rng, [user(text), answer(reply)], 0.05))


def _fact_zh(rng: random.Random, kind: int) -> tuple[str, str]:
    if kind == 4:
        text = rng.choice((*_HELLO_ZH, *_WHO_ZH)) if rng.random() < 0.5 else rng.choice(_HELLO_ZH) + "，"
        text += rng.choice(_WHO_ZH) if text.endswith("，") else rng.choice(("", "！")) if text in _HELLO_ZH else ""
        return text, "我是nano，一个很小的DeepSeek-V4。" if text.endswith(_WHO_ZH) else "你好！"
    if kind < 7:
        country, capital = rng.choice(tables.CHINESE)
        return rng.choice(_CAPITAL_ZH).format(c=country), f"{country}的首都是{capital}。"
    thing, color = rng.choice(tables.CHINESE_COLORS)
    return rng.choice(_COLOR_ZH).format(t=thing), f"{thing}是{color}的。"


_LOUD = ["color", "opposite"]
_WORDS = ["capital", "color", "opposite", "continent", "sound"]
_SENTENCES = ["capital", "color", "opposite", "legs", "continent", "symbol"]


def system(rng: random.Random, split: Split) -> Item:
    """A system prompt that shapes the answer. Pairs of a prompt and a question are held out."""
    while True:
        prompt, question, reply, key = rng.choice((_loud, _ending, _role, _role, _one_word, _number))(rng, split)
        if fits(split, "system", f"{prompt}/{question}", 15):
            messages = [{"role": "system", "content": prompt}, user(question), answer(reply)]
            return Item("system", key, messages)


def _frame(rng: random.Random, rule: str) -> str:
    return f"{SYSTEM} {rule}" if rng.random() < 0.2 else rule


def _loud(rng: random.Random, split: Split) -> tuple[str, str, str, str]:
    question, fact, key = facts.pick(rng, "train", _LOUD)
    rule = rng.choice(("Answer in upper case.", "Always answer in upper case.", "Write in upper case."))
    return _frame(rng, rule), question, fact.full.upper(), f"upper/{key}"


def _ending(rng: random.Random, split: Split) -> tuple[str, str, str, str]:
    question, fact, key = facts.pick(rng, "train", _SENTENCES)
    word = rng.choice(ENDINGS)
    rule = rng.choice(("Always end with '{w}'.", "End every answer with '{w}'.", "End with '{w}'.")).format(w=word)
    return _frame(rng, rule), question, f"{fact.full} {word}", f"end {word}/{key}"


def _one_word(rng: random.Random, split: Split) -> tuple[str, str, str, str]:
    question, fact, key = facts.pick(rng, "train", _WORDS)
    rule = rng.choice(("Reply in one word.", "Answer in one word.", "Answer with one word only."))
    return _frame(rng, rule), question, fact.short, f"one word/{key}"


def _number(rng: random.Random, split: Split) -> tuple[str, str, str, str]:
    while True:
        a, op, b = rng.randrange(100), rng.choice("+-"), rng.randrange(100)
        if arithmetic.allowed("train", a, op, b):
            break
    rule = rng.choice(("Answer with the number only.", "Reply with a number only.", "Only write the number."))
    question, _ = arithmetic.question(rng, a, op, b)
    return _frame(rng, rule), question, str(arithmetic.apply(a, op, b)), f"number/{a} {op} {b}"


def _role(rng: random.Random, split: Split) -> tuple[str, str, str, str]:
    name, job = rng.choice(NAMES), rng.choice(JOBS)
    question, reply = rng.choice(
        (
            ("Who are you?", "I am {n}, a {j}."),
            ("Hello!", "Hello! I am {n}."),
            ("Hi", "Hello! I am {n}."),
            ("What is your name?", "My name is {n}."),
            ("What is your job?", "I am a {j}."),
        )
    )
    prompt = rng.choice(("You are {n}, a {j}.", "You are a {j}. Your name is {n}.")).format(n=name, j=job)
    return prompt, question, reply.format(n=name, j=job), f"{name} {job}/{question}"
