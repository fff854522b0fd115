"""Events of a stream, as the router reads them: whole ones, in parts, and nonsense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.router.openai import CHAT, Ask
from shoal.router.stream import EVENT_BYTES_MAX, Stream

ASK = b'{"messages": [], "stream": true}'
WORD = b'data: {"choices": [{"delta": {"content": "a"}}]}'


@given(st.lists(st.sampled_from([b"\n\n", b"\r\n\r\n", b"\n\r\n"])), st.integers(1, 40))
def test_events_are_the_same_however_they_are_cut(ends: list[bytes], size: int) -> None:
    stream, text = Stream(Ask(CHAT, ASK)), b"".join(WORD + end for end in ends)
    out = [stream.feed(text[at : at + size]) for at in range(0, len(text), size)]
    assert b"".join(out) == text
    assert (stream.tokens, stream.text) == (len(ends), "a" * len(ends))


@pytest.mark.parametrize("payload", [b'{"id": "\xff"}', b'{"x": ' + b"[" * 200_000, b"{"])
def test_an_event_that_nobody_can_read_is_passed_on(payload: bytes) -> None:
    stream, event = Stream(Ask(CHAT, ASK)), b"data: " + payload + b"\n\n"
    assert stream.feed(event) == event
    assert not stream.failure


def test_an_event_without_an_end_is_given_up() -> None:
    stream = Stream(Ask(CHAT, ASK))
    failures = set()
    for _ in range(EVENT_BYTES_MAX // 65_536):
        assert stream.feed(b"x" * 65_536) == b""
        failures.add(stream.failure)
    stream.feed(b"x")
    assert (failures, stream.failure) == ({""}, "an event has no end")
