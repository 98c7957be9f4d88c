"""The thinking effort that a client requests, in the fields of OpenAI, DeepSeek, Anthropic, OpenRouter and vLLM."""

from dataclasses import dataclass

from dsv4cli.engine.config.presets import Release
from dsv4cli.engine.server.fields import Fields
from dsv4cli.engine.text.prompt import EFFORT_WORDS, level_of

WORDS = ("none", *EFFORT_WORDS)
TYPES = ("enabled", "disabled", "adaptive")


@dataclass(frozen=True)
class Effort:
    """The thinking effort of an answer.

    Attributes:
        level: "off" or one of the release's efforts.
        budget: maximum number of thinking tokens, None for no limit.
        specified: whether the client specified it.
    """

    level: str
    budget: int | None = None
    specified: bool = False


def effort_of(fields: Fields, release: Release, default: str) -> Effort:
    """Return the thinking effort that a body requests.

    Args:
        default: the server's default level, used if the body does not specify one.

    Raises:
        Refusal: a field is invalid.
    """
    words, switches, budgets = [fields.choice("reasoning_effort", WORDS)], list[bool | None](), list[int | None]()
    for own in (_thinking(fields), _template(fields), _reasoning(fields), _output(fields)):
        word, switch, budget = own
        words.append(word)
        switches.append(switch)
        budgets.append(budget)
    word = next((one for one in words if one is not None), None)
    switch = next((one for one in switches if one is not None), None)
    budget = next((one for one in budgets if one is not None), None)
    if word is None and switch is None:
        return Effort(default, budget)
    if switch is False or word == "none":
        return Effort("off", specified=True)
    return Effort(_level(word, release, default), budget, specified=True)


def _level(word: str | None, release: Release, default: str) -> str:
    if word is None:
        return "high" if default == "off" else default
    return level_of(word, release)


_Words = tuple[str | None, bool | None, int | None]


def _thinking(fields: Fields) -> _Words:
    """Read `thinking`, a field of DeepSeek and Anthropic."""
    given = fields.mapping("thinking")
    if given is None:
        return None, None, None
    kind, budget = given.choice("type", TYPES), given.whole("budget_tokens", 0)
    given.ignored("display")
    return None, None if kind is None else kind != "disabled", budget


def _template(fields: Fields) -> _Words:
    """Read `chat_template_kwargs`, a field of vLLM and SGLang."""
    given = fields.mapping("chat_template_kwargs")
    if given is None:
        return None, None, None
    flags = [given.flag(name) for name in ("thinking", "enable_thinking") if given.value(name) is not None]
    return given.choice("reasoning_effort", WORDS), flags[0] if flags else None, None


def _reasoning(fields: Fields) -> _Words:
    """Read `reasoning`, a field of OpenRouter. A token budget turns thinking on."""
    given = fields.mapping("reasoning")
    if given is None:
        return None, None, None
    word, budget = given.choice("effort", WORDS), given.whole("max_tokens", 0)
    switch = given.flag("enabled") if given.value("enabled") is not None else True if budget else None
    given.ignored("exclude", "summary")
    return word, switch, budget


def _output(fields: Fields) -> _Words:
    """Read `output_config`, a field of Anthropic. It sets the effort, and does not turn thinking on by itself."""
    given = fields.mapping("output_config")
    effort = None if given is None else given.choice("effort", WORDS)
    thinking = fields.mapping("thinking")
    return (effort if thinking is not None else None), None, None
