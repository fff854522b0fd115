"""The indexes: derived from the facts, kept by `apply`, rebuilt when a snapshot is loaded."""

from __future__ import annotations

from shoal.core.books.foresight import Foresight
from shoal.core.state.asked import taken_apart
from shoal.core.state.facts import Facts, Node
from shoal.core.state.queue import Queue
from shoal.core.state.records import Unfolded
from shoal.core.state.room import Division, Domain, Room
from shoal.core.state.sizes import Sizes
from shoal.core.state.tally import Tally
from shoal.model.job import Job, MemberRef
from shoal.model.resources import Kind


class Indexes(Facts):
    """Only `apply` changes these, like the facts they follow."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[Node] = []  # nodes by index
        self.rooms: list[Room] = []  # by node index
        self.cluster = Domain()  # all schedulable nodes
        self.divisions = (Division(), Division())  # the blocks, the racks
        self.brought: dict[str, dict[str, None]] = {}  # order -> nodes whose spec names it
        self.placed: dict[str, dict[MemberRef, Job]] = {}  # node -> members that hold slices
        self.capacity: dict[Kind, int] = {}  # kind of node -> how many are known
        self.open_capacity: dict[Kind, int] = {}  # kind of node -> how many are schedulable
        self.totals = Kind(0, 0, 0)  # of all nodes that are known
        self.endings: list[tuple[int, int]] = []  # (end, index) of nodes that end, sorted
        self.open_endings: list[tuple[int, int]] = []  # those of them that are schedulable
        self.looks_at = taken_apart({})  # what is asked about, taken apart
        self.asking: dict[str, int] = {}  # what is asked about -> by how many live jobs
        self.troubled: dict[str, None] = {}  # nodes that are suspect or in quarantine
        self.lost: dict[int, None] = {}  # indexes of nodes that are lost
        self.foresight = Foresight(1000, self.mix)  # for the largest node
        self.queue = Queue()
        self.tally = Tally()  # jobs by tenant
        self.sizes = Sizes()  # bytes of their specs by tenant
        self.numbers: dict[int, str] = {}  # job number -> id
        self.keys: dict[str, str] = {}  # submission key -> job id
        self.masters: set[str] = set()  # rendezvous points in use, "address:port"
        self.limits: list[tuple[int, str, int]] = []  # heap of (deadline_ms, job, attempt)
        self.leases: list[tuple[int, str, int]] = []  # heap of (until_ms, job, 0)
        self.aging: list[tuple[int, str, int]] = []  # heap of (when its span ends, job, attempt)
        self.elder: str | None = None  # the job that comes first because it waited for too long
        self.births_ms = 0  # the sum over live jobs of when they were submitted
        self.preemptible: dict[str, None] = {}  # jobs that hold slices and may be stopped
        self.elastic: dict[str, None] = {}  # jobs that hold slices and may grow or shrink
        self.dependents: dict[str, dict[str, None]] = {}  # job -> jobs that wait for its end
        self.flows: dict[str, dict[str, None]] = {}  # workflow -> its live jobs
        self.unfolded: dict[str, Unfolded] = {}  # array -> its elements that are jobs
        self.dues: list[tuple[int, str]] = []  # heap of (next due time, schedule)
        self.replicas: dict[str, dict[str, None]] = {}  # service -> its jobs
        self.napping: dict[str, None] = {}  # jobs that sleep, or are on the way there or back
        self.wakeful: dict[str, None] = {}  # those of them that sleep and are to be woken
        self.away: dict[str, None] = {}  # jobs that neighbors have
        self.awake: dict[str, None] = {}  # running jobs, the longest awake first
