"""The supplier against an API server: what it makes and deletes, what it reports, what it says when
it is refused. With KUBECONFIG the same tests run against a real one."""

from __future__ import annotations

import asyncio
import shutil

import pytest
from harness.kubernetes.kube import ADMIN, Kube, certificate, deployed_rules, server_tls

from shoal.model.node import NodeSpec
from shoal.model.supply import OrderPhase
from shoal.ports import SupplyError
from tests.engines.kubernetes.bed import CLUSTER, TOKEN, Bed, play, supply_in

PODS = {f"shoal-{CLUSTER}-o1-0", f"shoal-{CLUSTER}-o1-1"}


def only_ours(kube: Kube) -> None:
    if kube.real:
        pytest.skip("a fault that only the tests' own API server has; unset KUBECONFIG to run it")


def run_pods(kube: Kube, machine: str) -> None:
    for pod in kube.pods():
        kube.bind(pod, machine)
        kube.set_status(pod, {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"})


def test_an_order_becomes_pods_and_is_seen_and_released(kube: Kube) -> None:
    async def scene(bed: Bed) -> None:
        await bed.provision()
        await bed.provision()  # said again: it changes nothing
        assert kube.pods().keys() == PODS
        report = await bed.until(lambda report: bool(report.orders))
        assert report.orders[0].phase is OrderPhase.PENDING
        await bed.release()
        await bed.release()
        await bed.until(lambda report: not report.orders)
        assert kube.pods() == {}

    play(Bed(supply_in(kube)), scene)


def test_a_running_pod_is_released_within_its_grace_period(kube: Kube) -> None:
    kube.add_machine(f"k-{kube.namespace}")

    async def scene(bed: Bed) -> None:
        await bed.provision()
        run_pods(kube, f"k-{kube.namespace}")
        await bed.until(lambda report: report.orders[0].phase is OrderPhase.RUNNING)
        await bed.release()
        report = await bed.until(lambda report: bool(report.notes))
        assert {note.node for note in report.notes} == {"gpu-10", "gpu-11"}
        found = kube.pods()[f"shoal-{CLUSTER}-o1-0"]["metadata"]
        assert found["deletionGracePeriodSeconds"] == 60

    play(Bed(supply_in(kube)), scene)


def test_another_controller_finds_the_orders_of_the_one_before(kube: Kube) -> None:
    async def before(bed: Bed) -> None:
        await bed.provision()

    async def after(bed: Bed) -> None:
        report = await bed.supplier.look()
        assert [one.order for one in report.orders] == ["o1"]

    play(Bed(supply_in(kube)), before)
    play(Bed(supply_in(kube)), after)


def test_pods_of_others_are_neither_seen_nor_touched(kube: Kube) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"shoal-{CLUSTER}-o2-0", "labels": {"app": "other"}},
        "spec": {"containers": [{"name": "c", "image": "busybox"}]},
    }
    kube.admin("POST", kube.path("pods"), foreign)

    async def other(bed: Bed) -> None:
        await bed.provision()

    async def scene(bed: Bed) -> None:
        assert (await bed.supplier.look()).orders == ()
        await bed.release("o1")  # the other cluster has an order of this name
        with pytest.raises(SupplyError, match="that is not ours"):
            await bed.provision("o2")
        await bed.release("o2")

    play(Bed(supply_in(kube), "ffffffff"), other)
    play(Bed(supply_in(kube)), scene)
    assert kube.pods().keys() == {
        f"shoal-{CLUSTER}-o2-0",
        "shoal-ffffffff-o1-0",
        "shoal-ffffffff-o1-1",
    }


def test_everything_is_deleted_with_its_owner(kube: Kube) -> None:
    async def scene(bed: Bed) -> None:
        await bed.provision()
        kube.admin("DELETE", kube.path("configmaps", "shoal-nodes"))
        await bed.until(lambda report: not report.orders)
        names = {
            one["metadata"]["name"] for one in kube.admin("GET", kube.path("secrets"))["items"]
        }
        assert not any(name.startswith("shoal-") for name in names)
        with pytest.raises(SupplyError, match="owner: configmaps"):
            await bed.provision("o2")

    play(Bed(supply_in(kube)), scene)


