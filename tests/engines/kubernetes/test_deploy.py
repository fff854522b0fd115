"""What deploy/kubernetes installs: valid manifests, and rights for exactly what is asked."""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml
from harness.kubernetes import schema
from harness.kubernetes.kube import DEPLOY, Kube, deployed
from harness.waiting import until

from shoal import __version__
from shoal.calls.call import Needs
from shoal.calls.table import match
from shoal.cli.up.flags import Wanted
from shoal.client import Address, Client
from shoal.control.home import Home
from shoal.control.lifecycle import take_down
from shoal.engines.kubernetes import options, render, site
from shoal.machine.files import held
from shoal.machine.kernel import own_address
from shoal.model.node import NodeSpec
from shoal.model.supply import OrderPhase, Provision, Supply
from tests.engines.kubernetes.bed import Bed, play, supply_in

KUSTOMIZE: dict[str, Any] = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
OBJECTS = [
    (name, found)
    for name in KUSTOMIZE["resources"]
    for found in yaml.safe_load_all((DEPLOY / name).read_text())
]


def test_the_kustomization_names_every_file() -> None:
    files = {path.name for path in DEPLOY.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(KUSTOMIZE["resources"]) == files


def test_the_extras_are_valid_and_choose_pods_that_exist() -> None:
    """A ServiceMonitor is not Kubernetes' own: only its references are checked."""
    folder = DEPLOY / "extras"
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert listed["namespace"] == KUSTOMIZE["namespace"]
    files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(listed["resources"]) == files
    found = [
        one for name in sorted(files) for one in yaml.safe_load_all((folder / name).read_text())
    ]
    (monitor,) = [one for one in found if one["kind"] == "ServiceMonitor"]
    for version in schema.VERSIONS:
        for one in found:
            assert one is monitor or schema.problems(one, version) == []
    (service,) = deployed("Service")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (
        monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    )
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    called = match("GET", endpoint["path"])
    assert called is not None and called[0].may is Needs.READ_ALL
    (controller,) = deployed("StatefulSet")
    supply = Supply(name="x", engine="kubernetes", options={"image": "i"})
    (node,) = render.pods(
        "1a2b3c4d", "https://shoal:7700", Provision(order="o1", supply=supply, nodes=("x-1",)),
        options.read(supply), "t", [{"uid": "1"}],
    )  # fmt: skip
    labels = [one["metadata"]["labels"] for one in (node, controller["spec"]["template"])]
    for one in found:
        spec = one["spec"]
        chosen = spec.get("podSelector") or spec["selector"]
        assert one is monitor or any(chosen["matchLabels"].items() <= pod.items() for pod in labels)


CHART = DEPLOY.parent / "helm" / "shoal"


def rendered(text: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    """A template, as far as ours go: conditions, tables and words."""

    def table(found: re.Match[str]) -> str:
        return (
            "\n" + textwrap.indent(yaml.safe_dump(values[found[1]]), " " * int(found[2])).rstrip()
        )

    condition = r"\s*\{\{- if \.Values\.(\w+) \}\}(.*?)\s*\{\{- end \}\}"
    text = re.sub(condition, lambda m: m[2] if values[m[1]] else "", text, flags=re.DOTALL)
    text = re.sub(r"\s*\{\{- toYaml \.Values\.(\w+) \| nindent (\d+) \}\}", table, text)
    text = re.sub(r"\{\{ \.Values\.(\w+) \}\}", lambda m: str(values[m[1]]), text)
    text = text.replace("{{ .Release.Namespace }}", KUSTOMIZE["namespace"])
    assert "{{" not in text
    return [one for one in yaml.safe_load_all(text) if one]


def test_the_chart_makes_what_the_manifests_make() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    image = values["image"]
    on = values | {"networkPolicy": True, "disruptionBudget": True, "serviceMonitor": True}
    made = [
        one
        for path in sorted((CHART / "templates").glob("*.yaml"))
        for one in rendered(path.read_text(), on)
    ]
    plain = [
        one
        for path in [*DEPLOY.glob("*.yaml"), *(DEPLOY / "extras").glob("*.yaml")]
        if path.name != "kustomization.yaml"
        for one in yaml.safe_load_all(
            path.read_text().replace("image: shoal\n", f"image: {image}\n")
        )
    ]
    for one in (*made, *plain):  # text, but of the same content
        if "supply.yaml" in (one.get("data") or {}):
            one["data"] = yaml.safe_load(one["data"]["supply.yaml"])

    def key(one: dict[str, Any]) -> tuple[str, str]:
        return one["kind"], one["metadata"]["name"]

    assert sorted(made, key=key) == sorted(plain, key=key)
    assert not any(
        rendered((CHART / "templates" / f"{name}.yaml").read_text(), values)
        for name in ("network", "disruption", "monitor")
    )


def test_every_file_names_the_image_of_this_version() -> None:
    tags = {KUSTOMIZE["images"][0]["newTag"]}
    docs = DEPLOY.parents[1] / "docs" / "kubernetes.md"
    for path in (DEPLOY / "supply.yaml", CHART / "values.yaml", docs):
        tags |= set(re.findall(r"registry\.example/shoal:([\w.]+)", path.read_text()))
    assert tags == {__version__}


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
        called = match("GET", container[probe]["httpGet"]["path"])
        assert called is not None and called[0].may is Needs.OPEN


def given_supplies(folder: Path) -> str:
    """The file that the controller's pod is given."""
    (found,) = [one for one in deployed("ConfigMap") if one["metadata"]["name"] == "shoal-supply"]
    path = folder / "supply.yaml"
    path.write_text(found["data"]["supply.yaml"])
    return str(path)


def test_the_example_of_a_supply_is_one_that_the_supplier_takes(tmp_path: Path) -> None:
    wanted = Wanted("kubernetes", given_supplies(tmp_path), None, None)
    (supply,) = wanted.supplies("kubernetes")
    assert options.read(supply).owner in {one["metadata"]["name"] for one in deployed("ConfigMap")}


def test_the_controllers_command_serves_what_the_probes_ask_for(tmp_path: Path) -> None:
    """It stays in the foreground, shows its log, and ends when it is told to."""
    (controller,) = deployed("StatefulSet")
    container = controller["spec"]["template"]["spec"]["containers"][0]
    shoal, *words = container["command"]
    probe = container["readinessProbe"]["httpGet"]
    headers = {one["name"]: one["value"] for one in probe["httpHeaders"]}
    here = {
        "--supply=/etc/shoal/supply.yaml": f"--supply={given_supplies(tmp_path)}",
        "--host=0.0.0.0": f"--host={own_address()}",
        "--port=7700": "--port=0",
    }
    home = Home(tmp_path / "home")
    env = {**os.environ, "SHOAL_HOME": str(home.path)}
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name(shoal)), *(here.get(word, word) for word in words)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        until(lambda: home.address.exists() or process.poll() is not None, "it does not start")
        address = msgspec.json.decode(home.address.read_bytes(), type=Address)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # as a kubelet does
        answer = httpx.get(f"{address.url}{probe['path']}", verify=context, headers=headers)
        assert answer.status_code == 200
        with Client.at_home(home.path, patience_s=60) as client:
            until(lambda: [one.name for one in client.policy().supply] == ["gpu"], "no supply")
        process.terminate()
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == 0, printed.decode()
        # Not at the pod's own address, which changes with the pod.
        assert b"  shoal login https://shoal:7700 --fingerprint " in printed, printed.decode()
        assert not held(home.supervisor_lock) and not held(home.controller_lock)
    finally:
        process.kill()
        process.communicate()
        take_down(home, lambda _: None)


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
