"""The texts whose log-probabilities are compared: three of each class. No torch."""

from collections.abc import Mapping, Sequence

from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.prompt import encode_messages, with_tools
from dsv4cli.engine.verification.conversations import TIME, WEATHER, called, result, said, user

_ENGLISH = (
    "The river rises in the northern hills and runs south for "
    "two hundred miles before it meets the sea. In spring the "
    "snow melts, and the water covers the fields on both banks; in late summer a child can walk across it. The towns "
    "along its course were built on the higher ground, and every one of them has a bridge and a mill.",
    "Bread needs four things: flour, water, salt and time. Mix the first three until no dry flour is left, cover the "
    "bowl, and wait twelve hours. Fold the dough, let it rise "
    "again, and bake it in a very hot oven until the crust is "
    "dark. What most people get wrong is the waiting.",
    "What is the capital of France? The capital of France is P"
    "aris. What is the capital of Italy? The capital of Italy "
    "is Rome. What is the opposite of hot? The opposite of hot is cold. What is the color of the sky on a clear day? "
    "The sky on a clear day is blue.",
)
_CHINESE = (
    "法国的首都是巴黎。意大利的首都是罗马。日本的首都是东京。中国的首都是北京，它有两千多万人口，是一座有三千年历史的城市。"
    "每年春天，城里的人都去山上看花；到了秋天，树叶变红，游客更多。",
    "学而时习之，不亦说乎？有朋自远方来，不亦乐乎？人不知而不愠，不亦君子乎？孔子的这几句话，中国的学生都会背。老师常说，"
    "读书要先懂意思，再记句子，最后用到生活里去。",
    "17加25等于42。30加12等于42。一百减去五十八也等于四十二。小明有三个苹果，小红有五个，他们一共有八个苹果。如果每人再买两个，"
    "那么一共就有十二个苹果。",
)
_CODE = (
    "def merge(left, right):\n    result = []\n    i = j = 0\n   "
    " while i < len(left) and j < len(right):\n        if left[i] "
    "<= right[j]:\n            result.append(left[i])\n          "
    "  i += 1\n        else:\n            result.append(right[j])"
    "\n            j += 1\n    return result + left[i:] + right[j:]\n",
    "SELECT city, COUNT(*) AS visits\nFROM trips\nWHERE started"
    "_at >= '2024-01-01'\nGROUP BY city\nHAVING COUNT(*) > 10\n"
    "ORDER BY visits DESC, city ASC\nLIMIT 20;\n",
    '{"name": "dsv4", "version": "1.0.0", "scripts": {"test": "pytest -q", "lint": "ruff check ."}, "files": ["a.py", '
    '"b.py"], "private": true, "limits": {"memory": 16, "cpu": 2.5}}\n',
)
_MATH = (
    "17 * 25: 7 * 5 = 35; 1 * 5 + 3 = 8; 85. 17 * 2 = 34. 85 +"
    " 340 = 425. So 17 * 25 = 425. 46 * 38 = 1748. 318 + 457 = "
    "775. 1000 - 425 = 575. 575 / 25 = 23. 23 * 25 = 575.",
    "Let $f(x) = x^2 - 4x + 3$. Then $f(x) = (x - 1)(x - 3)$, so $f(x) = 0$ if and only if $x = 1$ or $x = 3$. The "
    "derivative is $f'(x) = 2x - 4$, which is zero at $x = 2$, where $f(2) = -1$ is the minimum.",
    "Proof. Assume that $\\sqrt{2} = p/q$ with integers $p, q$"
    " that have no common factor. Then $p^2 = 2q^2$, so $p$ is "
    "even, say $p = 2r$. Then $4r^2 = 2q^2$, so $q^2 = 2r^2$ and $q$ is even as well, a contradiction.",
)


def _calls() -> tuple[str, ...]:
    weather = called(("c1", "get_weather", {"city": "Paris", "unit": "celsius"}))
    answered = [user("What is the weather in Paris?"), weather]
    answered.append(result("c1", '{"temperature": 21, "unit": "celsius", "sky": "sunny"}'))
    answered.append(said("It is 21 degrees celsius and sunny in Paris."))
    time = called(("c1", "get_time", {"city": "Rome"}))
    both = called(("c1", "get_weather", {"city": "Oslo", "unit": "celsius"}), ("c2", "get_time", {"city": "Rome"}))
    conversations = (
        (answered, [WEATHER]),
        ([user("What time is it in Rome?"), time, result("c1", '{"time": "12:30"}')], [TIME]),
        ([user("What is the weather in Oslo? What time is it in Rome?"), both], [WEATHER, TIME]),
    )
    # without thinking, all releases have the same prompts
    return tuple(
        "".join(encode_messages(with_tools(messages, tools), release="v4", thinking=False))
        for messages, tools in conversations
    )


def number_texts() -> Mapping[str, Sequence[str]]:
    """Return the texts by class. Each begins with BOS."""
    plain = {"english": _ENGLISH, "chinese": _CHINESE, "code": _CODE, "math": _MATH}
    return {kind: tuple(tokens.BOS + text for text in texts) for kind, texts in plain.items()} | {"tools": _calls()}
