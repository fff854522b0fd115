"""Collectives over the hosts of a tour, with torch in real processes on the loopback."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from shoal.model.fabric import Host, Tour
from shoal.probes import collectives
from shoal.probes.collective_ranks import Found, Located, conclusions, row
from shoal.probes.collectives import Guest
from tests.needs import need

need("torch")


def addresses(many: int) -> tuple[Host, ...]:
    """The port above the first one's is free, too."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as door:
            port = door.getsockname()[1]
        try:
            socket.create_server(("127.0.0.1", port % 65_535 + 1)).close()
        except OSError:
            continue
        return tuple(Host(f"n{number + 1}", "127.0.0.1", port - number) for number in range(many))


def test_three_hosts_measure_while_one_has_no_torch_and_one_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collectives, "MEET_S_MAX", 3.0)
    hosts, deadline = addresses(5), time.monotonic() + 120
    found: dict[int, Found] = {}

    def measure(own: int) -> None:
        asked = Tour(hosts=hosts, own=own, collectives=True)
        found[own] = collectives.run(asked, deadline, bytes_max=8**5)

    threads = [threading.Thread(target=measure, args=(own,)) for own in (0, 1, 4)]
    without = Guest(2, 0, torch=False)
    threads.append(threading.Thread(target=collectives.meet, args=(hosts, without, deadline)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)

    assert found[1] == found[4] == Found()  # one set of figures, from the first host
    assert found[0].notes[:2] == (
        "collectives: without n4, which did not come",
        "collectives: torch is not installed on n3",
    )
    rows = {(one.name, one.size_bytes): one for one in found[0].rows}
    assert {one.ranks for one in rows.values()} == {3}
    assert {one.backend for one in rows.values()} == {"gloo"}
    for name in ("all-reduce", "all-gather", "all-to-all"):
        sizes = [size for kind, size in rows if kind == name]
        assert len(sizes) == 5
        assert 8**5 - 12 < max(sizes) <= 8**5  # a whole number of floats for each of 3 ranks
        large = rows[name, max(sizes)]
        assert large.algorithm_mbs == pytest.approx(large.size_bytes / large.took_us, abs=1)


def test_bandwidths_are_those_of_nccl_tests() -> None:
    """Its example: what all-reduce moves is 2(n-1)/n of its size, and the others (n-1)/n."""
    assert row("all-reduce", 1_000_000_000, 8, 0.01, "nccl").algorithm_mbs == 100_000
    assert row("all-reduce", 1_000_000_000, 8, 0.01, "nccl").bus_mbs == 175_000
    assert row("all-gather", 1_000_000_000, 8, 0.01, "nccl").bus_mbs == 87_500
    assert row("all-to-all", 1_000_000_000, 8, 0.01, "nccl").bus_mbs == 87_500


def test_a_host_that_hears_nobody_says_where_it_waited() -> None:
    asked = Tour(hosts=addresses(2), own=1, collectives=True)
    (note,) = collectives.run(asked, time.monotonic() + 0.2).notes
    assert note.startswith("collectives: n2 could not meet the others at n1: ")


def test_what_halving_found_is_one_sentence_and_a_weak_link() -> None:
    nodes = tuple(f"n{number}" for number in range(1, 9))
    seen: dict[tuple[int, ...], float] = {tuple(range(8)): 200.0, (4, 5, 6, 7): 1000.0}
    seen |= {(0, 1, 2, 3): 210.0, (2, 4): 190.0}
    weak, notes = conclusions(nodes, Located(nodes=(2,)), seen, 1000.0)
    assert notes == ["all-reduce over all 8 is 5 times slower than over the half without n3: n3"]
    assert (weak[0].node, weak[0].peer, weak[0].mbs, weak[0].usual_mbs) == ("n3", "", 190, 1000)
    weak, notes = conclusions(nodes, Located(pairs=((1, 6),)), seen, 1000.0)
    assert (weak[0].node, weak[0].peer) == ("n2", "n7")
    assert notes[0].endswith("without n2 or n7: the link between n2 and n7")
