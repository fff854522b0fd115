"""The cache of volumes from URLs: its bound, what stays, and what a killed agent left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.agent.blocks.store import FILES
from shoal.agent.faults import CannotStart
from shoal.agent.images.render import Mount
from shoal.agent.keeping import url_helper
from shoal.agent.keeping.url_cache import UrlCache
from shoal.agent.keeping.volumes import mounts_of
from shoal.model.commands import Launch
from shoal.model.job import Fault, MemberRef
from shoal.model.volume import parse, volumes_problem


class Small(UrlCache):
    """On a disk with 200 bytes for everything, so half of them are for the cache."""

    def _free(self) -> int:
        return 200 - sum(entry.size for entry in self.entries())


def put(cache: UrlCache, key: str, size: int, at_s: int) -> None:
    part = cache.root / ".part"
    (part / FILES).mkdir(parents=True)
    (part / FILES / "data").write_bytes(bytes(size))
    (part / FILES).chmod(0o555)
    assert cache.put(part, key) == size
    os.utime(cache.root / f"{key}.size", (at_s, at_s))


def here(cache: UrlCache) -> set[str]:
    names = {path.name for path in cache.root.iterdir()}
    keys = {name for name in names if not name.endswith(".size")}
    assert names == keys | {f"{key}.size" for key in keys}
    return keys


def test_the_least_recently_used_volume_makes_room_and_one_in_use_stays(tmp_path: Path) -> None:
    cache = Small(tmp_path)
    for at_s, key in enumerate("abc"):
        put(cache, key, 30, at_s)
    cache.make_room("f", 10, set())
    assert here(cache) == {"a", "b", "c"}
    assert cache.find("a"), "this counts as a use"
    cache.make_room("f", 40, {"b"})
    assert here(cache) == {"a", "b"}, "b is older, and in use"
    cache.make_room("g", 30, {"b"})
    assert here(cache) == {"b"}, "what is on its way counts, too"
    with pytest.raises(CannotStart, match="do not fit") as raised:
        cache.make_room("h", 10, {"b"})
    assert raised.value.fault is Fault.MISSING, "another node may have room"
    assert here(cache) == {"b"}


def test_what_a_killed_agent_had_not_finished_is_removed(tmp_path: Path) -> None:
    cache = Small(tmp_path)
    put(cache, "whole", 10, 1)
    for name in (".x.part", "unnamed"):
        (tmp_path / name / FILES).mkdir(parents=True)
    for name in (".x.log", ".gone.size", "gone.size"):
        (tmp_path / name).write_text("1")
    assert not cache.find("unnamed")
    cache.clear_up()
    assert here(cache) == {"whole"}


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    """The helper's user may have put it there: it must not be shown to anybody."""
    cache = Small(tmp_path)
    (tmp_path / ".part").mkdir()
    (tmp_path / ".part" / FILES).symlink_to("/etc")
    with pytest.raises(CannotStart, match="not a folder"):
        cache.put(tmp_path / ".part", "key")


def test_files_that_change_while_they_are_fetched_are_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fsspec")
    source = tmp_path / "source" / "deep"
    source.mkdir(parents=True)
    (source / "words").write_text("first")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    read_end, write_end = os.pipe()
    os.write(write_end, b'{"node": "n1"}\n' * 3)
    monkeypatch.setattr("sys.stdin", os.fdopen(read_end))
    copy = url_helper.copy

    def changing(*words: object) -> None:
        copy(*words)  # type: ignore[arg-type]
        (source / "words").write_text("second")
        monkeypatch.setattr(url_helper, "copy", copy)

    monkeypatch.setattr(url_helper, "copy", changing)
    url_helper.fetch(f"file://{tmp_path}/source", 0, 1, url_helper.Ears())
    monkeypatch.undo()
    assert (tmp_path / "here" / FILES / "deep" / "words").read_text() == "second"
    assert (tmp_path / "here" / FILES / "deep" / "words").stat().st_mode & 0o777 == 0o444
    assert capsys.readouterr().out.count("fingerprint") == 2


