"""What we ask of a Ray for an order: the options of an actor, and what it starts. Pure."""

from __future__ import annotations

import re

import msgspec

from shoal.model.supply import Provision, Supply
from shoal.ports import Supplier, SupplierKind, SupplyContext, SupplyError

NAMESPACE = "shoal"
MEBIBYTE = 1024 * 1024
# What a supply may say under `options`.
OPTIONS = {
    "address": "where the head of Ray answers, HOST:PORT",
    "token_file": "a file with Ray's token, on the controller's machine",
    "whole": "yes: each node is a whole machine of Ray, with all that Ray has there",
    "python": "a Python with Shoal, on Ray's machines; without it, that of Ray's workers",
    "folder": "a folder for nodes, on Ray's machines; without it, ~/.shoal-nodes",
    "checkpoints": "a folder that all of Ray's machines share; without it, each has its own",
}


def _build(context: SupplyContext) -> Supplier:
    from shoal.engines.ray.supplier import RaySupplier

    return RaySupplier(context)


SUPPLIER = SupplierKind(
    "Ray",
    OPTIONS,
    _build,
    install="pip install 'shoal[ray]'",
    needs="--address HOST:PORT, of a Ray that runs already; to make a cluster of bare machines: "
    "shoal up --host 0.0.0.0, then shoal join on each",
)
FOLDER = "~/.shoal-nodes"
YES, NO = ("yes", "true"), ("no", "false", "")
ADDRESS = re.compile(r"[A-Za-z0-9._-]{1,253}:[0-9]{1,5}|\[[0-9a-fA-F:]{2,45}\]:[0-9]{1,5}")


class Where(msgspec.Struct, frozen=True):
    """One Ray, and how it is reached."""

    address: str
    token_file: str = ""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One actor, as the driver asks Ray for it. `whole`: a Ray node that nobody uses, with all that
    it has. `again`: for an agent that lives already; if it does not, nothing is started. `plan` is
    for the holder (`holder.Holder`)."""

    name: str
    order: str
    cpus: float
    gpus: float
    memory_bytes: int
    whole: bool = False
    again: bool = False
    plan: Plan


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a holder starts, and where. It adds the labels of the Ray node that it is on."""

    cluster: str
    order: str
    node: str
    home: str
    python: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    labels: dict[str, str]


def where(supply: Supply) -> Where:
    """Refuses what is not understood: a misspelt option would be ignored otherwise."""
    for name in supply.options:
        if name not in OPTIONS:
            known = ", ".join(OPTIONS)
            raise SupplyError(
                f"supply {supply.name}: Ray has no option '{name}'; there are {known}"
            )
    address = supply.options.get("address", "")
    if not ADDRESS.fullmatch(address):
        given = f"'{address[:80]}' is not" if address else "is missing: write"
        raise SupplyError(f"supply {supply.name}: address {given} HOST:PORT, such as 10.0.0.1:6379")
    if supply.options.get("whole", "") not in (*YES, *NO):
        raise SupplyError(f"supply {supply.name}: whole must be yes or no")
    if supply.lot != 1:
        raise SupplyError(f"supply {supply.name}: lot must be 1, because Ray brings single nodes")
    return Where(address, supply.options.get("token_file", ""))


def ask(context: SupplyContext, command: Provision) -> Ask:
    supply = command.supply
    where(supply)
    return Ask(
        name=actor_name(context.cluster, command.order),
        order=command.order,
        cpus=supply.cpu_milli / 1000,
        gpus=supply.gpus,
        memory_bytes=supply.memory_mb * MEBIBYTE,
        whole=is_whole(supply),
        plan=plan(context, command),
    )


def plan(context: SupplyContext, command: Provision) -> Plan:
    supply = command.supply
    (node,) = command.nodes
    folder = f"{supply.options.get('folder', FOLDER).rstrip('/')}/{context.cluster}"
    whole = is_whole(supply)
    amounts = {
        "--gpus": "" if whole else str(supply.gpus),
        "--gpu-model": supply.gpu_model,
        "--gpu-memory": f"{supply.gpu_memory_mb}M" if supply.gpu_memory_mb else "",
        "--cpus": f"{supply.cpu_milli / 1000:g}" if supply.cpu_milli and not whole else "",
        "--memory": f"{supply.memory_mb}M" if supply.memory_mb else "",
    }
    return Plan(
        cluster=context.cluster,
        order=command.order,
        node=node,
        home=f"{folder}/{command.order}",
        python=supply.options.get("python", ""),
        arguments=(
            *("-m", "shoal.main", "join", context.join_url, "--foreground", "--name", node),
            *("--order", command.order, "--origin", supply.name),
            *(word for flag, value in amounts.items() if value for word in (flag, value)),
            *(word for taint in supply.taints for word in ("--taint", taint)),
        ),
        environment={
            "SHOAL_JOIN_TOKEN": context.join_token,
            "SHOAL_CHECKPOINT_ROOT": supply.options.get("checkpoints", f"{folder}/checkpoints"),
        },
        labels=supply.labels,
    )


def is_whole(supply: Supply) -> bool:
    """A supply that says neither is of whole machines, because a node needs one of them."""
    said = supply.options.get("whole", "") in YES
    return said or (not supply.gpus and not supply.cpu_milli)


def whole_of(ask: Ask, total: dict[str, float]) -> Ask:
    """The request for a whole Ray node, which has these amounts."""
    cpus, gpus = total.get("CPU", 0), total.get("GPU", 0)
    amounts = ("--gpus", f"{gpus:g}", "--cpus", f"{cpus:g}")
    changed = msgspec.structs.replace(ask.plan, arguments=(*ask.plan.arguments, *amounts))
    return msgspec.structs.replace(ask, cpus=cpus, gpus=gpus, whole=False, plan=changed)


def actor_name(cluster: str, order: str) -> str:
    return f"shoal-{cluster}-{order}"
