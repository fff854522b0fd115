"""The objects that are made in Kubernetes, exactly as they are sent. Pure."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

from shoal.engines.kubernetes import patch
from shoal.engines.kubernetes.options import CONTAINER, Options
from shoal.machine.files import ONE_USER
from shoal.model.supply import Provision, Supply

Object = dict[str, Any]

CLUSTER, ORDER, SUPPLY, NODE, LOT = (
    "shoal-cluster",
    "shoal-order",
    "shoal-supply",
    "shoal-node",
    "shoal-lot",
)
TOKEN_KEY = "join-token"
TOKEN_FOLDER = "/run/secrets/shoal"
VOLUME = "/var/lib/shoal"  # an emptyDir: of root, mode 2777
HOME = f"{VOLUME}/home"  # made by Shoal, for its user only
AFTER_S = 15  # after its members have ended, a node sweeps up and reports its end
TITLE_CHARACTERS_MAX = 1000
# Cluster autoscalers end the machines of idle pods. An order that nobody needs is released by the
# controller; until then a job may run there.
KEEP = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}


def selector(cluster: str) -> str:
    """Finds everything of this cluster, and nothing else."""
    return f"app.kubernetes.io/managed-by=shoal,{CLUSTER}={cluster}"


def common_labels(cluster: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "shoal",
        "app.kubernetes.io/instance": f"shoal-{cluster}",
        "app.kubernetes.io/managed-by": "shoal",
        CLUSTER: cluster,
    }


def owner_name(cluster: str) -> str:
    return f"shoal-{cluster}"


def owner(cluster: str, join_url: str) -> Object:
    """Owns the pods and secrets. When it is deleted, Kubernetes deletes them, too."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": owner_name(cluster), "labels": common_labels(cluster)},
        "data": {
            "url": join_url,
            "about": "Owns the pods and secrets of a Shoal cluster. They are deleted with it.",
        },
    }


def owned_by(config_map: Object) -> list[Object]:
    """A controller, or `kubectl drain` would want --force. Without blockOwnerDeletion, because that
    needs a right to the owner's finalizers."""
    found = config_map["metadata"]
    owner_ = {"apiVersion": "v1", "kind": "ConfigMap", "name": found["name"], "uid": found["uid"]}
    return [{**owner_, "controller": True}]


def secret_name(cluster: str, token: str, owners: list[Object]) -> str:
    """Another token, or another owner, has another name. So a secret is never changed, the
    controller needs no right to read or write secrets that exist, and what is deleted with an owner
    that is gone is not in the way."""
    mark = hashlib.sha256(f"{token} {owners[0]['uid']}".encode()).hexdigest()[:10]
    return f"shoal-{cluster}-join-{mark}"


def secret(cluster: str, token: str, owners: list[Object]) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": secret_name(cluster, token, owners),
            "labels": common_labels(cluster),
            "ownerReferences": owners,
        },
        "type": "Opaque",
        "immutable": True,
        "data": {TOKEN_KEY: base64.b64encode(token.encode()).decode()},
    }


def pod_name(cluster: str, order: str, index: int) -> str:
    return f"shoal-{cluster}-{order}-{index}"


def pods(
    cluster: str,
    join_url: str,
    command: Provision,
    options: Options,
    token: str,
    owners: list[Object],
) -> list[Object]:
    """One for each node of the lot."""
    return [
        _pod(
            cluster, join_url, command, options, secret_name(cluster, token, owners), owners, index
        )
        for index in range(len(command.nodes))
    ]


def _pod(
    cluster: str,
    join_url: str,
    command: Provision,
    options: Options,
    token_secret: str,
    owners: list[Object],
    index: int,
) -> Object:
    supply = command.supply
    values = {
        "cluster": cluster,
        "order": command.order,
        "node": command.nodes[index],
        "lot": str(len(command.nodes)),
    }
    made = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(cluster, command.order, index),
            "labels": {
                **common_labels(cluster),
                "app.kubernetes.io/component": "node",
                SUPPLY: supply.name,
                ORDER: command.order,
                NODE: command.nodes[index],
                LOT: str(len(command.nodes)),
            },
            "annotations": {**KEEP, "shoal-why": command.why[:TITLE_CHARACTERS_MAX]},
            "ownerReferences": owners,
        },
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": options.grace_s,
            **({"activeDeadlineSeconds": _lasts_s(supply)} if supply.lasts_ms else {}),
            # Jobs run in this pod: they get no token for the API server, and no list of services.
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": options.user != 0,
                "runAsUser": options.user,
                "runAsGroup": options.user,
                "fsGroup": options.user,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **_where(cluster, options),
            "containers": [_container(join_url, command, options, index)],
            "volumes": [
                {"name": "home", "emptyDir": {}},
                # A container has 64 MB of shared memory otherwise, and data loaders need more.
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
                {"name": "token", "secret": {"secretName": token_secret, "defaultMode": 0o400}},
            ],
        },
    }
    found: Object = patch.merged(made, patch.filled(options.pod, values))
    return found


