"""`shoal plan`: how many GPUs, for how long, and what it costs; without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Option, flag, number, verb
from shoal.forms.failure import REFUSED, USAGE, Failure

if TYPE_CHECKING:
    from shoal.plan.hardware import Cluster
    from shoal.plan.model import Model
    from shoal.plan.money import Rates

TRAINING, SERVING, HISTORY, COSTS = "Training", "Serving", "Your own history", "Hardware and money"
LOCAL = "-"  # --history without a PATH


@verb(
    Option(
        "--model",
        "-m",
        metavar="NAME|FILE",
        default="",
        help="A known model, or a file.",
        heading=TRAINING,
    ),
    Option(
        "--tokens", metavar="N", default="", help="Tokens to train on, e.g. 2T.", heading=TRAINING
    ),
    Option(
        "--batch",
        metavar="TOKENS",
        default="",
        help="Tokens of one step. [4M, 16M from 100B parameters]",
        heading=TRAINING,
    ),
    Option(
        "--sequence",
        metavar="N",
        default="",
        help="Tokens of a sequence. [the model's]",
        heading=TRAINING,
    ),
    Option(
        "--layout",
        metavar="NAME=N,...",
        default="",
        help="Fix a part of the layout, e.g. tensor=8,pipeline=4.",
        heading=TRAINING,
    ),
    Option(
        "--precision",
        metavar="NAME",
        default="bf16",
        help="bf16, fp16 or fp8. [bf16]",
        heading=TRAINING,
    ),
    Option(
        "--deadline",
        metavar="TIME",
        default="",
        help="The smallest cluster that is done in this time.",
        heading=TRAINING,
    ),
    Option(
        "--budget",
        metavar="MONEY",
        default="",
        help="The fastest cluster for this much, e.g. 2M.",
        heading=TRAINING,
    ),
    flag("--serve", help="Plan replicas of a service instead of a training run.", heading=SERVING),
    Option("--rate", metavar="N/s", default="", help="Requests per second.", heading=SERVING),
    Option(
        "--input",
        metavar="TOKENS",
        default="1000",
        help="Tokens of a prompt, on average. [1000]",
        heading=SERVING,
    ),
    Option(
        "--output",
        metavar="TOKENS",
        default="300",
        help="Tokens of an answer, on average. [300]",
        heading=SERVING,
    ),
    Option(
        "--ttft",
        metavar="TIME",
        default="",
        help="Time to the first token, for 9 of 10 requests.",
        heading=SERVING,
    ),
    Option(
        "--tpot",
        metavar="TIME",
        default="",
        help="Time per token after it, for 9 of 10 requests.",
        heading=SERVING,
    ),
    Option(
        "--measured",
        metavar="FILE",
        default="",
        help="Rates and latencies of one measured replica.",
        heading=SERVING,
    ),
    Option(
        "--history",
        metavar="[PATH]",
        default=None,
        is_flag=False,
        flag_value=LOCAL,
        help="Replay this cluster's history, or a trace, on more nodes.",
        heading=HISTORY,
    ),
    Option(
        "--goal",
        metavar="GOAL",
        default="",
        help='E.g. "p90 wait < 1h"; p1-p99, mean; wait, jct.',
        heading=HISTORY,
    ),
    Option(
        "--days",
        metavar="N",
        type=number(0),
        default=0,
        help="Only the last N days of the history. [all]",
        heading=HISTORY,
    ),
    Option(
        "--policy",
        "-p",
        metavar="NAME",
        default="",
        help="A policy, or a file. [the history's, or fair]",
        heading=HISTORY,
    ),
    flag("--skip-too-large", help="Leave out jobs that no such node can run.", heading=HISTORY),
    Option(
        "--gpu", "-g", metavar="NAME", default="h100", help="Kind of GPU. [h100]", heading=COSTS
    ),
    Option(
        "--nodes",
        metavar="N",
        default="",
        help="Number of nodes. [the least that fits, or the history's]",
        heading=COSTS,
    ),
    Option(
        "--gpus",
        metavar="N",
        default="",
        help="Number of GPUs instead: whole nodes, or a part of one.",
        heading=COSTS,
    ),
    Option("-n", "either", default="", help="Refused: nodes or GPUs?", hidden=True),
    Option(
        "--node",
        metavar="NAME",
        default="",
        help="Kind of node. [the usual one with this GPU]",
        heading=COSTS,
    ),
    Option(
        "--fabric", metavar="NAME", default="", help="Kind of network. [infiniband]", heading=COSTS
    ),
    Option(
        "--hardware",
        metavar="FILE",
        default="",
        help="Other hardware, or measured figures.",
        heading=COSTS,
    ),
    Option(
        "--storage",
        metavar="BYTES/s",
        default="",
        help="Storage for checkpoints, e.g. 400G. [1G per node]",
        heading=COSTS,
    ),
    Option(
        "--prices",
        metavar="FILE",
        default="",
        help="Price list, as for `shoal prices`.",
        heading=COSTS,
    ),
    Option(
        "--region",
        metavar="CC",
        default="world",
        help="Grid for the CO2, e.g. fr, us. [world]",
        heading=COSTS,
    ),
)
def plan(home: Path, json: bool, history: str | None, serve: bool, **words: str) -> None:
    """Plan a cluster: how many GPUs, for how long, at what cost.

    Nothing is started, and no cluster is needed. A plan is an estimate from
    formulas, checked against published runs: docs/plan.md explains each figure,
    docs/plan-formulas.md has the formulas with their sources.

    Examples:
      shoal plan --model llama3-70b --tokens 2T --gpu h100 --nodes 128
      shoal plan --model gpt2-xl --tokens 10B --gpu h200 --gpus 1
      shoal plan --model my-model.yaml --tokens 300B --gpu a100 --deadline 30d
      shoal plan --model llama3-8b --tokens 1T --budget 500k --region fr
      shoal plan --serve --model llama3-70b --rate 20/s --ttft 500ms --tpot 50ms
      shoal plan --history --goal "p90 wait < 1h"
    """
    from shoal.plan.hardware import Impossible

    if many := words.pop("either"):
        fix = f"--gpus {many} for so many GPUs, --nodes {many} for so many whole nodes"
        raise Failure(f"-n: say which you mean: {fix}", USAGE)
    if words["gpus"] and (serve or history is not None):
        raise Failure("--gpus: is for training runs, without --serve and --history", USAGE)
    if history is not None and serve:
        raise Failure("--serve: cannot be combined with --history; give one of them", USAGE)
    if words["goal"] and history is None:
        raise Failure("--goal: needs --history, the jobs that it is about", USAGE)
    try:
        if history is not None:
            from shoal.cli.plan_history import plan_history

            plan_history(home, "" if history == LOCAL else history, json, **words)
        elif serve:
            _serve(words, json)
        else:
            _train(words, json)
    except Impossible as error:
        raise Failure(str(error), REFUSED) from None


def _train(words: dict[str, str], json: bool) -> None:
    from shoal.cli.screen import plan_tables, show
    from shoal.forms import plan as forms
    from shoal.plan.inverse import smallest
    from shoal.plan.layout import Stack
    from shoal.plan.report import Ask, batch_for, plan
    from shoal.plan.search import least_nodes

    model = _model(words)
    if not words["tokens"]:
        raise Failure("--tokens is missing: how many tokens to train on, e.g. --tokens 2T", USAGE)
    size = next((name for name in ("nodes", "gpus") if words[name]), "")
    if size and (words["deadline"] or words["budget"]):
        raise Failure(f"--{size}: leave it out with --deadline or --budget, which find it", USAGE)
    if words["nodes"] and words["gpus"]:
        raise Failure("--gpus: cannot be combined with --nodes; give one of them", USAGE)
    cluster = _cluster(words, forms.whole(words["nodes"], "--nodes", 1e7) if words["nodes"] else 1)
    if words["gpus"]:
        cluster = cluster.of(forms.whole(words["gpus"], "--gpus", 1e7))
    batch = batch_for(model)
    if words["batch"]:
        batch = max(1, round(forms.amount(words["batch"], "--batch") / model.sequence))
    ask = Ask(
        model=model,
        cluster=cluster,
        tokens=forms.amount(words["tokens"], "--tokens"),
        batch=batch,
        rates=_rates(words, cluster),
        stack=Stack(precision=words["precision"]),
        fixed=forms.layout(words["layout"]),
        storage_bytes_per_s=forms.amount(words["storage"], "--storage") if words["storage"] else 0,
    ).check()
    cluster.accelerator.peak(ask.stack.precision)
    found = None
    with show.Spinner(quiet=json) as progress:
        if words["deadline"] or words["budget"]:
            progress("looking for the size")
            deadline = forms.seconds(words["deadline"], "--deadline") if words["deadline"] else None
            budget = forms.amount(words["budget"], "--budget") if words["budget"] else None
            found = smallest(ask, deadline, budget)
            ask = ask.on(found.chosen.nodes)
        elif not size:
            nodes = least_nodes(model, cluster, batch, ask.stack, ask.fixed)
            ask = ask.on(max(1, nodes))
        progress("comparing layouts")
        made = plan(ask)
    if json:
        show.as_json(plan_tables.as_document(made, found))
        return
    if found is not None:
        plan_tables.print_inverse(found, ask.rates)
    plan_tables.print_plan(made)
    if not size and found is None:
        show.note("note: the least that fits; --nodes N or --gpus N plans another size")


def _serve(words: dict[str, str], json: bool) -> None:
    from shoal.cli.screen import plan_tables, show
    from shoal.forms import plan as forms
    from shoal.plan import money, serving
    from shoal.plan.serving import Goals, Load

    if not words["rate"]:
        raise Failure("--rate is missing: requests per second, e.g. --rate 20/s", USAGE)
    load = Load(
        rate=forms.rate(words["rate"]),
        input=forms.whole(words["input"], "--input", 1e7),
        output=forms.whole(words["output"], "--output", 1e7),
    ).check()
    goals = Goals(
        **{
            f"{name}_s": forms.seconds(words[name], f"--{name}")
            for name in ("ttft", "tpot")
            if words[name]
        }
    )
    cluster = _cluster(words, 1)
    rates = _rates(words, cluster)
    if words["measured"]:
        gpus, points = forms.measured(words["measured"])
        choices = [serving.measured(points, gpus, load, goals)]
        found = serving.Serving(choices=choices, problems={})
    else:
        with show.Spinner(quiet=json) as progress:
            progress("simulating replicas")
            found = serving.choose(_model(words), cluster, load, goals, words["precision"])
    monthly = {one.gpus: money.per_month(one.total_gpus, rates) for one in found.choices}
    if json:
        show.as_json(
            {
                "load": load,
                "currency": rates.currency,
                "a_month": monthly[found.choices[0].gpus],
                "replicas": found.choices[0].replicas,
                "gpus_each": found.choices[0].gpus,
                "choices": found.choices,
                "problems": found.problems,
            }
        )
        return
    plan_tables.print_serving(found, rates, monthly)


def _model(words: dict[str, str]) -> Model:
    import msgspec

    from shoal.forms import plan as forms

    if not words["model"]:
        raise Failure("--model is missing: name a model, e.g. llama3-70b, or a file", USAGE)
    model = forms.model(words["model"])
    if words["sequence"]:
        sequence = forms.whole(words["sequence"], "--sequence", 1e8)
        model = msgspec.structs.replace(model, sequence=sequence).check()
    return model


def _cluster(words: dict[str, str], nodes: int) -> Cluster:
    from shoal.forms.plan import hardware
    from shoal.plan.hardware import Impossible

    known = hardware(words["hardware"])
    try:
        return known.cluster(words["gpu"], nodes, node=words["node"], fabric=words["fabric"])
    except Impossible as error:
        raise Failure(str(error), USAGE) from None


def _rates(words: dict[str, str], cluster: Cluster) -> Rates:
    """From the price list that was named; otherwise list prices."""
    from shoal.forms.prices import read
    from shoal.ledger.book_state import Hardware
    from shoal.ledger.prices import rate_of
    from shoal.plan import money

    grams = money.GRIDS.get(words["region"].lower())
    if grams is None:
        known = ", ".join(money.GRIDS)
        raise Failure(f"--region: there is no {words['region'][:20]!r}; there are {known}", USAGE)
    chip, node = cluster.accelerator, cluster.node
    other = node.power_w / node.gpus
    if not words["prices"]:
        return money.Rates(
            currency="USD",
            per_gpu_hour=chip.price_hour or None,
            price_source=f"list price, {chip.price_hour:g} USD per GPU-hour"
            if chip.price_hour
            else "no price is known; give --prices",
            watts_per_gpu=chip.power_w + other,
            co2_g_per_kwh=grams,
            grid=words["region"].lower(),
        )
    prices = read(words["prices"])
    rate = rate_of(prices, "", Hardware(chip.name, node.gpus))
    hour = None if rate.per_hour is None else float(rate.per_hour)
    return money.Rates(
        currency=prices.currency,
        per_gpu_hour=hour,
        price_source=words["prices"]
        if hour is not None
        else f"{words['prices']} has no price for {chip.name}",
        watts_per_gpu=other + (float(rate.watts[1]) if rate.watts else chip.power_w),
        pue=prices.pue if prices.pue != 1 else money.PUE,
        co2_g_per_kwh=grams if prices.co2_g_per_kwh is None else prices.co2_g_per_kwh,
        grid=words["region"].lower(),
    )
