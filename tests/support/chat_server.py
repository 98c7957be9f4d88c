"""A server on loopback that speaks OpenAI's chat completions and says what it is told to, with all that goes wrong."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dsv4cli.engine.server.page import MATH_PATH, math_library, page

MODEL, CONTEXT = "fake-v4", 4096


@dataclass
class Says:
    """One answer: thinking and text in pieces, so many seconds apart, then calls of tools.

    reasoning: the field that the thinking is in. usage: None for a server that counts nothing. status, headers,
    message: a refusal in its place. cut: the connection ends after so many pieces. damage: a line of the stream in the
    place of its end. finish: empty where nothing is said of it. done: the last line comes.
    """

    text: Sequence[str] = ()
    thought: Sequence[str] = ()
    calls: Sequence[dict[str, Any]] = ()
    finish: str = "stop"
    pause: float = 0.0
    reasoning: str = "reasoning_content"
    usage: dict[str, Any] | None = field(default_factory=lambda: {"prompt_tokens": 20, "completion_tokens": 5})
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    message: str = ""
    cut: int | None = None
    damage: str = ""
    done: bool = True

    def deltas(self) -> Iterator[dict[str, Any]]:
        """Its pieces, each as a delta."""
        yield {"role": "assistant", "content": ""}
        yield from ({self.reasoning: piece} for piece in self.thought)
        yield from ({"content": piece} for piece in self.text)
        for index, call in enumerate(self.calls):
            name, arguments = call["name"], call["arguments"]
            head = {"index": index, "id": f"c{index}", "type": "function", "function": {"name": name, "arguments": ""}}
            yield {"tool_calls": [head]}
            for part in (arguments[:3], arguments[3:]):
                yield {"tool_calls": [{"index": index, "function": {"arguments": part}}]}


class ChatServer:
    """Answers are taken from `script`, one a question, the last one again and again. bodies: what was asked, as JSON.

    key: what it wants as an API key. count_after: /tokenize answers once it is set. counts: it has /tokenize, for
    which a byte is a token; counted: how often it was asked. answered: an answer was sent to its end. ended: the
    other side has closed a connection in an answer. stopped: nothing is answered any more.
    """

    def __init__(self) -> None:
        self.script: list[Says] = [Says(["Yes."])]
        self.bodies: list[dict[str, Any]] = []
        self.models: list[dict[str, Any]] = [{"id": MODEL, "max_model_len": CONTEXT}]
        self.key = ""
        self.counts, self.counted = True, 0
        self.count_after = threading.Event()
        self.count_after.set()
        self.answered, self.ended = threading.Event(), threading.Event()
        self.stopped = False
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if not server.stopped:
                    server.get(self)

            def do_POST(self) -> None:
                if not server.stopped:
                    server.post(self)

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator["ChatServer"]:
        """Serves until the end."""
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self.stop()
            thread.join()

    def stop(self) -> None:
        """Nobody listens any more, nor on a connection that a browser has opened ahead; harmless the second time."""
        self.stopped = True
        self.count_after.set()
        self._server.shutdown()
        self._server.server_close()

    def get(self, handler: BaseHTTPRequestHandler) -> None:
        """The page, or the models."""
        if handler.path == "/":
            body, policy = page()
            _send(handler, 200, body, {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": policy})
        elif handler.path.partition("?")[0] == MATH_PATH:
            _send(handler, 200, math_library(), {"Content-Type": "text/javascript"})
        elif handler.path == "/v1/models" and self._admits(handler):
            _send_json(handler, 200, {"object": "list", "data": self.models})

    def post(self, handler: BaseHTTPRequestHandler) -> None:
        """An answer, or the tokens of a text."""
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        if not self._admits(handler):
            return
        if handler.path == "/tokenize":
            self.counted += 1
            self.count_after.wait()
            if not self.stopped:  # who asked is gone, and the error would be printed into a later test
                self._tokenize(handler, body)
            return
        if handler.path != "/v1/chat/completions":
            _send_json(handler, 404, {"detail": "Not Found"})
            return
        self.bodies.append(body)
        says = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if says.status != 200:
            _send_json(handler, says.status, {"error": {"message": says.message}}, says.headers)
            return
        try:
            self._stream(handler, says)
            self.answered.set()
        except OSError:
            self.ended.set()

    def _admits(self, handler: BaseHTTPRequestHandler) -> bool:
        if self.key and handler.headers["Authorization"] != f"Bearer {self.key}":
            _send_json(handler, 401, {"error": {"message": "no such key"}})
            return False
        return True

    def _tokenize(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if not self.counts:
            _send_json(handler, 404, {"detail": "Not Found"})
            return
        text = body["prompt"] if "prompt" in body else "".join(str(one.get("content")) for one in body["messages"])
        _send_json(handler, 200, {"count": len(text.encode()), "tokens": list(text.encode())})

    def _stream(self, handler: BaseHTTPRequestHandler, says: Says) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        for number, delta in enumerate(says.deltas()):
            if number == says.cut:
                return
            _event(handler, {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}, says.pause)
        if says.damage:
            handler.wfile.write(f"data: {says.damage}\n\n".encode())
            return
        finish = ("tool_calls" if says.calls else says.finish) if says.finish else None
        _event(handler, {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        if says.usage is not None:
            _event(handler, {"choices": [], "usage": says.usage})
        if says.done:
            handler.wfile.write(b"data: [DONE]\n\n")


def _event(handler: BaseHTTPRequestHandler, value: dict[str, Any], pause: float = 0.0) -> None:
    """In two parts, so that a line, and a character in it, may come in two."""
    content = f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()
    middle = len(content) // 2
    for part in (content[:middle], content[middle:]):
        handler.wfile.write(part)
        handler.wfile.flush()
        time.sleep(pause / 2)


def _send_json(handler: BaseHTTPRequestHandler, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
    _send(handler, status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})


def _send(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
    handler.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(body))}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)
