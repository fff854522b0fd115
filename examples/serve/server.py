"""A small server in the manner of OpenAI's, for the transformer of examples/train/chars.py.

    python server.py --checkpoint ~/.shoal/checkpoints/j1          listens on $PORT, else 8000
    shoal serve chat --probe /health -- python server.py --checkpoint ~/.shoal/checkpoints/j1

It knows /v1/chat/completions (whole, or streamed by server-sent events), /v1/models and /health. A
token is one character. Without a checkpoint its weights are random, and /health says so.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "train"))

from model import ALPHABET, CONTEXT, CharTransformer, encode
from shoal.train.checkpoints import CheckpointStore, Damage, collect, put_back
from shoal.train.errors import TrainError
from shoal.train.saver import read

NAME = "chars"
BODY_BYTES_MAX = 1 << 20
TOKENS_MAX = 2048
SILENCE_S = 60  # of a client that keeps its connection


class BadRequest(Exception):
    """What is wrong with a request, and in which field."""

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field = field
        self.status = status


class Writer:
    """The model, and where its weights are from. One thread at a time computes."""

    def __init__(self, directory: str) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        self._model = CharTransformer().to(self.device).eval()
        self.weights = load(self._model, directory)
        self._turn = threading.Lock()

    def write(self, text: str, length: int, temperature: float, seed: int | None) -> Iterator[str]:
        """Goes on with a text, character by character."""
        chance = torch.Generator(self.device)
        chance.manual_seed(seed) if seed is not None else chance.seed()
        numbers = encode(text or "\n")[None].to(self.device)
        for _ in range(length):
            with self._turn, torch.inference_mode():
                scores = self._model(numbers[:, -CONTEXT:])[:, -1]
                if temperature == 0:
                    following = scores.argmax(-1, keepdim=True)
                else:
                    likely = (scores / temperature).softmax(-1)
                    following = torch.multinomial(likely, 1, generator=chance)
            numbers = torch.cat([numbers[:, -CONTEXT:], following], 1)
            yield ALPHABET[int(following)]


def load(model: CharTransformer, directory: str) -> str:
    """The newest checkpoint that is whole; returns what the weights are."""
    if not directory:
        return "random: no --checkpoint was given"
    store = CheckpointStore(os.path.expanduser(directory))
    for found in store.find():
        if not found.whole:
            continue
        try:
            store.verify(found.name, store.manifest(found.name).files)
        except Damage as damage:
            print(f"{found.name} is damaged and will not be used: {damage}", file=sys.stderr)
            continue
        state = {"model": model}
        collected = collect(state)
        read(collected, store, found.name, None)
        put_back(state, collected)
        return f"step {found.step}, from {found.name}"
    return f"random: there is no checkpoint in {directory}"


class Ask:
    """A request for a completion, checked field by field."""

    def __init__(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        self.model = body.get("model", NAME)
        if self.model != NAME:
            raise BadRequest(f"there is no model {self.model!r}; use {NAME!r}", "model", 404)
        self.text = conversation(body.get("messages"))
        self.length = self._number(body, "max_tokens", 1, TOKENS_MAX, 64, int)
        self.temperature = self._number(body, "temperature", 0, 10, 0.8, (int, float))
        self.seed = self._number(body, "seed", 0, 2**63 - 1, None, int)
        self.stream = body.get("stream", False)
        if not isinstance(self.stream, bool):
            raise BadRequest("must be true or false", "stream")

    @staticmethod
    def _number(body: dict, name: str, least: float, most: float, usual: Any, kind: Any) -> Any:
        value = body.get(name)
        if value is None:
            return usual
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
            raise BadRequest(f"must be a number from {least} to {most}", name)
        return value


def conversation(messages: Any) -> str:
    """What was said, line by line: the model goes on with it."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest('must be a list such as [{"role": "user", "content": "..."}]', "messages")
    lines = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):  # in parts, of which text is all that can be read
            texts = [part.get("text") for part in content if isinstance(part, dict)]
            content = "".join(text for text in texts if isinstance(text, str))
        if not isinstance(content, str):
            raise BadRequest("each needs a content that is text", "messages")
        lines.append(content)
    return "\n".join(lines)


class Busy:
    """Counts answers under way, so that an end can let them end."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._count, seconds)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SILENCE_S
    disable_nagle_algorithm = True
    writer: Writer
    busy = Busy()

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, {"status": "ok", "weights": self.writer.weights})
        elif self.path == "/v1/models":
            model = {"id": NAME, "object": "model", "created": 0, "owned_by": "shoal"}
            self._send(200, {"object": "list", "data": [model]})
        else:
            self._refuse(BadRequest(f"there is no {self.path[:80]}", status=404))

    def do_POST(self) -> None:
        with self.busy:
            self._complete()

    def _complete(self) -> None:
        try:
            body = self._body()
            if self.path != "/v1/chat/completions":
                raise BadRequest(f"there is no {self.path[:80]}", status=404)
            ask = Ask(body)
        except BadRequest as problem:
            self._refuse(problem)
            return
        answer = self.writer.write(ask.text, ask.length, ask.temperature, ask.seed)
        if ask.stream:
            self._stream(answer)
        else:
            self._whole(ask, answer)

    def _body(self) -> Any:
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > BODY_BYTES_MAX:
            self.close_connection = True  # what follows was not read
            status = 413 if length.isdecimal() else 411
            raise BadRequest(f"content-length must be from 0 to {BODY_BYTES_MAX}", status=status)
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not JSON: {str(error)[:100]}") from None

    def _whole(self, ask: Ask, answer: Iterator[str]) -> None:
        text = "".join(answer)
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        usage = {
            "prompt_tokens": len(ask.text),
            "completion_tokens": len(text),
            "total_tokens": len(ask.text) + len(text),
        }
        self._send(200, {**heading("chat.completion"), "choices": [choice], "usage": usage})

    def _stream(self, answer: Iterator[str]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("cache-control", "no-cache")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        head = heading("chat.completion.chunk")
        try:
            self._event(head, {"role": "assistant", "content": ""})
            for character in answer:
                self._event(head, {"content": character})
            self._event(head, {}, "length")
            self._chunk(b"data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:  # the client is gone: nobody reads the rest
            self.close_connection = True

    def _event(self, head: dict[str, Any], delta: dict[str, str], why: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": why}
        self._chunk(b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _refuse(self, problem: BadRequest) -> None:
        error = {"message": str(problem), "type": "invalid_request_error", "param": problem.field}
        self._send(problem.status, {"error": error})

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        if self.close_connection:
            self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """The gateway keeps an access log."""


def heading(kind: str) -> dict[str, Any]:
    made = int(time.time())
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": made, "model": NAME}


class Server(ThreadingHTTPServer):
    daemon_threads = True  # connections that are kept and idle hold nobody up
    request_queue_size = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", default="", help="a directory that shoal.train wrote")
    options = parser.parse_args()
    torch.set_num_threads(1)  # more would only hinder the other replicas
    try:
        Handler.writer = Writer(options.checkpoint)
    except TrainError as error:
        sys.exit(f"error: {error}")
    server = Server(("0.0.0.0", int(os.environ.get("PORT", "8000"))), Handler)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    weights = Handler.writer.weights
    print(f"port {server.server_port}, {Handler.writer.device}, weights: {weights}", flush=True)
    server.serve_forever()
    server.server_close()
    Handler.busy.wait(SILENCE_S)


if __name__ == "__main__":
    main()
