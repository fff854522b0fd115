"""Fetches a volume from a URL into a folder, with the credentials in its own environment.

Run by an agent as `python -m shoal.agent.keeping.url_helper URL [MEMBER MEMBERS]`, as the member's
user, in the folder of a holding; with the last two, it fetches only the share of this member. It
prints what it found, waits for a line that tells it to go on, and prints which blocks it has and
how many it could take. What it reads then (`Sought`) says which blocks it should read from the URL,
and which its node's neighbors have. When its input ends it ends, too: the agent has the files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import queue
import resource
import sys
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from shoal.agent.blocks.pace import Pace
from shoal.agent.blocks.sharing import TELL_S, Sharing
from shoal.agent.blocks.store import FILES, PARTS, SAYS, Holding
from shoal.agent.keeping.readers import Readers
from shoal.model.blocks import FILES_MAX, TOO_MANY, Layout, Sought
from shoal.model.volume import share

LISTING_BYTES_MAX = 2 << 30  # of memory while a store is listed
TRIES = 3  # the files may change while they are fetched
AT_ONCE = 8
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


class Go(msgspec.Struct, frozen=True):
    """The agent's first line. `alone`: there is nobody to share with. `lazy`: only those files are
    fetched that readers ask for."""

    node: str = ""
    alone: bool = True
    lazy: bool = False


class Order(msgspec.Struct, frozen=True):
    """Any other line, with what changes: `bytes_s` for this helper; `all`: what nobody has read is
    wanted, too. Else the line is `Sought`."""

    bytes_s: float | None = None
    all: bool = False
    node: str = ""  # only `Go` has it
    source: str = ""  # only `Sought` has it


class Ears:
    """What the agent says. The end of the input is the end of this process."""

    def __init__(self) -> None:
        self.go: queue.SimpleQueue[Go] = queue.SimpleQueue()
        self.sought: queue.SimpleQueue[Sought] = queue.SimpleQueue()
        self.pace = Pace()
        self.readers: Readers | None = None
        self._all = False
        threading.Thread(target=self._listen, daemon=True).start()

    def attach(self, readers: Readers) -> None:
        self.readers = readers
        readers.all = self._all

    def _listen(self) -> None:
        for line in sys.stdin:
            order = msgspec.json.decode(line, type=Order)
            if order.node:
                self.sought = queue.SimpleQueue()  # what is there is about what was fetched before
                self.go.put(msgspec.json.decode(line, type=Go))
            elif order.source:
                self.sought.put(msgspec.json.decode(line, type=Sought))
            if order.bytes_s is not None:
                self.pace.bytes_s = order.bytes_s
            if order.all:
                self._all = True
                if self.readers is not None:
                    self.readers.all = True
        os._exit(0)


class Listing(NamedTuple):
    """`ranges`: parts of a file can be read."""

    files: dict[str, tuple[str, int | None]]  # path in the volume -> its address, its size
    fingerprint: str
    ranges: bool
    versions: dict[str, dict[str, str]]  # of each path

    @property
    def layout(self) -> Layout:
        files = sorted(self.files.items())
        return Layout((path, size if self.ranges else None) for path, (_, size) in files)

    @property
    def size(self) -> int:
        return sum(size or 0 for _, size in self.files.values())

    def share(self, member: int, members: int) -> Listing:
        if members == 1:
            return self
        own = share(self.files, member, members)
        return self._replace(files={path: self.files[path] for path in own})


def say(**words: object) -> None:
    print(SAYS + msgspec.json.encode(words).decode(), flush=True)


def main(url: str, member: str = "0", members: str = "1") -> int:
    ears = Ears()
    try:
        fetch(url, int(member), int(members), ears)
    except Exception as error:  # of any library that fsspec uses
        found = error if isinstance(error, Problem) else explain(url, error)
        say(problem=str(found), here=found.here)
        if ears.readers is not None:
            ears.readers.fail(str(found))
    else:
        say(done=True)
    sys.stdout.flush()
    os._exit(0)  # threads of a library may hang


def fetch(url: str, member: int, members: int, ears: Ears) -> None:
    from fsspec.core import url_to_fs

    fs, root = url_to_fs(url)
    listing = look(fs, root, url)
    for _ in range(TRIES):
        own = listing.share(member, members)
        layout = own.layout
        if problem := layout.problem():
            raise Problem(f"{url}: {problem}")
        sizes = {"size": own.size, "total": listing.size, "count": layout.count}
        say(fingerprint=listing.fingerprint, **sizes)
        go = ears.go.get()
        holding = Holding(os.getcwd(), layout, listing.fingerprint)
        error: Exception | None = None
        try:
            copy(fs, own, holding, go, ears)
        except Exception as raised:  # perhaps because the files have changed
            error = raised
        holding.close()
        before, listing = listing, look(fs, root, url)
        if same(before, listing):
            if error is not None:
                raise error
            if ears.readers is not None:
                ears.readers.close()
            make_read_only(FILES)
            return
        if ears.readers is not None:  # somebody has read what was there before
            raise Problem(f"{url} changed while it was read")
        say(changed=True)
    raise Problem(f"{url} changed {TRIES} times while it was fetched")


def same(before: Listing, after: Listing) -> bool:
    """One without a version has another fingerprint each time."""
    unknown = before.fingerprint.startswith("?") and after.fingerprint.startswith("?")
    return before.files == after.files if unknown else before.fingerprint == after.fingerprint


def look(fs: Any, root: str, url: str) -> Listing:
    fs.invalidate_cache()
    ranges = True
    if urlsplit(url).scheme in ("http", "https"):
        name = unquote(urlsplit(url).path.rpartition("/")[2])
        if not name:
            raise Problem(f"{url} does not name a file, and folders of web servers have no listing")
        found, single = {root: fs.info(root)}, name
        ranges = gives_ranges(fs, root)
    else:
        found = listed(fs, root, url)
        root = root.rstrip("/")
        single = os.path.basename(root) if set(found) == {root} else ""
    files: dict[str, tuple[str, int | None]] = {}
    versions: dict[str, dict[str, str]] = {}
    digest, known = hashlib.sha256(), True
    for address in sorted(found):
        info = found[address]
        if (address.endswith("/") and not single) or info.get("type", "file") != "file":
            continue
        path = single or address[len(root) :].lstrip("/")
        if not path or any(part in ("", ".", "..") for part in path.split("/")) or "\0" in path:
            raise Problem(f"{url}: the object {address[:200]!r} cannot be a file: rename it")
        files[path] = address, info.get("size")
        version = versions[path] = {name: str(info[name]) for name in VERSIONS if info.get(name)}
        known = known and bool(version)
        digest.update(json.dumps([path, info.get("size"), version]).encode())
    if not files:
        raise Problem(f"there is nothing at {url}")
    if len(files) > FILES_MAX:
        raise Problem(f"{url}: {TOO_MANY}")
    fingerprint = digest.hexdigest() if known else f"?{uuid.uuid4().hex}"
    return Listing(files, fingerprint, ranges, versions)


def listed(fs: Any, root: str, url: str) -> dict[str, Any]:
    """Most stores list all that they have before they return: ten million names would take all of
    the node's memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = LISTING_BYTES_MAX if hard == resource.RLIM_INFINITY else min(hard, LISTING_BYTES_MAX)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        return dict(fs.find(root, detail=True))
    except MemoryError:
        raise Problem(f"{url}: {TOO_MANY}") from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def gives_ranges(fs: Any, url: str) -> bool:
    """Does this web server give parts of a file? One that does not would send all of it for each
    part."""
    from fsspec.asyn import sync

    async def ask() -> bool:
        session = await fs.set_session()
        headers = {**fs.kwargs.get("headers", {}), "Range": "bytes=0-0"}
        words = {**fs.kwargs, "headers": headers}
        async with session.get(fs.encode_url(url), **words) as answer:
            parts: bool = answer.status == 206
            answer.close()  # whatever else it sends is not read
            return parts

    return bool(sync(fs.loop, ask))


