"""Tokens in the ledger: exact whoever dies, kept by the hour, and what a million of them cost."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest

from shoal.control.store.sqlite import SqliteStore
from shoal.core.state.events.cluster import ControllerStarted
from shoal.database.settings import FileSettings
from shoal.database.sqlite import Place
from shoal.forms.ledger_csv import text_of
from shoal.ledger.accounts import DAY_MS, HOUR_MS, Account, Meter, Only, Tokens
from shoal.ledger.accounts import Place as Spot
from shoal.ledger.book_state import BookState, Hardware, Owner
from shoal.ledger.live import LiveLedger
from shoal.ledger.postings import Addition, Postings
from shoal.ledger.store import HOURS_KEPT, JOBS_KEPT_HOURS, OLDER_JOBS, LedgerStore
from shoal.ledger.tokens import FOLDERS_KEPT, Parties, Quota, hear_tokens, nobody
from shoal.model.budget import BudgetPeriod
from shoal.model.ledger import By, LedgerView, Price, PriceList
from shoal.model.policy import Policy, Tenant
from shoal.model.report import Report
from shoal.model.service import ServiceLoad
from shoal.model.tokens import TokenCount
from tests.database import two_heads

MIRROR = msgspec.msgpack.encode(BookState())
OWNERS = {"chat": "lab", "code": "shop"}


@pytest.fixture(params=two_heads.KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with two_heads.place(request, tmp_path) as found:
        yield found


class Router:
    """Counts, and keeps its counts in its folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.counts: dict[tuple[str, str], Tokens] = {}

    def answers(self, service: str, caller: str, tokens: Tokens) -> None:
        key = service, caller
        self.counts[key] = self.counts.get(key, Tokens()).plus(tokens)

    def loads(self) -> tuple[ServiceLoad, ...]:
        return tuple(
            ServiceLoad(
                service=name,
                token_counts=tuple(
                    TokenCount(service=name, caller=caller, folder=self.folder, **count._asdict())
                    for (service, caller), count in self.counts.items()
                    if service == name
                ),
            )
            for name in OWNERS
        )


class Clock:
    ms = 1_000_000 * HOUR_MS + 1

    def now_ms(self) -> int:
        return self.ms


class World:
    """A log and a ledger, whose controller may be killed."""

    def __init__(self, path: Path) -> None:
        self.path, self.clock = path, Clock()
        self.log = SqliteStore(path / "shoal.db")
        self.log.commit([ControllerStarted(at_ms=self.clock.ms, epoch=1)], [])
        self.began()

    def began(self) -> None:
        """What the last one had not written is gone with it."""
        place, settings = self.path / "ledger.db", FileSettings(self.path)
        self.ledger = LiveLedger(place, settings, self.log, self.clock)
        self.ledger.who = lambda service, caller: Parties(OWNERS[service], caller.partition(".")[0])
        event = ControllerStarted(at_ms=self.clock.ms, epoch=2)
        self.ledger.stepped(Report(), [event], self.log.commit([event], []))

    def hears(self, *loads: ServiceLoad) -> None:
        self.ledger.stepped(Report(services=loads), [], self.log.commit([], []))

    def view(self, by: By = By.ACCOUNT, **more: str) -> LedgerView:
        return asyncio.run(self.ledger.view(by, 0, 0, Only(**more)))


