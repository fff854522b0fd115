"""Calls that the page, nodes and monitoring send, which the client does not offer as methods."""

from __future__ import annotations

from typing import Any

from shoal.calls.call import WEBSOCKET, Calls, Head, Needs, call
from shoal.model.budget import BudgetView
from shoal.model.joining import Joined, Joining
from shoal.model.ledger import By
from shoal.model.policy import PolicyDiff, PolicyDraft, PolicyForm, PolicyRecord
from shoal.model.views import JobView, LogHits, LogPart


class PageCalls(Calls):
    """An answer of `Any` is for the page alone; its handler says what it is."""

    @call("GET", "/", Needs.OPEN, head=Head.ANY)
    def index(self) -> bytes:
        """The page."""

    @call("GET", "/favicon.ico", Needs.OPEN, head=Head.ANY)
    def icon(self) -> bytes:
        """The page's icon."""

    @call("GET", "/web/{name}", Needs.OPEN, head=Head.ANY)
    def file(self, name: str) -> bytes:
        """A file of the page."""

    @call("GET", "/status", Needs.OPEN)
    def public_status(self) -> bytes:
        """The public status page; unknown, unless an admin has switched it on."""

    @call("GET", "/v1/session", Needs.OPEN, head=Head.ONLY_LEADER)
    def session(self) -> Any:
        """The browser's session; empty if it is not signed in."""

    @call("POST", "/v1/session", Needs.OPEN, body="data")
    def sign_in(self, data: Any) -> Any:
        """Begins a session, with a token or the code of a link."""

    @call("POST", "/v1/session/end", Needs.SIGNED_IN)
    def sign_out(self) -> None:
        """Ends the browser's session, at every head."""

    @call("GET", "/v1/oidc/begin", Needs.OPEN, head=Head.ONLY_LEADER)
    def begin_sign_in(self, *, tenant: str = "") -> bytes:
        """Sends the browser to the provider."""

    @call("GET", "/v1/oidc/callback", Needs.OPEN, head=Head.ONLY_LEADER)
    def end_sign_in(
        self,
        *,
        code: str = "",
        state: str = "",
        error: str = "",
        error_description: str = "",
        iss: str = "",
    ) -> bytes:
        """The provider sends the browser back to here."""

    @call("GET", "/v1/stream", Needs.READ, streams=True)
    def stream(self) -> bytes:
        """Changes in the cluster, beginning with all of it: server-sent events."""

    @call("GET", "/v1/queue", Needs.READ)
    def queue(self, *, limit: int = 100, group: str = "") -> Any:
        """Waiting jobs in the scheduler's order. `group`: only jobs of this one, by its key."""

    @call("GET", "/v1/timeline", Needs.READ)
    def timeline(
        self,
        *,
        from_ms: int = 0,
        to_ms: int = 0,
        node: str = "",
        job: str = "",
        least_ms: int = 0,
    ) -> Any:
        """What ran where: of the last hour, unless a range is named. Neighbors shorter than
        `least_ms` on the same GPUs become one bar without a job."""

    @call("GET", "/v1/moment", Needs.READ)
    def moment(self, at_ms: int) -> Any:
        """The cluster as it was then. Steps and loads are not part of it: they are samples."""

    @call("GET", "/v1/budgets", Needs.READ)
    def budgets(self) -> list[BudgetView]:
        """Budgets of the tenants that the sender sees; those that have used most of theirs come
        first, at most 1,000."""

    @call("GET", "/v1/ledger/csv", Needs.READ)
    def ledger_csv(
        self,
        *,
        by: By = By.ACCOUNT,
        from_ms: int = 0,
        to_ms: int = 0,
        tenant: str | None = None,
        user: str | None = None,
        tokens: bool = False,
    ) -> str:
        """The rows of the ledger's report as a file, with exact amounts. `tokens`: those of
        services of language models instead of GPU time."""

    @call("GET", "/v1/jobs/{job_id}/logs/part", Needs.READ)
    def log_part(
        self,
        job_id: str,
        *,
        member: int | None = None,
        attempt: int = 0,
        places: str = "",
        back: bool = False,
        share: float | None = None,
        since_ms: int = 0,
        line: str = "",
        grep: str = "",
        wait_s: float = 0,
    ) -> LogPart:
        """Without a member, the first 64 in the order in which their output came. It begins at
        `places` (a byte of each member), at a share of the whole, at a time or at a line
        (MEMBER:BYTE); `back`: what is before that, or before the end. `grep`: only these lines."""

    @call("GET", "/v1/jobs/{job_id}/logs/find", Needs.READ)
    def log_find(
        self,
        job_id: str,
        *,
        member: int | None = None,
        attempt: int = 0,
        text: str = "",
        from_member: int = 0,
        from_offset: int = 0,
    ) -> LogHits:
        """Where lines with this text are; without a text: where each member's first error is. The
        answer says where to go on."""

    @call("GET", "/v1/fields", Needs.READ)
    def fields(self) -> Any:
        """The fields of a job, for a form."""

    @call("GET", "/v1/form", Needs.READ)
    def form(self, *, like: str = "", instead: bool = False) -> Any:
        """The form of a job that is to run again; `instead`: in the place of the one that waits."""

    @call("POST", "/v1/form", Needs.WRITE, body="data")
    def check_form(self, data: Any) -> Any:
        """What was filled in, as a form, a file and a command line, or what is wrong with it so
        far. Nothing is submitted."""

    @call("POST", "/v1/form/submit", Needs.WRITE, body="data", status=201)
    def submit_form(self, data: Any) -> JobView:
        """Submits what was filled in."""

    @call("GET", "/v1/policy/form", Needs.READ)
    def policy_form(self) -> PolicyForm:
        """The policy in force, as its reader may see it, with what its fields mean."""

    @call("POST", "/v1/policy/draft", Needs.ADMIN, body="data")
    def policy_draft(self, data: PolicyDraft) -> PolicyDiff:
        """Reads a draft and tries it out; says where it differs from the policy in force. Nothing
        is changed."""

    @call("GET", "/v1/policy/history", Needs.READ_ALL)
    def policy_history(self, *, limit: int = 20) -> list[PolicyRecord]:
        """The policies that the log still has, the newest first."""

    @call("GET", "/v1/policy/history/{seq:int}", Needs.READ_ALL)
    def earlier_policy(self, seq: int) -> PolicyForm:
        """A policy of the past, by the number of its event."""

    @call("GET", "/v1/policy/diff", Needs.READ_ALL)
    def policy_diff(self, *, before: int = 0, after: int = 0) -> PolicyDiff:
        """What differs between two policies, by the numbers of their events; 0: the one in force.
        `policy` is the one after, and `expected` the version of the one before."""

    @call("GET", "/v1/simulation", Needs.ADMIN)
    def simulation(self) -> Any:
        """The newest replay, and how far it is."""

    @call("POST", "/v1/simulation", Needs.ADMIN, body="data")
    def simulate(self, data: Any) -> Any:
        """Replays the cluster's history under other policies."""

    @call("POST", "/v1/simulation/cancel", Needs.ADMIN)
    def cancel_simulation(self) -> Any:
        """Ends the replay."""

    @call("GET", "/v1/plan", Needs.SIGNED_IN)
    def plan_choices(self) -> Any:
        """The models and machines that a plan may name."""

    @call("POST", "/v1/plan", Needs.SIGNED_IN, body="data")
    def plan(self, data: Any) -> bytes:
        """What a training run would need."""

    @call("POST", "/v1/services/{name}/try", Needs.WRITE, body="data", streams=True)
    def try_service(self, name: str, data: Any) -> bytes:
        """Sends a request to the service. Answers with lines of JSON: `status` first, then `text`,
        and a `problem` if it broke."""


