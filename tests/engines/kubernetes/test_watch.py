"""What an API server may do to a client, and how the supplier goes on: broken watches, 410, 429,
409, an outage. These are faults of the tests' own API server."""

from __future__ import annotations

import asyncio
import time

import pytest
from harness.kubernetes.apiserver import Asked, Reply
from harness.kubernetes.kube import REAL, Kube
from harness.kubernetes.store import ApiError

from shoal.engines.kubernetes import access, client, watch
from shoal.engines.kubernetes.client import Client, Refused
from shoal.engines.kubernetes.options import Place
from shoal.engines.kubernetes.watch import Mirror
from shoal.model.supply import OrderPhase
from shoal.ports import SupplyError
from tests.engines.kubernetes.bed import Bed, play, run_to_its_end, supply_in

if REAL:
    pytest.skip("faults that only the tests' own API server has", allow_module_level=True)


def lists_of(kube: Kube) -> int:
    return sum(one.verb == "list" and one.resource == "pods" for one in kube.server.asked)


def watches_of(kube: Kube) -> int:
    return sum(one.verb == "watch" and one.resource == "pods" for one in kube.server.asked)


def fail(
    kube: Kube, times: int, reply: Reply, verb: str = "", resource: str = "pods"
) -> list[float]:
    """The next requests of this kind get this answer; returns when they came."""
    came: list[float] = []

    def fault(asked: Asked) -> Reply | None:
        meant = asked.user == "shoal" and verb in ("", asked.verb) and asked.resource == resource
        if not meant:
            return None
        came.append(time.monotonic())
        return reply if len(came) <= times else None

    kube.server.faults.append(fault)
    return came


def error(code: int, reason: str, text: str, **headers: str) -> Reply:
    return Reply(code, ApiError(code, reason, text).status(), headers)


async def settle(fact: object) -> None:
    assert callable(fact)
    deadline = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def test_a_broken_watch_resumes_where_it_was_without_listing_again(kube: Kube) -> None:
    async def scene(bed: Bed) -> None:
        await bed.supplier.look()
        await settle(lambda: watches_of(kube) == 1)
        for round_ in range(3):
            kube.call(kube.server.cut)
            await bed.provision(f"o{round_ + 1}")  # while the watch is down, or not yet back
            await bed.until(lambda report: len(report.orders) == round_ + 1)  # noqa: B023
        assert lists_of(kube) == 1 and watches_of(kube) >= 2

    play(Bed(supply_in(kube)), scene)


def test_after_410_everything_is_listed_again(kube: Kube) -> None:
    async def scene(bed: Bed) -> None:
        await bed.provision()
        await bed.until(lambda report: bool(report.orders))
        await settle(lambda: watches_of(kube) == 1)
        # While the watch is cut, a pod goes, and the server forgets that it did.
        kube.call(kube.server.cut)
        kube.admin("DELETE", kube.path("pods", "shoal-1a2b3c4d-o1-1"))
        kube.call(kube.server.store.forget)
        await bed.until(lambda report: report.orders[0].phase is OrderPhase.UNKNOWN)
        assert lists_of(kube) == 2

    play(Bed(supply_in(kube)), scene)


def test_410_as_an_answer_is_410_too(kube: Kube) -> None:
    async def scene(bed: Bed) -> None:
        fail(kube, 1, error(410, "Expired", "too old resource version"), "watch")
        await bed.provision()
        await bed.until(lambda report: bool(report.orders) and watches_of(kube) >= 2)
        assert lists_of(kube) == 2

    play(Bed(supply_in(kube)), scene)


