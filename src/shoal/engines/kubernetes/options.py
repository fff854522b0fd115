"""What a supply says about Kubernetes: the words under `options`, read and checked. Pure."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from shoal.engines.kubernetes import patch
from shoal.model.supply import Supply
from shoal.ports import Supplier, SupplierKind, SupplyContext, SupplyError

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(?!\n)")  # of a namespace
DOTTED = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(?!\n)")  # of most other objects
RESOURCE = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?")
KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?")
VALUE = re.compile(r"([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?")
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
USER_MAX = 2**31 - 1
GRACE_S_MAX = 24 * 3600

# Labels of a machine that become labels of the node on it. `x/*` is all labels that begin so.
LABELS = (
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
    "node.kubernetes.io/instance-type",
    "kubernetes.io/arch",
    "kubernetes.io/hostname",
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "karpenter.sh/capacity-type",
    "cloud.google.com/gke-spot",
    "eks.amazonaws.com/capacityType",
)


class Place(msgspec.Struct, frozen=True):
    """Where pods are made. An empty field means what kubectl would take, and inside a cluster, the
    pod's own service account and namespace."""

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""


class Toleration(msgspec.Struct, frozen=True):
    key: str
    value: str = ""  # empty: whatever the value is
    effect: str = ""  # empty: all of them


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The words of one supply."""

    place: Place
    image: str
    gpu_resource: str = "nvidia.com/gpu"
    rdma_resource: str = ""  # of InfiniBand and RoCE cards; empty: pods get none
    host_network: bool = False
    selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    labels: tuple[str, ...] = LABELS
    service_account: str = ""
    pull_secret: str = ""
    priority_class: str = ""
    runtime_class: str = ""
    owner: str = ""  # a ConfigMap that owns what is made; empty: one is made
    user: int = 1000
    grace_s: int = 60  # from the end's notice to SIGKILL
    whole: bool = False  # no two of our pods on one machine
    pod: dict[str, Any] = {}  # merged into each pod


# A word of a supply, and the field here.
WORDS = {
    "kubeconfig": "place",
    "context": "place",
    "namespace": "place",
    "image": "image",
    "gpu_resource": "gpu_resource",
    "rdma_resource": "rdma_resource",
    "host_network": "host_network",
    "selector": "selector",
    "tolerations": "tolerations",
    "labels": "labels",
    "service_account": "service_account",
    "pull_secret": "pull_secret",
    "priority_class": "priority_class",
    "runtime_class": "runtime_class",
    "owner": "owner",
    "user": "user",
    "grace": "grace_s",
    "whole": "whole",
    "pod": "pod",
}
CONTAINER = "node"  # what the container in a pod is called


def _build(context: SupplyContext) -> Supplier:
    from shoal.engines.kubernetes.supplier import KubernetesSupplier

    return KubernetesSupplier(context)


SUPPLIER = SupplierKind("Kubernetes", WORDS, _build, install="pip install 'shoal[kubernetes]'")
SIMULATED = "sim_"  # how words begin that are for `shoal sim` alone


def field(supply: Supply, word: str) -> str:
    """How an error names a field, so that people find it in their policy."""
    return f"supply.{supply.name}.{word}"


def place_of(supply: Supply) -> Place:
    """Where a supply's pods are, which is known even if the rest of its words is wrong."""
    words = supply.options
    return Place(words.get("kubeconfig", ""), words.get("context", ""), words.get("namespace", ""))


def labels_wanted(supply: Supply) -> tuple[str, ...]:
    text = supply.options.get("labels")
    return LABELS if text is None else tuple(_parts(text))


