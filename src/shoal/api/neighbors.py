"""The API of neighbors: who they are, what they offer, what of ours is there."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
from typing import TYPE_CHECKING

import msgspec

from shoal.api.audit import note
from shoal.api.events import newest
from shoal.api.handling import handles
from shoal.api.http import Request
from shoal.api.offers import lowest, rates_of
from shoal.api.problems import Refusal, accepted
from shoal.api.reach import Reach
from shoal.calls.cluster import ClusterCalls
from shoal.calls.histories import SharedView
from shoal.client import transport
from shoal.client.transport import Endpoint, ShoalError
from shoal.control.jointoken import parts
from shoal.control.reach import is_loopback
from shoal.control.stores import Stores
from shoal.core.state.events.log import published
from shoal.core.state.events.neighbors import JobHanded, JobReturned, JobSettled, JobWithdrawn
from shoal.ledger.live import LiveLedger
from shoal.model.job import JOB_NAME_PATTERN, Job, Restart
from shoal.model.ledger import PriceList
from shoal.model.neighbor import ANY, NEIGHBORS_MAX, PRICE_UNIT
from shoal.model.neighbor_views import GoneView, NeighborView, NewNeighbor, ThereView
from shoal.model.report import DeclareGone, Nothing
from shoal.model.resources import plural
from shoal.model.views import Done
from shoal.ports import StoreError

if TYPE_CHECKING:
    from shoal.control.neighboring.driver import Neighboring
    from shoal.control.neighboring.known import Known
    from shoal.control.neighboring.site import Site
    from shoal.model.offers import OffersView

NAME_CHARACTERS_MAX = 40
SHOWN_MAX = 100  # jobs of one neighbor
LABELS_MAX, LABEL_SHOWN_MAX = 32, 63  # of a neighbor
MOVED_MAX = 30
MOVES = (JobHanded, JobWithdrawn, JobReturned, JobSettled)
LINES_MAX = 20
NAME = re.compile(JOB_NAME_PATTERN)
NOT_NAMES = (ANY, "here", "home")


class Neighbors:
    @handles(ClusterCalls.neighbors)
    def listing(self, reach: Reach) -> list[NeighborView]:
        driver = reach.loop.neighboring
        sites = driver.sites.values() if driver else ()
        return [view_of(reach, site) for site in sites if _concerns(reach, site.name)]

    @handles(ClusterCalls.shared_with_neighbors)
    async def shared(self, reach: Reach, live_ledger: LiveLedger | None) -> SharedView:
        prices = live_ledger.prices if live_ledger is not None else PriceList()
        moved = await newest(reach, MOVES, MOVED_MAX)
        return SharedView(
            price=lowest(rates_of(reach.loop.state, prices)),
            currency=prices.currency,
            guests=sorted(reach.guests()),
            moved=published(moved),
        )

    @handles(ClusterCalls.set_neighbor)
    async def set(
        self,
        request: Request,
        reach: Reach,
        stores: Stores | None,
        name: str,
        data: NewNeighbor,
    ) -> NeighborView:
        loop = reach.loop
        if len(name) > NAME_CHARACTERS_MAX or not NAME.fullmatch(name) or name in NOT_NAMES:
            raise Refusal(
                422, f"{name[:64]!r} is not a name for a neighbor; use one like east", "name"
            )
        if stores is None:
            raise Refusal(404, "this controller keeps no neighbors")
        note(request.scope, on=name)
        from shoal.control.neighboring.driver import start

        known, offers = await _asked(data)
        _refuse(loop.cluster, loop.neighboring, name, known)
        driver = loop.neighboring or start(loop, stores.settings, {})
        try:
            await driver.put(name, known)
        except StoreError as error:
            if not driver.sites:
                driver.close()
            raise Refusal(507, f"cannot be kept: {error}", "name") from None
        await loop.settled()
        site = driver.sites[name]
        site.offers, site.heard_ms = offers, loop.clock.now_ms()
        return view_of(reach, site)

    @handles(ClusterCalls.neighbor_gone)
    def gone(self, reach: Reach, name: str) -> GoneView:
        jobs = _known(reach, name)
        lines = gone_lines(name, jobs, _services_at(reach, name))
        return GoneView(name=name, lines=lines, jobs=[job.id for job in jobs])

    @handles(ClusterCalls.remove_neighbor)
    async def remove(
        self,
        request: Request,
        reach: Reach,
        stores: Stores | None,
        name: str,
        gone: bool = False,
    ) -> Done:
        loop, jobs, known = reach.loop, _known(reach, name), None
        note(request.scope, on=name)
        if jobs and not gone:
            there = f"{plural(len(jobs), 'job')} of ours {'are' if len(jobs) > 1 else 'is'} there"
            fix = "cancel or await them, or declare it gone: shoal neighbor remove --gone"
            raise Refusal(422, f"{there}, first {jobs[0].id}; {fix} {name}", "name")
        if (services := _services_at(reach, name)) and not gone:
            fix = "serve it without that cluster, or declare it gone: shoal neighbor remove --gone"
            raise Refusal(422, f"service {services[0]} is there; {fix} {name}", "name")
        if loop.neighboring is not None:
            known = loop.neighboring.known.get(name)
            if not gone:  # no job there needs a secret of ours any more
                with contextlib.suppress(ShoalError, TimeoutError):
                    await loop.neighboring.sites[name].carrier.hide(())
            await loop.neighboring.remove(name)
        await loop.request(Nothing())  # its last report is taken in: it gets nothing after that
        await loop.settled()
        left = _jobs_at(reach, name) or _services_at(reach, name)
        if not gone and known is not None and stores is not None and left:
            from shoal.control.neighboring.driver import start

            await (loop.neighboring or start(loop, stores.settings, {})).put(name, known)
            what = f"a job or service of ours has just gone to {name}"
            raise Refusal(422, f"{what}; try again", "name")
        answer = accepted(await loop.request(DeclareGone(name, reach.name)))
        return Done(id=name, note=answer.note if jobs else "")


async def _asked(data: NewNeighbor) -> tuple[Known, OffersView]:
    """It answers, with the certificate that the token names, and accepts the token."""
    from shoal.control.neighboring.known import Known, problem_with_version
    from shoal.control.neighboring.site import offers_of
    from shoal.control.neighboring.wire import Wire

    secret, dot, pin = data.token.strip().partition(".")
    if not parts(secret)[0]:
        message = "is not a token of a neighbor; there, run: shoal neighbor invite NAME"
        raise Refusal(422, message, "token")
    try:
        endpoint = transport.at(data.url.strip(), secret)
        if not endpoint.secure and not is_loopback(endpoint.host):
            raise ShoalError(f"{endpoint.url} is not encrypted; use https://")
        if endpoint.secure and dot:
            endpoint = await asyncio.to_thread(pinned, endpoint, transport.read_fingerprint(pin))
        wire = Wire(endpoint.url, secret, endpoint.certificate)
        try:
            offers = await offers_of(wire, [])
        finally:
            wire.close()
    except ValueError:
        message = "is damaged: what follows its dot is not the fingerprint of a certificate"
        raise Refusal(422, message, "token") from None
    except ShoalError as error:
        raise Refusal(422, str(error), "url") from None
    if problem := problem_with_version(offers.version):
        raise Refusal(422, f"{data.url}: {problem}", "url")
    return (
        Known(
            url=endpoint.url,
            token=secret,
            certificate=endpoint.certificate,
            cluster=offers.cluster,
            tenant=offers.tenant,
        ),
        offers,
    )


def pinned(endpoint: Endpoint, fingerprint: str) -> Endpoint:
    """With the certificate that has this fingerprint. Blocks."""
    try:
        shown = transport.presented(endpoint)
    except (OSError, http.client.HTTPException) as error:
        raise ShoalError(f"{endpoint.url} does not answer ({error})") from None
    for certificate in (shown.anchor, shown.leaf):
        if transport.fingerprint(certificate) == fingerprint:
            return msgspec.structs.replace(endpoint, certificate=certificate)
    found = transport.fingerprint(shown.leaf)
    message = f"the certificate at {endpoint.url} is not the one that the token names"
    raise ShoalError(f"{message} (expected {fingerprint}, found {found}); nothing was sent to it")


def _refuse(cluster: str, driver: Neighboring | None, name: str, known: Known) -> None:
    if not known.cluster:
        raise Refusal(422, "does not say which cluster it is; upgrade it", "url")
    if known.cluster == cluster:
        raise Refusal(422, "is this cluster itself", "url")
    there = driver.known if driver is not None else {}
    for other, one in there.items():
        if other == name and one.cluster != known.cluster:
            fix = f"choose another name, or first: shoal neighbor remove {name}"
            raise Refusal(422, f"{name} is another cluster ({one.url}); {fix}", "name")
        if other != name and (one.cluster, one.tenant) == (known.cluster, known.tenant):
            fix = "to keep tenants apart there, it has to invite you by another name"
            raise Refusal(422, f"is a neighbor already, as {other}; {fix}", "url")
    if name not in there and len(there) >= NEIGHBORS_MAX:
        raise Refusal(422, f"a cluster has at most {NEIGHBORS_MAX} neighbors", "name")


def _known(reach: Reach, name: str) -> list[Job]:
    """Our jobs there. It may be known by them alone, if its token was lost."""
    driver, jobs = reach.loop.neighboring, _jobs_at(reach, name)
    there = jobs or _services_at(reach, name)
    if not there and (driver is None or name not in driver.sites):
        message = f"there is no neighbor {name[:64]!r}; see: shoal neighbor list"
        raise Refusal(404, message, "name")
    return jobs


def _jobs_at(reach: Reach, name: str) -> list[Job]:
    state = reach.loop.state
    jobs = (state.jobs[job_id] for job_id in state.away)
    return [job for job in jobs if job.away is not None and job.away.neighbor == name]


def _services_at(reach: Reach, name: str) -> list[str]:
    found = reach.loop.state.services.items()
    return [service for service, known in found if name in known.sites]


def gone_lines(name: str, jobs: list[Job], services: list[str]) -> list[str]:
    """What a person takes on who declares it gone."""
    lines = [f"{name} is forgotten, with our token there; end the token there, too"]
    if services:
        lines.append(f"it may go on serving these until it is asked again: {_named(services)}")
    if not jobs:
        return [*lines, "no job of ours is there"]
    again = [job for job in jobs if not _never(job)]
    ended = [job.id for job in jobs if _never(job)]
    if again:
        names = _named([job.id for job in again])
        lines.append(f"these wait here again and may run twice if {name} still runs them: {names}")
    if ended:
        names = _named(ended)
        lines.append(f"these are cancelled, because they must not run twice: {names}")
    lines.append("output that they have left there and not here is lost")
    return lines


def _never(job: Job) -> bool:
    """As the core decides it."""
    return job.spec.restart is Restart.NEVER


def _named(ids: list[str]) -> str:
    more = len(ids) - LINES_MAX
    return ", ".join(ids[:LINES_MAX]) + (f" and {more} more" if more > 0 else "")


def _concerns(reach: Reach, name: str) -> bool:
    """Whether jobs of the reader may go there: the policy is shown to the same extent."""
    tenants = reach.loop.policy.neighbor(name).tenants
    return reach.who.sees_all or not tenants or reach.who.tenant in tenants


def view_of(reach: Reach, site: Site) -> NeighborView:
    jobs, offers = _jobs_at(reach, site.name), site.offers
    seen = [job for job in jobs if reach.sees(job)]
    heard = site.heard_ms and max(0, reach.loop.clock.now_ms() - site.heard_ms)
    view = NeighborView(
        name=site.name,
        url=site.known.url,
        cluster=site.known.cluster,
        round_trip_ms=site.round_trip_ms,
        heard_ms_ago=heard if site.heard_ms else -1,
        problem=site.problem,
        count=len(seen),
        jobs=[there_view(site, job) for job in seen[:SHOWN_MAX]],
    )
    if offers is not None:
        view.version, view.currency = offers.version, offers.currency
        view.gpus, view.gpus_free = offers.gpus, offers.gpus_free
        view.waiting, view.price = offers.waiting, offers.price
        some = list(offers.labels.items())[:LABELS_MAX]
        view.labels = {key[:LABEL_SHOWN_MAX]: value[:LABEL_SHOWN_MAX] for key, value in some}
    return view


def there_view(site: Site, job: Job) -> ThereView:
    away = job.away
    assert away is not None, job.id
    there = site.there.get((job.id, job.attempt))
    return ThereView(
        job=job.id,
        id=away.id,
        state=there.phase if there is not None else "",
        since_ms=away.since_ms,
        gpus=job.spec.gpus * job.spec.members,
        running_ms=away.running_ms,
        price=away.price / PRICE_UNIT if away.price is not None else None,
        withdrawn=away.withdrawn,
    )
