"""The audit log: every line is there, a changed past shows, and a full disk is not silent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from shoal.control import audit
from shoal.control import audit as audit_queue
from shoal.control.alarms import Alarms
from shoal.control.audit import AuditBroken, AuditLog, newest_first, verify, without_secret
from shoal.model.people import AuditEntry


def entry(number: int = 0, **fields: Any) -> AuditEntry:
    return AuditEntry(seq=0, at_ms=number, who="ann", verb="jobs.cancel", on=f"j{number}", **fields)


class Kept:
    """A log on the disk, written by as many controllers as there are calls."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.alarms = Alarms()

    def run(self, work: Callable[[AuditLog], Coroutine[Any, Any, None]]) -> None:
        async def both() -> None:
            log = AuditLog(self.path, self.alarms)
            try:
                async with asyncio.timeout(60):
                    await work(log)
            finally:
                await log.close()

        asyncio.run(both())

    def write(self, *numbers: int) -> None:
        async def work(log: AuditLog) -> None:
            for number in numbers:
                await log.write(entry(number))

        self.run(work)

    @property
    def numbers(self) -> list[int]:
        return [one.at_ms for one in newest_first(self.path)][::-1]


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "audit.log")


def test_lines_follow_each_other_over_controllers(kept: Kept) -> None:
    for start in (0, 3, 6):
        kept.write(start, start + 1, start + 2)
    assert kept.numbers == list(range(9))
    first, newest = verify(kept.path)
    assert first is not None
    assert newest is not None
    assert (first.seq, newest.seq, newest.on) == (1, 9, "j8")
    assert kept.path.stat().st_mode & 0o777 == 0o600
    assert (kept.path.parent / "audit.mark").stat().st_mode & 0o777 == 0o600