def read(supply: Supply) -> Options:
    """Raises `SupplyError`, which names the word that is wrong."""
    words = {
        word: text.strip()
        for word, text in supply.options.items()
        if not word.startswith(SIMULATED)
    }
    for word in words:
        if word not in WORDS:
            raise SupplyError(f"{field(supply, word)}: is unknown; there are {', '.join(WORDS)}")
    if not words.get("image"):
        raise SupplyError(
            f"{field(supply, 'image')}: is missing; name a container image that has Shoal in it"
        )
    plain = {
        WORDS[word]: _matched(supply, word, words[word], pattern)
        for word, pattern in PATTERNS.items()
        if words.get(word)
    }
    if words.get("namespace"):
        _matched(supply, "namespace", words["namespace"], NAME)
    found = Options(
        place=place_of(supply),
        image=_matched(supply, "image", words["image"], IMAGE),
        selector=_pairs(supply, words.get("selector", "")),
        tolerations=tuple(
            _toleration(supply, part) for part in _parts(words.get("tolerations", ""))
        ),
        labels=_labels(supply, words["labels"]) if "labels" in words else LABELS,
        user=_number(supply, "user", words.get("user", "1000"), 0, USER_MAX),
        grace_s=_number(supply, "grace", words.get("grace", "60").rstrip("s"), 1, GRACE_S_MAX),
        whole=_truth(supply, "whole", words.get("whole", "no")),
        host_network=_truth(supply, "host_network", words.get("host_network", "no")),
        pod=_pod(supply, words.get("pod", "{}")),
        **plain,
    )
    if supply.gpus == 0 and "gpu_resource" in words:
        raise SupplyError(f"{field(supply, 'gpu_resource')}: is of no use without gpus")
    return found


IMAGE = re.compile(r"[\w][\w.:/@-]{0,1000}", re.ASCII)
PATTERNS = {
    "gpu_resource": RESOURCE,
    "rdma_resource": RESOURCE,
    "service_account": DOTTED,
    "pull_secret": DOTTED,
    "priority_class": DOTTED,
    "runtime_class": DOTTED,
    "owner": DOTTED,
}


def _matched(supply: Supply, word: str, text: str, pattern: re.Pattern[str]) -> str:
    if pattern.fullmatch(text) is None:
        raise SupplyError(f"{field(supply, word)}: Kubernetes allows no such name: {text!r}")
    return text


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _pairs(supply: Supply, text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in _parts(text):
        key, equals, value = part.partition("=")
        if not equals or KEY.fullmatch(key) is None or VALUE.fullmatch(value) is None:
            raise SupplyError(f"{field(supply, 'selector')}: {part!r} is not LABEL=VALUE")
        pairs[key] = value
    return pairs


def _toleration(supply: Supply, text: str) -> Toleration:
    rest, _, effect = text.partition(":")
    key, _, value = rest.partition("=")
    right = KEY.fullmatch(key) and VALUE.fullmatch(value) and effect in ("", *EFFECTS)
    if not right:
        raise SupplyError(
            f"{field(supply, 'tolerations')}: {text!r} is not KEY[=VALUE][:EFFECT], with an effect "
            f"of {', '.join(EFFECTS)}"
        )
    return Toleration(key, value, effect)


def _labels(supply: Supply, text: str) -> tuple[str, ...]:
    parts = _parts(text)
    for part in parts:
        if (
            KEY.fullmatch(part.removesuffix("*").rstrip("/") if part.endswith("/*") else part)
            is None
        ):
            raise SupplyError(f"{field(supply, 'labels')}: {part!r} is not the name of a label")
    return tuple(parts)


def _number(supply: Supply, word: str, text: str, least: int, most: int) -> int:
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise SupplyError(f"{field(supply, word)}: {text!r} is not a number from {least} to {most}")
    return int(text)


def _pod(supply: Supply, text: str) -> dict[str, Any]:
    try:
        return patch.read(text, CONTAINER)
    except ValueError as error:
        raise SupplyError(f"{field(supply, 'pod')}: {error}") from None


def _truth(supply: Supply, word: str, text: str) -> bool:
    if text.lower() not in ("yes", "true", "no", "false"):
        raise SupplyError(f"{field(supply, word)}: {text!r} is not yes or no")
    return text.lower() in ("yes", "true")
