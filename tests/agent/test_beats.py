"""Beats: what members say of their work reaches the controller, and nothing else does."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

import msgspec
import pytest

from shoal.agent.beats import METRICS_BYTES_MAX, Beats
from shoal.model.job import MemberRef
from shoal.model.progress import BEAT_BYTES_MAX, Beat
from tests.agent.rig import rig

REF = MemberRef("j1", 1, 0)

BEATING = """
import os, socket, msgspec
link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
link.connect(b"\\0" + os.environ["SHOAL_BEATS"].encode())
print("beats go to", os.environ["SHOAL_BEATS"])
for line in open(os.environ["LINES"]):
    steps, saved = map(int, line.split())
    link.send(msgspec.msgpack.encode({"ref": os.environ["SHOAL_REF"], "steps": steps,
        "step": steps, "saved_step": saved, "loss": 0.5}))
print("all sent")
import time
time.sleep(600)
"""


def encode(beat: Beat) -> bytes:
    return msgspec.msgpack.encode(beat)


def sender(name: str) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    link.connect(b"\0" + name.encode())
    return link


def test_a_member_s_beats_are_in_the_report_as_long_as_it_lives(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("1 0\n2 0\n3 2\n")
    with rig() as node:
        node.launch(REF, sys.executable, "-c", BEATING, env={"LINES": str(lines)})
        node.says(REF, "all sent")
        (told,) = node.ask().progress
        assert (told.ref, told.beat.steps, told.beat.saved_step) == (REF, 3, 2)
        quiet = told.quiet_ms
        node.until(lambda: node.ask().progress[0].quiet_ms > quiet)
        node.stop(REF)
        node.exit(REF)
        assert node.ask().progress == ()


def test_a_flood_of_garbage_leaves_the_agent_at_work(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("7 0\n")
    with rig() as node:
        node.launch(REF, sys.executable, "-c", BEATING, env={"LINES": str(lines)})
        node.says(REF, "all sent")
        name = node.text(REF).split()[3]
        flood = f"""
import os, socket
link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
link.connect(b"\\0{name}")
print("flooding", flush=True)
sizes = [0, 1, 100, 4096, 5000, 100_000]
while True:
    for size in sizes:
        link.send(os.urandom(size))
