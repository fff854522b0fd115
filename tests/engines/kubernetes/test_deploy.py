"""What deploy/kubernetes installs: valid manifests, and rights for exactly what is asked."""

from __future__ import annotations

import time
from typing import Any

import pytest
import yaml

from shoal.api.certificate import Certificate
from shoal.api.principal import Needs
from shoal.engines.kubernetes import options, site
from shoal.model.node import NodeSpec
from shoal.model.supply import OrderPhase, Supply
from tests.engines.kubernetes import schema
from tests.engines.kubernetes.bed import Bed, play, supply_in
from tests.engines.kubernetes.kube import DEPLOY, Kube, deployed

KUSTOMIZE: dict[str, Any] = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
OBJECTS = [
    (name, found)
    for name in KUSTOMIZE["resources"]
    for found in yaml.safe_load_all((DEPLOY / name).read_text())
]


def test_the_kustomization_names_every_file() -> None:
    files = {path.name for path in DEPLOY.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(KUSTOMIZE["resources"]) == files


@pytest.mark.parametrize("version", schema.VERSIONS)
@pytest.mark.parametrize(("name", "found"), OBJECTS, ids=lambda one: str(one)[:40])
def test_every_manifest_is_valid(name: str, found: dict[str, Any], version: str) -> None:
    assert schema.problems(found, version) == []


def test_references_between_manifests_hold() -> None:
    (controller,) = deployed("StatefulSet")
    pod = controller["spec"]["template"]
    labels = pod["metadata"]["labels"]
    (service,) = deployed("Service")
    assert service["spec"]["selector"].items() <= labels.items()
    assert controller["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    maps = {one["metadata"]["name"] for one in deployed("ConfigMap")}
    assert {one["configMap"]["name"] for one in pod["spec"]["volumes"]} <= maps
    accounts = {one["metadata"]["name"] for one in deployed("ServiceAccount")}
    assert pod["spec"]["serviceAccountName"] in accounts
    for kind in ("RoleBinding", "ClusterRoleBinding"):
        for binding in deployed(kind):
            assert {one["name"] for one in binding["subjects"]} == accounts
            assert {one["namespace"] for one in binding["subjects"]} == {KUSTOMIZE["namespace"]}


def test_the_probes_ask_for_a_route_that_needs_no_token() -> None:
    (controller,) = deployed("StatefulSet")
    container = controller["spec"]["template"]["spec"]["containers"][0]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] == Certificate.path
    assert Certificate.opt == Needs.OPEN.opt


def test_the_example_of_a_supply_is_one_that_the_supplier_takes() -> None:
    (found,) = [one for one in deployed("ConfigMap") if one["metadata"]["name"] == "shoal-supply"]
    (written,) = yaml.safe_load(found["data"]["supply.yaml"])
    words = {word: str(written[word]) for word in written if word in options.WORDS}
    options.read(Supply(name=written["name"], engine="kubernetes", gpus=8, options=words))
    owners = {one["metadata"]["name"] for one in deployed("ConfigMap")}
    assert words["owner"] in owners


def test_the_roles_grant_exactly_what_the_supplier_asks_for(
    kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request of a whole life is allowed, and every right is used by one of them."""
    if kube.real:
        pytest.skip("only the tests' own API server writes down requests; unset KUBECONFIG")
    monkeypatch.setattr(site, "STARTS_S", -1.0)
    machine = f"k-{kube.namespace}"
    kube.add_machine(machine)

    async def scene(bed: Bed) -> None:
        await bed.provision()
        await bed.provision()
        for pod in kube.pods():
            kube.bind(pod, machine)
        await bed.until(lambda _: any(one.resource == "events" for one in kube.server.asked))
        for pod in kube.pods():
            kube.set_status(pod, {"phase": "Running"})
        await bed.until(lambda report: report.orders[0].phase is OrderPhase.RUNNING)
        await bed.supplier.drain(NodeSpec(id="gpu-10", cpu_milli=1, memory_mb=1), "slow")
        await bed.release()
        deadline = time.monotonic() + 60
        while not {("watch", "pods"), ("watch", "nodes")} <= {
            (one.verb, one.resource) for one in kube.server.asked
        }:
            assert time.monotonic() < deadline
            await bed.supplier.look()

    play(Bed(supply_in(kube)), scene)
    asked = {(one.verb, one.resource) for one in kube.server.asked if one.user == "shoal"}
    granted = {
        (verb, resource)
        for role in [*deployed("Role"), *deployed("ClusterRole")]
        for rule in role["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }
    assert asked == granted
