"""A stream of tokens on its way to a client: what was sent already, and how another replica goes
on. Pure: bytes in, bytes out."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from shoal.router.openai import UNREADABLE, Ask, Usage, decode, encode

EVENT_BYTES_MAX = 4 << 20
TEXT_CHARS_MAX = 2 << 20  # remembered of a stream; a longer one cannot be continued
END_OF_EVENT = re.compile(rb"\r?\n\r?\n")
END_BYTES = 3  # what of such an end may have come before
DONE = b"[DONE]"
OWN_FAULT = 500  # errors below are the request's


class Failed(Exception):
    """The replica has ended the stream, and not well."""


class Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | dict[str, Any] | None = None


class Chunk(msgspec.Struct):
    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[Choice] = []
    usage: Usage | None = None
    error: dict[str, Any] | str | None = None


_chunk = msgspec.json.Decoder(Chunk)


class Stream:
    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._buffer = bytearray()
        self._texts: list[str] = []
        self._chars = 0
        self._head: dict[str, Any] = {}  # id, created and model of the first chunk
        self._role = False
        self._stuck = ""
        self._skip = ""  # sent already, and comes again
        self._before = 0  # tokens of replicas before this one
        self.again = 0  # replicas that failed in the middle
        self.tokens = 0
        self.finished = False
        self.done = False
        self.understood = False
        self.failure = ""  # the replica has ended the stream, and not well
        self.usage: Usage | None = None

    @property
    def text(self) -> str:
        """What the client has got."""
        return "".join(self._texts) + self._skip

    def feed(self, data: bytes) -> bytes:
        """What the client gets for these bytes of a replica."""
        known = max(0, len(self._buffer) - END_BYTES)  # an event has no end before it
        self._buffer += data
        out: list[bytes] = []
        start = 0
        try:
            for match in END_OF_EVENT.finditer(self._buffer, known):
                event = bytes(self._buffer[start : match.end()])
                start = match.end()
                out.append(self._event(event))
        except Failed as failed:  # what came before it counts
            self.failure = str(failed)
        del self._buffer[:start]
        if len(self._buffer) > EVENT_BYTES_MAX:
            self.failure = "an event has no end"
        return b"".join(out)

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(b"data:"):
            return event if not self.again else b""  # a comment that keeps a connection open
        payload = event[5:].strip()
        if payload == DONE:
            self.done = True
            return event
        try:
            chunk = _chunk.decode(payload)
        except UNREADABLE:
            return event  # not ours to understand
        if chunk.error is not None:
            code = chunk.error.get("code") if isinstance(chunk.error, dict) else None
            if isinstance(code, int) and code < OWN_FAULT:
                self.done = True
                return event
            raise Failed("the replica reported an error")
        self.understood = True
        return self._token(event, payload, chunk)

    def _token(self, event: bytes, payload: bytes, chunk: Chunk) -> bytes:
        if chunk.usage is not None:
            self.usage = chunk.usage
            if not chunk.choices and not self._ask.wants_usage:
                return b""  # the router asked for it, not the client
        if not self._head:
            self._head = {"id": chunk.id, "created": chunk.created, "model": chunk.model}
        for choice in chunk.choices:
            end = choice.finish_reason
            if end == "abort" or (isinstance(end, dict) and end.get("type") == "abort"):
                raise Failed("the replica aborted the request")
            self._remember(choice)
            self.finished = self.finished or end is not None
        if not self.again:
            return event
        return self._rewritten(decode(payload))

    def _remember(self, choice: Choice) -> None:
        delta = choice.delta or Delta()
        text = choice.text or delta.content or ""
        other = bool(delta.tool_calls or delta.function_call)
        if other:
            self._stuck = "a call of a tool was being sent"
        elif delta.reasoning_content or delta.reasoning:
            self._stuck = "its thoughts were being sent"
            other = True
        self.tokens += bool(text or other)
        if not text:
            return
        self._chars += len(text)
        if self._chars > TEXT_CHARS_MAX:
            self._stuck, self._texts = f"it is longer than {TEXT_CHARS_MAX} characters", []
        else:
            self._texts.append(text)

    # -- at another replica

    def problem(self) -> str:
        """Why it cannot go on elsewhere; "" if it can, or if nothing was sent."""
        return (self._stuck or self._ask.stuck()) if self.tokens else ""

    def over(self) -> bytes | None:
        """If only its end is missing: that end."""
        if self.tokens and not self.finished and not self._ask.left(self.tokens):
            end: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None}
            end["delta" if self._ask.chat else "text"] = {} if self._ask.chat else ""
            kind = "chat.completion.chunk" if self._ask.chat else "text_completion"
            chunk = {**self._head, "object": kind, "choices": [end]}
            return b"data: " + encode(chunk) + b"\n\ndata: [DONE]\n\n"
        return b"data: [DONE]\n\n" if self.finished else None

    def move(self) -> dict[str, Any]:
        """What to change in the request for the next replica. In a chat, blanks at the end are made
        again, because templates strip them."""
        self.again += 1
        self.failure = ""
        self._buffer = bytearray()
        self.usage = None
        self._role = self._role or bool(self._head)
        if not self.tokens:
            return {}
        text = self.text
        kept = text.rstrip() if self._ask.chat else text
        blanks = len(text) - len(kept) - len(self._skip)
        for piece in reversed(self._texts):
            if len(piece) > blanks:
                break
            self.tokens, blanks = self.tokens - 1, blanks - len(piece)
        self._texts, self._skip = [kept], text[len(kept) :]
        self._before = self.tokens
        return self._ask.continued(kept, self._before) if kept else {}

    def _rewritten(self, chunk: dict[str, Any]) -> bytes:
        """A chunk of a later replica, as if it came from the first."""
        chunk |= {name: value for name, value in self._head.items() if value}
        kept = [one for one in chunk.get("choices", []) if self._continue(one)]
        usage = chunk.get("usage")
        if usage:
            prompt = max(0, usage.get("prompt_tokens", 0) - self._before)
            made = usage.get("completion_tokens", 0) + self._before
            whole = {"prompt_tokens": prompt, "completion_tokens": made}
            usage |= {**whole, "total_tokens": prompt + made}
            self.usage = msgspec.convert(usage, Usage, strict=False)
        if not kept and chunk.get("choices"):
            return b""
        chunk["choices"] = kept
        return b"data: " + encode(chunk) + b"\n\n"

    def _continue(self, choice: dict[str, Any]) -> bool:
        """Whether anything of it is new to the client."""
        place = choice.get("delta") if self._ask.chat else choice
        name = "content" if self._ask.chat else "text"
        if not isinstance(place, dict):
            return True
        if self._role:
            place.pop("role", None)
        text = place.get(name)
        if isinstance(text, str) and self._skip:
            place[name] = self._new(text)
        empty = not place.get(name) and not any(
            place.get(other) for other in ("tool_calls", "reasoning_content", "reasoning")
        )
        return not empty or choice.get("finish_reason") is not None

    def _new(self, text: str) -> str:
        """What of it the client has not got. Blanks that come again are counted once."""
        if self._skip.startswith(text):
            self._skip = self._skip[len(text) :]
            new = ""
        elif text.startswith(self._skip):
            new, self._skip = text[len(self._skip) :], ""
        else:
            self._texts.insert(-1, self._skip)
            new, self._skip = text, ""
        return new
