"""Calls about jobs: submit, list, wait for, change and read them; workflows and schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shoal.calls.call import Calls, Head, Needs, call
from shoal.model.explanation import Explanation
from shoal.model.finding import EVERY_JOB, JobFilter, LabelsChange, NoteText
from shoal.model.job import JobSpec
from shoal.model.kept import FileKey, FilePart, FilesView, HandedFiles, KeptFile, Kind, Received
from shoal.model.ledger import CostView
from shoal.model.schedule import ScheduleSpec, ScheduleView
from shoal.model.series import JobSeries
from shoal.model.session import SessionRequest, SessionView
from shoal.model.trials import TrialsView
from shoal.model.views import (
    Done,
    JobRow,
    JobView,
    LeaseUntil,
    LeaseView,
    LogView,
    PackageView,
    Submission,
    Submissions,
    Submitted,
)
from shoal.model.workflow import WorkflowJob, WorkflowSubmission, WorkflowView

if TYPE_CHECKING:
    from shoal.calls.histories import WhyView


class JobCalls(Calls):
    @call("POST", "/v1/jobs", Needs.WRITE, body=Submission, status=201, once=True, neighbor=True)
    def submit(
        self, spec: JobSpec, key: str = "", until_ms: int = 0, *, cancelled: bool = False
    ) -> JobView:
        """Submits a job. The same key again returns the same job. With `until_ms`, a moment of the
        cluster's clock, it has a lease: it is stopped then, unless that is renewed. `cancelled`:
        the job of this key, which may be on its way, is not to run: it is cancelled, now or from
        its first moment."""

    @call("POST", "/v1/submissions", Needs.WRITE, body=Submissions, once=True, neighbor=True)
    def submit_many(self, specs: Sequence[JobSpec], key: str = "") -> list[Submitted]:
        """Submits up to 1,000 jobs (4 MiB) at once, each for itself. The answers are in the order
        of the specs; the refusal of one says nothing about the others. The same key again returns
        the same jobs. For the same command with other arguments, an array is lighter still."""

    @call("GET", "/v1/jobs", Needs.READ, headed=("sort", "cursor", "count", "group"), neighbor=True)
    def jobs(
        self,
        *,
        finished: bool = False,
        limit: int = 100,
        before: str = "",
        wanted: JobFilter = EVERY_JOB,
    ) -> list[JobRow]:
        """Live jobs in the order of the queue; with `finished`, then the others, newest first.
        `wanted` leaves out jobs that do not match. `before` gives the next page: the finished jobs
        that ended before this one. An array is one row; `wanted.array` lists its elements.

        Over HTTP, `sort` (submitted, started, ended, name, user, tenant, state, priority, gpus,
        time, attempts; with "-" before it, the largest first) lists live and finished jobs
        together. The header `shoal-next` is the `cursor` of the next page; without it, this was
        the last. With `count`, the header `shoal-count` says how many match ("about 812" if some
        only may). `shoal-left-out` is there if too many match to sort all of them. `group`: only
        jobs that wait for this, by its `key` in the queue."""

    @call("GET", "/v1/jobs/{job_id}", Needs.READ, head=Head.ENDED, neighbor=True)
    def job(self, job_id: str, *, wait_for: str = "", wait_s: float = 0) -> JobView:
        """A job. With `wait_for` ("running", "asleep" or "finished") it returns when the job has
        reached that state, or after `wait_s` (30 at most): look at the state."""

    @call("POST", "/v1/jobs/{job_id}/cancel", Needs.WRITE, neighbor=True)
    def cancel(self, job_id: str) -> Done:
        """Stops a job, live or waiting."""

    @call("POST", "/v1/jobs/{job_id}/lease", Needs.WRITE, body=LeaseUntil, neighbor=True)
    def renew_lease(self, job_id: str, until_ms: int) -> LeaseView:
        """Lets a job that has a lease live until then, a moment of the cluster's clock, at most 7
        days ahead. A lease never becomes shorter."""

    @call("POST", "/v1/jobs/{job_id}/sleep", Needs.WRITE)
    def sleep(self, job_id: str) -> Done:
        """Puts a running job to sleep: it holds memory of its nodes, and no GPU and no CPU. Returns
        at once; `job(job_id, wait_for="asleep", wait_s=30)` waits."""

    @call("POST", "/v1/jobs/{job_id}/wake", Needs.WRITE)
    def wake(self, job_id: str) -> Done:
        """Wakes a job as soon as there is room: it goes on where it stopped. Returns at once."""

    @call("POST", "/v1/jobs/{job_id}/requeue", Needs.WRITE, once=True)
    def requeue(self, job_id: str, key: str = "") -> Done:
        """Stops the job and runs it again, from its last checkpoint. A job that has ended is
        submitted again, as a new job and once for each key."""

    @call("POST", "/v1/jobs/{job_id}/retry", Needs.WRITE)
    def retry(self, job_id: str) -> Done:
        """Runs elements of an array again that ended without success: one (j7.3), or all (j7)."""

    @call("GET", "/v1/jobs/{job_id}/why", Needs.READ, late="shoal.calls.histories", neighbor=True)
    def why(self, job_id: str) -> WhyView:
        """Why the job waits, or where it runs and why there."""

    @call("GET", "/v1/jobs/{job_id}/explanation", Needs.READ, head=Head.ENDED, neighbor=True)
    def explanation(self, job_id: str) -> Explanation:
        """What happened to the job: attempts, causes, the last lines of the first failure, cost."""

    @call("POST", "/v1/jobs/{job_id}/labels", Needs.WRITE, body=LabelsChange)
    def label_job(self, job_id: str, labels: Mapping[str, str | None]) -> Done:
        """Sets labels of a job, live or ended; None removes one."""

    @call("POST", "/v1/jobs/{job_id}/notes", Needs.WRITE, body=NoteText)
    def note_job(self, job_id: str, text: str) -> Done:
        """Writes a note about a job, live or ended; an empty text removes all of its notes."""

    @call("POST", "/v1/jobs/{job_id}/sessions", Needs.WRITE, body="request", neighbor=True)
    def open_session(self, job_id: str, request: SessionRequest) -> SessionView:
        """Has the member's node enter a meeting that the sender holds: see shoal.sessions."""

    @call("GET", "/v1/jobs/{job_id}/logs", Needs.READ, head=Head.ENDED, neighbor=True)
    def logs(
        self,
        job_id: str,
        *,
        member: int = 0,
        attempt: int = 0,
        offset: int = 0,
        wait_s: float = 0,
        grep: str = "",
        since_ms: int = 0,
    ) -> LogView:
        """Output from `offset` on; a negative one counts from the end. Attempt 0 is the newest.
        If there is nothing yet, it waits up to `wait_s` for more. `grep`: only lines that contain
        this text. `since_ms`: only output written since then."""

    @call(
        "GET",
        "/v1/jobs/{job_id}/files",
        Needs.READ,
        head=Head.ENDED,
        renamed={"kind": "folder"},
        neighbor=True,
    )
    def files(self, job_id: str, path: str = "", *, kind: Kind = Kind.OUTPUT) -> FilesView:
        """The files that the job has kept: all, or those at and below `path`."""

    @call(
        "GET", "/v1/jobs/{job_id}/files/part", Needs.READ, renamed={"kind": "folder"}, neighbor=True
    )
    def file_part(
        self, job_id: str, path: str, offset: int = 0, *, kind: Kind = Kind.OUTPUT
    ) -> FilePart:
        """A few MiB of a kept file. A file whose `version` changes has been replaced meanwhile."""

    @call("GET", "/v1/jobs/{job_id}/files/key", Needs.WRITE)
    def file_key(self, job_id: str) -> FileKey:
        """The key of a job's files, if it asked for their encryption."""

    @call("GET", "/v1/jobs/{job_id}/series", Needs.READ)
    def job_series(self, job_id: str, *, since_ms: int = 0, members: bool = True) -> JobSeries:
        """The job's curves. `since_ms` leaves out older points; `members=False` leaves out the
        curves of members, which are most of it."""

    @call("GET", "/v1/jobs/{job_id}/trials", Needs.READ)
    def trials(
        self,
        job_id: str,
        *,
        by: str = "",
        highest: bool | None = None,
        sort: str = "",
        offset: int = 0,
        limit: int = 100,
    ) -> TrialsView:
        """The trials of a sweep: variables, metrics, states and costs. `by`: the metric that says
        which is the best, by its lowest value, or the `highest`. `sort`: a variable, a metric,
        last.METRIC, index, state, step, gpu_time or cost; with "-" before it, the largest first.
        Without it, the best come first. At most 1,000 in an answer; `offset` gives the others."""

    @call("GET", "/v1/jobs/{job_id}/cost", Needs.READ, neighbor=True)
    def cost(self, job_id: str) -> CostView:
        """What the job has cost so far."""

    @call("GET", "/v1/packages/{package}", Needs.READ, neighbor=True)
    def package(self, package: str) -> PackageView:
        """Whether the controller has a packed working directory, so that it need not be sent."""

    @call("PUT", "/v1/packages/{package}", Needs.WRITE, body="archive", neighbor=True)
    def put_package(self, package: str, archive: bytes) -> PackageView:
        """Sends a packed working directory; its SHA-256 is its name. `send_package` sends a file,
        and only if the controller does not have it."""

    @call("GET", "/v1/handed/{mark}", Needs.WRITE, neighbor=True)
    def handed(self, mark: str) -> FilesView:
        """What has come of the saved work of a job that a neighbor is about to hand over. `mark`
        names the hand-over."""

    @call("POST", "/v1/handed/{mark}/parts", Needs.WRITE, body="part", neighbor=True)
    def hand_part(self, mark: str, part: FilePart) -> Received:
        """Sends a few MiB of a file of that work; how much of the file is there now."""

    @call("PUT", "/v1/handed/{mark}", Needs.WRITE, body=HandedFiles, neighbor=True)
    def hand_files(self, mark: str, files: Sequence[KeptFile]) -> Received:
        """These are all of its files. The job with this mark begins with them."""


