"""The part of the client that lists and reads the files that jobs have kept."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from shoal.model.kept import FilePart, FilesView, Kind

Answer = TypeVar("Answer")


class Calls(Protocol):
    """What these calls need of the client."""

    def _call(self, method: str, kind: type[Answer], *parts: str, **query: Any) -> Answer: ...


class FileCalls:
    def files(self: Calls, job_id: str, path: str = "", *, kind: Kind = Kind.OUTPUT) -> FilesView:
        """The files that the job has kept: all, or those at and below `path`."""
        query = {"path": path, "folder": kind.value}
        return self._call("GET", FilesView, "jobs", job_id, "files", **query)

    def file_part(
        self: Calls, job_id: str, path: str, offset: int = 0, *, kind: Kind = Kind.OUTPUT
    ) -> FilePart:
        """A few MiB of a kept file. A file whose `version` changes has been replaced meanwhile."""
        query: dict[str, Any] = {"path": path, "offset": offset, "folder": kind.value}
        return self._call("GET", FilePart, "jobs", job_id, "files", "part", **query)
