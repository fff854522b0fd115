"""Services at a neighbor, against one that a test makes up: what is sent, when, and once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from shoal.client.transport import ShoalError, Unreachable
from shoal.control.certificates import self_signed
from shoal.control.neighboring import services
from shoal.control.neighboring.services import Abroad, ServiceOut, sent_spec
from shoal.control.neighboring.wire import Wire
from shoal.core.state.state import State
from shoal.model.far import Far
from shoal.model.neighbor import HOME
from shoal.model.service import Service, ServiceSpec
from shoal.model.sites import Site, SiteReport, SiteWork
from tests.core.serving import service_spec

PEM = self_signed("door").decode()
CLUSTER = "0a1b2c3d"


class Neighbor:
    """Answers calls as a host does. It goes back by itself if a version is `bad`."""

    url = "https://192.0.2.7:7700"
    find = Wire.find

    def __init__(self) -> None:
        self.specs: dict[str, list[ServiceSpec]] = {}
        self.told: dict[str, tuple[Far, ...]] = {}
        self.puts: list[ServiceSpec] = []
        self.state = "ready"
        self.port, self.certificate = 9_080, PEM
        self.old = self.lost = False

    async def ask(self, kind: Any, method: Any, *given: Any, **_: Any) -> Any:
        if self.old:
            raise Unreachable("it does not accept our token", status=403)
        made = getattr(self, method.__name__)(*given)
        if self.lost and method.__name__ == "submit_service":
            self.lost = False
            raise Unreachable("the answer was lost")
        return msgspec.convert(msgspec.to_builtins(made), kind, strict=False)

    def services(self) -> list[Any]:
        return [self.service(name) for name in self.specs]

    def service(self, name: str) -> dict[str, Any]:
        if name not in self.specs:
            raise ShoalError("there is no such service", status=404)
        spec = self.specs[name][-1]
        return {"name": name, "state": self.state, "ready": 1, "spec": spec, "why": "so"}

    def submit_service(self, spec: ServiceSpec) -> dict[str, Any]:
        self.puts.append(spec)
        self.specs.setdefault(spec.name, []).append(spec)
        return self.service(spec.name)

    def stop_service(self, name: str) -> dict[str, Any]:
        del self.specs[name]
        return {}

    def set_service_sites(self, name: str, doors: tuple[Far, ...]) -> dict[str, Any]:
        self.told[name] = doors
        return {"port": self.port, "certificate": self.certificate}


class Carrier:
    def has_all(self, package: str, hidden: Any) -> bool:
        return True

    def renamed(self, spec: Any, hidden: Any) -> Any:
        return spec


class Home:
    def __init__(self) -> None:
        self.host, self.state = Neighbor(), State()
        self.spec, self.has, self.version, self.ends = service_spec(), 0, 1, False
        self.known = True
        loop = SimpleNamespace(
            door=lambda: (9_080, PEM), check=lambda: None, settled=self.settled, state=self.state
        )
        self.abroad = Abroad(
            cast(Any, loop), CLUSTER, "west", cast(Any, self.host), cast(Any, Carrier())
        )

    async def settled(self) -> None:
        pass

    def round(self, times: int = 1) -> SiteReport:
        for _ in range(times):
            self.state.services = {}
            if self.known:
                service = self.state.services["chat"] = Service(spec=self.spec)
                service.sites["west"] = Site(version=1, asked_ms=0)
            work = SiteWork("chat", self.version, self.has, self.ends, ())
            spec = sent_spec(self.spec, CLUSTER, self.version, "")
            outs = [ServiceOut(work, spec, {}, "")] if self.known else []
            found = asyncio.run(self.abroad.round(outs, 2_000_000))
        return found[0] if found else SiteReport(service="")


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setattr(services, "_towards", lambda _: "192.0.2.1")
    return Home()


def test_it_is_sent_once_and_told_of_its_other_sites(home: Home) -> None:
    said = home.round()
    assert (said.version, said.ready, said.refused) == (1, True, "")
    assert said.door is not None
    assert (said.door.site, said.door.address, said.door.price) == ("west", "192.0.2.7", 2_000_000)
    assert "PRIVATE" not in said.door.certificate
    (ours,) = home.host.told["chat"]
    assert (ours.site, ours.address, ours.port) == ("home", "192.0.2.1", 9_080)
    home.has = 1
    home.round(3)
    (sent,) = home.host.puts
    assert sent.replica.labels == {HOME: f"{CLUSTER}.v1"} and sent.clusters == ()
    home.spec = service_spec(scale={"least": 2, "most": 2})  # no other version
    home.round(3)
    assert len(home.host.puts) == 2


def test_what_went_back_by_itself_is_not_sent_again_until_home_says_so(home: Home) -> None:
    home.round()
    home.has, home.version = 1, 2
    assert home.round().version == 2
    home.has = 2
    home.host.specs["chat"].pop()
    for _ in range(3):
        assert home.round().version == 1
    assert len(home.host.puts) == 2
    home.has = home.version = 1
    home.round(2)
    assert [one.replica.labels[HOME][-1] for one in home.host.puts] == ["1", "2", "1"]


def test_a_lost_answer_and_a_lost_service_only_send_it_again(home: Home) -> None:
    home.host.lost = True
    said = home.round()
    assert said.version == 0 and "lost" in said.why and not said.refused
    assert home.round().version == 1
    home.has = 1
    home.host.specs, home.host.told = {}, {}
    assert home.round(2).version == 1
    assert home.host.told["chat"]


def test_a_name_that_is_used_there_is_not_touched(home: Home) -> None:
    home.host.specs["chat"] = [service_spec()]
    said = home.round(2)
    assert said.refused == "the name chat is already used there" and not home.host.puts
    home.ends = True
    assert home.round().ended and home.host.specs["chat"]


def test_it_ends_and_a_stranger_of_ours_is_stopped(home: Home, monkeypatch: Any) -> None:
    home.round()
    home.ends = True
    assert not home.round().ended
    assert home.round().ended and not home.host.specs
    home.host.specs["gone"] = [msgspec.structs.replace(home.host.puts[0], name="gone")]
    home.host.specs["theirs"] = [service_spec("theirs")]
    home.known = False
    monkeypatch.setattr(services, "STRANGERS_S", 0.0)
    home.abroad._some = True
    home.round()
    assert list(home.host.specs) == ["theirs"]


def test_an_older_neighbor_and_one_that_lies_of_its_door_are_named(home: Home) -> None:
    home.host.old = True
    assert "an older Shoal" in home.round().refused
    home.host.old = False
    home.host.certificate = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"
    said = home.round()
    assert "its door: the certificate of west" in said.refused and said.door is None


def test_who_may_call_there(home: Home) -> None:
    for access, owner, there in (
        ((), "", ("open",)),
        ((), "lab", ("default",)),
        (("cluster",), "", ("default",)),
        (("lab", "art"), "", ("default",)),
        (("open",), "lab", ("open",)),
    ):
        spec = service_spec(route={"service": "chat", "access": access})
        assert sent_spec(spec, CLUSTER, 1, owner).way.access == there