def test_requests_of_one_turn_share_one_write(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    write = os.write

    def counted(handle: int, data: memoryview) -> int:
        if os.path.samestat(os.fstat(handle), kept.path.stat()):
            writes.append(len(data))
        return write(handle, data)

    monkeypatch.setattr(os, "write", counted)

    async def work(log: AuditLog) -> None:
        await asyncio.gather(*(log.write(entry(number)) for number in range(100)))
        assert len(newest_lines(kept)) == 100  # answered only when it is in the file
        assert len(writes) == 1

    kept.run(work)


def newest_lines(kept: Kept) -> list[bytes]:
    return kept.path.read_bytes().splitlines()


def _edit(lines: list[bytes]) -> list[bytes]:
    return [
        line.replace(b'"who":"ann"', b'"who":"eve"') if b"j4" in line else line for line in lines
    ]


DAMAGES: list[tuple[Callable[[list[bytes]], list[bytes]], str]] = [
    (_edit, r"line 5 of audit.log \(number 5\) was changed"),
    (lambda lines: lines[:4] + lines[5:], "line 5 of audit.log has number 6 but follows 4"),
    (
        lambda lines: [*lines[:4], lines[5], lines[4], *lines[6:]],
        "line 5 .* number 6 but follows 4",
    ),
    (lambda lines: lines[:-1], "the log ends at number 8, but number 9 was written"),
    (lambda _: [], "the log is empty, but number 9 was written"),
    (lambda lines: lines[3:], "line 1 of audit.log has number 4: the lines before it are missing"),
    (lambda lines: [*lines, lines[-1]], "line 10 .* number 9 but follows 9"),
    (lambda lines: [*lines[:4], b"{}", *lines[5:]], "line 5 of audit.log was changed"),
    (lambda lines: [*lines[:-1], lines[-1][:40]], "line 9 of audit.log was changed"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_a_changed_past_is_found_and_the_line_is_named(
    damage: Callable[[list[bytes]], list[bytes]], words: str, kept: Kept
) -> None:
    kept.write(*range(9))
    changed = damage(newest_lines(kept))
    kept.path.write_bytes(b"".join(line + b"\n" for line in changed))
    with pytest.raises(AuditBroken, match=words):
        verify(kept.path)


def test_a_new_end_in_place_of_the_old_one_is_found_by_the_mark(kept: Kept) -> None:
    """The lines form a chain, but not the chain that was written."""
    kept.write(*range(5))
    mark = (kept.path.parent / "audit.mark").read_bytes()
    kept.path.write_bytes(b"".join(line + b"\n" for line in newest_lines(kept)[:3]))
    (kept.path.parent / "audit.mark").unlink()
    kept.write(13, 14, 15)
    (kept.path.parent / "audit.mark").write_bytes(mark)
    with pytest.raises(AuditBroken, match=r"line 5 of audit.log is not the line that was written"):
        verify(kept.path)
    (kept.path.parent / "audit.mark").unlink()
    with pytest.raises(AuditBroken, match=r"audit.mark is missing"):
        verify(kept.path)


def test_a_log_that_was_cut_off_raises_an_alarm_and_can_never_look_whole_again(kept: Kept) -> None:
    kept.write(*range(5))
    kept.path.write_bytes(b"".join(line + b"\n" for line in newest_lines(kept)[:3]))
    kept.write(5, 6)
    assert "ends at line 3, but line 5 was written" in kept.alarms.texts[0]
    with pytest.raises(AuditBroken, match=r"line 4 of audit.log has number 6 but follows 3"):
        verify(kept.path)


def test_half_a_line_of_a_crash_is_dropped(kept: Kept) -> None:
    kept.write(0, 1)
    with kept.path.open("ab") as file:
        file.write(b'{"seq":3,"at_')
    kept.write(2)
    assert kept.numbers == [0, 1, 2]
    verify(kept.path)
    assert kept.alarms.texts == ()


def test_files_are_rotated_the_chain_goes_on_and_the_oldest_goes(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "FILE_BYTES_MAX", 1_000)
    monkeypatch.setattr(audit, "FILES_MAX", 3)
    kept.write(*range(6))
    assert kept.numbers == list(range(6))
    verify(kept.path)
    kept.write(*range(6, 60))
    assert sorted(path.name for path in kept.path.parent.glob("audit.log*")) == [
        "audit.log",
        "audit.log.1",
        "audit.log.2",
    ]
    first, newest = verify(kept.path)
    assert first is not None
    assert newest is not None
    assert first.seq > 40
    assert newest.seq == 60
    (kept.path.parent / "audit.log.1").unlink()
    with pytest.raises(AuditBroken, match=r"lines were removed"):
        verify(kept.path)
    (kept.path.parent / "audit.log.2").unlink()
    with pytest.raises(AuditBroken, match=r"the lines before number .* are missing"):
        verify(kept.path)


def test_on_a_full_disk_lines_wait_an_alarm_is_raised_and_nothing_is_lost(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_queue, "RETRY_S", 0.01)
    write = os.write
    full = True

    def limited(handle: int, data: memoryview) -> int:
        """A nearly full disk takes a part before it refuses."""
        if not full or not os.path.samestat(os.fstat(handle), kept.path.stat()):
            return write(handle, data)
        if len(data) > 20:
            return write(handle, data[:20])
        raise OSError(28, "No space left on device")

    async def work(log: AuditLog) -> None:
        nonlocal full
        await log.write(entry(0))
        monkeypatch.setattr(os, "write", limited)
        await log.write(entry(1))
        await log.write(entry(2))
        assert log.stuck
        assert "cannot be written: No space left" in kept.alarms.texts[0]
        assert len(newest_lines(kept)) == 1  # the part that was written is gone again
        full = False
        log._flush()
        assert not log.stuck
        assert kept.alarms.texts == ()
        await log.write(entry(3))

    kept.run(work)
    assert kept.numbers == [0, 1, 2, 3]
    verify(kept.path)


def test_the_number_of_waiting_lines_is_bounded_and_what_is_dropped_is_counted(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_queue, "WAITING_MAX", 3)
    kept.path.mkdir()  # it cannot be opened

    async def work(log: AuditLog) -> None:
        for number in range(10):
            await log.write(entry(number))
        assert log.stuck
        kept.path.rmdir()
        log._flush()
        assert not log.stuck

    kept.run(work)
    assert kept.numbers == [7, 8, 9]
    assert [one.skipped for one in newest_first(kept.path)] == [0, 0, 7]
    verify(kept.path)


def test_a_damaged_mark_stops_nothing_and_is_reported(kept: Kept) -> None:
    kept.write(0, 1)
    (kept.path.parent / "audit.mark").write_bytes(b"nonsense")
    with pytest.raises(AuditBroken, match=r"audit.mark is missing"):
        verify(kept.path)
    kept.write(2)
    assert "which says where the audit log ends" in kept.alarms.texts[0]
    (kept.path.parent / "audit.mark").unlink()
    (kept.path.parent / "audit.mark").symlink_to("/etc/passwd")
    kept.write(3)
    assert any("cannot be written" in text for text in kept.alarms.texts)


def test_a_token_in_a_path_loses_its_secret() -> None:
    assert without_secret("shoal_ab12cd34_s3cr-et_x rotate") == "shoal_ab12cd34_... rotate"