class FlowCalls(Calls):
    """`tenant`: an admin may name any; without one it is the sender's own."""

    @call("POST", "/v1/workflows", Needs.WRITE, body=WorkflowSubmission, status=201, once=True)
    def submit_workflow(self, jobs: Sequence[WorkflowJob], key: str = "") -> WorkflowView:
        """Submits all of the jobs or none. The same key again returns the same workflow."""

    @call("GET", "/v1/workflows/{workflow}", Needs.READ)
    def workflow(self, workflow: str) -> WorkflowView:
        """A workflow and its jobs."""

    @call("POST", "/v1/workflows/{workflow}/cancel", Needs.WRITE)
    def cancel_workflow(self, workflow: str) -> Done:
        """Cancels those of its jobs that have not ended."""

    @call("PUT", "/v1/schedules/{name}", Needs.WRITE, body="spec")
    def set_schedule(self, spec: ScheduleSpec) -> ScheduleView:
        """Adds the schedule, or changes it."""

    @call("GET", "/v1/schedules", Needs.READ)
    def schedules(self) -> list[ScheduleView]:
        """All schedules that the sender may see."""

    @call("GET", "/v1/schedules/{name}", Needs.READ)
    def schedule(self, name: str, *, tenant: str = "") -> ScheduleView:
        """A schedule, with its next and last runs."""

    @call("POST", "/v1/schedules/{name}/pause", Needs.WRITE)
    def pause_schedule(self, name: str, *, tenant: str = "") -> Done:
        """Nothing is submitted by the schedule until it is resumed."""

    @call("POST", "/v1/schedules/{name}/resume", Needs.WRITE)
    def resume_schedule(self, name: str, *, tenant: str = "") -> Done:
        """Has a paused schedule go on."""

    @call("POST", "/v1/schedules/{name}/run", Needs.WRITE, once=True)
    def run_schedule(self, name: str, key: str = "", *, tenant: str = "") -> Done:
        """One run now; the answer's id is its job. The same key again returns the same run."""

    @call("DELETE", "/v1/schedules/{name}", Needs.WRITE)
    def remove_schedule(self, name: str, *, tenant: str = "") -> Done:
        """Removes the schedule; jobs that it has submitted go on."""