class MachineCalls(Calls):
    @call("GET", "/metrics", Needs.READ_ALL)
    def metrics(self) -> bytes:
        """For Prometheus, which sends the token from its `authorization: credentials_file`."""

    @call("GET", "/v1/certificate", Needs.OPEN, head=Head.ANY)
    def certificate(self) -> str:
        """The cluster's CA. Trust it only if its SHA-256 is the one that the head shows."""

    @call("POST", "/v1/join", Needs.NODE, body="data")
    def join(self, data: Joining) -> Joined:
        """A key for this machine; every key that its node had before is void."""

    @call(WEBSOCKET, "/v1/link", Needs.NODE, streams=True)
    def link(self) -> None:
        """A node's link with its head."""

    @call(WEBSOCKET, "/v1/meetings/{meeting}/host", Needs.WRITE, streams=True, neighbor=True)
    def hold_meeting(self, meeting: str) -> None:
        """Holds a meeting, at which members of a job call their sender."""

    @call(
        WEBSOCKET,
        "/v1/meetings/{meeting}/guests/{guest:int}",
        Needs.WRITE,
        streams=True,
        neighbor=True,
    )
    def receive_guest(self, meeting: str, guest: int) -> None:
        """The connection with one guest of a meeting."""

    @call(WEBSOCKET, "/v1/meetings/{meeting}/enter", Needs.OPEN, streams=True)
    def enter_meeting(self, meeting: str) -> None:
        """Enters a meeting; its key is the first message."""