def test_a_server_that_was_restored_from_a_backup_is_listed_again(
    kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts a watch from a place that it has not reached yet, and says nothing."""
    monkeypatch.setattr(watch, "SILENT_S", 1.0)  # two bookmarks of the tests' server

    async def scene(bed: Bed) -> None:
        await bed.provision()
        await bed.until(lambda report: bool(report.orders))
        await settle(lambda: watches_of(kube) == 1)
        kube.call(kube.server.store.restore)
        kube.admin("DELETE", kube.path("pods", "shoal-1a2b3c4d-o1-1"))
        kube.call(kube.server.cut)
        await bed.until(lambda report: report.orders[0].phase is OrderPhase.UNKNOWN)
        assert lists_of(kube) == 2

    play(Bed(supply_in(kube)), scene)


def test_bookmarks_keep_the_place_fresh(kube: Kube) -> None:
    """Changes of others move the server on. Without bookmarks, our place would be forgotten."""

    async def scene(bed: Bed) -> None:
        await bed.supplier.look()
        (site,) = bed.supplier._sites.values()
        for index in range(3):
            body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"x{index}"}}
            kube.admin("POST", kube.path("configmaps"), body)
        version = str(kube.call(lambda: kube.server.store.version))
        await settle(lambda: site.pods._version == version)
        kube.call(kube.server.store.forget)
        kube.call(kube.server.cut)
        await bed.provision()
        await bed.until(lambda report: bool(report.orders))
        assert lists_of(kube) == 1

    play(Bed(supply_in(kube)), scene)


def test_a_change_is_reported_before_anyone_looks(kube: Kube) -> None:
    async def scene(bed: Bed) -> None:
        await bed.supplier.look()
        await settle(lambda: bed.changes == 1)
        await bed.provision()  # two pods, reported together
        await settle(lambda: bed.changes == 2)

    play(Bed(supply_in(kube)), scene)


def test_retry_after_is_honored(kube: Kube) -> None:
    async def scene(bed: Bed) -> None:
        busy = error(429, "TooManyRequests", "too many requests", retry_after="1")
        came = fail(kube, 1, busy, "create")
        await bed.provision()
        assert came[1] - came[0] >= 1.0

    play(Bed(supply_in(kube)), scene)


def test_overload_that_lasts_is_reported_and_passes(
    kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PAUSE_S", 0.001)
    times = client.TRIES_MAX
    came = fail(kube, times, error(429, "TooManyRequests", "too many requests"), "create")

    async def scene(bed: Bed) -> None:
        with pytest.raises(
            SupplyError,
            match=r"^supply gpu: https://.* has too many requests; trying again later",
        ):
            await bed.provision()
        assert len(came) == times
        await bed.provision()

    play(Bed(supply_in(kube)), scene)
    assert len(kube.pods()) == 2


def test_a_conflict_with_another_writer_is_tried_again(kube: Kube) -> None:
    text = 'Operation cannot be fulfilled on resourcequotas "team": the object has been modified'
    came = fail(kube, 2, error(409, "Conflict", text), "create")
    play(Bed(supply_in(kube)), lambda bed: bed.provision())
    assert len(kube.pods()) == 2 and len(came) == 4


def test_an_outage_is_reported_and_over_when_the_server_is_back(
    kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PAUSE_S", 0.01)
    monkeypatch.setattr(watch, "PAUSE_S_MAX", 0.2)
    monkeypatch.setattr(watch, "GOOD_S", 0.5)

    async def scene(bed: Bed) -> None:
        await bed.provision()
        await bed.until(lambda report: bool(report.orders))
        kube.run(kube.server.stop())
        line = ""
        deadline = time.monotonic() + 60
        while not line and time.monotonic() < deadline:
            try:
                await bed.supplier.look()
                await asyncio.sleep(0.02)
            except SupplyError as problem:
                line = str(problem)
        assert line.startswith(f"kubeconfig: https://127.0.0.1:{kube.port} (context test of ")
        with pytest.raises(SupplyError):
            await bed.release()
        kube.run(kube.server.start())
        while True:
            try:
                report = await bed.supplier.look()
                break
            except SupplyError:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
        assert [one.order for one in report.orders] == ["o1"]

    play(Bed(supply_in(kube)), scene)


def test_a_long_list_comes_in_pages_and_a_page_that_is_too_old_begins_again(
    kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "PAGE", 3)
    for index in range(10):
        kube.add_machine(f"m{index}")

    async def scene() -> None:
        api = Client(access.find(Place(kubeconfig=kube.kubeconfig)))
        mirror = Mirror(api, "/api/v1/nodes", dict, lambda: None)
        first = True

        def fault(asked: Asked) -> Reply | None:
            nonlocal first
            if asked.resource == "nodes" and asked.verb == "list" and kube.server.pages and first:
                first = False
                kube.server.store.forget()
                kube.server.store.version += 1
                kube.server.store.floor += 1
            return None

        kube.server.faults.append(fault)
        try:
            for _ in range(20):
                try:
                    await mirror.ready(10)
                    if mirror.items:
                        break
                except Refused:
                    pass
                await asyncio.sleep(0.05)
            assert len(mirror.items) == 10 and mirror.lists == 1 and not first
        finally:
            await mirror.close()
            await api.close()

    run_to_its_end(scene())


def test_a_token_in_a_file_is_read_again_when_it_is_refused(kube: Kube) -> None:
    token = kube.folder / "token"
    token.write_text("shoal-token")
    kube.kubeconfig = kube.write_config("rotating", "", tokenFile="token")

    async def scene(bed: Bed) -> None:
        await bed.supplier.look()
        token.write_text("second")
        kube.server.users = {"second": "shoal", "admin-token": "admin"}
        await bed.provision()

    play(Bed(supply_in(kube)), scene)


def test_a_plugin_prints_the_credential(kube: Kube) -> None:
    script = kube.folder / "login"
    script.write_text(
        '#!/bin/sh\necho x >>"$0.runs"\n'
        'echo "{\\"kind\\": \\"ExecCredential\\", \\"status\\": {\\"token\\": \\"$TOKEN\\"}}"\n'
    )
    script.chmod(0o755)
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "./login",
        "env": [{"name": "TOKEN", "value": "shoal-token"}],
    }
    kube.kubeconfig = kube.write_config("plugin", "", exec=plugin)  # type: ignore[arg-type]
    play(Bed(supply_in(kube)), lambda bed: bed.provision())
    assert len(kube.pods()) == 2
    assert (kube.folder / "login.runs").read_text().count("x") == 1
    script.write_text("#!/bin/sh\necho please log in >&2\nexit 3\n")

    async def scene(bed: Bed) -> None:
        with pytest.raises(SupplyError, match="ended with code 3: please log in"):
            await bed.supplier.look()

    play(Bed(supply_in(kube)), scene)
