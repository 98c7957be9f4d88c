"""Settings that can change while `dsv4 chat` runs: system message, reasoning effort, sampling, limits, model."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dsv4cli.commands.chat.turn import Chat
from dsv4cli.errors import UsageError

SETTINGS: Mapping[str, type[int] | type[float]] = {
    "temperature": float,
    "top-p": float,
    "top-k": int,
    "min-p": float,
    "presence-penalty": float,
    "frequency-penalty": float,
    "repetition-penalty": float,
    "seed": int,
    "max-tokens": int,
    "think-budget": int,
}


def system(chat: Chat, text: str) -> None:
    """Show or set the system message."""
    if text:
        chat.session.system = text
        chat.save()
    chat.out.status(f"system message: {chat.session.system or 'none'}")


def think(chat: Chat, level: str) -> None:
    """Show or set the reasoning effort. Raises UsageError."""
    if level:
        chat.conversation.think(level)
        chat.choose(replace(chat.session.choices, think=level))
    chat.out.status(f"thinking: {chat.conversation.effort or 'off'}")


def model(chat: Chat, name: str) -> None:
    """Show the model, or switch to another one. Raises UsageError, and the errors of loading."""
    if name:
        chat.models.change(chat, name)
    else:
        chat.out.status(f"model: {chat.models.name}")


def show_thinking(chat: Chat, word: str) -> None:
    """Show the last reasoning, or turn streaming of reasoning on or off. Raises UsageError."""
    if not word:
        thought = chat.session.last_answer().get("reasoning_content")
        chat.out.reasoning(f"{thought or 'the last answer has no reasoning'}\n")
        return
    if word not in ("on", "off"):
        raise UsageError(f"/show-thinking cannot be {word}", "use on or off, or no argument to show the last reasoning")
    chat.view.show_thinking = word == "on"


def set_value(chat: Chat, words: str) -> None:
    """Show all settings in `SETTINGS`, or show or set one of them. Raises UsageError."""
    name, _, value = words.replace("=", " ").partition(" ")
    name = name.replace("_", "-")
    if not words:
        chat.out.table([[name, str(_setting(chat, name))] for name in SETTINGS])
        return
    if name not in SETTINGS:
        raise UsageError(f"there is no setting {name!r}", f"use one of {', '.join(SETTINGS)}")
    if value.strip():
        _set(chat, name, value)
    chat.out.status(f"{name}: {_setting(chat, name)}")


def _set(chat: Chat, name: str, value: str) -> None:
    try:
        number = SETTINGS[name](value)
    except ValueError:
        raise UsageError(f"{name} cannot be {value.strip()!r}", f"use a number, for example /set {name}=1") from None
    if name == "max-tokens":
        chat.conversation.limits = replace(chat.conversation.limits, max_tokens=int(number))
    elif name == "think-budget":
        chat.think_budget = check_budget(int(number))
    else:
        field = name.replace("-", "_")
        given: dict[str, Any] = {field: number}
        seed = int(number) if name == "seed" else chat.sampling.seed
        chat.sampling = chat.sampling.chosen(given.get("temperature"), given.get("top_p"), seed, given)
        if name != "seed":
            chat.choose(replace(chat.session.choices, **given))


def _setting(chat: Chat, name: str) -> object:
    from dsv4cli.engine.chat.remote import RemoteSampling

    if name == "max-tokens":
        return chat.conversation.limits.max_tokens
    if name == "think-budget":
        return "none" if chat.think_budget is None else chat.think_budget
    sampling, field = chat.sampling, name.replace("-", "_")
    if isinstance(sampling, RemoteSampling) and field not in {"seed", *sampling.given}:
        return "the server's own"
    return getattr(sampling, field)


def check_budget(tokens: int | None) -> int | None:
    """Return a thinking budget in tokens, after checking it. Raises UsageError."""
    from dsv4cli.engine.settings import require

    require(tokens is None or tokens >= 0, "--think-budget", tokens, "use 0 or more tokens")
    return tokens
