"""The forms of OpenAI's interface: what a request asks for, and the bytes of answers."""

from __future__ import annotations

import json
import time
from typing import Any

from harness.engine.text import render

ANSWER_TOKENS = {"completions": 16, "chat": 1_024}  # where a request names no number


class BadRequest(Exception):
    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Asked:
    """A request that was read."""

    __slots__ = ("chat", "ends", "key", "made", "model", "most", "prompt", "stream", "usage")

    def __init__(self, body: bytes, chat: bool, key: str) -> None:
        try:
            asked = json.loads(body)
        except ValueError as error:
            raise BadRequest(f"the body is not JSON: {error}") from None
        if not isinstance(asked, dict):
            raise BadRequest("the body is not an object")
        self.chat, self.key, self.made = chat, key, int(time.time())
        self.model = str(asked.get("model") or "")
        self.stream = asked.get("stream") is True
        self.usage = bool((asked.get("stream_options") or {}).get("include_usage"))
        self.ends = not asked.get("ignore_eos")
        if asked.get("n", 1) != 1:
            raise BadRequest("'n' must be 1")
        most = asked.get("max_completion_tokens") or asked.get("max_tokens")
        self.most = ANSWER_TOKENS["chat" if chat else "completions"] if most is None else most
        if not isinstance(self.most, int) or self.most < 1:
            raise BadRequest("'max_tokens' must be a positive integer")
        self.prompt = _chat(asked.get("messages")) if chat else _text(asked.get("prompt"))

    @property
    def kind(self) -> str:
        if not self.chat:
            return "text_completion"
        return "chat.completion.chunk" if self.stream else "chat.completion"

    def whole(self, text: str, finish: str, usage: dict[str, Any]) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice |= {"text": text, "logprobs": None}
        return json.dumps({"choices": [choice], **self._named(), "usage": usage}).encode()

    def piece(self, text: str | None, finish: str | None = None) -> bytes:
        """A part of the text, or with None the end (in a chat, without `finish`, the beginning)."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        if not self.chat:
            choice |= {"text": text or "", "logprobs": None}
        elif text is not None:
            choice["delta"] = {"content": text}
        else:
            choice["delta"] = {} if finish else {"role": "assistant", "content": None}
        return event({"choices": [choice], **self._named()})

    def last(self, usage: dict[str, Any]) -> bytes:
        return event({"choices": [], **self._named(), "usage": usage})

    def _named(self) -> dict[str, Any]:
        return {"id": self.key, "object": self.kind, "created": self.made, "model": self.model}


def _text(prompt: object) -> str:
    if not isinstance(prompt, str):
        raise BadRequest("'prompt' must be a text")
    return prompt


def _chat(messages: object) -> str:
    """llama.cpp continues whenever the last message is the assistant's; vLLM when asked."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("'messages' is required")
    if not all(isinstance(each, dict) for each in messages):
        raise BadRequest("'messages' must be objects")
    return render(messages, messages[-1].get("role") == "assistant")


def usage(prompt: int, cached: int, answer: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def error(message: str, status: int) -> bytes:
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    return json.dumps({"error": {"message": message, "type": kind, "code": status}}).encode()
