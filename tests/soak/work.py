"""What a soak's cluster is busy with: clients that record what they hear, a service under load, a
gang that trains, arrays and maps."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from harness.clients import Recorder

from shoal.client import Client, ShoalError
from shoal.model.job import JobSpec
from shoal.model.service import Probe, Route, Scale, ServiceSpec
from tests.soak.world import SHOAL, World

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CLIENTS = 6
PAUSE_S = 0.4
LOADERS = 4
ASK_S = 30.0
TRIES = 8  # of one request, at the gateways in turn
MAP_INPUTS = 40
SERVICE = "soak"


class Asked(msgspec.Struct, frozen=True):
    """A request that got no answer at one gateway."""

    number: int
    gateway: str
    began: float
    ended: float
    why: str


class Work:
    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.dice = random.Random(seed)
        self.recorders: list[Recorder] = []
        self.failed: list[Asked] = []  # at one gateway
        self.given_up = 0  # at all gateways, again and again
        self.answered = 0
        self.maps: list[str] = []  # what was wrong with them
        self.maps_done = 0
        self.gangs: list[str] = []
        self._numbers = itertools.count(1)
        self._end = threading.Event()
        self._stays = contextlib.ExitStack()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        with self.world.asking() as client:
            client.submit_service(self._service())
            self.gangs.append(client.submit(self._gang(), key="gang-0").id)
        for number in range(CLIENTS):
            seed = self.dice.randrange(2**32)
            recorder = Recorder(number, self._recording_client, self.spec, seed, PAUSE_S)
            self.recorders.append(recorder)
            recorder.start()
        for _ in range(LOADERS):
            self._thread(self._load)
        self._thread(self._map)
        self._thread(self._train)

    def end(self) -> None:
        self._end.set()
        for recorder in self.recorders:
            recorder.end()
        for thread in (*self.recorders, *self._threads):
            thread.join(180)

    def _thread(self, work: object) -> None:
        thread = threading.Thread(target=self._in_network, args=(work,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _in_network(self, work: object) -> None:
        with self.world.net.network():
            work()  # type: ignore[operator]

    def _recording_client(self) -> Client:
        """Called by the thread that uses it, which stays in the switch's network."""
        self._stays.enter_context(self.world.net.network())
        return self.world.client(patience_s=1, timeout_s=15)

    # -- jobs ------------------------------------------------------------------------------

    def env(self) -> dict[str, str]:
        path = os.environ.get("PATH", os.defpath)
        return {"PATH": path, "SOAK_SHARED": str(self.world.shared), "PYTHONPATH": str(ROOT)}

    def job(self, module: str, *words: str, **fields: object) -> JobSpec:
        command = (sys.executable, "-m", f"tests.soak.{module}", *words)
        return msgspec.convert({"command": command, "env": self.env(), **fields}, JobSpec)

    def spec(self, dice: random.Random) -> JobSpec:
        words = (str(dice.choice((0, 0.5, 2))), str(dice.choice((0, 0, 0, 3))))
        fields: dict[str, object] = {"gpus": 1, "stop_grace_ms": 500}
        if dice.random() < 0.08:
            fields["sweep"] = {"ranges": [[0, 3]]}
        else:
            fields["members"] = dice.choice((1, 1, 1, 2))
            fields |= dice.choice(({}, {"restart": "on-failure", "retries": 2}))
        return self.job("member", *words, **fields)

    def _gang(self) -> JobSpec:
        again = {"restart": "on-failure", "retries": 1000}
        return self.job("trainer", "300", members=3, gpus=1, priority=10, **again)

    def _train(self) -> None:
        """One gang after the other; each goes on from its checkpoints until it has all steps."""
        with self.world.client() as client:
            while not self._end.wait(1):
                with contextlib.suppress(ShoalError):
                    if client.job(self.gangs[-1]).finished_ms is not None:
                        key = f"gang-{len(self.gangs)}"
                        self.gangs.append(client.submit(self._gang(), key=key).id)

    # -- the service -----------------------------------------------------------------------

    def _service(self) -> ServiceSpec:
        return ServiceSpec(
            name=SERVICE,
            replica=self.job("replica", gpus=1, priority=20),
            scale=Scale(least=3, most=3),
            probe=Probe(path="/", every_ms=1_000, failures=3),
            route=Route(service=SERVICE, response_timeout_ms=5_000),
        )

    def gateways(self) -> dict[str, str]:
        """The host and port of each head's gateway."""
        found = {}
        for head in self.world.heads:
            port = head.home / ".shoal" / "gateway.port"
            if port.exists():
                found[head.name] = f"{head.address}:{port.read_text()}"
        return found

    def _load(self) -> None:
        with self.world.client() as client:
            while not self._end.is_set():
                with contextlib.suppress(ShoalError):
                    view = client.service(SERVICE)
                    if view.ready:
                        break
                self._end.wait(0.5)
            path = urlsplit(view.url).path or "/"
        while not self._end.wait(self.dice.uniform(0, 0.2)):
            self._request(path, next(self._numbers))

    def _request(self, path: str, number: int) -> None:
        gateways = list(self.gateways().items())
        for attempt in range(TRIES):
            name, place = gateways[(number + attempt) % len(gateways)]
            began = time.time()
            why = _get(place, f"{path}?n={number}")
            if not why:
                self.answered += 1
                return
            self.failed.append(Asked(number, name, began, time.time(), why))
            self._end.wait(1)
        self.given_up += 1

    # -- maps ------------------------------------------------------------------------------

    def _map(self) -> None:
        """`shoal map` on the first head's machine, again and again."""
        folder = self.world.scratch / "map"
        folder.mkdir()
        (folder / "work.py").write_text(
            "import time\ndef double(n): time.sleep(0.05); return 2 * n\n"
        )
        (folder / "inputs").write_text("".join(f"{n}\n" for n in range(MAP_INPUTS)))
        wanted = [str(2 * n) for n in range(MAP_INPUTS)]
        for number in itertools.count():
            if self._end.wait(5):
                return
            out = folder / f"out-{number}"
            words = ("map", "work.py:double", "inputs", "-o", str(out), "--cluster", "-n", "2")
            while not out.exists() and not self._end.is_set():
                self._map_once(folder, words)
            if out.exists():
                self.maps_done += 1
                if out.read_text().split() != wanted:
                    self.maps.append(f"map {number} has other results than it should")

    def _map_once(self, folder: Path, words: tuple[str, ...]) -> None:
        """It may be interrupted by the loss of its machine; the next goes on from its journal."""
        host = self.world.heads[0]
        with contextlib.suppress(subprocess.TimeoutExpired, AssertionError):
            script = f'cd {folder} && exec "$@"'
            host.run("sh", "-c", script, "sh", *SHOAL, *words, timeout_s=60)
        self._end.wait(2)


def _get(place: str, path: str) -> str:
    """Empty, or why there was no good answer."""
    connection = http.client.HTTPConnection(place, timeout=ASK_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        return "" if answer.status == 200 else f"status {answer.status}"
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()
