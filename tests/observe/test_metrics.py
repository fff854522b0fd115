"""What Prometheus is told: checked by its own tools, and scraped by a real one."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from harness.waiting import until

from shoal.api.metrics import collect, escaped, family, histogram, number
from shoal.control.counters import OTHERS, TENANTS_MAX, Counters, Histogram
from shoal.control.history.history import History
from shoal.control.loop import ControlLoop
from shoal.core.state.state import State
from shoal.model.job import JobSpec
from shoal.model.series import GpuSample, NodeSample
from shoal.model.service import Service, ServiceLoad, ServiceSpec
from tests.core.training import Training
from tests.observe.conftest import Observed

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
TOKEN_WORDS = "the token is missing or wrong"

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is missing")


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        shutil.which(tool) is None, reason=f"{tool} is not installed (Debian: prometheus)"
    )


def promtool(*args: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *args], input=text, text=True, capture_output=True, timeout=120, check=False
    )


def scrape(observed: Observed, token: str | None = None) -> str:
    token = token or observed.home.token.read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{observed.client.url}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        return cast(bytes, answer.read()).decode()


def values(text: str) -> dict[str, dict[str, float]]:
    """Metric -> labels as text -> value, read by the library that Prometheus' makers wrote."""
    found: dict[str, dict[str, float]] = {}
    for metric in parser.text_string_to_metric_families(text):
        for sample in metric.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


@pytest.fixture(scope="module")
def training(observed: Observed) -> Iterator[str]:
    job = observed.train(100_000, members=2, pace_s=0.02)
    until(lambda: observed.client.job_series(job).points != [])
    yield job
    observed.client.cancel(job)
    observed.wait(job)


def test_the_metrics_tell_what_the_cluster_does(observed: Observed, training: str) -> None:
    assert observed.wait(observed.run("exit 3")) == "failed"
    until(lambda: "shoal_node_cpu_busy_ratio" in scrape(observed))
    until(lambda: 'part="input"' in scrape(observed))
    told = values(scrape(observed))
    assert abs(sum(told["shoal_job_step_share"].values()) - 1) < 1e-6
    assert told["shoal_gpus"] == {"state=held": 2, "state=free": 6, "state=unusable": 0}
    assert told["shoal_nodes"]["state=ready"] == 2
    assert told["shoal_node_up"] == {"node=n1": 1, "node=n2": 1}
    assert told["shoal_jobs"]["state=running,tenant=default"] == 1
    assert told["shoal_job_step"][f"job_id={training},tenant=default"] > 0
    assert told["shoal_job_loss"][f"job_id={training},tenant=default"] > 0
    assert told["shoal_jobs_finished_total"]["outcome=failed,tenant=default"] >= 1
    assert told["shoal_job_placements_total"]["tenant=default"] >= 2
    assert told["shoal_step_duration_seconds_count"][""] > 0
    assert told["shoal_commit_duration_seconds_bucket"]["le=+Inf"] > 0
    assert told["shoal_job_wait_seconds_count"][""] >= 2
    assert told["process_resident_memory_bytes"][""] > 1e7


@needs("promtool")
def test_promtool_finds_nothing_to_say(observed: Observed, training: str) -> None:
    said = promtool("check", "metrics", text=scrape(observed))
    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")


def test_who_has_no_token_is_told_nothing(observed: Observed) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        scrape(observed, "wrong")
    assert caught.value.code == 401
    assert TOKEN_WORDS in caught.value.read().decode()


@pytest.fixture
def deployed(tmp_path: Path, observed: Observed) -> Path:
    """The files of deploy/, with this cluster's address and token."""
    for name in ("prometheus.yml", "alerts.yml"):
        shutil.copy(DEPLOY / name, tmp_path)
    shutil.copy(observed.home.token, tmp_path / "shoal-token")
    config = tmp_path / "prometheus.yml"
    address = observed.client.url.removeprefix("http://")
    text = config.read_text().replace("127.0.0.1:7700", address)
    config.write_text(text.replace("scrape_interval: 5s", "scrape_interval: 1s"))
    assert address in config.read_text()
    return config


@needs("promtool")
def test_the_deployed_files_are_sound(deployed: Path) -> None:
    for check in (["config", str(deployed)], ["rules", str(DEPLOY / "alerts.yml")]):
        said = promtool("check", *check)
        assert said.returncode == 0, said.stdout + said.stderr


@needs("promtool")
def test_the_rules_wake_somebody_when_they_should_and_not_before(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "alerts.yml", tmp_path)
    file = shutil.copy(Path(__file__).with_name("alerts_test.yml"), tmp_path)
    said = promtool("test", "rules", str(file))
    assert said.returncode == 0, said.stdout + said.stderr


@needs("prometheus")
def test_a_real_prometheus_scrapes_the_cluster(
    deployed: Path, tmp_path: Path, training: str
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        "prometheus",
        f"--config.file={deployed}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as server:
        try:

            def ask(query: str) -> list[Any]:
                path = f"/api/v1/query?query={urllib.parse.quote(query)}"
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as a:
                        return cast(list[Any], json.load(a)["data"]["result"])
                except OSError:
                    return []

            def number_of(query: str) -> float | None:
                found = ask(query)
                return float(found[0]["value"][1]) if found else None

            log_text = (tmp_path / "log").read_text
            until(lambda: number_of("sum(shoal_gpus)") == 8, more=lambda: log_text())
            assert number_of('up{job="shoal"}') == 1
            assert number_of('shoal_nodes{state="ready"}') == 2
            until(lambda: (number_of("shoal_job_step") or 0) > 0)
            assert ask("shoal_job_step")[0]["metric"]["job_id"] == training
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/rules", timeout=10) as got:
                groups = json.load(got)["data"]["groups"]
            assert all(
                rule["lastError"] == "" for rule in groups[0]["rules"] if "lastError" in rule
            )
        finally:
            server.terminate()
            server.wait(timeout=120)


# -- what dashboards, rules and pages may name -----------------------------------------------


def all_names() -> set[str]:
    """Every metric that the code can tell."""
    text = (ROOT / "src" / "shoal" / "api" / "metrics.py").read_text()
    return set(re.findall(r'"((?:shoal|process)_[a-z_]+)"', text))


def used_names(text: str) -> set[str]:
    found = set(re.findall(r"\b((?:shoal|process)_[a-z_]+)\b", text))
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in found}