def test_an_owner_that_is_made_again_owns_a_secret_of_its_own(kube: Kube) -> None:
    """Its pods must not use the old one, which is about to be deleted."""

    async def scene(bed: Bed) -> None:
        await bed.provision()
        (before,) = {str(pod["spec"]["volumes"][2]) for pod in kube.pods().values()}
        kube.admin("DELETE", kube.path("configmaps", "shoal-nodes"))
        await bed.until(lambda report: not report.orders)
        owner = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "shoal-nodes"}}
        kube.admin("POST", kube.path("configmaps"), owner)
        await bed.provision("o2")
        (after,) = {str(pod["spec"]["volumes"][2]) for pod in kube.pods().values()}
        assert before != after

    play(Bed(supply_in(kube)), scene)


def test_a_namespace_that_would_be_another_path_is_refused(kube: Kube) -> None:
    async def scene(bed: Bed) -> None:
        with pytest.raises(SupplyError, match=r"^namespace: Kubernetes allows no such name"):
            await bed.supplier.look()

    play(Bed(supply_in(kube, namespace="a/../b")), scene)


def test_without_an_owner_in_the_supply_one_is_made(kube: Kube) -> None:
    kube.use_admin()

    async def scene(bed: Bed) -> None:
        await bed.provision()
        await bed.provision("o2")
        owner = kube.admin("GET", kube.path("configmaps", f"shoal-{CLUSTER}"))
        for pod in kube.pods().values():
            assert pod["metadata"]["ownerReferences"][0]["uid"] == owner["metadata"]["uid"]

    play(Bed(supply_in(kube, owner="")), scene)


def test_the_token_is_in_a_secret_that_the_controller_cannot_read(kube: Kube) -> None:
    async def scene(bed: Bed) -> None:
        await bed.provision()
        pod = str(kube.pods())
        assert TOKEN not in pod and "shoal-1a2b3c4d-join-" in pod

    play(Bed(supply_in(kube)), scene)
    if not kube.real:
        verbs = {one.verb for one in kube.server.asked if one.resource == "secrets"}
        assert verbs == {"create"}


def test_labels_and_notices_of_machines_are_reported(kube: Kube) -> None:
    machine = f"k-{kube.namespace}"
    kube.add_machine(machine, {"topology.kubernetes.io/zone": "z1", "other": "x"})

    async def scene(bed: Bed) -> None:
        await bed.provision()
        run_pods(kube, machine)
        report = await bed.until(lambda report: len(report.notes) == 2)
        labels = report.notes[0].labels
        assert labels == {"kubernetes.io/hostname": machine, "topology.kubernetes.io/zone": "z1"}
        assert report.notes[0].ends_in_ms is None
        kube.taint(
            machine, {"key": "cloud.google.com/impending-node-termination", "effect": "NoSchedule"}
        )
        report = await bed.until(lambda report: report.notes[0].ends_in_ms is not None)
        left = report.notes[0].ends_in_ms
        assert left is not None and left <= 25_000
        assert report.notes[0].ends_why == f"Google ends the machine ({machine})"
        report = await bed.until(lambda report: (report.notes[0].ends_in_ms or 0) < left)
        kube.taint(machine)
        await bed.until(lambda report: report.notes[0].ends_in_ms is None)
        kube.set_machine(machine, ready=False)
        report = await bed.until(lambda report: bool(report.orders[0].reason))
        assert "is not ready: Kubelet stopped posting" in report.orders[0].reason

    play(Bed(supply_in(kube)), scene)


def test_an_evicted_pod_is_an_end_and_then_a_failed_order(kube: Kube) -> None:
    kube.add_machine(f"k-{kube.namespace}")

    async def scene(bed: Bed) -> None:
        await bed.provision()
        run_pods(kube, f"k-{kube.namespace}")
        for pod in kube.pods():
            kube.admin(
                "POST",
                kube.path("pods", pod) + "/eviction",
                {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}},
            )
        report = await bed.until(
            lambda report: len(report.notes) == 2 and bool(report.notes[0].ends_why)
        )
        assert report.notes[0].ends_why == "Eviction API: evicting"
        conditions = kube.pods()[f"shoal-{CLUSTER}-o1-0"]["status"]["conditions"]
        for pod in kube.pods():
            kube.set_status(pod, {"phase": "Failed", "conditions": conditions})
        report = await bed.until(lambda report: report.orders[0].phase is OrderPhase.ENDED)
        assert report.orders[0].failed and "was evicted" in report.orders[0].reason

    play(Bed(supply_in(kube)), scene)


