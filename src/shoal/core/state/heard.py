"""What the controller has heard since it started: not logged, and learned again by listening."""

from __future__ import annotations

import msgspec

from shoal.core.books.hang import Pace
from shoal.core.books.scale import RecentWork
from shoal.core.books.scoring import Change
from shoal.core.books.scoring import Gang as Scores
from shoal.core.books.spending import Recent
from shoal.model.blocks import HOLDINGS_MAX, Held
from shoal.model.fabric import Cut, Host
from shoal.model.health import CheckResult, Verdict
from shoal.model.job import MemberRef
from shoal.model.kept import Copied
from shoal.model.neighbor import NeighborReport
from shoal.model.node import End
from shoal.model.progress import Beat
from shoal.model.report import Hung
from shoal.model.service import ServiceLoad
from shoal.model.supply import SupplyReport

VOLUME_BYTES_MAX = 1 << 50  # a node that reports more does not tell the truth


class Watch(msgspec.Struct):
    """What the members of one attempt report of their steps."""

    attempt: int
    pace: Pace
    gang: Scores = msgspec.field(default_factory=Scores)
    beats: dict[int, Beat] = {}  # the newest of each member
    recent: dict[int, Recent] = {}  # where the time of each member's last steps went
    slow: dict[int, Change] = {}  # members that hold up the others
    stuck: tuple[int, ...] = ()  # members whose stacks are wanted
    ended: bool = False  # a member has ended and takes no more steps; its exit is not reported yet
    unsaved: int = 0  # saves in a row that have failed, as it was last said
    unsaved_ms: int = 0  # not said again before this


class Touring(msgspec.Struct, kw_only=True):
    """Nodes that measure the network between them."""

    id: str
    hosts: tuple[Host, ...]
    begun_ms: int
    until_ms: int
    key: str = ""  # while it lasts; hosts prove to each other that they know it
    collectives: bool = False
    results: dict[str, CheckResult] = {}  # by node, as they come in
    ended_ms: int | None = None
    incarnations: dict[str, int] = {}  # of its nodes, when it began
    about: str = ""  # the node whose links are checked, if a suspicion asked for the tour
    cuts: tuple[Cut, ...] = ()  # halves against halves, instead of all links
    unmeasured: dict[str, str] = {}  # nodes that nothing is known of, and why; when it has ended


class Storing(msgspec.Struct, kw_only=True):
    """Nodes that measure a storage. Turn by turn one of `alone` measures; in the last turn all
    `nodes` do, at the same time."""

    id: str
    target: str
    nodes: tuple[str, ...]
    alone: tuple[str, ...]
    begun_ms: int
    phase_ms: int
    turn: int = 0
    turn_begun_ms: int = 0
    turn_until_ms: int = 0
    limit_ms: int = 0  # of a probe in this turn
    at_ms: int = 0  # when all begin, in the last turn
    own: dict[str, CheckResult] = {}  # of `alone`
    results: dict[str, CheckResult] = {}  # of all
    ended_ms: int | None = None


class Starting(msgspec.Struct):
    """An attempt of a replica from its placement on. `got_ms`: how long it took to get what."""

    attempt: int
    at_ms: int  # when its nodes last said what they get for it
    what: str = ""
    got_ms: dict[str, int] = {}
    listened_ms: int | None = None  # when it first listened on its port
    served_ms: int | None = None  # when the gateway first had it

    def gets(self, what: str, now_ms: int) -> None:
        if self.what:
            self.got_ms[self.what] = self.got_ms.get(self.what, 0) + now_ms - self.at_ms
        self.what, self.at_ms = what, now_ms


class Heard:
    """Any phase may write here. A controller that restarts begins with all of it empty (ADR 2)."""

    def __init__(self) -> None:
        # When each node that is not lost last reported; the one silent for longest comes first.
        self.contacts: dict[str, int] = {}
        # The newest (incarnation, sequence) of each node, lost or not: older reports are refused.
        self.said: dict[str, tuple[int, int]] = {}
        # When that report was heard, for nodes that end leases by themselves.
        self.leasing: dict[str, int] = {}
        # node -> replicas that listen on their ports by themselves; None: its agent does not look
        self.listens: dict[str, frozenset[MemberRef] | None] = {}
        self.versions: dict[str, str] = {}  # of the nodes' agents; empty before 0.6.0
        self.getting: dict[str, dict[MemberRef, str]] = {}  # node -> members not ready, and why
        # node -> what does not answer there, and since when we know
        self.hangs: dict[str, dict[Hung, int]] = {}
        # node -> what its members have on GPUs, in MB
        self.uses: dict[str, dict[MemberRef, int]] = {}
        self.naps: dict[str, dict[int, int]] = {}  # job -> how long members took to sleep or wake
        # node -> members that were used while they slept, and how often
        self.touched: dict[str, dict[MemberRef, int]] = {}
        self.watches: dict[str, Watch] = {}  # of jobs whose members report their steps
        self.unsaved: dict[str, int] = {}  # job -> a saved step that no event has noted yet
        self.idles: dict[str, tuple[int, dict[int, int]]] = {}  # job -> attempt, member -> since
        self.warm: dict[str, dict[str, int]] = {}  # job -> nodes ready for it, and when heard
        self.copied: dict[str, Copied] = {}  # job -> the head's newest copy of its checkpoints
        self.checks_sent: dict[tuple[str, str], int] = {}  # node, check -> when, a moment ago
        self.asked: dict[str, str] = {}  # node -> the check that a user asked for
        self.verdicts: dict[str, tuple[str, CheckResult, Verdict]] = {}  # node -> its last check
        self.tours: dict[str, Touring] = {}  # under way, and the last that ended
        self.storing: Storing | None = None  # under way, or the last that ended
        self.loads: dict[str, ServiceLoad] = {}  # what the gateway last reported of each service
        self.recent_work: dict[str, RecentWork] = {}  # of each service
        self.neighbors: dict[str, NeighborReport] = {}  # the newest word of each
        self.supplied: dict[str, SupplyReport] = {}  # the newest of each engine that brings nodes
        self.own_ends: dict[str, End] = {}  # node -> as it says itself
        self.announced: dict[str, dict[str, End]] = {}  # engine -> ends of nodes that it brought
        self.trouble_ms: dict[str, int] = {}  # engine -> since when it has a problem
        self.missing_ms: dict[str, int] = {}  # order -> since when its supplier does not show it
        self.quiet: dict[str, int | None] = {}  # replica -> the nap (its start) that may begin now
        self.down_ms: dict[str, int] = {}  # replica -> since when the gateway cannot reach it
        self.starts: dict[str, Starting] = {}  # replica -> since its placement
        self.holdings: dict[str, tuple[Held, ...]] = {}  # node -> what it has of volumes
        self.holders: dict[str, dict[str, Held]] = {}  # volume -> the same, by node

    def hold(self, node: str, holdings: tuple[Held, ...]) -> None:
        """What the node has now. Nothing but its own disk is believed of it."""
        before, holdings = self.holdings.get(node, ()), holdings[:HOLDINGS_MAX]
        if holdings == before:
            return
        for holding in before:
            nodes = self.holders.get(holding.volume, {})
            nodes.pop(node, None)
            if not nodes:
                self.holders.pop(holding.volume, None)
        self.holdings.pop(node, None)
        if holdings:
            self.holdings[node] = holdings
        for holding in holdings:
            if 0 < holding.held_bytes <= holding.size_bytes <= VOLUME_BYTES_MAX:
                self.holders.setdefault(holding.volume, {})[node] = holding
