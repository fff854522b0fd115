"""`shoal report` and `shoal prices`: what they print and write, and bad input in one line."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest

from shoal.cli.verbs.report import moment_ms, percents
from shoal.forms.prices import parse, to_text
from tests.cli.conftest import Shoal, assert_one_clear_line
from tests.live.cluster import Live

PRICES = """\
currency: EUR
pue: 1.25
co2_g_per_kwh: 400
gpus:
  H100: {per_hour: 2.50}
  A100: {purchase: 8760, life_years: 2, per_month: 73}
  "*": {per_hour: 1, idle_watts: 40, busy_watts: 240}
nodes:
  "n*": {per_hour: 0.8}
"""


def test_the_report_adds_up_to_a_hundred_percent(
    live_shoal: Shoal, cluster: Live, tmp_path: Path
) -> None:
    job = cluster.run("true", gpus=1, tenant="red")
    cluster.wait(job)
    result = live_shoal("report")
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[-1].split()[0] == "all"
    assert "100.0%" in lines[-1]
    shares = [float(word[:-1]) for word in re.findall(r"\d+\.\d%", "\n".join(lines[3:-1]))]
    assert abs(sum(shares) - 100) < 0.05
    for by in ("tenant", "user", "job", "node", "day", "hour"):
        told = live_shoal("report", "--by", by)
        assert told.code == 0
        assert "100.0%" in told.out.splitlines()[-1]
    view = json.loads(live_shoal("report", "--by", "job", "--json").out)
    assert sum(row["gpu_us"] for row in view["rows"]) == view["capacity_gpu_us"]
    assert job in {row["key"] for row in view["rows"]}

    table = tmp_path / "r.csv"
    wrote = live_shoal("report", "--by", "tenant", "--csv", str(table))
    assert wrote.out == f"wrote {table}\n"
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert {row["tenant"] for row in rows} >= {"", "red"}


def test_prices_are_set_and_used(live_shoal: Shoal, tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(PRICES)
    assert live_shoal("prices", "check", str(file)).code == 0
    assert "in force" in live_shoal("prices", "set", str(file)).out
    assert parse(live_shoal("prices").out, ".yaml") == parse(PRICES, ".yaml")
    heads = [line.split() for line in live_shoal("report").out.splitlines()]
    head = next(words for words in heads if words[:1] == ["ACCOUNT"])
    assert head == ["ACCOUNT", "GPU-HOURS", "SHARE", "EUR", "KWH", "KG", "CO2"]
    view = json.loads(live_shoal("report", "--json").out)
    hours = view["capacity_gpu_us"] / 3.6e9
    assert view["cost"] == pytest.approx(hours * (1 + 0.8 / 8))
    file.write_text("currency: EUR\ngpus: {H100: {per_hour: 1}}\n")
    live_shoal("prices", "set", str(file))
    told = live_shoal("report", "--json")
    view = json.loads(told.out)
    assert view["cost"] is None  # a part of a sum is not passed off as the sum
    assert any("no price for GPUs without a model" in note for note in view["notes"])


def test_a_range_without_data_is_told(live_shoal: Shoal) -> None:
    result = live_shoal("report", "--from", "2020-01-01", "--to", "2020-02-01")
    assert result.code == 0
    assert "nothing is booked in this range; the ledger begins" in result.err


@pytest.mark.parametrize(
    "args",
    [
        ["report", "--from", "yesterday-ish"],
        ["report", "--to", "2026-13-01"],
        ["report", "--from", "2026-02-01", "--to", "2026-01-01"],
        ["report", "--from", "0001-01-01"],
        ["report", "--by", "color"],
        ["report", "--csv", "/nowhere/at/all.csv"],
        ["prices", "sell"],
        ["prices", "set"],
        ["prices", "show", "x.yaml"],
        ["prices", "check", "x.txt"],
        ["prices", "check", "missing.yaml"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line(args: list[str], live_shoal: Shoal) -> None:
    assert_one_clear_line(live_shoal(*args))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("gpus: {H100: {per_hour: -2}}", "gpus.H100.per_hour: is -2"),
        ("gpus: {H100: {per_hour: .nan}}", "must be a number"),
        ("gpus: {H100: {per_hour: two}}", "gpus.H100.per_hour: must be a number"),
        ("gpus: {H100: {per_hour: true}}", "must be a number"),
        ("gpus: {H100: {per_hours: 2}}", "did you mean 'per_hour'?"),
        ("gpus: {H100: 2}", "gpus.H100: must be a table"),
        ("gpus: [1]", "gpus: must be names with prices"),
        ("gpus: {H100: {}}\ncurrency: EUR", "gpus.H100: is empty"),
        ("gpus: {H100: {purchase: 9}}\ncurrency: EUR", "life_years: is missing"),
        ("gpus: {H100: {idle_watts: 9}}", "busy_watts: is missing"),
        ("gpus: {H100: {idle_watts: 9, busy_watts: 3}}", "less than idle_watts"),
        ("gpus: {H100: {per_hour: 2}}", "currency: is missing"),
        ("nodes: {n1: {idle_watts: 1, busy_watts: 2}}", "under gpus"),
        ("curency: EUR", "did you mean 'currency'?"),
        ("pue: 0.5", "pue: expected float >= 1.0"),
        ("gpus: {H100: {per_hour: 1e300}}\ncurrency: EUR", "gpus.H100.per_hour"),
        ("gpus: {a: {per_hour: 1, per_hour: 2}}", "twice"),
    ],
)
def test_a_bad_price_list_says_the_field_and_the_fix(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        parse(text, ".yaml")
    assert "\n" not in str(caught.value)


def test_a_price_list_survives_being_told() -> None:
    assert parse(to_text(parse(PRICES, ".yaml")), ".yaml") == parse(PRICES, ".yaml")


def test_moments_are_dates_times_or_how_long_ago() -> None:
    now_ms = 1_800_000_000_000
    assert moment_ms("--from", "now", now_ms) == now_ms
    assert moment_ms("--from", "2h", now_ms) == now_ms - 7_200_000
    assert moment_ms("--from", "1970-01-02", now_ms) == 86_400_000
    assert moment_ms("--from", "1970-01-01T01:00", now_ms) == 3_600_000
    assert moment_ms("--from", "1970-01-01T01:00+01:00", now_ms) == 0


@pytest.mark.parametrize("amounts", [[1, 1, 1], [999, 1], [1], [3, 3, 1, 7, 5], [10**18, 1, 1]])
def test_shares_are_rounded_so_that_they_add_up(amounts: list[int]) -> None:
    assert sum(int(text[:-1].replace(".", "")) for text in percents(amounts)) == 1000
