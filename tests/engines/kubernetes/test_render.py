"""What is sent to Kubernetes, to the letter. `SHOAL_GOLDEN=write` writes the files again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from harness.kubernetes import schema

from shoal.engines.kubernetes import options, render
from shoal.model.supply import Provision, Supply
from shoal.ports import SupplyError

GOLDEN = Path(__file__).parents[2] / "golden" / "kubernetes"
CLUSTER = "1a2b3c4d"
URL = "https://shoal.ml.svc:7700"
TOKEN = "shoal_0_secret.aa:bb"
OWNERS = render.owned_by({"metadata": {"name": "shoal-nodes", "uid": "0-1-2"}})

PLAIN = Supply(name="cpu", engine="kubernetes", options={"image": "registry.example/shoal:0.4"})
FULL = Supply(
    name="a100",
    engine="kubernetes",
    gpus=8,
    cpu_milli=63_500,
    memory_mb=512_000,
    lot=2,
    most=4,
    lasts_ms=3_600_000,
    labels={"pool": "a100", "tier": "1"},
    taints=("big=yes",),
    options={
        "image": "registry.example/shoal@sha256:0123",
        "namespace": "ml",
        "gpu_resource": "amd.com/gpu",
        "selector": "node.kubernetes.io/instance-type=p4d.24xlarge",
        "tolerations": "nvidia.com/gpu,dedicated=ml:NoSchedule",
        "service_account": "jobs",
        "pull_secret": "registry",
        "priority_class": "batch",
        "runtime_class": "nvidia",
        "owner": "shoal-nodes",
        "user": "1234",
        "grace": "120",
        "whole": "yes",
        "pod": json.dumps(
            {
                "metadata": {
                    "labels": {
                        "team": "vision",
                        "kueue.x-k8s.io/queue-name": "ml",
                        "kueue.x-k8s.io/pod-group-name": "shoal-${cluster}-${order}",
                    },
                    "annotations": {"kueue.x-k8s.io/pod-group-total-count": "${lot}"},
                },
                "spec": {
                    "hostNetwork": True,
                    "affinity": {
                        "nodeAffinity": {
                            "requiredDuringSchedulingIgnoredDuringExecution": {
                                "nodeSelectorTerms": [
                                    {"matchExpressions": [{"key": "rail", "operator": "Exists"}]}
                                ]
                            }
                        }
                    },
                    "volumes": [
                        {"name": "data", "persistentVolumeClaim": {"claimName": "datasets"}},
                        {"name": "shm", "emptyDir": {"sizeLimit": "64Gi"}},
                        {
                            "name": "home",
                            "emptyDir": None,
                            "persistentVolumeClaim": {"claimName": "scratch"},
                        },
                    ],
                    "containers": [
                        {
                            "name": "node",
                            "resources": {
                                "requests": {"rdma/hca": "1"},
                                "limits": {"rdma/hca": "1"},
                            },
                            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                        }
                    ],
                },
            }
        ),
    },
)


def objects(supply: Supply) -> list[dict[str, Any]]:
    nodes = tuple(f"{supply.name}-{index + 1}" for index in range(supply.lot))
    command = Provision(order="o17", supply=supply, nodes=nodes, why="2 jobs wait for 8 GPUs")
    read = options.read(supply)
    return [
        render.owner(CLUSTER, URL),
        render.secret(CLUSTER, TOKEN, OWNERS),
        *render.pods(CLUSTER, URL, command, read, TOKEN, OWNERS),
    ]


@pytest.mark.parametrize("supply", [PLAIN, FULL], ids=lambda supply: supply.name)
def test_a_supply_becomes_exactly_these_objects(supply: Supply) -> None:
    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    made = yaml.dump_all(objects(supply), Dumper=Plain, sort_keys=False)
    path = GOLDEN / f"{supply.name}.yaml"
    if os.environ.get("SHOAL_GOLDEN") == "write":
        path.write_text(made)
    assert made == path.read_text()


@pytest.mark.parametrize("version", schema.VERSIONS)
@pytest.mark.parametrize("supply", [PLAIN, FULL], ids=lambda supply: supply.name)
def test_every_object_is_valid_in_the_oldest_and_the_newest_kubernetes(
    supply: Supply, version: str
) -> None:
    pod = {"metadata": {"name": "p", "namespace": "ml", "uid": "1"}, "spec": {"nodeName": "k1"}}
    event = render.sick_event(pod, "slow GPU 3", "2026-11-16T11:00:00Z", "p.1")
    found = [schema.problems(one, version) for one in [*objects(supply), event]]
    assert [wrong for wrong in found if wrong] == []


def test_the_validation_finds_a_field_that_does_not_exist() -> None:
    pod = objects(PLAIN)[-1]
    pod["spec"]["containers"][0]["imagePullPolicyy"] = "Always"
    assert "imagePullPolicyy" in str(schema.problems(pod, "1.29"))


def test_the_join_token_is_in_the_secret_only() -> None:
    _, secret, *pods = objects(FULL)
    assert TOKEN not in json.dumps(pods)
    assert secret["immutable"] and pods[0]["spec"]["automountServiceAccountToken"] is False


def test_a_pod_gets_network_cards_locked_memory_and_the_hosts_network_if_its_supply_says_so() -> (
    None
):
    words = {**PLAIN.options, "rdma_resource": "rdma/hca", "host_network": "yes"}
    made = objects(msgspec.structs.replace(PLAIN, options=words))
    assert not [wrong for one in made for wrong in schema.problems(one, schema.VERSIONS[0])]
    pod = made[-1]["spec"]
    inside = pod["containers"][0]
    assert pod["hostNetwork"] and pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert inside["resources"] == {"requests": {"rdma/hca": "1"}, "limits": {"rdma/hca": "1"}}
    assert inside["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


def test_pods_keep_to_the_restricted_pod_security_standard() -> None:
    pod = objects(PLAIN)[-1]["spec"]
    inside = pod["containers"][0]["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert inside == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert all({"emptyDir", "secret"} & volume.keys() for volume in pod["volumes"])
    assert not any(pod.get(field) for field in ("hostNetwork", "hostPID", "hostIPC"))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({}, "supply.x.image: is missing; name a container image that has Shoal in it"),
        ({"image": "i", "imagee": "j"}, "supply.x.imagee: is unknown; there are kubeconfig"),
        ({"image": "i", "namespace": "Not OK"}, "supply.x.namespace: Kubernetes allows no such"),
        ({"image": "i", "selector": "zone"}, "supply.x.selector: 'zone' is not LABEL=VALUE"),
        ({"image": "i", "tolerations": "a:b"}, "supply.x.tolerations: 'a:b' is not KEY"),
        ({"image": "i", "grace": "0"}, "supply.x.grace: '0' is not a number from 1 to 86400"),
        ({"image": "i", "user": "root"}, "supply.x.user: 'root' is not a number"),
        ({"image": "i", "whole": "maybe"}, "supply.x.whole: 'maybe' is not yes or no"),
        ({"image": "i", "gpu_resource": "amd.com/gpu"}, "supply.x.gpu_resource: is of no use"),
        ({"image": "i", "pod": "x=y"}, "supply.x.pod: must be a table with metadata and spec"),
        ({"image": "i", "pod": '{"kind": "Pod"}'}, "supply.x.pod: must be a table with metadata"),
        (
            {"image": "i", "pod": '{"metadata": {"labels": {"shoal-node": "n"}}}'},
            "supply.x.pod: label shoal-node is Shoal's own",
        ),
        (
            {"image": "i", "pod": '{"spec": {"containers": [{"name": "node", "args": []}]}}'},
            "supply.x.pod: the container's args is Shoal's own",
        ),
        (
            {"image": "i", "pod": '{"spec": {"containers": [{"name": "log"}]}}'},
            "supply.x.pod: a pod has one container, node; others go to initContainers",
        ),
        (
            {"image": "i", "pod": '{"spec": {"volumes": [{"emptyDir": {}}]}}'},
            "supply.x.pod: every row of volumes must have a name",
        ),
        ({"image": "a b"}, "supply.x.image: Kubernetes allows no such name: 'a b'"),
        ({"image": "i", "labels": "a b"}, "supply.x.labels: 'a b' is not the name of a label"),
    ],
)
def test_a_wrong_word_is_refused_with_a_line_that_names_it(
    words: dict[str, str], line: str
) -> None:
    with pytest.raises(SupplyError) as caught:
        options.read(Supply(name="x", engine="kubernetes", options=words))
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)