def test_ended_pods_are_deleted_after_a_while(kube: Kube) -> None:
    kube.add_machine(f"k-{kube.namespace}")

    async def scene(bed: Bed) -> None:
        await bed.provision()
        run_pods(kube, f"k-{kube.namespace}")
        done = {"terminated": {"exitCode": 0, "finishedAt": "2026-01-01T00:00:00Z"}}
        status = {"name": "node", "state": done, "image": "i", "imageID": "", "ready": False}
        for pod in kube.pods():
            kube.set_status(
                pod, {"phase": "Succeeded", "containerStatuses": [{**status, "restartCount": 0}]}
            )
        await bed.until(lambda report: not report.orders)
        assert kube.pods() == {}

    play(Bed(supply_in(kube)), scene)


def test_a_sick_machine_is_reported_as_an_event_of_the_pod(kube: Kube) -> None:
    kube.add_machine(f"k-{kube.namespace}")

    async def scene(bed: Bed) -> None:
        await bed.provision()
        run_pods(kube, f"k-{kube.namespace}")
        await bed.until(lambda report: report.orders[0].phase is OrderPhase.RUNNING)
        await bed.supplier.drain(NodeSpec(id="gpu-10", cpu_milli=1, memory_mb=1), "GPU 3 is slow")
        events = kube.admin("GET", kube.path("events"))["items"]  # others write there, too
        (event,) = [one for one in events if one["reason"] == "MachineSick"]
        assert event["message"].endswith("GPU 3 is slow") and event["type"] == "Warning"

    play(Bed(supply_in(kube)), scene)


# -- refusals ------------------------------------------------------------------------------


def refused(bed: Bed) -> str:
    found: list[str] = []

    async def scene(bed: Bed) -> None:
        with pytest.raises(SupplyError) as caught:
            await bed.provision()
        found.append(str(caught.value))

    play(bed, scene)
    assert "\n" not in found[0] and len(found[0]) <= 300
    return found[0]


def test_a_namespace_that_is_missing_is_named_and_used_when_it_is_there(kube: Kube) -> None:
    kube.use_admin()
    missing = f"{kube.namespace}-2"

    async def scene(bed: Bed) -> None:
        with pytest.raises(SupplyError) as caught:
            await bed.provision()
        assert f"supply.gpu.namespace: there is no namespace {missing} at" in str(caught.value)
        await asyncio.to_thread(kube.add_namespace, missing)
        await bed.provision()
        kube.admin("DELETE", f"/api/v1/namespaces/{missing}")

    play(Bed(supply_in(kube, namespace=missing, owner="")), scene)


def test_an_exceeded_quota_is_reported_and_leaves_no_part_of_a_lot(kube: Kube) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "team"},
        "spec": {"hard": {"requests.nvidia.com/gpu": "3"}},
    }
    kube.admin("POST", kube.path("resourcequotas"), quota)
    if kube.real:  # its controller takes a moment to count
        asyncio.run(asyncio.sleep(3))
    text = refused(Bed(supply_in(kube)))
    assert text.startswith(f"supply.gpu.namespace {kube.namespace}: exceeded quota: team")
    assert kube.pods() == {}
    kube.admin("DELETE", kube.path("resourcequotas", "team"))
    play(Bed(supply_in(kube)), lambda bed: bed.provision())
    assert kube.pods().keys() == PODS


PLUGINS = {
    "priority_class": ({"priority_class": "batch"}, ": no PriorityClass with name batch was found"),
    "service_account": (
        {"service_account": "jobs"},
        ': error looking up service account NS/jobs: serviceaccount "jobs" not found',
    ),
    "gpus, cpus or memory": (
        {},
        ": maximum nvidia.com/gpu usage per Container is 1, but limit is 2",
    ),
    "namespace NS": ({"user": "0"}, ': violates PodSecurity "restricted:latest": '),
}


