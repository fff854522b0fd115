"""Fetches a volume from a URL into a folder, with the credentials in its own environment.

Run by an agent as `python -m shoal.agent.keeping.url_helper URL FOLDER`, as the member's user. It
prints what it found, waits for a line that tells it to go on, and prints how far it is. When its
input ends it ends, too: the agent has the files already.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

SAYS = "shoal-volume "  # begins a line for the agent; libraries may print lines of their own
TRIES = 3  # the files may change while they are fetched
FILES_MAX = 200_000
AT_ONCE = 8
TELL_S = 0.5
# What shows that an object has changed, in the words of the file systems of fsspec.
VERSIONS = (
    *("ETag", "etag", "md5Hash", "md5", "content_md5", "Content-MD5", "Digest", "checksum"),
    *("crc32c", "generation", "mtime", "LastModified", "last_modified", "Last-Modified"),
    *("updated", "modified"),
)


class Problem(Exception):
    """`here`: another node may do better."""

    def __init__(self, why: str, *, here: bool = False) -> None:
        super().__init__(why)
        self.here = here


class Listing(NamedTuple):
    files: dict[str, tuple[str, int | None]]  # path in the volume -> its address, its size
    fingerprint: str

    @property
    def size(self) -> int:
        return sum(size or 0 for _, size in self.files.values())


def say(**words: object) -> None:
    print(SAYS + json.dumps(words), flush=True)


def main(url: str, folder: str) -> int:
    try:
        fetch(url, folder)
    except Problem as problem:
        say(problem=str(problem), here=problem.here)
    except Exception as error:  # of any library that fsspec uses
        found = explain(url, error)
        say(problem=str(found), here=found.here)
    else:
        say(done=True)
    sys.stdout.flush()
    os._exit(0)  # threads of a library may hang


def fetch(url: str, folder: str) -> None:
    from fsspec.core import url_to_fs

    fs, root = url_to_fs(url)
    listing = look(fs, root, url)
    for number in range(TRIES):
        say(fingerprint=listing.fingerprint, size=listing.size, files=len(listing.files))
        if not sys.stdin.readline():
            os._exit(0)
        part = f"{folder}-{number}"
        os.mkdir(part, 0o700)
        copy(fs, listing, part)
        before, listing = listing, look(fs, root, url)
        if same(before, listing):
            os.rename(part, folder)
            make_read_only(folder)
            return
    raise Problem(f"{url} changed {TRIES} times while it was fetched")


def same(before: Listing, after: Listing) -> bool:
    """One without a version has another fingerprint each time."""
    unknown = before.fingerprint.startswith("?") and after.fingerprint.startswith("?")
    return before.files == after.files if unknown else before.fingerprint == after.fingerprint


def look(fs: Any, root: str, url: str) -> Listing:
    fs.invalidate_cache()
    if urlsplit(url).scheme in ("http", "https"):
        name = unquote(urlsplit(url).path.rpartition("/")[2])
        if not name:
            raise Problem(f"{url} does not name a file, and folders of web servers have no listing")
        found, single = {root: fs.info(root)}, name
    else:
        found = fs.find(root, detail=True)
        root = root.rstrip("/")
        single = os.path.basename(root) if set(found) == {root} else ""
    files: dict[str, tuple[str, int | None]] = {}
    digest, known = hashlib.sha256(), True
    for address in sorted(found):
        info = found[address]
        if (address.endswith("/") and not single) or info.get("type", "file") != "file":
            continue
        path = single or address[len(root) :].lstrip("/")
        if not path or any(part in ("", ".", "..") for part in path.split("/")) or "\0" in path:
            raise Problem(f"{url}: the object {address[:200]!r} cannot be a file: rename it")
        files[path] = address, info.get("size")
        version = {name: str(info[name]) for name in VERSIONS if info.get(name)}
        known = known and bool(version)
        digest.update(json.dumps([path, info.get("size"), version]).encode())
    if not files:
        raise Problem(f"there is nothing at {url}")
    if len(files) > FILES_MAX:
        raise Problem(f"{url} holds {len(files)} files, more than {FILES_MAX}: use archives")
    return Listing(files, digest.hexdigest() if known else f"?{uuid.uuid4().hex}")


def copy(fs: Any, listing: Listing, folder: str) -> None:
    for parent in sorted({os.path.dirname(path) for path in listing.files}):
        os.makedirs(os.path.join(folder, parent), mode=0o700, exist_ok=True)

    def one(path: str, counted: Counter) -> None:
        address, size = listing.files[path]
        target = os.path.join(folder, path)
        fs.get_file(address, target, callback=callback(counted.add))
        if size is not None and os.path.getsize(target) != size and "://" not in address:
            raise Problem(f"{address} arrived with {os.path.getsize(target)} of {size} bytes")

    with Counter() as counted, ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(one, listing.files, repeat(counted)):
            pass


def callback(add: Callable[[int], None]) -> Any:
    from fsspec.callbacks import Callback

    class Counting(Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            add(inc)

    return Counting()


class Counter:
    """Prints how many bytes have arrived, when more have. A transfer that hangs prints nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._got = 0
        self._over = threading.Event()

    def add(self, count: int) -> None:
        with self._lock:
            self._got += count

    def __enter__(self) -> Counter:
        threading.Thread(target=self._tell, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _tell(self) -> None:
        told = 0
        while not self._over.wait(TELL_S):
            if self._got != told:
                told = self._got
                say(got=told)


def make_read_only(folder: str) -> None:
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            os.chmod(os.path.join(place, name), 0o444)
        os.chmod(place, 0o555)


def explain(url: str, error: Exception) -> Problem:
    """One line that a user can act on. For fsspec, a web server that does not answer or refuses is
    a file that is not there; the cause has the reason."""
    scheme = urlsplit(url).scheme
    if scheme in ("http", "https") and isinstance(error.__cause__, Exception):
        error = error.__cause__
    said = next(iter(str(error).splitlines()), "")[:300] or type(error).__name__
    if isinstance(error, ImportError):
        what = "pip install 'shoal[volumes]' there brings S3 and https; or add it to requirements"
        return Problem(f"this node cannot read {scheme}:// ({said}); {what}", here=True)
    if isinstance(error, FileNotFoundError):
        return Problem(f"there is nothing at {url} ({said})")
    refused = getattr(error, "status", 0) in (401, 403) or isinstance(error, PermissionError)
    if refused or "Credential" in type(error).__name__:
        what = "give the job its own credentials by --env or --secret"
        return Problem(f"{url} must not be read ({said}); {what}")
    if isinstance(error, ValueError) and "rotocol not known" in said:
        return Problem(f"fsspec knows no {scheme}://")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Problem(f"this node's disk: {error.strerror}", here=True)
    return Problem(f"{url} cannot be read: {said}", here=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
