"""The cluster as the stream of changes shows it, kept current by a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http import HTTPStatus

import msgspec

from shoal.client import Client, ShoalError
from shoal.client.connections import Interrupt, Interrupted
from shoal.model.feed import Change, JobLine, NodeLine, Snapshot
from shoal.model.views import StatusView

AGAIN_S = 1.0
_SNAPSHOT = msgspec.json.Decoder(Snapshot)
_CHANGE = msgspec.json.Decoder(Change)
_BEAT = msgspec.json.Decoder(dict[str, int])


class Live:
    """`lock` is held while it changes. `since_s`: when it was last heard of, if it is away now."""

    def __init__(self, connect: Callable[[], Client], roused: Callable[[], None]) -> None:
        self._connect, self._roused = connect, roused
        self._interrupt = Interrupt()
        self._over = threading.Event()
        self._heard_s = time.time()
        self._last_id = ""
        self.lock = threading.Lock()
        self.status: StatusView | None = None
        self.nodes: dict[str, NodeLine] = {}
        self.jobs: dict[str, JobLine] = {}
        self.busy: dict[str, tuple[int, ...]] = {}
        self.number = 0  # grows with every change
        self.skew_ms = 0
        self.since_s: float | None = None
        self.trouble = ""
        self.refused: ShoalError | None = None  # the token is void: to ask again does not help
        self._thread = threading.Thread(target=self._run, name="live", daemon=True)

    @property
    def now_ms(self) -> int:
        """The controller's time."""
        return int(time.time() * 1000) + self.skew_ms

    def read(self, client: Client) -> None:
        """Once: all of it, and the time now: that of a snapshot is when something last changed."""
        for told in client.stream():
            self._take(told.kind, told.id, told.data)
            if self.status is not None and told.kind == "beat":
                return
        raise ShoalError("the controller ended while it answered; try again")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._interrupt.ask()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        while not self._over.is_set():
            trouble = "the controller ended"
            try:
                with self._connect() as client:
                    lent = client.lent(patience_s=0, interrupt=self._interrupt)
                    for told in lent.stream(self._last_id):
                        with self.lock:
                            self._take(told.kind, told.id, told.data)
                        if told.kind != "beat" or self.since_s is not None:
                            self._roused()
                        self.since_s, self.trouble, self._heard_s = None, "", time.time()
            except Interrupted:
                return
            except ShoalError as error:
                if error.status == HTTPStatus.UNAUTHORIZED:
                    self.refused = error
                    self._roused()
                    return
                trouble = error.message if error.status else str(error)
            except Exception as error:  # such as a message that this version cannot read
                trouble = f"cannot read the stream: {error}"
            self.since_s, self.trouble = self._heard_s, trouble
            self._roused()
            self._over.wait(AGAIN_S)

    def _take(self, kind: str, name: str, data: bytes) -> None:
        if kind == "beat":
            self.skew_ms = _BEAT.decode(data)["now_ms"] - int(time.time() * 1000)
            return
        if kind == "snapshot":
            whole = _SNAPSHOT.decode(data)
            self.nodes, self.jobs, self.busy = {}, {}, {}
            change = Change(
                status=whole.status, nodes=whole.nodes, jobs=whole.jobs, busy=whole.busy
            )
            self.skew_ms = whole.status.now_ms - int(time.time() * 1000)
        elif kind == "change":
            change = _CHANGE.decode(data)
        else:
            return
        self._last_id, self.number = name, self.number + 1
        self.status = change.status or self.status
        self.nodes |= {one.id: one for one in change.nodes}
        self.jobs |= {one.id: one for one in change.jobs}
        self.busy |= change.busy
        for job in [*(one.id for one in change.ended), *change.gone_jobs]:
            self.jobs.pop(job, None)
        for node in change.gone_nodes:
            self.nodes.pop(node, None)
            self.busy.pop(node, None)