@pytest.mark.parametrize("seed", range(8))
def test_no_token_is_lost_or_counted_twice_whoever_is_killed(seed: int, tmp_path: Path) -> None:
    rng, world, made = random.Random(seed), World(tmp_path), 1
    router, truth = Router("f1"), Counter[tuple[str, str, str]]()
    for _ in range(400):
        world.clock.ms += rng.randrange(1, HOUR_MS // 20)
        service, caller = rng.choice(list(OWNERS)), rng.choice(["", "lab.k1", "shop.k2", "shop.k3"])
        prompt = rng.randrange(5_000)
        used = Tokens(1, prompt, rng.randrange(prompt + 1), rng.randrange(900))
        router.answers(service, caller, used)
        for name, count in used._asdict().items():
            truth[service, caller, name] += count
        chance = rng.random()
        if chance < 0.5:
            world.hears(*router.loads())
        elif chance < 0.6:
            asyncio.run(world.ledger.write())
        elif chance < 0.65:
            world.began()  # the controller was killed
        elif chance < 0.68:  # the folder is made again, after what it had was booked
            world.hears(*router.loads())
            asyncio.run(world.ledger.write())
            made += 1
            router = Router(f"f{made}")
    world.hears(*router.loads())
    for by in (By.ACCOUNT, By.HOUR):
        view, found = world.view(by), Counter[tuple[str, str, str]]()
        for row in view.tokens:
            for name in Tokens._fields:
                found[row.service, row.caller, name] += getattr(row, name)
        told = truth
        if by is By.HOUR:
            told = Counter()
            for (service, _, name), count in truth.items():
                told[service, "", name] += count
            assert len({row.key for row in view.tokens}) > 5
        assert +found == +told
        totals = {one.service: one for one in view.token_costs}
        for service in OWNERS:
            for name in Tokens._fields:
                whole = sum(n for (s, _, what), n in truth.items() if (s, what) == (service, name))
                assert getattr(totals[service], name) == whole
    assert made > 1


def test_what_tenants_and_keys_have_used_is_told_to_the_step(tmp_path: Path) -> None:
    world, router, day = World(tmp_path), Router("f"), BudgetPeriod.DAY
    lab = Tenant(name="lab", budget_tokens=1_000, budget_period=BudgetPeriod.MONTH)
    policy, one = Policy(tenants=(lab,)), Quota("lab.k1", "lab", 500, day)
    world.ledger.quotas = lambda: (one, Quota("shop.k2", "shop", 9, day))

    def told() -> dict[tuple[str, str], int]:
        world.hears(*router.loads())
        found = asyncio.run(world.ledger.spendings(policy))
        assert {one.until_ms for one in found if one.key} == {
            (world.clock.ms // DAY_MS + 1) * DAY_MS
        }
        return {(one.tenant, one.key): one.tokens for one in found}

    world.clock.ms = (world.clock.ms // DAY_MS + 1) * DAY_MS + 1
    router.answers("chat", "lab.k1", Tokens(1, 300, 200, 30))
    router.answers("chat", "lab.k9", Tokens(1, 1, 0, 1))
    router.answers("chat", "", Tokens(1, 70, 0, 7))
    assert told() == {("lab", ""): 332, ("lab", "lab.k1"): 330, ("shop", "shop.k2"): 0}
    world.clock.ms += 4 * HOUR_MS  # old hours are remembered, and not counted twice
    router.answers("chat", "lab.k1", Tokens(1, 10, 0, 0))
    assert told()["lab", "lab.k1"] == told()["lab", "lab.k1"] == 340
    world.clock.ms += DAY_MS  # another day: the key begins again, its tenant's month goes on
    router.answers("chat", "shop.k2", Tokens(1, 5, 0, 5))
    found = told()
    assert (found["lab", ""], found["lab", "lab.k1"], found["shop", "shop.k2"]) == (342, 0, 10)


def test_a_router_that_goes_back_to_what_it_wrote_last_counts_on_from_there() -> None:
    postings = Postings()

    def booked(*prompts: int) -> int:
        for prompt in prompts:
            count = TokenCount(service="chat", prompt=prompt, folder="f")
            hear_tokens(postings, ServiceLoad(service="chat", token_counts=(count,)), nobody)
        return sum(one.prompt for one in postings.adds.tokens.values())

    assert booked(100, 150, 150) == 150
    assert booked(120, 130) == 160


def test_folders_that_are_remembered_are_bounded() -> None:
    postings = Postings()
    for number in range(FOLDERS_KEPT + 5):
        count = TokenCount(service="chat", prompt=1, folder=f"f{number}")
        hear_tokens(postings, ServiceLoad(service="chat", token_counts=(count,)), nobody)
    assert list(postings.cluster.tokens) == [f"f{n}" for n in range(5, FOLDERS_KEPT + 5)]
    assert sum(one.prompt for one in postings.adds.tokens.values()) == FOLDERS_KEPT + 5


def test_old_hours_become_days_and_old_callers_one(place: Place) -> None:
    store, now = LedgerStore(place), JOBS_KEPT_HOURS + 10_000
    hours = [1, 2, 30, now - HOURS_KEPT - 100, now - 1]
    meters = [Meter("chat", "lab", caller, "lab") for caller in ("k1", "k2", "")]
    added = {(hour, meter): Tokens(1, 10, 4, 5) for hour in hours for meter in meters}
    store.put([Addition(tokens=added), Addition(tokens=added)], MIRROR, 2)
    for _ in range(2):
        store.roll(now, [])
        found = store.tokens(By.ACCOUNT, 0, 1 << 40)
        assert {meter.caller: amount for _, meter, amount in found} == {
            "": Tokens(10, 100, 40, 50),
            "k1": Tokens(4, 40, 16, 20),
            "k2": Tokens(4, 40, 16, 20),
            OLDER_JOBS: Tokens(12, 120, 48, 60),
        }
    at = {key for key, _, _ in store.tokens(By.HOUR, 0, 1 << 40)}
    assert at == {0, 24, (now - HOURS_KEPT - 100) // 24 * 24, now - 1}
    assert store.tokens(By.DAY, 0, 24)[0][0] == 0
    recent = store.spent_tokens(now - 1, now)
    assert recent == {(caller, "lab"): 2 * (10 + 5) for caller in ("k1", "k2", "")}
    store.close()


def test_a_million_tokens_cost_what_the_replicas_gpus_cost(tmp_path: Path) -> None:
    world = World(tmp_path)
    hour = world.clock.ms // HOUR_MS
    assert world.ledger._store is not None
    spots = {
        Spot(hour, "n1", "j1", Account.SERVING): 3 * 3_600_000_000,
        Spot(hour, "n1", "j1", Account.STARTUP): 3_600_000_000,
        Spot(hour, "n1", "j2", Account.USEFUL): 50 * 3_600_000_000,
    }
    owners = {"j1": Owner("lab", "ann", "", "chat"), "j2": Owner("lab", "ann", "")}
    machines = {"n1": Hardware("H100", 8)}
    entry = Addition(amounts=spots, owners=owners, machines=machines)
    world.ledger._store.put([entry], MIRROR, 2)
    router = Router("f")
    router.answers("chat", "shop.k2", Tokens(2, 700_000, 200_000, 100_000))
    router.answers("chat", "lab.k1", Tokens(1, 100_000, 0, 150_000))
    router.answers("code", "lab.k1", Tokens(1, 10, 0, 20))
    world.hears(*router.loads())
    view = world.view()
    assert [one.cost for one in view.token_costs] == [None, None]  # there is no price list
    world.ledger.set_prices(PriceList(currency="EUR", gpus={"*": Price(per_hour=2.5)}))
    chat, code = world.view().token_costs
    assert (chat.cost, chat.gpu_us) == (10.0, 4 * 3_600_000_000)
    assert chat.per_million_generated == 40.0  # 10 EUR for 250,000
    assert chat.per_million_computed == float(Fraction(10 * 1_000_000, 850_000))
    assert (code.cost, code.per_million_generated) == (None, None)  # its replicas have no GPUs

    lab = world.view(tenant="lab")  # what it called, and what others called of its own service
    assert [(one.service, one.generated) for one in lab.token_costs] == [("chat", 250_000)]
    assert lab.token_costs[0].cost == 10.0
    seen = {(row.service, row.caller, row.tenant): row.generated for row in lab.tokens}
    assert seen == {
        ("chat", "lab.k1", "lab"): 150_000,
        ("chat", "others", ""): 100_000,
        ("code", "lab.k1", "lab"): 20,
    }
    assert world.view(tenant="lab", user="ann").tokens == []

    rows = [line.split(",") for line in text_of(world.view(), tokens=True).splitlines()]
    assert rows[0] == ["service", "owner", "key", "tenant", *Tokens._fields]
    assert ["chat", "lab", "shop.k2", "shop", "2", "700000", "200000", "100000"] in rows
    rows = [line.split(",") for line in text_of(world.view(By.DAY), tokens=True).splitlines()]
    assert rows[1][1:] == ["chat", "", "", "", "3", "800000", "200000", "250000"]
