"""A job's output: bytes stay bytes in a pipe, and a terminal stays unharmed."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cli.screen.output import LINE_BYTES_MAX, TerminalText, TextOutput


def written(chunks: list[tuple[int, bytes]], *, prefixed: bool, terminal: bool) -> bytes:
    out = io.BytesIO()
    sink = TextOutput(prefixed=prefixed, terminal=terminal, out=out)
    for member, data in chunks:
        sink.write(1, member, data)
    sink.end()
    return out.getvalue()


def test_a_pipe_gets_the_bytes_as_they_are() -> None:
    data = bytes(range(256)) + b"\x1b[2J no newline"
    assert written([(0, data)], prefixed=False, terminal=False) == data


def test_members_are_told_apart_by_whole_lines() -> None:
    chunks = [(0, b"he"), (1, b"other\n"), (0, b"llo\nrest")]
    assert written(chunks, prefixed=True, terminal=False) == b"[1] other\n[0] hello\n[0] rest\n"


def test_a_line_without_end_is_let_go_in_pieces() -> None:
    out = io.BytesIO()
    sink = TextOutput(prefixed=True, terminal=False, out=out)
    sink.write(1, 0, b"x" * (LINE_BYTES_MAX + 1))
    assert len(out.getvalue()) > LINE_BYTES_MAX


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"plain\r\n\tx\n", "plain\r\n\tx\n"),
        ("größe 鱼\n".encode(), "größe 鱼\n"),
        (b"bad \xff byte", "bad \ufffd byte"),
        (b"a\x1b[2Jb", "ab"),
        (b"a\x1b[31mred", "a\x1b[31mred\x1b[0m"),
        (b"a\x1b]0;title\x07b", "ab"),
        (b"a\x1b]52;c;aGk=\x1b\\b", "ab"),
        (b"a\x1bcb", "ab"),
        (b"a\x1b[?1049hb", "ab"),
        (b"a\x1bP1;2|x\x1b\\b", "ab"),
        (b"bell\x07 nul\x00", "bell\ufffd nul\ufffd"),
        ("c1 \x9b2J".encode(), "c1 \ufffd2J"),
        (b"cut \x1b[", "cut "),
    ],
)
def test_a_terminal_gets_text_and_colors_only(data: bytes, text: str) -> None:
    assert written([(0, data)], prefixed=False, terminal=True).decode() == text


PIECES = st.sampled_from(
    [b"\x1b", b"[", b"]", b"2J", b"31m", b"\x07", b"a", b"\\", b"P", b"\xc3", b"\xbc", b" ", b"\n"]
)


@given(st.lists(PIECES).map(b"".join), st.integers(0, 30))
def test_where_the_output_is_cut_does_not_matter(data: bytes, cut: int) -> None:
    whole = written([(0, data)], prefixed=False, terminal=True)
    parts = written([(0, data[:cut]), (0, data[cut:])], prefixed=False, terminal=True)
    assert parts == whole


@given(st.lists(PIECES))
def test_no_sequence_but_a_color_gets_through(pieces: list[bytes]) -> None:
    text = TerminalText()
    shown = text.feed(b"".join(pieces)) + text.feed(b"", final=True)
    while "\x1b" in shown:
        _, _, shown = shown.partition("\x1b")
        assert shown.startswith("[")
        assert shown.lstrip("[0123456789;:").startswith("m")
