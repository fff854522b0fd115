"""`shoal prices`: show, check and change what GPU time costs in money, energy and CO2."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, verb
from shoal.forms.failure import USAGE, Failure

if TYPE_CHECKING:
    from shoal.model.ledger import PriceList

ACTIONS = {"show": 0, "check": 1, "set": 1}


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

    if action not in ACTIONS:
        message = f"there is no 'shoal prices {units.quoted(action)[1:-1]}'"
        raise Failure(f"{message}; use one of {', '.join(ACTIONS)}", USAGE)
    if bool(file) != bool(ACTIONS[action]):
        fix = f"write: shoal prices {action}{' FILE' if ACTIONS[action] else ''}"
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
        show.line(f"{file} {now}: {gist(wanted)}", "green")


def gist(one: PriceList) -> str:
    from shoal.model.resources import plural

    parts = [plural(len(one.gpus), "GPU model"), plural(len(one.nodes), "node price")]
    money = f" in {one.currency}" if one.currency else ""
    return f"{', '.join(parts)}{money}, PUE {one.pue:g}"
