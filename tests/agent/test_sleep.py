"""Real members are put to sleep and woken by a real agent, and nothing of them is lost."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

from shoal.agent.ownership import processes
from shoal.model.commands import Sleep, Wake
from shoal.model.job import MemberRef
from tests.agent.rig import Rig, rig

REF = MemberRef("j1", 1, 0)

# Each line is the hash of the one before; a child and a grandchild in a session of its own do half
# of the work each, and the parent adds theirs up.
CHAIN = """
import hashlib, os, subprocess, sys, time
lines, pause, depth = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
below = None
if depth:
    words = [sys.executable, __file__, sys.argv[1], sys.argv[2], str(depth - 1)]
    below = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=depth == 1)
last = b"begin %d" % depth
for number in range(lines):
    last = hashlib.sha256(last).hexdigest().encode()
    if below:
        last += below.stdout.readline().strip().encode()
    print(last.decode(), flush=True)
    time.sleep(pause)
sys.exit(below.wait() if below else 0)
"""


def chain(lines: int, depth: int) -> list[str]:
    """What it writes when nobody disturbs it."""
    below = chain(lines, depth - 1) if depth else [""] * lines
    last, found = f"begin {depth}", []
    for line in below:
        last = hashlib.sha256(last.encode()).hexdigest() + line
        found.append(last)
    return found


def sleep(node: Rig, ref: MemberRef = REF) -> None:
    assert node.report is not None
    node.order(Sleep(node="n1", incarnation=node.report.incarnation, ref=ref))


def wake(node: Rig, ref: MemberRef = REF, gpus: tuple[int, ...] = ()) -> None:
    assert node.report is not None
    node.order(Wake(node="n1", incarnation=node.report.incarnation, ref=ref, gpus=gpus))


def sleeps(node: Rig, ref: MemberRef = REF) -> bool:
    return node.report is not None and any(one.ref == ref for one in node.report.asleep)


def fall_asleep(node: Rig, ref: MemberRef = REF) -> None:
    sleep(node, ref)
    node.until(lambda: sleeps(node, ref))


def is_awake(node: Rig, ref: MemberRef = REF) -> bool:
    report = node.report
    return report is not None and any(one.ref == ref for one in report.woke)


def tree(node: Rig) -> dict[int, str]:
    """The state of each process of the node's members."""
    seen = processes()
    mark = f"SHOAL_NODE_DIR={node.directory}\0".encode()
    found = {}
    for pid, one in seen.items():
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes():
                found[pid] = one.state
        except OSError:
            continue
    return found


def still(node: Rig) -> bool:
    """A shell waits in the kernel (D) for its child, if that was stopped before it became another
    program: they share their memory until then."""
    return set(tree(node).values()) <= {"T", "D"}


def test_a_hash_chain_over_three_processes_is_the_same_after_many_naps(tmp_path: Path) -> None:
    script = tmp_path / "chain.py"
    script.write_text(CHAIN)
    with rig() as node:
        node.launch(REF, sys.executable, str(script), "300", "0.01", "2")
        node.until(lambda: node.text(REF).count("\n") >= 3)
        for _ in range(4):
            fall_asleep(node)
            states = tree(node)
            assert len(states) == 3 and set(states.values()) == {"T"}
            said = (node.directory / "members" / str(REF) / "output").read_text()
            wake(node)
            node.until(lambda: is_awake(node))
            node.until(lambda: len(node.text(REF)) > len(said))  # noqa: B023
        assert node.exit(REF).code == 0
        assert node.text(REF).splitlines() == chain(300, 2)


OBEYS = "trap 'echo obeys; exit 7' TERM; echo up; while :; do sleep 0.02; done"


def test_a_sleeper_that_is_to_stop_can_obey_and_one_that_is_killed_exits_like_any_other() -> None:
    stubborn, killed = MemberRef("j2", 1, 0), MemberRef("j3", 1, 0)
    with rig() as node:
        node.launch(REF, "sh", "-c", OBEYS)
        node.launch(stubborn, "sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.02; done")
        node.launch(killed, "sh", "-c", "echo up; setsid sleep 600 & wait")
        for ref in (REF, stubborn, killed):
            node.says(ref, "up")
            fall_asleep(node, ref)
        node.wait(lambda: still(node))
        node.stop(REF, grace_ms=60_000)
        ended = node.exit(REF)
        assert (ended.code, ended.stopped) == (7, True) and "obeys" in node.text(REF)
        node.stop(stubborn, grace_ms=200)
        assert node.exit(stubborn).code == 128 + signal.SIGKILL
        os.kill(leader(node, killed), signal.SIGKILL)
        ended = node.exit(killed)
        assert (ended.code, ended.stopped) == (128 + signal.SIGKILL, False)
        node.wait(lambda: not tree(node))
        report = node.ask()
        assert not (report.asleep or report.dozing or report.waking or report.alive)


def leader(node: Rig, ref: MemberRef) -> int:
    """The first process of the member."""
    mark = f"SHOAL_REF={ref}\0".encode()
    seen = {pid: processes()[pid] for pid in tree(node)}
    marked = [pid for pid in seen if mark in Path(f"/proc/{pid}/environ").read_bytes()]
    return next(pid for pid in marked if seen[pid].session == pid and seen[pid].parent not in seen)


def test_what_the_job_had_stopped_stays_stopped_and_what_somebody_wakes_is_stopped_again() -> None:
    script = "sleep 600 & kill -STOP $!; echo $!; sleep 600 & echo $!; echo up; wait"
    with rig() as node:
        node.launch(REF, "sh", "-c", script)
        node.says(REF, "up")
        own, other = map(int, node.text(REF).split()[:2])
        node.wait(lambda: tree(node)[own] == "T")
        fall_asleep(node)
        node.wait(lambda: still(node))
        os.kill(other, signal.SIGCONT)
        node.wait(lambda: tree(node)[other] == "S")
        node.until(lambda: tree(node)[other] == "T")
        wake(node)
        node.until(lambda: is_awake(node))
        node.wait(lambda: tree(node)[other] == "S")
        assert tree(node)[own] == "T"
        node.stop(REF)
        node.exit(REF)


def test_nothing_of_a_sleeper_outlives_its_agent_or_its_agent_and_keeper() -> None:
    with rig() as node:
        for killed in ("agent", "both"):
            ref = MemberRef(killed, 1, 0)
            node.launch(ref, "sh", "-c", "setsid sleep 600 & echo up; wait")
            node.says(ref, "up")
            fall_asleep(node, ref)
            pids = tree(node)
            if killed == "both":
                agent = node.agent_pid()
                node.keeper.kill()  # the agent dies with it
                node.wait(lambda: agent not in (seen := processes()) or seen[agent].state == "Z")  # noqa: B023
            node.restart(signal.SIGKILL)
            assert not pids.keys() & tree(node).keys()
            assert node.ask().alive == ()


def test_an_agent_that_ends_lets_its_sleepers_end_well(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    script = f"trap 'echo saved >{saved}; exit 0' TERM; echo up; while :; do sleep 0.02; done"
    with rig() as node:
        node.launch(REF, "sh", "-c", script)
        node.says(REF, "up")
        fall_asleep(node)
    assert saved.read_text() == "saved\n"