def _where(cluster: str, options: Options) -> Object:
    """Which machines it may run on, and under whose name."""
    found: Object = {}
    if options.host_network:
        found |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if options.service_account:
        found["serviceAccountName"] = options.service_account
    if options.pull_secret:
        found["imagePullSecrets"] = [{"name": options.pull_secret}]
    if options.priority_class:
        found["priorityClassName"] = options.priority_class
    if options.runtime_class:
        found["runtimeClassName"] = options.runtime_class
    if options.selector:
        found["nodeSelector"] = options.selector
    if options.tolerations:
        found["tolerations"] = [
            {
                "key": one.key,
                **(
                    {"operator": "Equal", "value": one.value}
                    if one.value
                    else {"operator": "Exists"}
                ),
                **({"effect": one.effect} if one.effect else {}),
            }
            for one in options.tolerations
        ]
    if options.whole:
        apart = {
            "labelSelector": {"matchLabels": {CLUSTER: cluster}},
            "topologyKey": "kubernetes.io/hostname",
        }
        found["affinity"] = {
            "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
        }
    return found


def _container(join_url: str, command: Provision, options: Options, index: int) -> Object:
    amounts = _amounts(command.supply, options)
    return {
        "name": CONTAINER,
        "image": options.image,
        "command": join_command(join_url, command, index),
        "env": [
            {"name": "SHOAL_HOME", "value": HOME},
            {"name": "HOME", "value": VOLUME},
            {"name": ONE_USER, "value": "1"},  # true by the securityContext below
            {"name": "SHOAL_END_GRACE_S", "value": str(max(1, options.grace_s - AFTER_S))},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        # Equal requests and limits: the last to be evicted, and what the scheduler was promised.
        **({"resources": {"requests": amounts, "limits": dict(amounts)}} if amounts else {}),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {
                "drop": ["ALL"],
                # Cards read and write memory that is locked, and a pod cannot set that limit.
                **({"add": ["IPC_LOCK"]} if options.rdma_resource else {}),
            },
        },
        # The last lines of a node that could not join are then in the pod's status, which is read
        # anyway, so no right to read logs is needed.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "home", "mountPath": VOLUME},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "token", "mountPath": TOKEN_FOLDER, "readOnly": True},
        ],
    }


def _amounts(supply: Supply, options: Options) -> dict[str, str]:
    amounts: dict[str, str] = {}
    if supply.cpu_milli:
        amounts["cpu"] = f"{supply.cpu_milli}m"
    if supply.memory_mb:
        amounts["memory"] = f"{supply.memory_mb}Mi"
    if supply.gpus:
        amounts[options.gpu_resource] = str(supply.gpus)
    if options.rdma_resource:
        amounts[options.rdma_resource] = "1"  # device plugins count pods that share the cards
    return amounts


def join_command(join_url: str, command: Provision, index: int) -> list[str]:
    """What runs in the container, as its first process: it joins, and ends with the node."""
    supply = command.supply
    words = ["shoal", "join", join_url, "--foreground", "--name", command.nodes[index]]
    words += ["--origin", supply.name, "--order", command.order]
    words += ["--token-file", f"{TOKEN_FOLDER}/{TOKEN_KEY}", "--node-ip", "$(POD_IP)"]
    words += ["--gpus", str(supply.gpus)]
    if supply.cpu_milli:
        words += ["--cpus", f"{supply.cpu_milli / 1000:g}"]
    if supply.memory_mb:
        words += ["--memory", f"{supply.memory_mb}M"]
    for name, value in sorted(supply.labels.items()):
        words += ["--label", f"{name}={value}"]
    for taint in supply.taints:
        words += ["--taint", taint]
    if supply.lasts_ms:
        words += ["--ends-in", str(_lasts_s(supply))]
    return words


def _lasts_s(supply: Supply) -> int:
    return max(1, supply.lasts_ms // 1000)


def sick_event(pod: Object, why: str, now: str, name: str) -> Object:
    """For people who look at the pod or at the namespace's events: its machine is sick."""
    found = pod["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": found["namespace"]},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": found["name"],
            "namespace": found["namespace"],
            "uid": found["uid"],
        },
        "type": "Warning",
        "reason": "MachineSick",
        "message": f"Shoal measured a fault of machine {pod['spec'].get('nodeName', '')}: {why}"[
            :TITLE_CHARACTERS_MAX
        ],
        "source": {"component": "shoal"},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
