"""A service in several clusters: which version each site is to have, and what becomes of it there.

A roll-out goes from site to site, home first: the next one is sent the version when the one before
has it ready. If it fails at a site that had an earlier version ready, home goes back to the version
before, and the sites follow. What is sent follows from the state alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from shoal.core.features.neighbors import barred_by, gpus_there, too_dear
from shoal.core.features.service.sleep import look_at
from shoal.core.state.events.services import (
    ServiceSet,
    SiteAsked,
    SiteEnded,
    SiteHeard,
    SitesTold,
)
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.durations import duration_text
from shoal.model.identity import EVERY_TENANT
from shoal.model.neighbor import ANY, HERE, NeighborReport, Wish, stays_home
from shoal.model.policy import Policy
from shoal.model.reason import quoted
from shoal.model.report import Accepted, Answer, DeclareGone, Refused, SetSites
from shoal.model.service import Routing, Service, ServiceSpec
from shoal.model.sites import HOME_SITE, Site, SiteReport, SiteView, SiteWork

# A roll-out passes a site that is silent, or at which it fails, for so long.
PASSED_MS = 300_000
LOOK_MS = 10_000
SAID_MAX, SAID_PAUSE_MS = 20, 60_000  # changes of one version at a site that are noted at once


def named(spec: ServiceSpec) -> tuple[str, ...]:
    """The sites but home, in the order of a roll-out."""
    return tuple(name for name in spec.clusters if name != HERE)


def clusters_problem(state: State, policy: Policy, spec: ServiceSpec) -> Refused | None:
    """Of a service that names other clusters: why it could never be served there."""
    sites = named(spec)
    if len(set(spec.clusters)) < len(spec.clusters):
        return Refused("clusters", "names a cluster twice")
    if bad := next((name for name in sites if name in (ANY, HOME_SITE)), None):
        return Refused("clusters", f"{bad} is not the name of a neighbor; see: shoal neighbor list")
    if not sites:
        return None
    if home := stays_home(spec.replica):
        return Refused("clusters", f"cannot be chosen: {home}")
    if spec.way.routing is Routing.CACHE:
        why = "a router of tokens knows the replicas of its own cluster only; leave out route"
        return Refused("clusters", f"cannot be chosen: {why}")
    if spec.way.certificate:
        why = "its certificate is a secret of this cluster; leave out port and certificate"
        return Refused("clusters", f"cannot be chosen: {why}")
    for name in sites:
        if barred := barred_by(state, policy.neighbor(name), spec.replica):
            return Refused("clusters", f"{name}: {barred}")
    return None


# -- home: which version goes where ----------------------------------------------------------------


def roll_out(round_: Round, service: Service) -> None:
    """The next site is sent the version that the service has here."""
    spec, state = service.spec, round_.state
    if service.stopping or not _ready_here(state, service):
        return
    for name in named(spec):
        site = service.sites.get(name)
        if site is None or site.version != service.version:
            if site is None and _barred(state, service, name):
                continue
            event = SiteAsked(
                at_ms=round_.now_ms, service=spec.name, site=name, version=service.version
            )
            round_.emit(event)
            return
        if site.ready != service.version and not _passed(state, service, name, round_.now_ms):
            look_at(round_, max(round_.now_ms + LOOK_MS, site.asked_ms + PASSED_MS))
            return


def _ready_here(state: State, service: Service) -> bool:
    serving = (job for job in service.ready if job not in service.draining)
    return service.proven and all(
        state.jobs[job].spec.version == service.version for job in serving
    )


def _barred(state: State, service: Service, name: str) -> str:
    """Why it is not sent there; empty: it is."""
    share, spec, report = state.policy.neighbor(name), service.spec, state.heard.neighbors.get(name)
    if report is None:
        return "it is no neighbor, or has not been heard of yet; see: shoal neighbor list"
    if not report.clock_ms:
        return f"it cannot be asked: {quoted(report.problem)}"
    gpus = spec.scale.most * spec.replica.gpus * spec.replica.members
    if share.gpus_max and gpus and gpus_there(state, name) + gpus > share.gpus_max:
        return f"the policy has at most {share.gpus_max} GPUs of ours there"
    dear = too_dear(share, Wish(), report.price) if spec.replica.gpus else ""
    return dear or barred_by(state, share, spec.replica)


def _said(state: State, service: Service, name: str) -> SiteReport | None:
    report = state.heard.neighbors.get(name)
    services = report.services if report is not None else ()
    return next((one for one in services if one.service == service.spec.name), None)


def _passed(state: State, service: Service, name: str, now_ms: int) -> bool:
    """Whether the roll-out goes on without it. It gets the version when it can."""
    report, said = state.heard.neighbors.get(name), _said(state, service, name)
    site = service.sites[name]
    if said is not None and said.refused:
        return True
    silent = report is None or bool(report.problem)
    fails = said is not None and (said.state == "failing" or said.version != service.version)
    return (silent or fails) and now_ms >= site.asked_ms + PASSED_MS


def hear_sites(round_: Round, reports: tuple[NeighborReport, ...]) -> None:
    """A neighbor is believed about services that it was asked to serve."""
    for name, one in ((report.name, one) for report in reports for one in report.services):
        service = round_.state.services.get(one.service)
        site = service.sites.get(name) if service is not None else None
        if service is not None and site is not None:
            _hear(round_, service, name, site, one)


def _hear(round_: Round, service: Service, name: str, site: Site, said: SiteReport) -> None:
    now_ms = round_.now_ms
    if said.ended and ends_there(service, name):
        round_.emit(SiteEnded(at_ms=now_ms, service=service.spec.name, site=name))
        return
    if why := _failed(service, site, said, now_ms):
        _go_back(round_, service, name, why)
    ready = said.version if said.ready or not said.version else site.ready
    changed = (said.version, ready, said.door or site.door) != (site.has, site.ready, site.door)
    paced = site.said < SAID_MAX or now_ms >= site.said_ms + SAID_PAUSE_MS
    if changed and paced and not said.ended:
        event = SiteHeard(
            at_ms=now_ms,
            service=service.spec.name,
            site=name,
            has=said.version,
            ready=ready,
            door=said.door or site.door,
            why=quoted(said.why) if said.version != site.has and said.why else "",
        )
        round_.emit(event)


def _failed(service: Service, site: Site, said: SiteReport, now_ms: int) -> str:
    """Why the version that it was sent last cannot be had there, where an earlier one was ready."""
    wanted = service.version
    if site.version != wanted or site.ready in (0, wanted) or service.before is None:
        return ""
    if said.refused:
        return f"does not take it: {quoted(said.refused)}"
    if site.has == wanted and said.version not in (0, wanted):
        return f"has gone back to version {said.version}: {quoted(said.why)}"
    if said.state == "failing" and now_ms >= site.asked_ms + PASSED_MS:
        return f"has not got it ready within {duration_text(PASSED_MS)}: {quoted(said.why)}"
    return ""


def _go_back(round_: Round, service: Service, name: str, why: str) -> None:
    assert service.before is not None, service.spec.name
    back = f"back to version {service.before_version}"
    event = ServiceSet(
        at_ms=round_.now_ms,
        service=service.spec.name,
        spec=msgspec.structs.replace(service.before, clusters=service.spec.clusters),
        version=service.before_version,
        back=True,
        why=f"version {service.version} failed at {name}, which {why}; {back}",
    )
    round_.emit(event)


def ends_there(service: Service, name: str) -> bool:
    return service.stopping or name not in service.spec.clusters


def forget_sites(round_: Round, request: DeclareGone) -> None:
    why = f"{request.neighbor} was declared gone by {request.who}"
    for name, service in round_.state.services.items():
        if (site := request.neighbor) in service.sites:
            round_.emit(SiteEnded(at_ms=round_.now_ms, service=name, site=site, why=why))


def outgoing_services(state: State) -> Iterator[tuple[str, SiteWork]]:
    """What neighbors are told, again and again: the neighbor, and what it is to do."""
    for name, service in state.services.items():
        for site, known in service.sites.items():
            others = tuple(door for door in service.far if door.site != site)
            yield (
                site,
                SiteWork(
                    service=name,
                    version=service.version if known.version == service.version else 0,
                    has=known.has,
                    ends=ends_there(service, site),
                    doors=others,
                ),
            )


def unsettled(state: State, work: SiteWork, site: str) -> bool:
    """Whether something is expected to happen there soon."""
    known = state.services[work.service].sites[site]
    return work.ends or known.ready != known.version or known.door is None


# -- a neighbor: what home says --------------------------------------------------------------------


def set_sites(round_: Round, request: SetSites) -> Answer:
    service = round_.state.services.get(request.service)
    scopes = (EVERY_TENANT, service.spec.replica.tenant if service is not None else "")
    if service is None or request.scope not in scopes:
        return Refused("service", f"there is no service {request.service}", missing=True)
    if service.doors != request.doors:
        event = SitesTold(at_ms=round_.now_ms, service=request.service, doors=request.doors)
        round_.emit(event)
    return Accepted(request.service)


# -- what people are told --------------------------------------------------------------------------


def sites_text(state: State, service: Service) -> str:
    """What a roll-out waits for, or who does not have it; empty: all have it."""
    if service.stopping:
        left = ", ".join(service.sites)
        return f"it ends at {left}{_silence(state, next(iter(service.sites)))}" if left else ""
    for view in sites_of(state, service):
        if view.why:
            return f"{view.name}: {view.why}"
    return ""


def sites_of(state: State, service: Service) -> list[SiteView]:
    names = dict.fromkeys((*named(service.spec), *service.sites))
    return [_view(state, service, name) for name in names]


def _view(state: State, service: Service, name: str) -> SiteView:
    site, said, version = service.sites.get(name), _said(state, service, name), service.version
    view = SiteView(name=name, version=site.ready if site is not None else 0)
    if site is not None and site.door is not None:
        view.address = f"{site.door.address}:{site.door.port}"
    if said is not None:
        view.state, view.replicas = said.state, said.replicas
    if ends_there(service, name):
        view.state, view.why = "stopping", f"it ends there{_silence(state, name)}"
    elif said is not None and said.refused:
        view.state, view.why = "refused", f"does not take it: {quoted(said.refused)}"
    elif site is None:
        view.state = "waiting"
        view.why = _barred(state, service, name) or "it comes after those before it have it ready"
    elif site.version != version:
        view.why = f"version {version} comes after those before it have it ready"
    elif site.ready != version:
        text = f": {quoted(said.why)}" if said is not None and said.why else ""
        view.why = f"version {version} is not ready there{text}{_silence(state, name)}"
    else:
        view.why = _silence(state, name).removeprefix("; ")
    return view


def _silence(state: State, name: str) -> str:
    report = state.heard.neighbors.get(name)
    trouble = quoted(report.problem) if report is not None and report.problem else ""
    return f"; it cannot be asked: {trouble}" if trouble else ""


# -- what always holds, in code that shares nothing with the code above ---------------------------


def sites_violation(state: State) -> str:
    """Empty if all is well."""
    for name, service in state.services.items():
        for key, site in service.sites.items():
            if not 1 <= site.version <= service.newest:
                return f"{name} is at {key} in version {site.version}, which it never had"
            if site.door is not None and site.door.site != key:
                return f"{name} calls {site.door.site} by the door of {key}"
    return ""