def test_an_image_gets_the_fetched_folder_read_only() -> None:
    env = {"SHOAL_VOLUME_DATA": "/home/volumes/key/files"}
    launch = Launch(
        node="n1",
        incarnation=1,
        ref=MemberRef("j1", 1, 0),
        argv=("true",),
        env=env,
        workdir="",
        stop_grace_ms=0,
        image="alpine",
        volumes=("s3://bucket/set:data",),
    )
    assert mounts_of(launch) == [Mount("/home/volumes/key/files", writable=False)]


ENDLESS = """
from shoal.agent.keeping import url_helper

class Store:
    def invalidate_cache(self): pass
    def find(self, root, detail):
        return {f"bucket/{n}": {"type": "file", "size": 1, "ETag": str(n)} for n in range(10**7)}

url_helper.LISTING_BYTES_MAX = 128 << 20
try:
    url_helper.look(Store(), "bucket", "s3://bucket")
except url_helper.Problem as problem:
    print(problem)
url_helper.LISTING_BYTES_MAX = 1 << 40
Store.find = lambda *_, **__: {f"bucket/{n}": {"size": 1, "ETag": "1"} for n in range(5)}
print(len(url_helper.look(Store(), "bucket", "s3://bucket").files))
"""


def test_a_store_of_ten_million_files_is_refused_in_one_line_and_takes_bounded_memory() -> None:
    done = subprocess.run([sys.executable, "-c", ENDLESS], capture_output=True, text=True)
    said = "s3://bucket: it has too many files, more than 200000: use archives"
    assert done.stdout.splitlines() == [said, "5"], done.stderr


def test_a_library_that_a_node_lacks_is_named_with_what_to_do() -> None:
    said = url_helper.explain("s3://b/k", ImportError("Install s3fs to access S3"))
    assert said.here
    assert "cannot read s3://" in str(said) and "pip install 'shoal[volumes]'" in str(said)


def test_a_web_server_that_does_not_answer_is_not_a_missing_file() -> None:
    missing = FileNotFoundError("https://host/a")
    assert "there is nothing at" in str(url_helper.explain("https://host/a", missing))
    missing.__cause__ = ConnectionRefusedError("Cannot connect to host")
    said = url_helper.explain("https://host/a", missing)
    assert said.here and "cannot be read: Cannot connect to host" in str(said)
    refused = missing.__cause__ = ValueError("403, message='Forbidden'")
    refused.status = 403  # type: ignore[attr-defined]
    assert "must not be read" in str(url_helper.explain("https://host/a", missing))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("s3://bucket/prefix:data", ""),
        ("https://host:8443/a/b.tar:data:ro", ""),
        ("s3://bucket/prefix:data:rw", "cannot be written"),
        ("https://me:word@host/a:data", "contains a password"),
        ("s3://bucket/../other:data", "holds '..'"),
    ],
)
def test_urls_of_volumes(text: str, problem: str) -> None:
    assert parse(text).url and parse(text).name == "data"
    said = volumes_problem((text,))
    assert problem in said if problem else not said
    assert "word" not in said.replace("password", "")


def test_a_cache_knows_how_much_it_holds_of_each_volume_also_after_a_restart(
    tmp_path: Path,
) -> None:
    cache = UrlCache(tmp_path)

    def put(key: str, volume: str, size: int, total: int) -> None:
        part = tmp_path / ".part"
        (part / FILES).mkdir(parents=True)
        (part / FILES / "file").write_bytes(bytes(size))
        cache.put(part, key, volume, total)

    put("share0", "v", 30, 100)
    put("share1", "v", 25, 100)
    put("whole", "w", 7, 0)
    put("lies", "x", 1, 1 << 200)
    assert {one.volume: (one.held_bytes, one.size_bytes) for one in cache.held} == {
        "v": (55, 100),
        "w": (7, 7),
        "x": (1, 1 << 50),
    }
    put("old", "", 5, 0)
    again = UrlCache(tmp_path)
    again.count()
    assert {one.volume for one in again.held} == {"v", "w", "x"}
    for path in tmp_path.glob("*.size"):
        path.unlink()
    again.count()
    assert again.held == ()
