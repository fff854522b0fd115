"""A scheduler that is wrong on purpose is caught: by the invariants, or by what really happened."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import pytest
from storm.fuzz import SeedFailed, Size, run_seed

import shoal.core.state.round
import shoal.core.step
import shoal.tick
from shoal.core.books import quarantine
from shoal.core.features import budget, ends, health, identity, workflow
from shoal.core.features import reclaim as idle
from shoal.core.features.service import rollout
from shoal.core.nodebook import Action, NodeBook
from shoal.core.phases import admit, heal, observe, reconcile
from shoal.core.scheduling import again, cycle, elastic, fit, preempt, sleepers
from shoal.core.scheduling.fit import GangFit
from shoal.core.scheduling.order import Walk
from shoal.core.state import apply_queue, ending, queue
from shoal.core.state.accounts import Accounts
from shoal.core.state.ending import stop
from shoal.core.state.events import nodes
from shoal.core.state.events.identity import TenantRemoved, UserRemoved
from shoal.core.state.events.runs import JobCheckpointed, JobPlaced
from shoal.core.state.queue import Gang, Lane
from shoal.core.state.room import Room
from shoal.core.state.round import Round
from shoal.core.state.state import Node, Rank, State
from shoal.core.state.tally import Tally
from shoal.model.commands import Envelope
from shoal.model.health import HealthRule
from shoal.model.job import Job, JobSpec, Member, Outcome, StopCause
from shoal.model.node import End, NodeHealth, NodeIntent
from shoal.model.report import Accepted, Answer, NodeReport, RemoveTenant, Submit
from shoal.model.resources import Demand, Kind, Slice
from shoal.tick import Stage, Tick

SEEDS_MAX = 200
# Healthy histories settle long before; a stuck one need not be watched for longer.
SIZE = Size(
    calm_ms=300_000,
    sleep_part=0,
    keepers_part=0,
    liars_part=0,
    data_part=0,
    hangs_part=0,
    leases_part=0,
)

Mutate = Callable[[pytest.MonkeyPatch], None]


def ignore_what_is_held(patch: pytest.MonkeyPatch) -> None:
    def blind(state: State, gang: Gang, avoid: Collection[int] = ()) -> GangFit | None:
        for node in state.order:
            if node.schedulable and node.spec.gpus >= gang.members * gang.demand.gpus:
                return GangFit([(node.index, gang.members)], "there are GPUs")
        return None

    patch.setattr(cycle, "fit", blind)


def place_part_of_a_gang(patch: pytest.MonkeyPatch) -> None:
    whole = fit.slices

    def part(state: State, plan: GangFit, demand: Demand) -> tuple[Slice, ...]:
        given = whole(state, plan, demand)
        return given[:-1] if len(given) > 1 else given

    patch.setattr(cycle, "slices", part)


def keep_what_was_replaced(patch: pytest.MonkeyPatch) -> None:
    def cancel(round_: Round, job: Job, why: str) -> None:
        if not why.startswith("replaced by"):
            ending.cancel(round_, job, why)

    patch.setattr(workflow, "cancel", cancel)


def forget_to_requeue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(heal, "_requeue", lambda *_: None)


def count_no_attempts(patch: pytest.MonkeyPatch) -> None:
    def placed(**fields: Any) -> JobPlaced:
        return JobPlaced(**{**fields, "attempt": 1})

    patch.setattr(cycle, "JobPlaced", placed)


def run_again_while_a_member_lives(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(heal, "all", any, raising=False)


def believe_old_reports(patch: pytest.MonkeyPatch) -> None:
    def hear(self: Tick, report: NodeReport) -> None:
        self._reports[report.spec.id] = report

    patch.setattr(observe, "_stale", lambda *_: False)
    patch.setattr(Tick, "hear", hear)


def skip_some_jobs_for_ever(patch: pytest.MonkeyPatch) -> None:
    class Forgetful(Walk):
        def next(self) -> tuple[Rank, Job, Lane] | None:
            while (head := super().next()) is not None and head[1].number % 3 == 0:
                pass
            return head

    patch.setattr(cycle, "Walk", Forgetful)


def give_nodes_up_too_soon(patch: pytest.MonkeyPatch) -> None:
    def expire(round_: Round, *, fences: bool) -> None:
        for node_id, heard_ms in list(round_.state.heard.contacts.items()):
            if round_.now_ms - heard_ms >= round_.policy.silent_after_ms:
                ends.lose(round_, round_.state.nodes[node_id], dead=False, why="silent")

    patch.setattr(observe, "_expire_silent", expire)


def obey_old_orders(patch: pytest.MonkeyPatch) -> None:
    take = NodeBook.take

    def obey(self: NodeBook, envelope: Envelope) -> list[Action]:
        self._newest = (0, 0)
        return take(self, envelope)

    patch.setattr(NodeBook, "take", obey)


def change_the_state_without_an_event(patch: pytest.MonkeyPatch) -> None:
    settle = heal._settle

    def meddle(round_: Round, job: Job) -> None:
        round_.state.next_port += 1
        settle(round_, job)

    patch.setattr(heal, "_settle", meddle)


def never_repeat_an_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reconcile, "_compare", lambda *_: None)


def fail_jobs_that_may_restart(patch: pytest.MonkeyPatch) -> None:
    def fail(round_: Round, job: Job, lost: list[str]) -> None:
        heal._finish(round_, job, Outcome.FAILED, 1, "lost")

    patch.setattr(heal, "_settle_loss", fail)


def take_any_end_for_success(patch: pytest.MonkeyPatch) -> None:
    def succeed(round_: Round, job: Job) -> None:
        heal._finish(round_, job, Outcome.SUCCEEDED, 0, "it ended")

    patch.setattr(heal, "_settle_failure", succeed)


def forget_submission_keys(patch: pytest.MonkeyPatch) -> None:
    submit = admit._submit

    def forget(round_: Round, request: Submit) -> Answer:
        return submit(round_, Submit(request.spec))

    patch.setattr(admit, "_submit", forget)


def give_any_gpu(patch: pytest.MonkeyPatch) -> None:
    def suits(demand: Demand, kind: Kind) -> bool:
        return kind.gpu_memory_mb > 0 and kind.containers >= demand.image

    patch.setattr(Demand, "suits", suits)


def forget_what_a_gang_insists_on(patch: pytest.MonkeyPatch) -> None:
    whole = queue.gang_of_spec

    def careless(spec: JobSpec) -> Gang:
        return whole(spec)._replace(required=False, per_node=0)

    patch.setattr(queue, "gang_of_spec", careless)


def place_others_beside_those_who_want_to_be_alone(patch: pytest.MonkeyPatch) -> None:
    change = Room.change

    def share(room: Room, slice_: Slice, sign: int, **rest: Any) -> None:
        change(room, slice_, sign, **{**rest, "exclusive": False})

    patch.setattr(Room, "change", share)


def grow_without_end(patch: pytest.MonkeyPatch) -> None:
    widest = elastic.widest

    def wider(state: State, job: Job, gang: Gang, avoid: Collection[int]) -> GangFit | None:
        spec = msgspec.structs.replace(job.spec, members_max=job.spec.members + 9)
        return widest(state, msgspec.structs.replace(job, spec=spec), gang, avoid)

    patch.setattr(cycle, "widest", wider)


def stop_the_more_entitled(patch: pytest.MonkeyPatch) -> None:
    def upside_down(
        state: State, job: Job, now_ms: int, *, holding: bool, freed_milli: int = 0
    ) -> tuple[float, ...]:
        return (0.0, job.spec.priority)

    patch.setattr(preempt, "_entitlement", upside_down)


def start_before_the_others_have_let_go(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cycle, "_short", lambda *_: False)


def call_a_pause_a_hang(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(health, "rule_of", lambda _: HealthRule(hang_floor_ms=200, hang_steps=2))


def never_notice_a_hang(patch: pytest.MonkeyPatch) -> None:
    def blind(round_: Round) -> None:
        round_.state.agenda.watch_ms = None

    patch.setattr(health, "_find_hangs", blind)


def quarantine_everybody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(health, "room_left", lambda *_: True)


def place_on_nodes_in_quarantine(patch: pytest.MonkeyPatch) -> None:
    def careless(node: Node) -> bool:
        return node.health is NodeHealth.READY and node.intent is NodeIntent.OPEN

    patch.setattr(Node, "schedulable", property(careless))


def never_test_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quarantine, "passed_by", lambda record, *_: record)
    patch.setattr(quarantine, "wake_ms", lambda *_: None)


def give_spares_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cycle, "spares_kept_from", lambda *_: set())


def forget_what_was_saved(patch: pytest.MonkeyPatch) -> None:
    def saved(**fields: Any) -> JobCheckpointed:
        return JobCheckpointed(**{**fields, "step": fields["step"] // 2})

    patch.setattr(shoal.core.state.round, "JobCheckpointed", saved)


def call_anybody_idle(patch: pytest.MonkeyPatch) -> None:
    def at_once(round_: Round, job: Job, _: int) -> None:
        stop(round_, job, StopCause.IDLE, "it looks idle")

    patch.setattr(idle, "_judge", at_once)


def start_who_has_no_budget_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Accounts, "held_by", lambda *_: "")


def ignore_the_caps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admit, "too_many", lambda *_, **__: None)


def ignore_the_caps_on_gpus(patch: pytest.MonkeyPatch) -> None:
    for module in (apply_queue, cycle, observe, rollout, sleepers):
        patch.setattr(module, "capped_by", lambda *_, **__: "")
    patch.setattr(apply_queue, "room_under_caps", lambda *_: None)
    patch.setattr(elastic, "room_under_caps", lambda *_: None)


def miscount_jobs_that_wait_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tally, "wait", lambda *_: None)


def hold_who_has_spent_little(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(budget, "HELD_MILLI", 500)


def run_again_what_is_done(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Member, "done", property(lambda _: False))


def restart_who_never_may(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JobSpec, "yields", property(lambda spec: spec.preemptible))
    patch.setattr(JobSpec, "resizes", property(lambda spec: spec.elastic))


def answer_before_storing(patch: pytest.MonkeyPatch) -> None:
    commit = Tick.commit

    def hasty(self: Tick) -> None:
        assert self._decision is not None
        answers = self._decision.step.answers
        for reply, answer in zip(self._decision.replies, answers, strict=True):
            reply.set_result(answer)
        commit(self)

    patch.setattr(Tick, "commit", hasty)


def use_an_epoch_that_is_not_stored(patch: pytest.MonkeyPatch) -> None:
    def begin(self: Tick, _: int) -> None:
        self.state.epoch += 1
        self._envelopes = 0
        self.stage = Stage.READY

    patch.setattr(Tick, "begin", begin)


def go_on_after_a_failed_commit(patch: pytest.MonkeyPatch) -> None:
    load = Tick.load

    def keep(self: Tick) -> None:
        if self.last_seq:
            self.stage = Stage.LOADED
        else:
            load(self)

    patch.setattr(Tick, "load", keep)


def serve_clients_that_have_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shoal.tick, "_is_open", lambda looked: looked.answer is None)


def believe_late_reports_after_a_load(patch: pytest.MonkeyPatch) -> None:
    load = Tick.load

    def forget(self: Tick) -> None:
        self._newest = {}
        load(self)

    patch.setattr(Tick, "load", forget)


def leave_the_tokens_of_a_removed_user(patch: pytest.MonkeyPatch) -> None:
    def removed(self: UserRemoved, state: State) -> None:
        del state.identity.users[self.user]

    patch.setattr(UserRemoved, "apply", removed)


def accept_and_remove_no_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(identity, "_remove_token", lambda _, request: Accepted(request.token))


def run_every_tenant_as_the_agent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reconcile, "uid_of", lambda *_: 0)


def remove_tenants_with_jobs(patch: pytest.MonkeyPatch) -> None:
    def remove(round_: Round, request: RemoveTenant) -> Answer:
        if request.tenant in round_.state.identity.tenants:
            round_.emit(TenantRemoved(at_ms=round_.now_ms, tenant=request.tenant))
        return Accepted(request.tenant)

    patch.setattr(identity, "_remove_tenant", remove)


def run_images_anywhere(patch: pytest.MonkeyPatch) -> None:
    suits = Demand.suits

    def anywhere(self: Demand, kind: Kind) -> bool:
        return suits(self._replace(image=False), kind)

    patch.setattr(Demand, "suits", anywhere)


def start_where_the_time_is_too_short(patch: pytest.MonkeyPatch) -> None:
    for module in (cycle, again):
        patch.setattr(module, "too_short", lambda *_: frozenset())
    patch.setattr(cycle, "cut_short", lambda *_: frozenset())


def stay_until_the_node_ends(patch: pytest.MonkeyPatch) -> None:
    def blind(round_: Round) -> None:
        round_.state.agenda.ends_ms = None

    patch.setattr(shoal.core.step, "close_ending", blind)


def forget_which_nodes_end(patch: pytest.MonkeyPatch) -> None:
    def only_the_node(_: State, node: Node, own: End | None, wanted: End | None) -> None:
        node.own_end, node.set_end = own, wanted

    patch.setattr(nodes, "set_end", only_the_node)


CAUGHT_BY_THE_INVARIANTS: list[tuple[Mutate, str]] = [
    (ignore_what_is_held, "not what it asked for|more than it has|what is held|kept as spares"),
    (place_part_of_a_gang, "runs with . of . members"),
    (forget_to_requeue, "goes on as a partial gang|nothing left to stop"),
    (run_again_while_a_member_lives, "waits but holds|nodes hold does not match|does not know"),
    (skip_some_jobs_for_ever, "waits without a reason"),
    (change_the_state_without_an_event, "is not the state that was lost"),
    (place_others_beside_those_who_want_to_be_alone, "what is free does|wants it for itself"),
    (grow_without_end, "runs with .* of .* members"),
    (start_before_the_others_have_let_go, "is held|given away more"),
    (place_on_nodes_in_quarantine, "free index"),
    (start_who_has_no_budget_left, "but the budget is used up|though the budget of"),
    (miscount_jobs_that_wait_again, "number of jobs by tenant does not match"),
    (use_an_epoch_that_is_not_stored, "is not the state that was lost|not 0"),
    (go_on_after_a_failed_commit, "does not lead to the state that was loaded"),
    (leave_the_tokens_of_a_removed_user, "has outlived its user"),
    (forget_which_nodes_end, "not in the order of their ends"),
]

CAUGHT_BY_WHAT_HAPPENED: list[tuple[Mutate, str]] = [
    (keep_what_was_replaced, "came in the place of"),
    (place_part_of_a_gang, "was placed with . members"),
    (forget_to_requeue, "stuck"),
    (count_no_attempts, "was placed as attempt 1 after 1"),
    (run_again_while_a_member_lives, "is said to be over, but .* lives"),
    (believe_old_reports, "is said to be lost, but .* lives|only old news came"),
    (skip_some_jobs_for_ever, "stuck"),
    (give_nodes_up_too_soon, "given up after only"),
    (obey_old_orders, "a second time|after its job had"),
    (never_repeat_an_order, "stuck"),
    (fail_jobs_that_may_restart, r"failed \(lost\), but"),
    (take_any_end_for_success, r"succeeded \(it ended\), but"),
    (forget_submission_keys, "became j"),
    (give_any_gpu, "was given GPUs that it did not ask for"),
    (forget_what_a_gang_insists_on, "must stay within one|on a node and is on"),
    (place_others_beside_those_who_want_to_be_alone, "is beside"),
    (grow_without_end, "was placed with .* members"),
    (stop_the_more_entitled, "for .* beyond its own|of no higher priority"),
    (start_before_the_others_have_let_go, "is held|more than it has|on GPU"),
    (call_a_pause_a_hang, "and is said to hang"),
    (never_notice_a_hang, "stuck"),
    (quarantine_everybody, "others: too many"),
    (place_on_nodes_in_quarantine, "which is in quarantine|kept as spares"),
    (never_test_again, "is quarantined, though it is well|is suspect, though"),
    (give_spares_away, "kept as spares"),
    (forget_what_was_saved, "goes back from step"),
    (start_who_has_no_budget_left, "starts, though the budget of .* is gone"),
    (ignore_the_caps, "too many by its cap"),
    (ignore_the_caps_on_gpus, "was given GPUs: .* now holds"),
    (call_anybody_idle, "is said to be idle"),
    (hold_who_has_spent_little, "of its budget, but BudgetHeld"),
    (run_again_what_is_done, "has done its work in attempt"),
    (restart_who_never_may, "runs again after attempt"),
    (answer_before_storing, "was accepted, but it is not in the log"),
    (use_an_epoch_that_is_not_stored, "commands were sent in epoch"),
    (
        go_on_after_a_failed_commit,
        "began after epoch|not in the log|was submitted twice|is said to wait",
    ),
    (serve_clients_that_have_left, "by a client that had left"),
    (believe_late_reports_after_a_load, "is said to be lost, but"),
    (accept_and_remove_no_token, "an admin was told"),
    (run_every_tenant_as_the_agent, "was started as user 0"),
    (remove_tenants_with_jobs, "was removed, but .* has not ended"),
    (run_images_anywhere, "runs in an image, which .* cannot run"),
    (start_where_the_time_is_too_short, "needs .* ms; n. lives"),
    (stay_until_the_node_ends, "goes on on n., which ends|was lost with n."),
]


# Seeds that show what few of them do; the others are tried if these no longer show it.
EARLY: dict[Mutate, int] = {
    start_before_the_others_have_let_go: 23,
    place_on_nodes_in_quarantine: 8,
    leave_the_tokens_of_a_removed_user: 113,
    quarantine_everybody: 37,
    never_test_again: 6,
    ignore_the_caps_on_gpus: 4,
    never_notice_a_hang: 3,
    call_anybody_idle: 9,
    run_again_what_is_done: 11,
    start_where_the_time_is_too_short: 58,
    believe_late_reports_after_a_load: 373,
    accept_and_remove_no_token: 40,
    run_every_tenant_as_the_agent: 9,
    remove_tenants_with_jobs: 29,
    run_images_anywhere: 5,
}


def _name(value: object) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("mutate", "words"), CAUGHT_BY_THE_INVARIANTS, ids=_name)
def test_the_invariants_catch(mutate: Mutate, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    assert re.search(words, _first_failure(mutate, checked=True))


@pytest.mark.parametrize(("mutate", "words"), CAUGHT_BY_WHAT_HAPPENED, ids=_name)
def test_what_really_happened_catches(
    mutate: Mutate, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a look at the controller's state."""
    mutate(monkeypatch)
    assert re.search(words, _first_failure(mutate, checked=False))


def _first_failure(mutate: Mutate, *, checked: bool) -> str:
    early = [EARLY[mutate]] if mutate in EARLY else []
    for seed in (*early, *range(SEEDS_MAX)):
        try:
            run_seed(seed, SIZE, checked=checked)
        except SeedFailed as failure:
            return str(failure)
    raise AssertionError(f"{SEEDS_MAX} seeds passed: nothing noticed")
