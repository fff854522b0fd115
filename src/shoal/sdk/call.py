"""`shoal.run`: a function as a job. Its result is kept with the job, and fetched from there."""

from __future__ import annotations

import base64
import pickle
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from shoal.client.transport import ShoalError
from shoal.forms.pack import packed
from shoal.link.packing import PackError, pack_files
from shoal.model.job import JobSpec
from shoal.model.views import Done, JobView
from shoal.sdk import member
from shoal.sdk.kept import Changed, parts
from shoal.sdk.member import CALL, CALL_FILE, IN_PACKAGE, RESULTS, Returned, Sent
from shoal.tasks.errors import restored
from shoal.tasks.functions import dump_function, dumper, main_script, refuse_within_main

if TYPE_CHECKING:
    from shoal.sdk.client import Client

Result = TypeVar("Result")

CALL_TEXT_MAX = 96 * 1024  # in the environment; a larger call is sent as a file
CALL_BYTES_MAX = 256 << 20
NOT_FOUND = 404
ENDS = {"cancelled": "was cancelled", "timed-out": "ran out of time"}
ARRIVE_S_MAX = 120.0  # a large result may arrive after its member's exit
LOOK_S = 0.2
_START_THERE = 'exec "${SHOAL_PYTHON:-python3}" -m shoal.sdk.member "$0"'


class JobFailed(ShoalError):
    """The job of a function has ended without a result: `state` says how, the message why."""

    def __init__(self, view: JobView, problem: str = "") -> None:
        how = ENDS.get(view.state, view.state)
        super().__init__(problem or f"{view.id} has no result, because it {how}: {view.why}")
        self.job = view.id
        self.state = view.state


class Call(Generic[Result]):
    """A function that runs as a job. `Call(client, "j7")` finds it again in another program."""

    def __init__(self, client: Client, job_id: str) -> None:
        self.client = client
        self.id = job_id

    def result(self, *, timeout_s: float | None = None) -> Result:
        """What the function returned in member 0. What it raised is raised here, with the traceback
        of the node as its cause. Raises TimeoutError after `timeout_s`; the job goes on."""
        found: Result = self.client.result(self.id, timeout_s=timeout_s)
        return found

    def results(self, *, timeout_s: float | None = None) -> list[Result]:
        """What it returned in each member, or in each element of an array, in their order."""
        return self.client.results(self.id, timeout_s=timeout_s)

    def wait(self, *, timeout_s: float | None = None) -> JobView:
        return self.client.wait(self.id, timeout_s=timeout_s)

    def done(self) -> bool:
        return self.client.job(self.id).finished_ms is not None

    def follow(self, *, member: int = 0) -> Iterator[str]:
        """The lines that a member prints, as it prints them."""
        return self.client.follow(self.id, member=member)

    def cancel(self) -> Done:
        return self.client.cancel(self.id)

    def __repr__(self) -> str:
        return f"<shoal call {self.id}>"


def run(fn: Callable[..., Result], /, *arguments: Any, **fields: Any) -> Call[Result]:
    """Runs `fn(*arguments)` as a job on the cluster and returns at once. The keywords are the
    fields of a job file; give keywords of the function with `functools.partial`.

        call = shoal.run(train, "large", gpus=8)
        print(call.result())

    With `members=2`, every member calls the function; `results()` has what each returned."""
    from shoal.sdk.client import Client

    refuse_within_main()
    return Client().call(fn, *arguments, **fields)


def submit(
    client: Client, fn: Callable[..., Result], arguments: tuple[Any, ...], fields: dict[str, Any]
) -> Call[Result]:
    refuse_within_main()
    if "command" in fields:
        raise ShoalError("is the function here; to run a command, use Client.run", "command")
    dump = dumper()
    body = dump_function(fn, dump, "fn")
    try:
        body = dump((fn, arguments))
    except Exception as error:
        raise TypeError(f"the arguments cannot be sent: {error}") from None
    from shoal.sdk.client import job_request

    wanted = {"command": ["python"], "name": _name(fn), **fields}
    spec, pack = job_request(wanted)
    workdir = Path(spec.workdir)
    spec = packed(client, spec, pack)
    root = _root(workdir, spec) if spec.package else ""
    sent = Sent(sys.version_info[:2], sys.path, main_script(), root, "", body)
    spec = _carried(client, _started(spec), sent, workdir)
    return Call(client, client.submit(spec).id)