def copy(fs: Any, listing: Listing, holding: Holding, go: Go, ears: Ears) -> None:
    """Until the holding is whole. Files that come as a whole come first, and are not shared."""
    files = holding.layout.files

    def whole(number: int, counted: Counter) -> None:
        path = files[number][0]
        address, size = listing.files[path]
        target = os.path.join(holding.folder, PARTS, f"whole-{number}")
        fs.get_file(address, target, callback=callback(counted.add, ears.pace))
        if size is not None and os.path.getsize(target) != size and "://" not in address:
            raise Problem(f"{address} arrived with {os.path.getsize(target)} of {size} bytes")
        holding.add_whole(number, target)

    missing = [
        number
        for number, (_, size) in enumerate(files)
        if size is None and not holding.is_whole(number)
    ]
    if missing:
        with Counter() as counted, ThreadPoolExecutor(AT_ONCE) as pool:
            for _ in pool.map(lambda number: whole(number, counted), missing):
                pass
    if not holding.missing():
        return

    def read(number: int) -> bytes:
        span = holding.layout.span(number)
        address, _ = listing.files[files[span.file][0]]
        data: bytes = fs.cat_file(address, start=span.offset, end=span.offset + span.size)
        if len(data) != span.size:
            raise Problem(f"{address} gave {len(data)} of {span.size} bytes from {span.offset} on")
        return data

    if go.lazy:
        ears.attach(Readers(holding, lambda path: unchanged(fs, listing, path)))
        say(ready=True)
    sharing = Sharing(
        holding,
        go.node,
        read,
        lambda words: say(**words),
        alone=go.alone,
        wanted=ears.readers,
        pace=ears.pace,
    )
    sharing.run(ears.sought)


def unchanged(fs: Any, listing: Listing, path: str) -> str:
    """Why this file is not what was listed; empty if it is."""
    address, size = listing.files[path]
    fs.invalidate_cache()
    now, before = fs.info(address), listing.versions[path]
    name = next((name for name in before if now.get(name)), "")  # the strongest that both have
    same = now.get("size") == size and (not name or str(now[name]) == before[name])
    return "" if same else f"{address} changed while it was read"


def callback(add: Callable[[int], None], pace: Pace) -> Any:
    from fsspec.callbacks import Callback

    class Counting(Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            pace.take(inc)
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
