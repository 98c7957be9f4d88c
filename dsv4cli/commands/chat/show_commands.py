"""Slash commands of `dsv4 chat` that show the conversation: its messages, tokens, statistics and context use."""

import json

from dsv4cli.commands.chat.turn import Chat
from dsv4cli.commands.draft_report import draft_words
from dsv4cli.commands.offload_report import report_traffic
from dsv4cli.errors import UsageError
from dsv4cli.output import counted

# prefix of a message in `show_history`, by role
SIGNS = {"user": "> ", "assistant": "", "tool": "→ "}


def show_history(chat: Chat, _: str) -> None:
    """Print the conversation as plain text: questions after the prompt sign, answers, tool calls and results."""
    from dsv4cli.engine.text.turns import text_of

    if not chat.session.messages:
        chat.out.status("the conversation is empty")
    for message in chat.session.messages:
        role, text = message["role"], text_of(message.get("content"))
        if text:
            chat.out.stream(f"{SIGNS.get(role, f'{role}: ')}{text}\n")
        for call in message.get("tool_calls") or ():
            chat.out.line(f"{call['function']['name']}({call['function']['arguments']})")


def show_stats(chat: Chat, _: str) -> None:
    """Print token counts and speeds of the session."""
    stats, last = chat.stats, chat.stats.last
    rows = [
        ["answers", f"{stats.turns:,}"],
        ["tokens generated", f"{stats.sampled:,}"],
        ["prompt tokens prefilled", f"{stats.prefilled:,}"],
        ["prompt tokens from the cache", f"{stats.reused:,}"],
    ]
    if last.tokens:
        rows.append(["last answer: time to first token", f"{last.first:.2f} s"])
    if last.rate:
        rows.append(["last answer: speed", last.speed])
    drafts = chat.conversation.all_drafts
    if drafts is not None and drafts.steps:
        rows.append(["drafts", draft_words(drafts)])
    chat.out.table(rows)
    report_traffic(chat.out, chat.conversation.offload)


def show_tokens(chat: Chat, text: str) -> None:
    """Print the token ids of a text, or the number of tokens of each message."""
    if text:
        ids = chat.conversation.text_ids(text)
        chat.out.line(f"{counted(len(ids), 'token')}: {' '.join(map(str, ids))}")
        return
    before = 0
    messages = chat.session.prompt()
    for number, message in enumerate(messages, 1):
        tokens = chat.conversation.tokens(messages[:number])
        chat.out.line(f"{tokens - before:7,}  {message['role']}: {excerpt(str(message.get('content') or ''))}")
        before = tokens
    chat.out.line(f"{before:7,}  total")


def show_context(chat: Chat, _: str) -> None:
    """Print how much of the context is used."""
    used, context = (
        chat.conversation.tokens(chat.window.messages(chat.conversation)) if chat.session.messages else 0,
        chat.conversation.context,
    )
    if context is None:
        chat.out.line(f"{counted(used, 'token')} used; the server does not report its context limit")
    else:
        chat.out.line(f"{used:,} of {context:,} tokens used, {max(context - used, 0):,} left")
    if chat.window.left_out:
        chat.out.line(
            f"the oldest {counted(chat.window.left_out, 'message')} are not in the prompt: the context is full"
        )


def copy(chat: Chat, _: str) -> None:
    """Copy the last answer to the terminal's clipboard. Raises UsageError."""
    if not chat.view.copies:
        raise UsageError("this terminal does not support copying", "use /save FILE or /json")
    text = str(chat.session.last_answer().get("content") or "")
    chat.out.clipboard(text)
    chat.out.status(f"{counted(len(text), 'character')} sent to the terminal's clipboard")


def show_json(chat: Chat, _: str) -> None:
    """Print the conversation as JSON messages."""
    chat.out.stream(json.dumps(chat.session.document(), ensure_ascii=False, indent=1) + "\n")


def excerpt(text: str) -> str:
    """Return the beginning of a text on one line, at most 60 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"
