"""What is hidden in output: every byte of a secret, wherever a piece of output begins or ends."""

from __future__ import annotations

import base64
import json
import os
import tempfile
import time
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.agent.secrets import PIECE_BYTES, PIECES_MAX, Mask, Piece, pieces_of
from shoal.agent.shipping import Output

VALUE = b"p4ss/w:rd+x=1"


@pytest.mark.parametrize(
    "printed",
    [
        VALUE,
        quote(VALUE, safe="").encode(),
        base64.b64encode(VALUE).rstrip(b"="),
        base64.urlsafe_b64encode(VALUE).rstrip(b"="),
        VALUE.hex().encode(),
        json.dumps(VALUE.decode()).strip('"').encode(),
    ],
)
def test_a_value_and_its_usual_encodings_are_hidden_and_nothing_moves(printed: bytes) -> None:
    text = b"before " + printed + b" after\n"
    assert Mask([VALUE]).hide(text) == b"before " + b"*" * len(printed) + b" after\n"


@pytest.mark.parametrize("user", [b"me:", b"you:", b"them:"])
def test_a_password_in_a_header_of_basic_authorization_is_hidden(user: bytes) -> None:
    """All but the characters that it shares with its neighbors."""
    header = base64.b64encode(user + VALUE)
    hidden = Mask([VALUE]).hide(header)
    assert hidden.count(b"*") >= len(header) * len(VALUE) // len(user + VALUE) - 6
    assert VALUE[2:-2] not in base64.b64decode(hidden.replace(b"*", b"A"))


def test_lines_of_a_key_are_hidden_one_by_one() -> None:
    key = b"-----BEGIN KEY-----\nMIIEvgIBADANBg\nkqhkiG9w0BAQEF\n}\n-----END KEY-----\n"
    shown = Mask([key]).hide(b"2: kqhkiG9w0BAQEF\n3: }\n")
    assert shown == b"2: **************\n3: }\n"


def test_short_values_are_not_hidden() -> None:
    assert not Mask([b"abc", b"  ab\n"])
    assert Mask([b"abc"]).hide(b"abcabc") == b"abcabc"
    assert Mask([]).hide(b"anything", cut_before=True, cut_after=True) == b"anything"


def test_at_a_cut_the_rest_of_a_secret_is_hidden() -> None:
    mask = Mask([b"0123456789"])
    assert mask.hide(b"456789 so", cut_before=True) == b"****** so"
    assert mask.hide(b"it is 01234", cut_after=True) == b"it is *****"
    assert mask.hide(b"789 012", cut_before=True, cut_after=True) == b"789 012", "too short"


def test_the_number_of_texts_to_look_for_is_bounded() -> None:
    many = [b"%064d" % number * 16 * 64 for number in range(64)]
    found = pieces_of(many)
    assert len(found) == PIECES_MAX
    assert max(map(len, found)) <= PIECE_BYTES


def naive(texts: list[bytes], data: bytes) -> bytes:
    hidden = bytearray(data)
    for text in texts:
        for at in range(len(data) - len(text) + 1):
            if data[at : at + len(text)] == text:
                hidden[at : at + len(text)] = b"*" * len(text)
    return bytes(hidden)


few = st.binary(min_size=4, max_size=12).map(lambda data: bytes(b"ab"[byte % 2] for byte in data))


@settings(max_examples=400, deadline=None)
@given(few, st.lists(st.sampled_from([b"a", b"b"]), max_size=60).map(b"".join))
def test_overlapping_occurrences_are_all_found(text: bytes, data: bytes) -> None:
    hidden = bytearray(data)
    for begin, end in Piece(text).spans(data):
        hidden[begin:end] = b"*" * (end - begin)
    assert bytes(hidden) == naive([text], data)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(few, min_size=1, max_size=3),
    st.lists(st.sampled_from([b"a", b"b", b"\n"]), max_size=80).map(b"".join),
    st.integers(0, 80),
    st.integers(0, 80),
)
def test_a_piece_with_what_is_around_it_is_hidden_like_the_whole(
    values: list[bytes], data: bytes, begin: int, length: int
) -> None:
    mask = Mask(values)
    lead = data[max(0, begin - mask.reach) : begin]
    piece = data[begin : begin + length]
    follow = data[begin + length :][: mask.reach]
    around = mask.hide(lead + piece + follow)[len(lead) :][: len(piece)]
    assert around == mask.hide(data)[begin : begin + length]


def test_no_value_makes_hiding_slow() -> None:
    """The agent does this for every piece of output, and a tenant chooses value and output. The
    bound is generous: a search that is quadratic would take minutes."""
    data = b"a" * 256 * 1024
    values = [b"a" * 64_000, b"a" * 40_000 + b"b", b"ab" * 30_000]
    began = time.process_time()
    mask = Mask(values)
    for chunk in (data, b"ab" * 128 * 1024, data[:-1] + b"b"):
        mask.hide(chunk)
        mask.begun(chunk)
    assert time.process_time() - began < 10


@settings(max_examples=200, deadline=None)
@given(few, st.lists(st.sampled_from([b"a", b"b"]), max_size=20).map(b"".join))
def test_what_begins_or_ends_at_an_edge_is_found(text: bytes, data: bytes) -> None:
    counts = range(1, min(len(text) - 1, len(data)) + 1)
    assert Piece(text).begun(data) == max([n for n in counts if data.endswith(text[:n])] or [0])
    rests = [n for n in counts if n >= 4 and data.startswith(text[-n:])]
    assert Piece(text).rest_at(data) == max(rests or [0])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(few, min_size=1, max_size=2),
    st.lists(st.lists(st.sampled_from([b"a", b"b", b"\n"]), max_size=20).map(b"".join), max_size=8),
    st.lists(st.integers(1, 16), min_size=1, max_size=8),
    st.integers(0, 60),
)
def test_output_is_shipped_alike_however_it_is_written_read_and_sent_again(
    values: list[bytes], written: list[bytes], sizes: list[int], again: int
) -> None:
    mask, whole = Mask(values), b"".join(written)
    with tempfile.TemporaryFile() as file:
        output = Output(file.fileno())
        output.kept, output.mask = 0, mask
        shipped = b""
        for number, part in enumerate([*written, b""]):
            os.pwrite(file.fileno(), part, os.fstat(file.fileno()).st_size)
            output.over = number == len(written)
            if number == len(written) // 2:  # a controller that has lost the end of its file
                shipped = shipped[:again]
                output.sent = output.kept = len(shipped)
            for size in sizes if not output.over else sizes * 100:
                start, data = output.next(size)
                data = output.hidden(start, data)
                assert start == len(shipped)
                shipped += data
                output.sent = len(shipped)
    assert shipped == mask.hide(whole, cut_after=True)
