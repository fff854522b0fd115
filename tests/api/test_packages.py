"""Packages at the API: kept when they are what they are called, refused in one sentence if not."""

from __future__ import annotations

import hashlib
import http.client
import io
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from harness.waiting import until

from shoal.client import Client, ShoalError
from shoal.control.packages import PackageError, PackageStore
from shoal.model.job import PACKAGE_BYTES_MAX
from tests.live.cluster import Live, live_cluster

DATA = b"a package " * 100_000
NAME = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_cluster(nodes=1, gpus=0) as cluster:
        yield cluster


def put(live: Live, name: str, data: bytes, length: int | None = None, token: str = "") -> int:
    """The status, by hand: the client would not send these."""
    parts = urlsplit(live.client.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
    token = token or live.home.token.read_text().strip()
    size = len(data) if length is None else length
    headers = {"Authorization": f"Bearer {token}", "Content-Length": str(size)}
    try:
        connection.request("PUT", f"/v1/packages/{name}", data, headers)
        if size > len(data):
            connection.sock.shutdown(1)
        return connection.getresponse().status
    except (http.client.RemoteDisconnected, ConnectionError):
        return 0  # it would not even answer
    finally:
        connection.close()


def kept(live: Live) -> set[str]:
    """The directory is made with the first."""
    return {path.name for path in live.home.packages.glob("*")}


def test_a_package_is_sent_once(live: Live) -> None:
    data = b"only here " * 100_000
    name = hashlib.sha256(data).hexdigest()
    client = Client.at_home(live.home.path)
    assert not client.has_package(name)
    client.send_package(name, len(data), io.BytesIO(data))
    assert client.has_package(name)
    file = live.home.packages / name
    assert file.read_bytes() == data
    made = file.stat().st_ino
    client.send_package(name, len(data), io.BytesIO(b"not even read"))
    assert file.stat().st_ino == made
    client.close()


def test_what_is_not_what_it_is_called_is_not_kept(live: Live) -> None:
    other = "0" * 64
    before = kept(live)
    assert put(live, other, DATA) == 422
    assert put(live, "nonsense", b"short") == 422
    assert put(live, "..%2f..%2ftoken", b"short") in (404, 422)
    assert put(live, other, b"", length=PACKAGE_BYTES_MAX + 1) in (0, 413)
    assert put(live, other, b"") == 413
    assert put(live, other, DATA[:1000], length=2000) in (0, 400)
    assert put(live, other, b"short", token="guess") == 401
    assert not live.client.has_package(other)
    until(lambda: kept(live) == before, "what was begun is cleared away")


def test_a_job_of_a_package_that_is_not_there_is_refused(live: Live) -> None:
    with pytest.raises(ShoalError, match="package: is not stored here"):
        live.client.submit(live.spec("true", package="1" * 64))
    live.client.send_package(NAME, len(DATA), io.BytesIO(DATA))
    with pytest.raises(ShoalError, match="workdir: must be a folder of the package"):
        live.client.submit(live.spec("true", package=NAME, workdir="a/../.."))


def test_packages_not_used_for_longest_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.control.packages.STORE_BYTES_MAX", 3000)
    store = PackageStore(tmp_path)
    names = []
    for number in range(4):
        data = bytes([number]) * 1000
        names.append(hashlib.sha256(data).hexdigest())
        upload = store.begin(names[-1], 1000, {names[0]})
        upload.write(data)
        upload.finish()
        upload.close()
    assert {path.name for path in tmp_path.iterdir()} == {names[0], names[2], names[3]}


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = __import__("shutil").disk_usage("/")._replace(free=10_000_000)
    monkeypatch.setattr("shoal.control.packages.shutil.disk_usage", lambda path: usage)
    with pytest.raises(PackageError, match="do not fit the controller's disk, which has 9 MiB"):
        PackageStore(tmp_path).begin(NAME, 50 << 20, set())


def send(store: PackageStore, data: bytes, tenant: str, used: frozenset[str] = frozenset()) -> str:
    name = hashlib.sha256(data).hexdigest()
    upload = store.begin(name, len(data), set(used), tenant)
    try:
        upload.write(data)
        upload.finish()
    finally:
        upload.close()
    return name


def test_a_tenant_uses_only_what_it_has_sent_itself(tmp_path: Path) -> None:
    store = PackageStore(tmp_path)
    name = send(store, b"secret code", "red")
    assert store.size(name, "red") == store.size(name) == 11
    assert store.size(name, "blue") is None, "to know the name is not enough"
    inode = (tmp_path / name).stat().st_ino
    send(store, b"secret code", "blue")
    assert store.size(name, "blue") == 11
    assert (tmp_path / name).stat().st_ino == inode, "it is stored once"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "of"])


def test_a_tenant_has_a_part_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.control.packages.TENANT_BYTES_MAX", 25)
    store = PackageStore(tmp_path)
    other = send(store, b"0123456789", "blue")
    first, second = (send(store, text * 10, "red") for text in (b"a", b"b"))
    os.utime(tmp_path / first, (1, 1))
    shared = send(store, b"0123456789", "red")  # red's oldest makes room
    assert [store.size(one, "red") for one in (first, second, shared)] == [None, 10, 10]
    assert store.size(first) is None, "nobody else had it"
    used = frozenset({second, shared})
    with pytest.raises(PackageError, match=r"red has .* of packages in use, its maximum") as caught:
        send(store, b"c" * 10, "red", used)
    assert caught.value.status == 429
    send(store, b"d" * 20, "red", frozenset())
    assert store.size(other, "blue") == 10, "what blue has is blue's"


def test_a_tenant_sends_only_so_many_packages_at_a_time(tmp_path: Path) -> None:
    store = PackageStore(tmp_path)
    names = [hashlib.sha256(bytes([n])).hexdigest() for n in range(6)]
    uploads = [store.begin(name, 1, set(), "red") for name in names[:4]]
    with pytest.raises(PackageError, match="red sends 4 packages already"):
        store.begin(names[4], 1, set(), "red")
    store.begin(names[5], 1, set(), "blue").close()
    uploads.pop().close()
    store.begin(names[4], 1, set(), "red").close()
    for upload in uploads:
        upload.close()
