"""Packs a working directory, without what git ignores, into one archive named by its content."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

from shoal.client import contexts
from shoal.model.job import PACKAGE_BYTES_MAX, PACKAGE_FILES_MAX

# Left out if there is no .gitignore.
SKIPPED = frozenset((".git", "__pycache__", ".venv"))
CACHES = (".pyc", ".egg-info", "_cache")
LARGEST_SHOWN = 3
IN_PLACE = "use --no-pack if all nodes see this folder"
GIT_S_MAX = 60.0
HEADER_BYTES = 1024  # about what an archive adds to a file


class PackError(Exception):
    """Why the directory cannot be packed, and the fix."""


class Package(NamedTuple):
    """An archive in a file without a name. `folder`: the requested directory, within `root`."""

    sha256: str
    size: int
    file: IO[bytes]
    root: Path
    folder: str
    left_behind: tuple[str, ...]  # links that lead outside, and special files
    ignored: Ignored | None = None


class Ignored(NamedTuple):
    """What stays here because git ignores it: the largest files and folders, by size."""

    files: int
    size: int
    largest: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        more = len(self.largest) - LARGEST_SHOWN
        named = [f"{name[:60]} ({_size_text(size)})" for name, size in self.largest[:LARGEST_SHOWN]]
        rest = f" and {more} more" if more > 0 else ""
        count = "1 file" if self.files == 1 else f"{self.files:,} files"
        return (
            f"not sent, for git ignores them: {count}, {_size_text(self.size)}: "
            f"{', '.join(named)}{rest}; `git add -f` what the job needs, or name it by a path that "
            "all nodes see"
        )


class PackedFile(NamedTuple):
    name: str
    status: os.stat_result


def pack_files(files: Mapping[str, bytes], workdir: Path | None) -> Package:
    """Packs these files, together with a directory or alone."""
    if workdir is not None:
        return pack(workdir, files)
    archive = tempfile.TemporaryFile(prefix="shoal-")  # noqa: SIM115 - the caller's now
    _write(archive, Path(), "", [], files)
    return _finished(archive, Path(), "", [], None)


def pack(workdir: Path, more: Mapping[str, bytes] | None = None) -> Package:
    """Packs the directory's whole repository, so that the job finds neighboring files, or only the
    directory if it is in none. The same content makes the same archive everywhere. `more` are files
    that are added at its top."""
    try:
        workdir = workdir.resolve(strict=True)
        root, in_git = _root_of(workdir)
        if root.parent == root:
            raise PackError(
                f"{root} is the whole machine; go to your project's folder, or {IN_PLACE}"
            )
        folder = str(workdir.relative_to(root))
        entries, left_behind = _sorted_out(root, in_git)
        _refuse_large(root, entries, in_git)
        archive = tempfile.TemporaryFile(prefix="shoal-")  # noqa: SIM115 - the caller's now
        _write(archive, root, "" if folder == "." else folder, entries, more or {})
    except FileNotFoundError as error:
        raise PackError(
            f"{error.filename} is gone; did the directory change while it was read?"
        ) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise PackError(f"cannot be packed: {where}{error.strerror or error}") from None
    place = "" if folder == "." else folder
    return _finished(archive, root, place, left_behind, _ignored(root) if in_git else None)


def _finished(
    archive: io.BufferedRandom,
    root: Path,
    folder: str,
    left_behind: list[str],
    ignored: Ignored | None,
) -> Package:
    size = archive.tell()
    archive.seek(0)
    digest = hashlib.file_digest(archive, "sha256").hexdigest()
    archive.seek(0)
    return Package(digest, size, archive, root, folder, tuple(left_behind), ignored)


def listed(workdir: Path) -> tuple[Path, list[PackedFile]]:
    """What `pack` would put into an archive, and the folder that their names are relative to."""
    try:
        root, in_git = _root_of(workdir.resolve(strict=True))
        return root, _sorted_out(root, in_git)[0]
    except OSError as error:
        raise PackError(f"cannot be read: {error.strerror or error}") from None


# -- what is packed -----------------------------------------------------------------------


def _root_of(workdir: Path) -> tuple[Path, bool]:
    """The repository's root, unless the repository ignores the directory."""
    top = _git(workdir, "rev-parse", "--show-toplevel")
    if top is None or top.returncode:
        said = top.stderr.decode(errors="replace") if top is not None else ""
        if said and "not a git repository" not in said:
            last = said.strip().splitlines()[-1]
            raise PackError(f"git cannot read {workdir}: {last}")
        return workdir, False
    ignored = _git(workdir, "check-ignore", "-q", str(workdir))
    root = Path(os.fsdecode(top.stdout).rstrip("\n")).resolve()
    if (ignored is not None and ignored.returncode == 0) or not workdir.is_relative_to(root):
        return workdir, False
    return root, True


