"""Saved work on its way to a neighbor and back, against neighbors that fail or lie."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from shoal.client.transport import ShoalError, Unreachable
from shoal.control.filedesk import FileDesk
from shoal.control.neighboring.carrying import TRIES_MAX, Carrier
from shoal.control.neighboring.site import Out, Site
from shoal.control.neighboring.site import There as Known
from shoal.control.outputs import Limits, OutputStore
from shoal.model.away import Away
from shoal.model.job import JobSpec, MemberRef, Outcome
from shoal.model.kept import FilePart, FilesView, KeptFile, Kind, Received
from shoal.model.neighbor import Ending

REF = MemberRef("j1", 2, 0)


class There:
    """A neighbor: its answers by call; those that were made."""

    def __init__(self, **answers: Callable[..., Any]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def ask(self, _: Any, method: Callable[..., Any], /, *given: Any, **more: Any) -> Any:
        self.asked.append(method.__name__)
        more.pop("within_s", None)
        answer = self.answers[method.__name__](*given, **more)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def store(tmp_path: Path) -> Iterator[OutputStore]:
    made = OutputStore(tmp_path / "outputs", Limits(job=1 << 20, total=1 << 30, spare=0))
    yield made
    made.close()


def carrier(store: OutputStore, there: There, files: dict[str, bytes] | None = None) -> Carrier:
    """`files`: saved here."""
    saved = {path: KeptFile(path, len(data), 7) for path, data in (files or {}).items()}

    async def part(_job: str, path: str, offset: int, _kind: Kind) -> FilePart:
        data = (files or {})[path]
        return FilePart(
            path=path,
            offset=offset,
            size=len(data),
            modified_ms=7,
            version="",
            data=data[offset : offset + 4],
        )

    desk = Mock(spec=FileDesk)
    desk.store, desk.part = store, part
    if files is not None:
        desk.store = Mock(wraps=store)
        desk.store.listing = lambda *_: list(saved.values())
    loop: Any = SimpleNamespace(
        files=desk, policy=SimpleNamespace(checkpoint_copy_mb=1), tick=Mock(), logs=Mock()
    )
    return Carrier(loop, "0123abcd", "west", there)  # type: ignore[arg-type]


def view(*files: KeptFile) -> FilesView:
    return FilesView(job="", files=list(files), total_bytes=0)


def test_only_what_is_missing_there_is_sent(store: OutputStore) -> None:
    sent: list[tuple[str, int]] = []

    def hand_part(_mark: str, part: FilePart) -> Received:
        sent.append((part.path, part.offset))
        return Received(kept=part.offset + len(part.data))

    files = {"whole": b"12345678", "half": b"12345678", "old": b"1234", "empty": b"", "new": b"1"}
    come = [KeptFile("whole", 8, 7), KeptFile("half", 4, 7), KeptFile("old", 4, 6)]
    there = There(handed=lambda _: view(*come), hand_part=hand_part, hand_files=lambda *_: None)
    asyncio.run(carrier(store, there, files).bring_work("j1", 2))
    assert sent == [("half", 4), ("old", 0), ("empty", 0), ("new", 0)]
    assert there.asked[-1] == "hand_files"


@pytest.mark.parametrize("kept", [0, -5, 3])
def test_a_neighbor_that_keeps_nothing_is_not_asked_for_ever(store: OutputStore, kept: int) -> None:
    there = There(handed=lambda _: view(), hand_part=lambda *_: Received(kept=kept))
    with pytest.raises(ShoalError, match="west does not keep a"):
        asyncio.run(carrier(store, there, {"a": b"12345678"}).bring_work("j1", 2))
    assert there.asked.count("hand_part") <= 2 * TRIES_MAX
    assert "hand_files" not in there.asked


def test_more_than_may_travel_is_not_fetched(store: OutputStore) -> None:
    there = There(files=lambda *_, **__: view(KeptFile("a", 2 << 20, 7)))
    with pytest.raises(ShoalError, match="more than the 1 MiB that may travel"):
        asyncio.run(carrier(store, there).fetch_work(REF, "j9"))
    assert there.asked == ["files"]


def served(data: dict[str, bytes], moved: dict[str, int] | None = None) -> There:
    """`moved`: so often, such a file is not there any more when it is asked for."""
    gone = dict(moved or {})

    def file_part(_job: str, path: str, offset: int, **_: Any) -> Any:
        if gone.get(path, 0) > 0:
            gone[path] -= 1
            return ShoalError("it has kept no such file", status=404)
        return FilePart(
            path=path,
            offset=offset,
            size=len(data[path]),
            modified_ms=7,
            version="1",
            data=data[path][offset : offset + 4],
        )

    listed = [KeptFile(path, len(one), 7) for path, one in data.items()]
    return There(files=lambda *_, **__: view(*listed), file_part=file_part)


def test_what_it_saved_comes_here_once(store: OutputStore) -> None:
    there = served({"a": b"12345678", "deep/b": b"1"}, moved={"deep/b": 1})
    carries = carrier(store, there)
    asyncio.run(carries.fetch_work(REF, "j9"))
    here = store.listing("j1", Kind.CHECKPOINT)
    assert {one.path: one.size for one in here} == {"a": 8, "deep/b": 1}
    assert store.index("j1").attempt == REF.attempt
    there.asked.clear()
    asyncio.run(carries.fetch_work(REF, "j9"))
    assert there.asked == ["files"]


def test_a_file_that_would_lead_elsewhere_is_refused(store: OutputStore) -> None:
    there = served({"../../x": b"1"})
    with pytest.raises(ShoalError, match="not a relative path"):
        asyncio.run(carrier(store, there).fetch_work(REF, "j9"))
    assert not store.listing("j1", Kind.CHECKPOINT)


def test_work_of_an_earlier_hand_over_does_not_come_late(store: OutputStore) -> None:
    later, earlier = MemberRef("j1", 5, 0), MemberRef("j1", 3, 0)
    asyncio.run(carrier(store, served({"a": b"new"})).fetch_work(later, "j9"))
    with pytest.raises(ShoalError, match="a later attempt has saved something"):
        asyncio.run(carrier(store, served({"a": b"older"})).fetch_work(earlier, "j8"))
    assert store.index("j1").attempt == later.attempt
    assert [one.size for one in store.listing("j1", Kind.CHECKPOINT)] == [3]


def test_files_here_that_cannot_be_read_are_asked_for_again(store: OutputStore) -> None:
    carries = carrier(store, There(), {})
    desk: Any = carries._loop.files
    desk.store.listing = Mock(side_effect=OSError("the mount hangs"))
    with pytest.raises(Unreachable, match="cannot be read now"):
        asyncio.run(carries.has_work("j1", 2))
    assert not asyncio.run(carries.has_work("j1", 1)), "it has never run"


@pytest.mark.parametrize(
    ("outcome", "cancelled", "fetched"),
    [
        ("cancelled", False, True),
        ("failed", False, True),
        ("succeeded", False, False),
        ("cancelled", True, False),
    ],
)
def test_output_comes_before_the_checkpoint_and_without_it(
    outcome: str, *, cancelled: bool, fetched: bool
) -> None:
    site, calls = Site.__new__(Site), Mock()
    calls.fetch, calls.fetch_work = AsyncMock(return_value=""), AsyncMock()
    calls.fetch_work.side_effect = ShoalError("no node that holds it gives it")
    site.carrier, site.name = calls, "west"
    there = Known()
    there.ended = Ending(outcome=Outcome(outcome), started=True)
    away = Away(neighbor="west", since_ms=0, cancelled=cancelled)
    out = Out("j1", 2, away, JobSpec(command=("true",)), {})
    missing = asyncio.run(site._fetch(out, there))
    names = [one[0] for one in calls.mock_calls]
    assert names == (["fetch", "fetch_work"] if fetched else ["fetch"])
    assert ("its checkpoint is not here: no node" in missing) is fetched
