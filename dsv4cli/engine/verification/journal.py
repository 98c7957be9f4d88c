"""The journal of a verification: each response is written when it arrives, so that a killed run can continue. No torch.

The first line names the server; each further line has one response, with a digest of its request.
"""

import hashlib
import json
import threading
from pathlib import Path

from dsv4cli.engine.chat.answer_file import LineFile
from dsv4cli.engine.verification.calls import ApiCall, ServerReply
from dsv4cli.errors import UsageError

SCHEMA = "dsv4.verify-journal/1"


class ReplyJournal:
    """The file of `--out`, which this process locks until it is closed."""

    def __init__(self, path: Path, url: str) -> None:
        """Open the journal to continue it, or create it.

        Raises:
            UsageError: the path is another file, or the journal of another server.
        """
        self._file, self._lock = LineFile(path), threading.Lock()
        self._kept: dict[tuple[str, str], ServerReply] = {}
        header = {"schema": SCHEMA, "url": url}
        try:
            self._read(path, header)
        except UsageError:
            self.close()
            raise
        if not self._file.lines:
            self._file.add(header, 0)

    def __len__(self) -> int:
        """Return the number of responses."""
        return len(self._kept)

    def close(self) -> None:
        """Close the file and release its lock."""
        self._file.close()

    def find(self, call: ApiCall) -> ServerReply | None:
        """Return the response to exactly this request; None if the journal has none."""
        with self._lock:
            return self._kept.get((call.key, _digest(call)))

    def add(self, call: ApiCall, reply: ServerReply) -> None:
        """Append a response, unless the journal has it. It is on disk when this returns. Raises CannotWrite."""
        name = (call.key, _digest(call))
        with self._lock:
            if name not in self._kept:
                self._file.add({"key": name[0], "request": name[1], "reply": reply.record()}, len(self._kept))
                self._kept[name] = reply

    def _read(self, path: Path, header: dict[str, str]) -> None:
        for number, line in enumerate(self._file.lines):
            try:
                record = json.loads(line)
                if number:
                    self._kept[record["key"], record["request"]] = ServerReply(**record["reply"])
                elif record["schema"] != SCHEMA:
                    raise ValueError(record)
                elif record != header:
                    raise UsageError(
                        f"{path} has the responses of another server, {record['url']}", "use another file for --out"
                    )
            except (ValueError, TypeError, LookupError, RecursionError):
                raise _no_journal(path, number + 1) from None
        if not self._file.remove_rest(f'{{"schema": "{SCHEMA}"'.encode()):
            raise _no_journal(path, 1)


def _digest(call: ApiCall) -> str:
    words = f"{call.method} {call.path} {call.most}".encode() + (call.content or b"")
    return hashlib.sha256(words).hexdigest()[:16]


def _no_journal(path: Path, line: int) -> UsageError:
    return UsageError(f"{path}, line {line}: not a journal of dsv4 verify", "use another file for --out")
