"""One round of the whole system: what was seen and asked for becomes events and commands."""

from __future__ import annotations

import msgspec

from shoal.core.features.array import look_for_more, unfold
from shoal.core.features.budget import budget
from shoal.core.features.caps import unreserve_capped
from shoal.core.features.ends import close_ending, dismissals
from shoal.core.features.fabric.tours import end_tours, tours_wanted
from shoal.core.features.halving import halve
from shoal.core.features.health import checks_wanted, paced, watch
from shoal.core.features.lease import end_leases
from shoal.core.features.neighbors import hand_over, hear_neighbors
from shoal.core.features.notices import report_waits
from shoal.core.features.reclaim import learn_startups, reclaim
from shoal.core.features.schedules import run_schedules
from shoal.core.features.service.serve import serve
from shoal.core.features.service.sites import hear_sites
from shoal.core.features.sleep import settle_naps
from shoal.core.features.storage import end_storage, storage_wanted
from shoal.core.features.supply.orders import hear_supplies
from shoal.core.features.supply.supply import supply
from shoal.core.features.workflow import settle_dependents
from shoal.core.phases.admit import admit, run_problem
from shoal.core.phases.heal import heal
from shoal.core.phases.observe import fences_wanted, observe
from shoal.core.phases.prepare import prepares_wanted
from shoal.core.phases.reconcile import reconcile
from shoal.core.phases.timekeeping import note_clock
from shoal.core.phases.wake import next_wake
from shoal.core.scheduling.cycle import schedule
from shoal.core.scheduling.functions import FUNCTIONS
from shoal.core.state.apply_queue import adopt_functions
from shoal.core.state.events.cluster import PolicyChanged
from shoal.core.state.events.log import Event
from shoal.core.state.round import Round
from shoal.core.state.state import Functions, State
from shoal.model.commands import Command
from shoal.model.job import Job
from shoal.model.policy import Policy
from shoal.model.report import Answer, NodeReport, Report
from shoal.model.supply import SupplyCommand


class Step(msgspec.Struct, frozen=True):
    """`events` are already applied to the state, and must be stored before `commands` are sent
    and `answers` (one per request, in order) are given. `finished` holds the whole records of
    the jobs that left the state. Without a report, no step is needed before `wake_ms`. `supplies`
    are commands for suppliers, sent when the events are stored. `reports` are those that were new,
    with what their nodes may say."""

    events: list[Event]
    commands: list[Command]
    answers: list[Answer]
    finished: list[Job]
    wake_ms: int | None
    supplies: list[SupplyCommand] = []
    reports: list[NodeReport] = []


def step(
    state: State, report: Report, policy: Policy, now_ms: int, functions: Functions = FUNCTIONS
) -> Step:
    round_ = Round(state, policy, now_ms)
    round_.ends = {one.id: one for one in report.ended}
    round_.port_seed = report.port_seed
    if functions is not state.functions:
        adopt_functions(state, functions)
    if policy != state.policy:
        round_.emit(PolicyChanged(at_ms=now_ms, policy=policy))
    note_clock(round_, report.drift_ms)
    fresh = observe(round_, report)  # what happened on the nodes
    hear_supplies(round_, report.supplies)  # what became of ordered nodes
    hear_neighbors(round_, report.neighbors)  # what became of jobs that other clusters run
    hear_sites(round_, report.neighbors)  # what became of services there
    watch(round_, fresh)  # what members report of their work
    halve(round_, fresh)  # trials of sweeps that are worse than others
    end_tours(round_, fresh)  # what nodes measured of the network between them
    end_storage(round_, fresh)  # what they measured of their storage
    learn_startups(round_, fresh)  # which members have begun to use their GPUs
    reclaim(round_, fresh)  # jobs that hold GPUs and do not use them
    answers = admit(round_, report.requests)  # what users want
    run_schedules(round_, report.dues, run_problem)  # what is due by a schedule
    budget(round_, report.spendings)  # tenants that have used up their budget
    close_ending(round_)  # nodes whose end is near
    end_leases(round_)  # jobs that nobody has renewed
    heal(round_)  # retry, requeue, give up
    settle_naps(round_)  # gangs of which the last living member has fallen asleep or woken
    serve(round_, report.services)  # as many replicas as services want
    unfold(round_)  # elements of arrays become jobs
    settle_dependents(round_)  # jobs that waited for one that has ended
    schedule(round_)  # order the queue and place what fits
    look_for_more(round_)  # elements that may have room, too
    hand_over(round_, report.neighbors)  # jobs that a neighbor would start sooner
    unreserve_capped(round_)  # jobs that a cap has come to keep back
    report_waits(round_)  # waits that somebody wants to know about
    supplies = supply(round_)  # which nodes to order, and which to give back
    commands = reconcile(round_, fresh)  # what should run minus what runs
    checks = checks_wanted(round_, fresh)  # which nodes should be measured
    checks += tours_wanted(round_, fresh)  # which nodes should meet which
    checks += storage_wanted(round_, fresh)  # which nodes should measure their storage
    commands += paced(round_, checks)
    commands += prepares_wanted(state, fresh, now_ms)  # which nodes should be warm for a gang
    commands += dismissals(state, fresh)  # which nodes may leave, as they asked
    if report.fences:
        commands += fences_wanted(round_)  # which silent nodes the engine should end
    wake_ms = next_wake(round_)
    return Step(round_.events, commands, answers, round_.finished, wake_ms, supplies, fresh)