def _name(fn: Callable[..., Any]) -> str:
    inner = getattr(fn, "func", fn)  # of a functools.partial
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", str(getattr(inner, "__name__", "call"))).strip("-._")
    return name[:63] or "call"


def _root(workdir: Path, spec: JobSpec) -> str:
    """The folder that was packed; the job's is inside it."""
    place = workdir.resolve()
    for _ in Path(spec.workdir).parts:
        place = place.parent
    return str(place)


def _started(spec: JobSpec) -> JobSpec:
    """With the Python of this program if that is there, else with the node's or the image's."""
    there = spec.package or spec.requirements or spec.image
    start = ("sh", "-c", _START_THERE) if there else (sys.executable, member.__file__)
    command = (*start, spec.name or "")  # the last word is for people
    return msgspec.structs.replace(spec, command=command)


def _carried(client: Client, spec: JobSpec, sent: Sent, workdir: Path) -> JobSpec:
    """The job with the call: in its environment, or in its package if it is large."""
    data = pickle.dumps(tuple(sent))
    text = base64.b64encode(zlib.compress(data)).decode()
    if len(text) <= CALL_TEXT_MAX:
        return msgspec.structs.replace(spec, env={**spec.env, CALL: text})
    if len(data) > CALL_BYTES_MAX:
        raise ShoalError(
            f"the function and its arguments have {len(data):,} bytes, and {CALL_BYTES_MAX:,} can "
            "be sent; let the function read large data itself",
            "fn",
        )
    if not spec.package:
        data = pickle.dumps(tuple(sent._replace(here=spec.workdir)))
    try:
        package = pack_files({CALL_FILE: data}, workdir if spec.package else None)
    except PackError as error:
        raise ShoalError(str(error), "workdir") from None
    with package.file as file:
        client.send_package(package.sha256, package.size, file)
    env = {**spec.env, CALL: IN_PACKAGE}
    return msgspec.structs.replace(spec, package=package.sha256, workdir=package.folder, env=env)


# -- what it returned --------------------------------------------------------------------------


def result_of(client: Client, view: JobView) -> Any:
    """Of a job that has ended: what its member 0 returned."""
    if view.spec.sweep is not None:
        message = f"{view.id} is an array; results() has the results of all elements, and"
        raise ShoalError(f"{message} Client.result('{view.id}.0') the one of an element", "job")
    return _results(client, view, 1)[0]


def results_of(client: Client, view: JobView) -> list[Any]:
    """Of all members, or of all elements of an array."""
    sweep = view.spec.sweep
    if sweep is None:
        return _results(client, view, len(view.gang))
    elements = (f"{view.id}.{sweep.index_at(position)}" for position in range(sweep.count))
    return [result_of(client, client.job(element)) for element in elements]


def _results(client: Client, view: JobView, members: int) -> list[Any]:
    if CALL not in view.spec.env:
        raise ShoalError(f"{view.id} runs a command, which has no result", "job")
    if view.state != "succeeded":
        raise _failure(client, view)
    found = [_returned(client, view, number) for number in range(members)]
    return [pickle.loads(one.body) for one in found]


def _failure(client: Client, view: JobView) -> BaseException:
    """The first error of a member, because the errors of others may follow from it."""
    errors = []
    for file in client.files(view.id, RESULTS).files:
        kept = _read(client, view.id, file.path)
        if kept is not None and kept.attempt == view.attempt and kept.text:
            errors.append(kept)
    if not errors:
        return JobFailed(view)
    first = min(errors, key=lambda kept: kept.at_ms)
    return restored(first.body, first.text)


def _returned(client: Client, view: JobView, number: int) -> Returned:
    ended_s = (client.status().now_ms - (view.finished_ms or 0)) / 1000
    deadline = time.monotonic() + ARRIVE_S_MAX - ended_s
    while True:
        kept = _read(client, view.id, f"{RESULTS}/result-{number}")
        if kept is not None and kept.attempt == view.attempt and not kept.text:
            return kept
        if time.monotonic() > deadline:
            message = f"{view.id} succeeded, but the result of member {number} is not kept, or no"
            raise JobFailed(view, f"{message} longer; see: shoal ls {view.id}")
        time.sleep(LOOK_S)


def _read(client: Client, job_id: str, path: str) -> Returned | None:
    """None if it is not there, or is replaced meanwhile."""
    try:
        return Returned(*pickle.loads(b"".join(parts(client, job_id, path))))
    except Changed:
        return None
    except ShoalError as error:
        if error.status != NOT_FOUND:
            raise
        return None
