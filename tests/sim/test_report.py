"""The page: whole in itself, and true to the replay."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from shoal.model.policy import Policy
from shoal.sim.replay.clusters import alike
from shoal.sim.replay.metrics import Outcome, summarize
from shoal.sim.replay.replay import replay
from shoal.sim.replay.report import _runs, binned, page, timeline
from shoal.sim.replay.traces import Arrival, Gangs, Trace

NODES = alike(2, gpus=8)


def small_trace(name: str = "a </script> trace.csv") -> Trace:
    gangs = Gangs(8)
    jobs = [(0, 100, 8), (5, 50, 16), (6, 20, 4), (7, 0, 1)]
    return Trace(name, [Arrival(s * 1000, w * 1000, gangs.spec(g), s + 2) for s, w, g in jobs])


def played(name: str = "fifo") -> Outcome:
    return replay(small_trace(), NODES, Policy(), name=name)


@pytest.mark.skipif(find_spec("plotly") is None, reason="needs plotly: pip install 'shoal[sim]'")
def test_the_page_holds_every_policy_and_asks_nothing_of_the_network() -> None:
    outcomes = [played("fifo"), played("<b>fair</b>")]
    text = page(small_trace(), NODES, outcomes, [summarize(outcome) for outcome in outcomes])
    own = text[: text.index("<script>")] + text[text.rindex("<script>") :]
    assert "Plotly.newPlot" in own
    assert "@" not in own.replace("@media", "")
    assert "<b>fair</b>" not in own[: own.index("<script>")]
    assert "&lt;b&gt;fair&lt;/b&gt;" in own
    assert "http://" not in own
    assert "https://" not in own
    for name in ("utilization", "queue", "sizes", "curves", "accounts", "timeline0", "timeline1"):
        assert f'id="{name}"' in own
        assert f'"{name}":' in own


def test_bins_keep_the_area_under_the_levels() -> None:
    levels = played().levels
    for bins in (1, 7, 400):
        means = binned(levels, levels.held_over_time, bins)
        area = sum(means) * levels.now_ms / bins
        assert area == pytest.approx(levels.sums["held"])
        assert max(means) <= levels.total * 1.000001


def test_the_timeline_shows_every_gpu_while_it_is_held() -> None:
    outcome = played()
    plot = timeline(outcome, NODES, ("seconds", 1000.0))
    area = sum(
        x * width / 0.94
        for bar in plot["data"]
        for x, width in zip(bar["x"], bar["width"], strict=True)
    )
    assert area == pytest.approx(outcome.levels.sums["held"] / 1_000_000)


def test_neighboring_gpus_are_drawn_as_one() -> None:
    assert _runs(0b1011) == [(0, 2), (3, 1)]
    assert _runs(0b11111111) == [(0, 8)]
    assert _runs(0b10100) == [(2, 1), (4, 1)]
    assert _runs(0) == []
