"""`shoal.Client`: the API for Python programs. The fields of a job or service are keywords."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shoal import client
from shoal.client import ShoalError
from shoal.forms.failure import BadField, Failure
from shoal.forms.pack import packed, packed_service
from shoal.forms.request import JOB, SERVICE, Form, Request, Spec, complete, read_file
from shoal.model.job import JobSpec
from shoal.model.service import ServiceSpec
from shoal.model.views import JobView, ServiceView
from shoal.sdk.following import PATIENCE_S, deadline_of, ended, line_groups

if TYPE_CHECKING:
    from shoal.sdk.call import Call
    from shoal.tasks.cluster import Cluster
    from shoal.tasks.mapping import OnError

Command = str | Sequence[str]
Item = TypeVar("Item")
Result = TypeVar("Result")


class Client(client.Client):
    """A cluster. `Client()` is the one that the `shoal` command uses: of this user on this machine,
    or the context in use. `Client(context="lab")` is a cluster that you logged in to; the folder
    of a job then travels with it. Threads may share a client.

        with shoal.Client() as cluster:
            job = cluster.run("python train.py", gpus=8)
            for line in cluster.follow(job.id):
                print(line)
            print(cluster.wait(job.id).state)

    A refusal is a `ShoalError`, with the `field` that is wrong. docs/python.md has more."""

    def run(self, /, command: Command, **fields: Any) -> JobView:
        """Submits a job and returns at once. The keywords are the fields of a job file:"""
        spec, pack = _request(JOB, {"command": command, **fields})
        return self.submit(packed(self, spec, pack))

    def run_file(self, /, path: str | os.PathLike[str], **fields: Any) -> JobView:
        """Submits the job of a job file (YAML, TOML or JSON). Keywords override its fields."""
        spec, pack = _request(JOB, fields, Path(path))
        return self.submit(packed(self, spec, pack))

    def serve(self, /, name: str, command: Command, **fields: Any) -> ServiceView:
        """Starts or changes a service and returns at once. The keywords are the fields of a
        service file:"""
        spec, pack = _request(SERVICE, {"name": name, "command": command, **fields})
        return self.submit_service(packed_service(self, spec, pack))

    def serve_file(self, /, path: str | os.PathLike[str], **fields: Any) -> ServiceView:
        """Starts or changes the service of a service file. Keywords override its fields."""
        spec, pack = _request(SERVICE, fields, Path(path))
        return self.submit_service(packed_service(self, spec, pack))

    def wait(self, job_id: str, *, timeout_s: float | None = None) -> JobView:
        """Returns when the job has ended: its `state` is succeeded, failed, cancelled or timed-out.
        A controller that restarts meanwhile does not matter. Raises TimeoutError after `timeout_s`;
        the job goes on."""
        deadline = deadline_of(timeout_s)
        while (view := ended(self, job_id, deadline)) is None:
            pass
        return view

    def follow(self, job_id: str, *, member: int = 0, attempt: int = 0) -> Iterator[str]:
        """The lines that a member writes, as it writes them, until the job has ended: of this
        attempt (0: the newest) and of those that follow it."""
        for lines in line_groups(self, job_id, member, attempt):
            yield from lines

    def call(self, /, fn: Callable[..., Result], *arguments: Any, **fields: Any) -> Call[Result]:
        """Runs `fn(*arguments)` as a job and returns at once: `shoal.run` on this cluster."""
        from shoal.sdk.call import submit

        return submit(self, fn, arguments, fields)

    def result(self, job_id: str, *, timeout_s: float | None = None) -> Any:
        """What the function of a job returned in member 0, when the job has ended. What it raised
        is raised here."""
        from shoal.sdk.call import result_of

        return result_of(self, self.wait(job_id, timeout_s=timeout_s))

    def results(self, job_id: str, *, timeout_s: float | None = None) -> list[Any]:
        """What the function of a job returned in each member, or in each element of an array."""
        from shoal.sdk.call import results_of

        return results_of(self, self.wait(job_id, timeout_s=timeout_s))

    def fetch(self, job_id: str, path: str, to: str | os.PathLike[str] = ".") -> Path:
        """Copies a file that the job has kept to a file or into a folder here, and returns its
        path. `files` lists them."""
        from shoal.sdk.kept import fetch

        return fetch(self.lent(patience_s=PATIENCE_S), job_id, path, Path(to))

    def map(
        self,
        fn: Callable[[Item], Result],
        items: Iterable[Item],
        *,
        worker: Cluster | None = None,
        workers: int | None = None,
        init: Callable[[], Any] | None = None,
        order: bool = True,
        retries: int = 2,
        on_error: OnError = "raise",
        chunk: int | None = None,
        progress: bool = True,
    ) -> Iterator[Result]:
        """`shoal.map` on this cluster. `worker` says what each worker gets, for instance
        `shoal.tasks.Cluster(gpus=1)`."""
        from shoal import tasks

        return tasks.map(
            fn,
            items,
            workers=workers,
            init=init,
            order=order,
            retries=retries,
            on_error=on_error,
            chunk=chunk,
            progress=progress,
            cluster=(worker or tasks.Cluster())._replace(endpoint=self.endpoint),
        )


def job_request(fields: dict[str, Any]) -> Request[JobSpec]:
    return _request(JOB, fields)


def read_job(path: str | os.PathLike[str], **fields: Any) -> JobSpec:
    """The job of a job file, checked as `shoal run` does, but not submitted."""
    return _request(JOB, fields, Path(path)).spec


def read_service(path: str | os.PathLike[str], **fields: Any) -> ServiceSpec:
    """The service of a service file, checked as `shoal serve` does, but not started."""
    return _request(SERVICE, fields, Path(path)).spec


_DOCUMENTED: Sequence[tuple[Callable[..., Any], Form[Any]]] = (
    (Client.run, JOB),
    (Client.serve, SERVICE),
)
for _method, _form in _DOCUMENTED:  # for help(shoal.Client)
    _lines = [f"    {name}: {field.text}" for name, field in _form.fields.items()]
    _method.__doc__ = "\n".join([_method.__doc__ or "", *_lines])


def _request(form: Form[Spec], fields: dict[str, Any], path: Path | None = None) -> Request[Spec]:
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        form.check_names(given)
        file = {} if path is None else read_file(form, path)
        return complete(form, given, file)
    except BadField as error:
        where = f"{path}: " if path is not None and error.field not in given else ""
        raise ShoalError(f"{where}{error.message}", error.field) from None
    except Failure as error:
        raise ShoalError(error.message) from None