@pytest.mark.parametrize("word", PLUGINS)
def test_a_refusal_of_an_admission_plugin_is_quoted_with_its_word(kube: Kube, word: str) -> None:
    """They answer 403, too, and have nothing to do with rights."""
    options, ending = PLUGINS[word]
    if word.startswith("gpus"):
        limits = {"type": "Container", "max": {"nvidia.com/gpu": "1"}}
        body = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"}}
        kube.admin("POST", kube.path("limitranges"), {**body, "spec": {"limits": [limits]}})
    if word.startswith("namespace"):
        enforce = {"pod-security.kubernetes.io/enforce": "restricted"}
        body = {"metadata": {"labels": enforce}}
        kube.admin("PATCH", f"/api/v1/namespaces/{kube.namespace}", body)
    text = refused(Bed(supply_in(kube, **options)))
    expected = f"supply.gpu.{word}{ending}".replace("NS", kube.namespace)
    assert text.startswith(expected), text
    assert "permission" not in text


def test_a_machine_is_drained_without_force(kube: Kube) -> None:
    """Only what every pod with an emptyDir needs has to be said."""
    machine = f"k-{kube.namespace}"
    kube.add_machine(machine)

    async def scene(bed: Bed) -> None:
        await bed.provision()
        run_pods(kube, machine)
        assert {text.partition(": ")[0] for text in kube.drain(machine)} == {
            "cannot delete Pods with local storage"
        }
        assert kube.drain(machine, delete_empty_dirs=True) == []
        await bed.until(lambda report: any(note.ends_why for note in report.notes))

    play(Bed(supply_in(kube)), scene)


def test_a_missing_right_is_named_and_used_when_it_is_given(kube: Kube) -> None:
    only_ours(kube)
    kube.server.rules["shoal"] = []

    async def scene(bed: Bed) -> None:
        with pytest.raises(SupplyError) as caught:
            await bed.supplier.look()
        assert 'no permission: pods is forbidden: User "shoal" cannot list' in str(caught.value)
        kube.server.rules["shoal"] = deployed_rules(kube.namespace)
        deadline = asyncio.get_running_loop().time() + 60
        while True:
            try:
                await bed.supplier.look()
                return
            except SupplyError:
                assert asyncio.get_running_loop().time() < deadline
                await asyncio.sleep(0.02)

    play(Bed(supply_in(kube)), scene)


def test_without_the_right_to_read_machines_the_rest_works(kube: Kube) -> None:
    only_ours(kube)
    kube.server.rules["shoal"] = [
        rule for rule in deployed_rules(kube.namespace) if "nodes" not in rule.resources
    ]

    async def scene(bed: Bed) -> None:
        await bed.provision()
        assert len((await bed.until(lambda report: bool(report.orders))).notes) == 0

    play(Bed(supply_in(kube)), scene)


def test_refused_credentials_are_read_again_when_their_owner_has_logged_in(kube: Kube) -> None:
    only_ours(kube)
    good = kube.kubeconfig
    kube.kubeconfig = kube.write_config("mine", "expired")

    async def scene(bed: Bed) -> None:
        with pytest.raises(SupplyError, match=r"does not accept our credentials .* log in again"):
            await bed.supplier.look()
        shutil.copy(good, kube.kubeconfig)
        assert (await bed.supplier.look()).orders == ()

    play(Bed(supply_in(kube)), scene)


def test_an_expired_certificate_is_named(kube: Kube) -> None:
    only_ours(kube)
    expired = certificate(kube.folder, days=-0.5)
    kube.run(kube.server.stop())
    kube.server._tls = server_tls(expired)
    kube.run(kube.server.start())
    kube.certificate = expired
    kube.kubeconfig = kube.write_config("late", ADMIN)
    text = refused(Bed(supply_in(kube)))
    assert text.startswith("supply.gpu.kubeconfig: https://127.0.0.1:")
    assert text.endswith("its certificate has expired")


def test_a_name_that_kubernetes_does_not_allow_is_refused_before_it_is_sent(kube: Kube) -> None:
    text = refused(Bed(supply_in(kube, priority_class="nope.")))
    assert text.startswith("supply.gpu.priority_class: Kubernetes allows no such name")
