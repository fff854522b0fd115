"""What the proxy says, read; what it is told, planned: the pure parts between."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.gateway.gateway import AccessLog, changes, latencies
from shoal.gateway.process import alert
from shoal.gateway.stats import (
    ActualServer,
    RuntimeFailure,
    parse_old_workers,
    parse_servers,
    parse_table,
    read_counts,
    stats,
    with_old_workers,
)
from shoal.model.service import Replica, Route, Served, Wanted
from shoal.model.tokens import ReplicaState

STAT = """# pxname,svname,qcur,scur,econ,eresp,status,weight,lbtot,hrsp_2xx,hrsp_5xx,req_tot,qtime,\
ctime,rtime,ttime,
_entry,FRONTEND,,9,,,OPEN,,,50,0,50,,,,,
chat,a,1,3,1,0,UP,100,40,30,2,40,1,2,30,40,
chat,b,0,2,0,0,DRAIN,100,10,10,0,10,1,2,30,40,
chat,c,0,0,0,0,DRAIN,0,10,10,0,10,1,2,30,40,
chat,BACKEND,2,12,1,0,UP,200,60,50,2,64,1,2,30,40,
_nowhere,BACKEND,0,0,0,0,UP,0,0,0,0,0,0,0,0,0,

"""

SERVERS = """1
# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_port
4 chat 1 a 10.0.0.1 2 0 100 80
4 chat 2 b 10.0.0.2 2 8 50 81
4 chat 3 c 10.0.0.3 0 1 1 82
"""


def test_counters_become_figures() -> None:
    counts = read_counts(parse_table(STAT))
    assert list(counts) == ["chat"]
    one = stats({}, counts, 2.0)[0]
    assert (one.in_flight, one.queued, one.held, one.work) == (5, 3, 4, 12)
    assert (one.requests_per_s, one.response_ms) == (26.0, 32)
    assert [(r.replica, r.draining, r.weight) for r in one.replicas] == [
        ("a", False, 100),
        ("b", True, 100),
        ("c", False, 0),
    ]
    assert one.replicas[0].failed_per_s == 1.5
    still = stats(counts, counts, 1.0)[0]
    assert (still.requests_per_s, still.failed_per_s) == (0.0, 0.0)


def test_what_an_older_worker_has_in_flight_counts() -> None:
    counts = read_counts(parse_table(STAT))
    older = {"chat": msgspec.structs.replace(counts["chat"], in_flight=5, queued=0)}
    newer = {"chat": msgspec.structs.replace(counts["chat"], in_flight=1, servers=())}
    merged = with_old_workers(newer, [older])["chat"]
    assert merged.in_flight == 6
    assert [(s.replica, s.in_flight, s.draining) for s in merged.servers] == [
        ("a", 3, True),
        ("b", 2, True),
    ]


def test_lists_are_read_and_nonsense_is_refused() -> None:
    servers = parse_servers(SERVERS)
    assert [(s.replica, s.draining, s.maintenance) for s in servers] == [
        ("a", False, False),
        ("b", True, False),
        ("c", False, True),
    ]
    assert (servers[1].address, servers[1].port, servers[1].weight) == ("10.0.0.2", 81, 50)
    processes = "#<PID> <type>\n5 master 0\n# workers\n6 worker 0\n# old workers\n7 worker 1\n"
    assert parse_old_workers(processes + "# programs\n8 worker x\n") == [7]
    for text in ("", "Unknown command"):
        with pytest.raises(RuntimeFailure):
            parse_table(text)
        with pytest.raises(RuntimeFailure):
            parse_servers(text)


def actual(replica: str, port: int = 80, **more: bool) -> ActualServer:
    return ActualServer(
        service="chat",
        replica=replica,
        address="10.0.0.1",
        port=port,
        weight=100,
        draining=more.get("draining", False),
        maintenance=more.get("maintenance", False),
    )


def planned(
    wanted: dict[str, ReplicaState], there: list[ActualServer], busy: dict[str, int] | None = None
) -> list[str]:
    replicas = tuple(
        Replica(id=name, address="10.0.0.1", port=80, state=state) for name, state in wanted.items()
    )
    served = Served(route=Route(service="chat"), replicas=replicas)
    flights = {("chat", name): count for name, count in (busy or {}).items()}
    commands = changes(Wanted(services=(served,)), there, flights)
    return [" ".join(command.split()[:4]) for command in commands]


READY, DRAINING = ReplicaState.READY, ReplicaState.DRAINING


def test_the_servers_become_those_that_are_wanted() -> None:
    assert planned({"a": READY}, [actual("a")]) == []
    assert planned({"a": READY}, []) == [
        "add server chat/a 10.0.0.1:80",
        "enable health chat/a",
        "enable server chat/a",
    ]
    assert planned({"a": DRAINING}, [actual("a")]) == ["set server chat/a state"]
    assert planned({"a": DRAINING}, [actual("a", draining=True)]) == []
    assert planned({"a": DRAINING}, []) == [], "what never was has nothing to finish"
    for state in ("draining", "maintenance"):
        back = planned({"a": READY}, [actual("a", **{state: True})])
        assert back == ["set server chat/a state"]


def test_what_is_unwanted_is_drained_and_deleted_when_it_is_idle() -> None:
    assert planned({}, [actual("a")], {"a": 1}) == ["set server chat/a state"]
    assert planned({}, [actual("a", draining=True)], {"a": 1}) == []
    gone = planned({}, [actual("a", draining=True)])
    assert gone == ["set server chat/a state", "del server chat/a"]


def test_a_replica_that_moved_stays_the_same_server_at_another_address() -> None:
    moved = ["set server chat/a addr", "set server chat/a health"]
    for busy in ({}, {"a": 1}):
        assert planned({"a": READY}, [actual("a", port=81)], busy) == moved
    back = planned({"a": READY}, [actual("a", port=81, draining=True)])
    assert back == [*moved, "set server chat/a state"]


def test_the_end_of_the_log_is_read_once_over_cuts_and_nonsense(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    line = (
        b'{"service":"chat","replica":"%s","status":%d,"connect_ms":1,"response_ms":%d,'
        b'"total_ms":9,"more":"x"}\n'
    )
    path.write_bytes(line % (b"a", 200, 1))
    log = AccessLog(path)
    assert log.fresh() == [], "what was there before is not of now"
    with path.open("ab") as file:
        file.write(line % (b"a", 200, 5) + b"nonsense\n" + line % (b"b", 500, 5))
        file.write(line % (b"c", 503, -1) + b'{"service":"chat","rep')
    assert latencies(log.fresh()) == {("chat", "a"): [6]}
    with path.open("ab") as file:
        file.write(b'lica":"d","status":200,"connect_ms":0,"response_ms":7,"total_ms":8}\n')
    assert latencies(log.fresh()) == {("chat", "d"): [7]}
    path.replace(tmp_path / "access.log.1")
    path.write_bytes(line % (b"e", 200, 3))
    assert latencies(log.fresh()) == {("chat", "e"): [4]}
    path.unlink()
    assert log.fresh() == []


def test_of_many_lines_the_last_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.gateway.gateway.READ_BYTES_MAX", 300)
    path = tmp_path / "access.log"
    log = AccessLog(path)
    text = (
        '{{"service":"s","replica":"r","status":200,"connect_ms":0,"response_ms":{},"total_ms":0}}'
    )
    path.write_text("".join(text.format(number) + "\n" for number in range(50)))
    assert latencies(log.fresh()) == {("s", "r"): [47, 48, 49]}
    assert log.fresh() == []


def test_haproxys_complaint_is_one_line() -> None:
    said = "[NOTICE] (1) : version\n[ALERT]    (1) : config : parsing [/x/it.cfg:7] : unknown 'x'\n"
    assert alert(said + "[ALERT] (1) : config : Fatal errors\n") == "parsing line 7 : unknown 'x'"
    assert alert("") == "it did not say why"
