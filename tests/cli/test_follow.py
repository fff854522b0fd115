"""Where the last lines of a log begin, whatever of it is kept and however fast it grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.cli.screen.follow import Reader
from shoal.model.views import LogView

SIZE = 1 << 30


def reader(fetch: Callable[[int], tuple[int, bytes, int]]) -> Reader:
    class Client:
        def logs(self, job: str, *, offset: int, **_: Any) -> LogView:
            start, data, end = fetch(offset)
            return LogView(
                attempt=1, member=0, offset=start, next_offset=end, ended=False, data=data
            )

    return Reader(lambda call: call(Client()), "j1", 1, [0], None)  # type: ignore[arg-type]


def test_a_log_that_grows_faster_than_it_is_read_still_has_last_lines() -> None:
    def fetch(offset: int) -> tuple[int, bytes, int]:
        start = SIZE + offset if offset < 0 else offset
        return start, b"y\n" * 1000, start + 2000  # whatever is asked for, there is more

    read = reader(fetch)
    read.skip_to_tail(10)
    assert read.open[0] >= SIZE - 20


def test_the_last_lines_are_found_behind_a_part_that_is_not_kept() -> None:
    def fetch(offset: int) -> tuple[int, bytes, int]:
        if offset < 0:
            return SIZE - 60_000, b"before the gap\n", SIZE - 59_985
        if offset < SIZE - 100:
            return offset, b"\n[shoal: 59,885 bytes of output are not kept here]\n", SIZE - 100
        return (offset, b"late line\n" * 10, SIZE) if offset < SIZE else (SIZE, b"", SIZE)

    read = reader(fetch)
    read.skip_to_tail(3)
    assert read.open[0] == SIZE - 30
