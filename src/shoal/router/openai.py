"""OpenAI's interface: what a request asks for, as far as the router must know, and errors in its
form. Pure: bytes in, bytes out."""

from __future__ import annotations

import re
from typing import Any

import msgspec

MODEL_CHARS_MAX = 256
TOKENS_MAX = 1 << 28  # of a request, whatever an engine says
MODELS = b"/v1/models"
COMPLETIONS, CHAT = b"/v1/completions", b"/v1/chat/completions"
# Those that the shared address offers: what they do ends with their answer.
SHARED = frozenset(
    b"/v1/completions /v1/chat/completions /v1/models /v1/embeddings /v1/messages /v1/moderations "
    b"/v1/rerank /v1/responses /v1/score /tokenize /detokenize".split()
)
# Text under these rules cannot be told from its beginning: the rule would begin again.
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
RULED = (*_GUIDED, "grammar", "json_schema", "regex", "ebnf", "structural_tag")

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
# What a decoder raises at bytes from a stranger.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
encode = msgspec.json.encode
decode = msgspec.json.decode


class Wrong(Exception):
    """A request that is refused, with its status and OpenAI's code."""

    def __init__(self, status: int, message: str, code: str, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> bytes:
        return error(self.status, str(self), self.code)


def error(status: int, message: str, code: str) -> bytes:
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return encode({"error": {"message": message, "type": kind, "param": None, "code": code}})


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """As OpenAI's older routes say it, and its newer one and Anthropic's."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: Details | None = None

    @property
    def prompt(self) -> int:
        return _count(self.prompt_tokens or self.input_tokens)

    @property
    def generated(self) -> int:
        return _count(self.completion_tokens or self.output_tokens)

    @property
    def cached(self) -> int | None:
        details = self.prompt_tokens_details or self.input_tokens_details
        if details is None or details.cached_tokens is None:
            return None
        return min(self.prompt, _count(details.cached_tokens))

    def saw(self, name: bytes, count: int) -> None:
        if name == b"input_tokens":
            self.input_tokens = max(self.input_tokens, count)
        else:
            self.output_tokens = max(self.output_tokens, count)


def _count(said: int) -> int:
    return min(TOKENS_MAX, max(0, said))


# In events of other routes, whose text is not read.
COUNTS = re.compile(rb'"(input_tokens|output_tokens)"\s*:\s*(\d{1,12})(?=\D)')
COUNT_BYTES = 48  # such a count, so that one is found that came in two parts


class Ask:
    """A request with a body of JSON."""

    def __init__(self, path: bytes, body: bytes) -> None:
        try:
            self.fields = _fields.decode(body)
        except UNREADABLE:
            raise Wrong(400, "the body is not a JSON object", "invalid_json") from None
        self.chat = path == CHAT
        self.text = self.chat or path == COMPLETIONS
        self.model = self._get("model", str) or ""
        if len(self.model) > MODEL_CHARS_MAX:
            why = f"model is longer than {MODEL_CHARS_MAX} characters; /v1/models lists the models"
            raise Wrong(400, why, "invalid_model")
        self.stream = self.text and bool(self._get("stream", bool | None))
        options = self._get("stream_options", dict[str, Any] | None) or {}
        self.wants_usage = bool(options.get("include_usage"))

    def _get(self, name: str, kind: Any) -> Any:
        raw = self.fields.get(name)
        if raw is None:
            return None
        try:
            return decode(raw, type=kind)
        except UNREADABLE:
            raise Wrong(400, f"{name} has the wrong type", "invalid_type") from None

    def rendered(self) -> str:
        """The text that an engine makes tokens of, or near to it: requests whose texts begin alike
        begin alike for the engine."""
        if not self.chat:
            prompt = self._get("prompt", Any) if "prompt" in self.fields else ""
            return prompt if isinstance(prompt, str) else encode(prompt).decode()
        parts = (
            [str(bytes(self.fields["tools"]), "utf-8", "replace")] if "tools" in self.fields else []
        )
        for message in self._messages():
            parts += (f"\n<{message.get('role')}>\n", _plain(message.get("content")))
            if message.get("tool_calls"):
                parts.append(encode(message["tool_calls"]).decode())
        return "".join(parts)

    def followed(self, text: str, answer: str) -> str:
        """How the next prompt of the same session begins."""
        return f"{text}\n<assistant>\n{answer}" if self.chat else text + answer

    def _messages(self) -> list[dict[str, Any]]:
        found = self._get("messages", list[dict[str, Any]])
        return found if found is not None else []

    def body(self, changes: dict[str, Any]) -> bytes:
        """As the replica gets it. Always written again: of a field that is there twice, the replica
        sees the one that the router has read."""
        return encode({**self.fields, **changes})

    def stuck(self) -> str:
        """Why an answer to this cannot be continued by another replica; "" if it can."""
        get = self._get
        counts = [get(name, Any) for name in ("n", "best_of")]
        choice = get("tool_choice", Any)
        shape = get("response_format", Any)
        if any(isinstance(one, int) and one > 1 for one in counts):
            return "it has more than one answer (n)"
        if any(get(name, Any) for name in ("logprobs", "top_logprobs", "echo", "suffix")):
            return "it has logprobs, echo or suffix"
        if isinstance(shape, dict) and shape.get("type", "text") != "text":
            return "it has a response_format"
        if any(get(name, Any) for name in RULED):
            return "its text follows a grammar"
        if choice == "required" or isinstance(choice, dict):
            return "it must call a tool"
        if not self.chat and not isinstance(get("prompt", Any), str):
            return "its prompt is not one text"
        return ""

    def continued(self, text: str, tokens: int) -> dict[str, Any]:
        """What to change so that the answer goes on after `text`, of which there are `tokens`."""
        changes: dict[str, Any] = {}
        for name in ("max_tokens", "max_completion_tokens", "min_tokens", "n_predict"):
            most = self._get(name, Any)
            if isinstance(most, int) and most > 0:
                changes[name] = max(most - tokens, 0 if name == "min_tokens" else 1)
        if not self.chat:
            return {**changes, "prompt": self._get("prompt", str) + text}
        messages = self._messages()
        if self._get("continue_final_message", Any) and messages:
            last = {**messages[-1], "content": _plain(messages[-1].get("content")) + text}
            messages = [*messages[:-1], last]
        else:
            messages = [*messages, {"role": "assistant", "content": text}]
        more = {"continue_final_message": True, "add_generation_prompt": False}
        return {**changes, "messages": messages, **more}

    def left(self, tokens: int) -> bool:
        """May the answer have more tokens than these?"""
        limits = [self._get(name, Any) for name in ("max_tokens", "max_completion_tokens")]
        return all(tokens < one for one in limits if isinstance(one, int) and one > 0)


def _plain(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    plain = (one.get("text") if isinstance(one, dict) else None for one in content)
    return "".join(
        text if isinstance(text, str) else encode(one).decode()
        for text, one in zip(plain, content, strict=True)
    )