@pytest.mark.parametrize("file", ["alerts.yml", "grafana-dashboard.json"])
def test_rules_and_dashboard_name_only_what_there_is(file: str) -> None:
    used = used_names((DEPLOY / file).read_text())
    assert len(used) > 10
    assert used - all_names() == set()


def test_the_page_of_the_docs_lists_every_metric() -> None:
    listed = used_names((ROOT / "docs" / "monitoring.md").read_text())
    assert all_names() - listed == set()
    assert {name for name in listed if name.startswith("shoal_")} - all_names() == set()


@needs("promtool")
def test_every_query_of_the_dashboard_is_one(tmp_path: Path) -> None:
    panels = json.loads((DEPLOY / "grafana-dashboard.json").read_text())["panels"]
    queries = [t["expr"] for panel in panels for t in panel.get("targets", [])]
    assert len(queries) > 20
    rules = [{"record": f"q:{n}", "expr": query} for n, query in enumerate(queries)]
    file = tmp_path / "queries.yml"
    file.write_text(json.dumps({"groups": [{"name": "q", "rules": rules}]}))
    said = promtool("check", "rules", str(file))
    assert said.returncode == 0, said.stdout + said.stderr


# -- bounds ----------------------------------------------------------------------------------


def test_many_jobs_and_tenants_do_not_make_many_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.api.metrics.JOBS_TOLD_MAX", 20)
    monkeypatch.setattr("shoal.api.metrics.TENANTS_MAX", 10)
    cluster = Training(nodes="abc", gpus=200, cpus=1000, memory_mb=0)
    ids = [cluster.run(gpus=1, tenant=f"team-{n}", memory_mb=0) for n in range(30)]
    for job in ids:
        cluster.walk(job, 1, loss=0.5)
    loop = SimpleNamespace(
        state=cluster.state,
        counters=Counters(),
        started_ms=0,
        tick=SimpleNamespace(waiting=0),
        clock=SimpleNamespace(now_ms=lambda: cluster.now_ms),
    )
    sample = NodeSample(at_ms=1, cpu_milli=5, gpus=(GpuSample(busy_milli=999, power_w=700),) * 2)
    history = SimpleNamespace(
        newest={"a": sample, "gone": sample}, file=SimpleNamespace(size_bytes=1)
    )
    spec = ServiceSpec(name="chat", replica=JobSpec(command=("serve",)))
    cluster.state.services["chat"] = Service(spec=spec, wanted=2, ready={"j1": 0})
    cluster.state.heard.loads["chat"] = ServiceLoad(service="chat", answers_per_ks=5000, p99_ms=20)
    text = "".join(collect(cast(ControlLoop, loop), cast(History, history)))
    if shutil.which("promtool"):
        said = promtool("check", "metrics", text=text)
        assert (said.returncode, said.stderr) == (0, "")
    told = values(text)
    assert told["shoal_service_response_seconds"]["percentile=99,service=chat"] == 0.02
    assert told["shoal_service_request_rate"] == {"service=chat": 5}
    assert len(told["shoal_job_loss"]) == 20
    assert len(told["shoal_jobs"]) == 10 + 1
    assert told["shoal_jobs"][f"state=running,tenant={OTHERS}"] == 20
    assert told["shoal_gpu_busy_ratio"] == {"gpu=0,node=a": 0.999, "gpu=1,node=a": 0.999}
    assert "shoal_gpu_temperature_celsius" not in told, "what nobody tells is not there"


def test_tenants_beyond_the_bound_are_counted_together() -> None:
    from shoal.core.state.events.runs import JobFinished
    from shoal.model.job import Outcome

    counters = Counters()
    for one in range(TENANTS_MAX + 50):
        end = JobFinished(at_ms=1, job="j1", attempt=1, outcome=Outcome.FAILED, code=1, why="")
        counters.happened(State(), [end], {"j1": f"t{one}"})
    assert len(counters.ends) == TENANTS_MAX + 1
    assert counters.ends["failed", OTHERS] == 50


def test_odd_names_and_numbers_are_written_as_prometheus_reads_them() -> None:
    odd = 'a"b\\c\nd'
    text = family("shoal_x", "gauge", "Text.", [({"name": odd}, 0.1), ({"name": "n-1"}, None)])
    assert values(text) == {"shoal_x": {f"name={odd}": 0.1}}
    assert escaped("plain1") == "plain1"
    assert family("shoal_x", "gauge", "Text.", []) == ""
    assert [number(v) for v in (True, 1e16, 0.25, 3.0)] == ["1", "1e+16", "0.25", "3"]
    seen = Histogram((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 99):
        seen.add(seconds)
    told = values(histogram("shoal_h_seconds", "Text.", seen))
    assert told["shoal_h_seconds_bucket"] == {"le=1": 2, "le=2": 3, "le=+Inf": 4}
    assert told["shoal_h_seconds_sum"] == {"": 102.0}