"""
        other = MemberRef("j2", 1, 0)
        node.launch(other, sys.executable, "-c", flood)
        node.says(other, "flooding")
        third = MemberRef("j3", 1, 0)
        for _ in range(5):
            assert [told.beat.steps for told in node.ask().progress] == [7]
        node.launch(third, "sh", "-c", "echo well")
        assert node.exit(third).code == 0
        node.stop(other)
        assert node.exit(other).stopped


@pytest.fixture
def beats() -> Beats:
    return Beats(lambda: None)


def test_only_living_members_are_believed(beats: Beats) -> None:
    with sender(beats.name) as link:
        link.send(encode(Beat(ref="j1.1.0", steps=1)))
        beats.take()
        assert beats.progress() == ()
        beats.expect(REF)
        link.send(encode(Beat(ref="j1.1.0", steps=1)))
        link.send(encode(Beat(ref="j1.1.1", steps=9)))
        beats.take()
        assert [told.beat.steps for told in beats.progress()] == [1]
        beats.forget(REF)
        assert beats.progress() == ()
    assert beats.refused == 2
    beats.close()


def test_what_is_wrong_in_any_way_is_dropped(beats: Beats) -> None:
    beats.expect(REF)
    wrong = [
        b"",
        b"\xc1",
        b"\x91" * BEAT_BYTES_MAX,
        os.urandom(BEAT_BYTES_MAX),
        encode(Beat(ref="j1.1.0", metrics={str(n): 1.0 for n in range(17)})),
        msgspec.msgpack.encode({"ref": "j1.1.0", "steps": -1}),
        encode(Beat(ref="j1.1.0")) + b"\0" * BEAT_BYTES_MAX,
    ]
    with sender(beats.name) as link:
        for data in wrong:
            link.send(data)
            beats.take()
        assert beats.progress() == ()
        assert beats.refused == len(wrong)
        reader, writer = os.pipe()
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(link, [encode(Beat(ref="j1.1.0", steps=4))], [reader] * 8)
        beats.take()
        assert len(os.listdir("/proc/self/fd")) == before, "descriptors sent along are not taken"
        os.close(reader)
        os.close(writer)
    beats.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to send as another user")
def test_a_beat_of_another_user_is_dropped(beats: Beats) -> None:
    beats.expect(REF)
    child = os.fork()
    if child == 0:
        os.setuid(12345)
        with sender(beats.name) as link:
            link.send(encode(Beat(ref="j1.1.0")))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    beats.take()
    assert (beats.progress(), beats.refused) == ((), 1)
    beats.close()


def test_a_new_checkpoint_is_told_at_once_and_an_old_one_again_is_not() -> None:
    told: list[int] = []
    beats = Beats(lambda: told.append(1))
    beats.expect(REF)
    with sender(beats.name) as link:
        for saved in (0, 5, 5):
            link.send(encode(Beat(ref="j1.1.0", saved_step=saved)))
            beats.take()
    assert len(told) == 1
    beats.close()


def test_a_member_that_saves_all_the_time_is_told_of_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.agent.beats.SAVED_S", 0.2)

    async def flood() -> list[int]:
        told: list[int] = []
        newest = asyncio.Event()

        def tell() -> None:
            told.append(node.progress()[0].beat.saved_step)
            if told[-1] == 499:
                newest.set()

        node = Beats(tell)
        node.expect(REF)
        with sender(node.name) as link:
            for saved in range(1, 500):
                link.send(encode(Beat(ref="j1.1.0", saved_step=saved)))
                node.take()
        await newest.wait()
        node.close()
        return told

    told = asyncio.run(flood())
    assert (told[0], told[-1]) == (1, 499), "the first at once, and the newest is not lost"
    assert len(told) < 50


def test_a_report_stays_small_however_much_members_say(beats: Beats) -> None:
    metrics = {"m" * 200 + str(number): 1.0 for number in range(16)}
    count = 2 * METRICS_BYTES_MAX // 3_500
    with sender(beats.name) as link:
        for number in range(count):
            ref = MemberRef("j1", 1, number)
            beats.expect(ref)
            link.send(encode(Beat(ref=str(ref), steps=number, metrics=metrics)))
            beats.take()
    told = beats.progress()
    assert [one.beat.steps for one in told] == list(range(count)), "all steps are told"
    assert len(msgspec.msgpack.encode(told)) < 2 * METRICS_BYTES_MAX
    beats.close()


def test_checkpoints_have_a_place_that_survives_attempts(tmp_path: Path) -> None:
    with rig() as node:
        write = 'test ! -e "$SHOAL_CHECKPOINT_DIR/a" || echo again; touch "$SHOAL_CHECKPOINT_DIR/a"'
        node.launch(REF, "sh", "-c", write)
        assert node.exit(REF).code == 0
        second = MemberRef("j1", 2, 0)
        node.launch(second, "sh", "-c", write)
        assert node.exit(second).code == 0
        assert (node.text(REF), node.text(second)) == ("", "again\n")
        assert (node.directory / "kept" / "j1" / "a").exists()
        own = MemberRef("j2", 1, 0)
        show = "echo $SHOAL_CHECKPOINT_DIR"
        node.launch(own, "sh", "-c", show, env={"SHOAL_CHECKPOINT_DIR": "/elsewhere"})
        assert node.exit(own).code == 0
        assert node.text(own) == "/elsewhere\n"
        assert not (node.directory / "kept" / "j2").exists()
        for job, members in (("j3", "1"), ("j4", "2")):
            one = MemberRef(job, 1, 0)
            node.launch(
                one, "sh", "-c", "ls -d $SHOAL_CHECKPOINT_DIR", env={"SHOAL_MEMBERS": members}
            )
            assert node.exit(one).code == 0
        left = sorted(path.name for path in (node.directory / "kept").glob("j*"))
        assert left == ["j1", "j4"], "an empty one goes, unless a peer may be about to use it"


def test_a_checkpoint_directory_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with rig(SHOAL_CHECKPOINT_ROOT=str(tmp_path / "file")) as node:
        node.launch(REF, "echo", "never")
        ended = node.exit(REF)
        assert ended.code == 127
        assert "cannot make the checkpoint directory" in ended.why
        assert "SHOAL_CHECKPOINT_DIR" in ended.why
        assert "\n" not in ended.why


def test_checkpoints_may_live_at_an_address(tmp_path: Path) -> None:
    with rig(SHOAL_CHECKPOINT_ROOT="s3://bucket/runs/") as node:
        node.launch(REF, "sh", "-c", "echo $SHOAL_CHECKPOINT_DIR")
        assert node.exit(REF).code == 0
        assert node.text(REF) == "s3://bucket/runs/j1\n"