def _git(where: Path, *words: str) -> subprocess.CompletedProcess[bytes] | None:
    """None if git is not installed."""
    try:
        return subprocess.run(
            ["git", "-C", str(where), *words],
            capture_output=True,
            timeout=GIT_S_MAX,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        raise PackError(f"git did not answer within {GIT_S_MAX:.0f} s in {where}") from None


def _sorted_out(root: Path, in_git: bool) -> tuple[list[PackedFile], list[str]]:
    entries, left_behind = [], []
    default = Path.home() / ".shoal"
    given = Path(os.environ.get("SHOAL_HOME") or default)
    private = [folder.resolve() for folder in (given, default, contexts.folder())]
    for name in _names(root, in_git):
        path = root / name
        if any(path.is_relative_to(folder) for folder in private):
            continue  # tokens of clusters, and their logs, are never part of the code
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue  # in git's index, but deleted
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFREG or (kind == stat.S_IFLNK and _stays_inside(root, name)):
            entries.append(PackedFile(name, status))
        else:
            left_behind.append(name)
        if len(entries) > PACKAGE_FILES_MAX:
            message = f"{root} has more than {PACKAGE_FILES_MAX:,} files"
            raise PackError(f"{message}; {_advice(in_git)}")
    entries.sort(key=lambda entry: os.fsencode(entry.name))
    return entries, sorted(left_behind)


def _names(root: Path, in_git: bool) -> Iterator[str]:
    if not in_git:
        yield from _walk(root)
        return
    listed = _git(root, "ls-files", "-co", "--exclude-standard", "-z")
    if listed is None or listed.returncode:
        said = listed.stderr.decode(errors="replace").strip() if listed is not None else "is gone"
        raise PackError(f"git cannot list {root}: {said.splitlines()[-1] if said else 'it failed'}")
    for name in dict.fromkeys(os.fsdecode(listed.stdout).split("\0")):
        path = root / name
        if not name:
            continue
        if path.is_dir() and not path.is_symlink():  # a repository within this one
            inner = path / ".git"
            for below in _names(path, inner.exists()):
                yield os.path.join(name.rstrip("/"), below)
        else:
            yield name


def _ignored(root: Path) -> Ignored | None:
    """Without SKIPPED and CACHES. An ignored folder is one entry with all of its content."""
    listed = _git(root, "ls-files", "-oi", "--exclude-standard", "--directory", "-z")
    if listed is None or listed.returncode:
        return None
    files, sizes = 0, []
    for name in dict.fromkeys(os.fsdecode(listed.stdout).split("\0")):
        short = name.rstrip("/")
        if not name or SKIPPED.intersection(short.split("/")) or short.endswith(CACHES):
            continue
        path = root / short
        inside = [path / below for below in _walk(path)] if path.is_dir() else [path]
        size = sum(
            one.lstat().st_size for one in inside[:PACKAGE_FILES_MAX] if os.path.lexists(one)
        )
        files += len(inside)
        if inside:
            sizes.append((name, size))
    sizes.sort(key=lambda part: (-part[1], part[0]))
    return Ignored(files, sum(size for _, size in sizes), tuple(sizes)) if sizes else None


def _walk(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root, onerror=_raise):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in [*files, *links]:
            if name not in SKIPPED:
                yield os.path.relpath(os.path.join(folder, name), root)


def _raise(error: OSError) -> None:
    raise error


def _stays_inside(root: Path, name: str) -> bool:
    target = os.readlink(root / name)
    if os.path.isabs(target):
        return False
    end = os.path.normpath(os.path.join(os.path.dirname(name), target))
    if end == ".." or end.startswith("../"):
        return False
    try:
        os.stat(root / name)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False  # it leads nowhere, and no node unpacks it
    # Through other links it may lead elsewhere than its text says.
    return Path(os.path.realpath(root / name)).is_relative_to(root)


# -- how large it may be ------------------------------------------------------------------


def _refuse_large(root: Path, entries: list[PackedFile], in_git: bool) -> None:
    """Checked before any file is read."""
    total = sum(entry.status.st_size + HEADER_BYTES for entry in entries)
    if total <= PACKAGE_BYTES_MAX:
        return
    parts: dict[str, int] = {}
    for entry in entries:
        first = entry.name.split("/", 1)[0]
        parts[first] = parts.get(first, 0) + entry.status.st_size
    largest = sorted(parts.items(), key=lambda part: (-part[1], part[0]))[:LARGEST_SHOWN]
    named = ", ".join(f"{name[:60]} ({_size_text(size)})" for name, size in largest)
    raise PackError(
        f"{root} is {_size_text(total)}, and at most {_size_text(PACKAGE_BYTES_MAX)} can be sent "
        f"to the nodes; largest are {named}; {_advice(in_git)}"
    )


def _advice(in_git: bool) -> str:
    if in_git:
        return f"list what the job does not need in .gitignore, or {IN_PLACE}"
    return f"make it a git repository with a .gitignore, or {IN_PLACE}"


def _size_text(size: int) -> str:
    if size < 1e5:
        return f"{size} bytes" if size < 1000 else f"{size / 1e3:.1f} kB"
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


# -- the archive --------------------------------------------------------------------------


def _write(
    archive: IO[bytes],
    root: Path,
    folder: str,
    entries: list[PackedFile],
    more: Mapping[str, bytes],
) -> None:
    """The archive has only names, content and whether a file is executable: nothing about who
    packed it, when or where."""
    with tarfile.open(fileobj=archive, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        if folder:  # it must exist even if it has no packed files
            place = tarfile.TarInfo(folder)
            place.type, place.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(place)
        for name, status in entries:
            info = tarfile.TarInfo(name)
            if stat.S_ISLNK(status.st_mode):
                info.type, info.mode = tarfile.SYMTYPE, 0o777
                info.linkname = os.readlink(root / name)
                tar.addfile(info)
                continue
            info.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
            with (root / name).open("rb") as file:
                info.size = os.fstat(file.fileno()).st_size
                try:
                    tar.addfile(info, file)
                except OSError as error:
                    if error.errno is not None:
                        raise
                    raise PackError(f"{name} changed while it was packed; try again") from None
        for name, content in more.items():
            info = tarfile.TarInfo(name)
            info.mode, info.size = 0o644, len(content)
            tar.addfile(info, io.BytesIO(content))
