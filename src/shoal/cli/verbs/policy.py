"""`shoal policy` and `shoal prices`: the documents that steer a cluster and value its time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, flag, verb
from shoal.forms.failure import USAGE, Failure

if TYPE_CHECKING:
    from shoal.model.ledger import PriceList
    from shoal.model.policy import Policy


# The least and the most policies that each action takes.
ACTIONS = {"show": (0, 1), "check": (1, 1), "diff": (1, 2), "set": (1, 1)}

SUMMARIES = {
    "fifo": "First come, first served. No job overtakes or preempts another.",
    "backfill": "Like fifo, but short jobs fill gaps if that delays no job ahead of them.",
    "fair": "Tenants share by quota and weight, short jobs fill gaps, priority preempts.",
    "srtf": "Shortest remaining time first, by the jobs' estimates. For comparison.",
    "srsf": "Shortest remaining time x GPUs first, by the estimates. For comparison.",
    "tiresias": "Least attained service first, in three levels. Needs no estimates.",
    "time-slice": "Like fair, and more jobs than GPUs take turns: one sleeps, another runs.",
}


@verb(
    Argument(
        "action", "[show|check|diff|set]", "What to do. [show]", required=False, default="show"
    ),
    Argument("policies", "[NAME|FILE]...", "A shipped policy, or a file. [in force]", nargs=-1),
    flag("--shipped", help="With show: list the policies that come with Shoal."),
)
def policy(action: str, policies: tuple[str, ...], shipped: bool, json: bool, home: Path) -> None:
    """Show, check, compare or change the scheduling policy.

    show prints a policy as a file; without a name, the policy in force. check
    reads a file as the controller would. diff shows where two policies differ;
    with one name, where it differs from the policy in force. set puts a policy
    in force at once; running jobs continue.

    A file (.yaml, .toml or .json) lists what differs from its base:

      base: fair
      patience: 30m            # times as 90s, 10m, 7d
      tenants:
        research: {weight: 2, quota_gpus: 32}
        vision: {parent: research, quota_gpus: 16, jobs_max: 100}

    order and placement may name your own functions, as module:name. The
    controller looks for the module on the PYTHONPATH that `shoal up` had (use
    full paths), and reads it once. See examples/policies.

    Examples:
      shoal policy
      shoal policy show --shipped
      shoal policy show fair > mine.yaml
      shoal policy check mine.yaml
      shoal policy diff mine.yaml
      shoal policy set mine.yaml
    """
    _check_usage(action, policies, shipped)
    if shipped:
        _print_shipped(json)
    elif action == "show":
        _show(_in_force(home) if not policies else _named(policies[0], load=False), json)
    elif action == "check":
        _check(policies[0], json)
    elif action == "diff":
        first = _in_force(home) if len(policies) == 1 else _named(policies[0], load=False)
        left = "IN FORCE" if len(policies) == 1 else policies[0]
        _diff(first, _named(policies[-1], load=False), left, policies[-1], json)
    else:
        _set(_named(policies[0], load=False), home, json)


def _check_usage(action: str, named: tuple[str, ...], shipped: bool) -> None:
    from shoal.forms import units

    if action not in ACTIONS:
        message = f"unknown command 'shoal policy {units.quoted(action)[1:-1]}'"
        raise Failure(f"{message}; use one of {', '.join(ACTIONS)}", USAGE)
    if shipped and (action != "show" or named):
        raise Failure("--shipped: lists policies; write: shoal policy show --shipped", USAGE)
    least, most = ACTIONS[action]
    if len(named) < least:
        raise Failure(
            f"{action}: needs the name of a policy or a file; see: shoal policy --help", USAGE
        )
    if len(named) > most:
        extra = units.quoted(named[most])
        raise Failure(f"{action}: {extra} is one too many; see: shoal policy --help", USAGE)


def _named(word: str, *, load: bool) -> Policy:
    from shoal.forms.policy import find

    return find(word, load=load)


def _in_force(home: Path) -> Policy:
    from shoal.cli import cluster

    with cluster.connect(home) as client:
        return client.policy()


def _show(one: Policy, json: bool) -> None:
    from shoal.cli.screen import show
    from shoal.forms.policy import to_text

    if json:
        show.as_json(one)
        return
    for text in to_text(one).splitlines():
        show.line(text)


def _print_shipped(json: bool) -> None:
    from shoal.cli.screen.show import Cell, Column, as_json, table
    from shoal.core.policies import SHIPPED

    if json:
        as_json(list(SHIPPED.values()))
        return
    columns = [Column("NAME"), Column("WHAT IT DOES", wraps=True)]
    table(columns, [[Cell(name, "bold"), SUMMARIES.get(name, "")] for name in SHIPPED])


def _check(word: str, json: bool) -> None:
    from shoal.cli.cluster import context_in_use
    from shoal.cli.screen import show

    away = bool(context_in_use())
    one = _named(word, load=not away)
    if json:
        show.as_json(one)
        return
    show.line(f"{word} is fine: {gist(one)}", "green")
    own = [name for name in (one.order, one.placement) if ":" in name]
    if away and own:
        show.note(f"{' and '.join(own)} will be looked up on the head when you set the policy")


def _diff(one: Policy, other: Policy, left: str, right: str, json: bool) -> None:
    from shoal.cli.screen import show
    from shoal.forms.policy import differences

    rows = differences(one, other)
    if json:
        show.as_json([{"field": field, "from": a, "to": b} for field, a, b in rows])
    elif rows:
        titles = [show.Column(title) for title in ("FIELD", left, right)]
        show.table(titles, [list(row) for row in rows])
    else:
        show.note("the policies are the same")


def _set(wanted: Policy, home: Path, json: bool) -> None:
    from shoal.cli import cluster
    from shoal.cli.screen import show
    from shoal.forms.policy import differences

    with cluster.connect(home) as client:
        before = client.policy()
        now = client.set_policy(wanted)
    if json:
        show.as_json(now)
        return
    changed = differences(before, now)
    if not changed:
        show.line(f"the policy is already '{now.name}'; nothing changed")
        return
    show.line(f"the policy is now '{now.name}': {gist(now)}", "green")
    for field, one, other in changed:
        show.line(f"  {field}: {one or 'none'} -> {other or 'none'}", "dim")


def gist(one: Policy) -> str:
    from shoal.model.resources import plural

    tenants = f", {plural(len(one.tenants), 'tenant')}" if one.tenants else ""
    return f"order {one.order}, placement {one.placement}, preempt {one.preempt}{tenants}"


# `shoal prices`: show, check and change what GPU time costs in money, energy and CO2.


PRICE_ACTIONS = {"show": 0, "check": 1, "set": 1}


@verb(
    Argument("action", "[show|check|set]", "What to do. [show]", required=False, default="show"),
    Argument("file", "[FILE]", "A price list.", required=False),
)
def prices(action: str, file: str | None, json: bool, home: Path) -> None:
    """Show, check or change the price list.

    A price list (.yaml, .toml or .json) holds the price of a GPU of each model,
    rented per hour or owned, the price of whole nodes, and the power they use:

      currency: EUR
      gpus:
        H100: {per_hour: 2.50}
        A100: {purchase: 9000, life_years: 4, per_month: 20}
        "*": {per_hour: 0.80, idle_watts: 30, busy_watts: 250}
      nodes:
        "rack1-*": {per_hour: 0.40}
      pue: 1.25
      co2_g_per_kwh: 380

    Reports use today's price list for the past as well.

    Examples:
      shoal prices
      shoal prices check prices.yaml
      shoal prices set prices.yaml
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show
    from shoal.forms import units
    from shoal.forms.prices import read, to_text

    if action not in PRICE_ACTIONS:
        message = f"unknown command 'shoal prices {units.quoted(action)[1:-1]}'"
        raise Failure(f"{message}; use one of {', '.join(PRICE_ACTIONS)}", USAGE)
    if bool(file) != bool(PRICE_ACTIONS[action]):
        fix = f"write: shoal prices {action}{' FILE' if PRICE_ACTIONS[action] else ''}"
        raise Failure(f"{action}: {'needs a file' if not file else 'takes no file'}; {fix}", USAGE)
    wanted = read(file) if file else None
    if action != "check":
        with cluster.connect(home) as client:
            wanted = client.prices() if wanted is None else client.set_prices(wanted)
    assert wanted is not None, "it was read from the file or the cluster"
    if json:
        show.as_json(wanted)
    elif action == "show":
        text = to_text(wanted) if wanted.gpus or wanted.nodes or wanted.currency else ""
        if not text:
            show.note("no price list is set; see: shoal prices --help")
        for line in text.splitlines():
            show.line(line)
    else:
        now = "is fine" if action == "check" else "is in force"
        show.line(f"{file} {now}: {price_gist(wanted)}", "green")


def price_gist(one: PriceList) -> str:
    from shoal.model.resources import plural

    parts = [plural(len(one.gpus), "GPU model"), plural(len(one.nodes), "node price")]
    money = f" in {one.currency}" if one.currency else ""
    return f"{', '.join(parts)}{money}, PUE {one.pue:g}"
