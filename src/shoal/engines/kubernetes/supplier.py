"""Brings nodes as pods. Every word that a supply says is turned into a request, and every refusal
into one line that names the word."""

from __future__ import annotations

import re

from shoal.engines.kubernetes import options as words
from shoal.engines.kubernetes import read
from shoal.engines.kubernetes.access import find
from shoal.engines.kubernetes.client import KubeError, Refused
from shoal.engines.kubernetes.options import Place
from shoal.engines.kubernetes.site import Site
from shoal.model.node import NodeSpec
from shoal.model.supply import (
    REASON_CHARACTERS_MAX,
    NodeNote,
    OrderStatus,
    Provision,
    Release,
    Supply,
    SupplyReport,
)
from shoal.ports import SupplyContext, SupplyError

ENGINE = "kubernetes"
AMOUNTS = "gpus, cpus or memory"


class KubernetesSupplier:
    """A `ports.Supplier`. It has one site for each API server and namespace that supplies name."""

    engine = ENGINE

    def __init__(self, context: SupplyContext) -> None:
        self._context = context
        self._sites: dict[Place, Site] = {}

    async def look(self) -> SupplyReport:
        orders: list[OrderStatus] = []
        notes: list[NodeNote] = []
        supplies = {one.name: one for one in self._context.supplies() if one.engine == ENGINE}
        for place in {words.place_of(one) for one in supplies.values()} | self._sites.keys():
            site = await self._site(place)
            try:
                orders += await site.look()
            except KubeError as error:
                raise SupplyError(explain(error, site)) from error
            notes += _notes(site, supplies)
        return SupplyReport(engine=ENGINE, orders=tuple(orders), notes=tuple(notes))

    async def provision(self, command: Provision) -> None:
        options = words.read(command.supply)
        site = await self._site(options.place)
        try:
            await site.provision(command, options, self._context.join_url, self._context.join_token)
        except KubeError as error:
            text, name = explain(error, site), command.supply.name
            named = text.partition(":")[0].partition(" ")[0] in (*words.WORDS, AMOUNTS.split()[0])
            whole = words.field(command.supply, text) if named else f"supply {name}: {text}"
            raise SupplyError(whole[:REASON_CHARACTERS_MAX]) from error

    async def release(self, command: Release) -> None:
        for site in list(self._sites.values()):
            try:
                await site.release(command.order)
            except KubeError as error:
                raise SupplyError(explain(error, site)) from error

    async def drain(self, node: NodeSpec, why: str) -> None:
        for site in list(self._sites.values()):
            try:
                if await site.report_sick(node.id, why):
                    return
            except KubeError as error:
                raise SupplyError(explain(error, site)) from error

    async def close(self) -> None:
        sites, self._sites = self._sites, {}
        for site in sites.values():
            await site.close()

    async def _site(self, place: Place) -> Site:
        """A site that works is kept. Where something is wrong, the kubeconfig is read again: its
        owner may have logged in again meanwhile."""
        site = self._sites.get(place)
        if site is not None and site.pods.problem is None:
            return site
        access = find(place)
        if words.NAME.fullmatch(access.namespace) is None:  # it becomes a part of URLs
            raise SupplyError(f"namespace: Kubernetes allows no such name: {access.namespace!r}")
        if site is None or access != site.access:
            if site is not None:
                await site.close()
            site = self._sites[place] = Site(access, self._context.cluster, self._context.changed)
        return site


def _notes(site: Site, supplies: dict[str, Supply]) -> list[NodeNote]:
    """Labels are those that the node's supply asks for."""
    ends = site.ends()
    found: list[NodeNote] = []
    for node, supply in site.nodes():
        labels: dict[str, str] = {}
        machine = site.machine_under(node)
        if machine is not None and supply in supplies:
            labels = read.labels_of(machine, words.labels_wanted(supplies[supply]))
        in_ms, why = ends.get(node, (None, ""))
        if labels or in_ms is not None:
            found.append(NodeNote(node=node, labels=labels, ends_in_ms=in_ms, ends_why=why))
    return found


def explain(error: KubeError, site: Site) -> str:
    """One line for people: the word of the supply that is about it, what is wrong, what helps."""
    where, namespace = site.access.source, site.access.namespace
    if not isinstance(error, Refused):
        text = f"kubeconfig: {error}"
    elif error.status == 401:
        text = (
            f"context: {site.access.server} does not accept our credentials ({where}); log in again"
        )
    elif error.status == 403 and NO_RIGHT.search(error.message):
        text = f"namespace {namespace}: no permission: {error.message}"
    elif error.status == 403:
        reason = error.message.partition(" is forbidden: ")[2] or error.message
        word = _word_of(reason)
        text = f"{word}{f' {namespace}' if word == 'namespace' else ''}: {reason}"
    elif error.status == 404 and f'namespaces "{namespace}"' in error.message:
        text = f"namespace: there is no namespace {namespace} at {site.access.server}"
    elif error.status == 404 and "configmaps" in error.message:
        text = f"owner: {error.message} in namespace {namespace}"
    elif error.status == 422:
        text = f"{_word_of(error.message)}: {error.message}"
    elif error.status == 429:
        text = f"{site.access.server} has too many requests; trying again later"
    else:
        text = f"{site.access.server} answers {error.status}: {error.message}"
    return " ".join(text.split())[:REASON_CHARACTERS_MAX]


# A right that is missing, as the API server words it. All other 403s are of its admission plugins.
NO_RIGHT = re.compile(r'(User "|system:serviceaccount:).* cannot ')
# What an invalid field or an admission plugin's refusal is about, and the supply's word for it.
SUBJECTS = (
    ("quota", "namespace"),
    ("namespace", "namespace"),
    ("PodSecurity", "namespace"),
    ("PriorityClass", "priority_class"),
    ("priorityClass", "priority_class"),
    ("service account", "service_account"),
    ("serviceAccount", "service_account"),
    ("RuntimeClass", "runtime_class"),
    ("runtimeClass", "runtime_class"),
    (" usage per ", AMOUNTS),  # a LimitRange
    (" limit to request ratio per ", AMOUNTS),
    ("resources", AMOUNTS),
    (".image", "image"),
    ("nodeSelector", "selector"),
    ("tolerations", "tolerations"),
)


def _word_of(message: str) -> str:
    return next((word for part, word in SUBJECTS if part in message), "pod")
