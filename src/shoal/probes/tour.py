"""Measures the network from this node to others: `python -m shoal.probes.tour TOUR.json`.

All hosts of a tour run this at about the same time. Who meets whom in which round follows from the
list of hosts alone (the circle method), so nobody has to lead. In a pair, the host that comes first
in the list opens its door, and the other one visits it and measures.

A host waits for one that is on the tour (its door answers) until that one has come to the same
round. A host that cannot be reached is given up after a bounded wait, and tried once more in a
second lap. A host that was given up learns of it at the door, and goes on too, so all stay in step.
"""

from __future__ import annotations

import argparse
import hmac
import os
import signal
import socket
import struct
import time
from pathlib import Path
from types import FrameType

import msgspec

from shoal.model.fabric import NOTE_MAX, SLOT_MS, Pair, Tour
from shoal.model.health import CheckResult
from shoal.probes import tour_door as doors
from shoal.probes import tour_door as flows
from shoal.probes.collective_ranks import Found

NICENESS = 5
RETRY_S = 0.1
CONNECT_S = 2.0
ALIVE_S = 10.0  # a door says every second that it is there; loaded machines take longer
ABSENT_S = 5.0  # no answer at all from that address: a broken link, or no machine
SHORT_S = 1.5  # for a host that should have started long ago
ALONE_S = 0.5  # before a visitor that does not come is looked for
LAPS = 2
PAIR_S_MAX = 60.0
# In a slot: when each direction begins, how long it is measured, and when it is too late. All pairs
# measure for the same time, because the last one would have the way for itself.
SLOT_OUT_S, SLOT_BACK_S, SLOT_FLOW_S, SLOT_LATE_S = 0.3, 2.6, 1.6, 1.5

FLOW = struct.Struct("!1sBI")  # which way, how many streams, for how many milliseconds
OUT, BACK, END, RATE = b"o", b"b", b"e", b"f"
MB = 1e6


class Passed(OSError):
    """It does not wait for us: it gave us up, or it believes to be done with us."""


class Stopped(BaseException):
    """SIGTERM."""


def rounds(hosts: int, own: int) -> list[int]:
    """The partner of host `own` in each round; -1: none. Everybody meets everybody once."""
    even = hosts + hosts % 2
    found = []
    for turn in range(even - 1):
        if own == even - 1:
            partner = turn
        elif own == turn:
            partner = even - 1
        else:
            partner = (2 * turn - own) % (even - 1)
        found.append(partner if partner < hosts else -1)
    return found


class Journey:
    """One host's way through the tour."""

    def __init__(self, asked: Tour, deadline: float) -> None:
        self.asked, self.deadline = asked, deadline
        self.pairs: dict[int, Pair] = {}  # also of partners that could not be measured with
        self._key = asked.key.encode()
        self._begun = time.monotonic()
        self._partners = list(asked.slots) or rounds(len(asked.hosts), asked.own)
        self.slots: list[Pair] = []  # what this host measured in them
        self._me = asked.hosts[asked.own]
        self._door = doors.Door(self._me.port, self._key, asked.own, len(asked.hosts))

    def close(self) -> None:
        self._door.close()

    def run(self) -> None:
        for position in range(LAPS * len(self._partners)):
            partner = self._partners[position % len(self._partners)]
            self._door.position = position
            if partner < 0 or partner in self._door.done:
                continue
            if time.monotonic() > self.deadline:
                self._failed(partner, "the time was up")
                continue
            try:
                self._meet(partner, position)
            except OSError as error:
                self._failed(partner, error.strerror or str(error))

    def run_slots(self) -> None:
        """Slots begin at times that all hosts know. Of a pair, the second host measures, so all
        pairs send the same way at the same moment."""
        for position, partner in enumerate(self.asked.slots):
            begins = (self.asked.at_ms + position * SLOT_MS) / 1000
            time.sleep(max(0.0, begins - time.time()))
            self._door.position = position
            if partner < 0:
                continue
            try:
                if time.time() > begins + SLOT_LATE_S:
                    raise TimeoutError("it came too late")
                if partner > self.asked.own:
                    with self._awaited(partner, position).socket as line:
                        self._serve(line, partner)
                    continue
                with self._visited(partner, position) as line:
                    self.slots.append(self._measure_slot(line, partner, position, begins))
            except OSError as error:
                if partner < self.asked.own:
                    self._failed(partner, error.strerror or str(error))
                    self.slots.append(self.pairs.pop(partner))

    def _measure_slot(
        self, line: socket.socket, partner: int, position: int, begins: float
    ) -> Pair:
        found = []
        for way, after_s in ((OUT, SLOT_OUT_S), (BACK, SLOT_BACK_S)):
            time.sleep(max(0.0, begins + after_s - time.time()))
            count = flows.streams_for_fast()
            found.append(self._flow(line, partner, position, way, count, SLOT_FLOW_S))
        line.sendall(END)
        doors.exactly(line, 1)
        rates = [max(1, round(rate / MB)) for rate in found]
        return Pair(self.asked.hosts[partner].node, 0, rates[0], rates[1])

    def _meet(self, partner: int, position: int) -> None:
        if partner < self.asked.own:
            with self._visited(partner, position) as line:
                self.pairs[partner] = self._measure(line, partner, position)
                self._door.done.add(partner)
        else:
            with self._awaited(partner, position).socket as line:
                self._serve(line, partner)
            self._door.done.add(partner)
            self.pairs.pop(partner, None)  # the visitor reports it

    def _failed(self, partner: int, why: str) -> None:
        peer = self.asked.hosts[partner]
        text = f"{self._me.node} could not measure with {peer.node}: {why}"
        self.pairs.setdefault(partner, Pair(peer.node, fault=text[:NOTE_MAX]))

    # -- finding each other ----------------------------------------------------------------

    def _patience(self, entered: float, error: OSError | None, position: int) -> float:
        """Until when a host is waited for that does not answer. A connection that is refused shows
        that the machine is there, so its probe may start at any moment."""
        if position >= len(self._partners):
            return entered  # the second lap: one try
        starts = self._begun + self.asked.start_ms / 1000
        if not isinstance(error, ConnectionRefusedError | ConnectionResetError | doors.Refused):
            starts = min(starts, entered + ABSENT_S)
        return min(self.deadline, max(starts, entered + SHORT_S))

    def _call(self, partner: int, kind: bytes, position: int) -> tuple[socket.socket, doors.Answer]:
        peer = self.asked.hosts[partner]
        line = socket.create_connection((peer.address, peer.port), timeout=CONNECT_S)
        try:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.settimeout(ALIVE_S)
            return line, doors.greet(line, self._key, kind, self.asked.own, partner, position)
        except BaseException:
            line.close()
            raise

    def _visited(self, partner: int, position: int) -> socket.socket:
        """A line to the partner, which has come to this round, too."""
        entered = time.monotonic()
        while True:
            try:
                line, answer = self._call(partner, doors.VISIT, position)
            except OSError as error:
                if time.monotonic() > self._patience(entered, error, position):
                    raise
                time.sleep(RETRY_S)
                continue
            try:
                self._wait_inside(line, answer.word)
                line.sendall(doors.proof(self._key, b"here", answer.nonce))
                return line
            except BaseException:
                line.close()
                raise

    def _wait_inside(self, line: socket.socket, word: bytes) -> None:
        """Until the partner itself says that it is ready. Its door says that it is alive."""
        while True:
            if word == doors.PASSED:
                raise Passed("it had given this node up")
            if word == doors.DONE:
                raise Passed("the measurement broke off")
            if time.monotonic() > self.deadline:
                raise TimeoutError("the time was up")
            word = doors.exactly(line, 1)
            if word == doors.NOW:
                return

    def _awaited(self, partner: int, position: int) -> doors.Line:
        """The line of a partner that visits us, and that proved that it is on this tour."""
        entered = time.monotonic()
        while True:
            met = self._door.visitor(partner, position, time.monotonic() + ALONE_S)
            if met is not None:
                break
            try:
                line, answer = self._call(partner, doors.KNOCK, position)
                line.close()
            except OSError as error:
                if time.monotonic() > self._patience(entered, error, position):
                    raise
                continue
            if answer.word in (doors.PASSED, doors.DONE):
                raise Passed("it had given this node up")
            if time.monotonic() > self.deadline:
                raise TimeoutError("the time was up")
        met.socket.settimeout(ALIVE_S)
        met.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            met.socket.sendall(doors.NOW)
            self._prove(met)
        except BaseException:
            met.socket.close()
            raise
        return met

    def _prove(self, met: doors.Line) -> None:
        """A hello that somebody has recorded and plays again does not know this."""
        shown = doors.exactly(met.socket, doors.PROOF_BYTES)
        if not hmac.compare_digest(shown, doors.proof(self._key, b"here", met.nonce)):
            met.socket.close()
            raise doors.Refused("a stranger came in its name")

    # -- measuring -------------------------------------------------------------------------

    def _measure(self, line: socket.socket, partner: int, position: int) -> Pair:
        peer = self.asked.hosts[partner]
        latency = flows.ping(line)
        least_s = flows.duration_s(self.asked.pair_ms / 1000, latency)
        found = []
        for way in (OUT, BACK):
            rate = self._flow(line, partner, position, way, 1, least_s)
            if rate >= flows.FAST_BYTES_S:
                many = flows.streams_for_fast()
                rate = max(rate, self._flow(line, partner, position, way, many, least_s))
            found.append(max(1, round(rate / MB)))
        line.sendall(END)
        doors.exactly(line, 1)
        median_us, least_us = (max(1, round(1e6 * one)) for one in latency)
        return Pair(peer.node, median_us, found[0], found[1], "", least_us)

    def _flow(
        self,
        line: socket.socket,
        partner: int,
        position: int,
        way: bytes,
        count: int,
        least_s: float,
    ) -> float:
        line.sendall(RATE + FLOW.pack(way, count, round(1000 * least_s)))
        streams: list[socket.socket] = []
        try:
            for _ in range(count):
                stream, answer = self._call(partner, doors.STREAM, position)
                streams.append(stream)
                stream.sendall(doors.proof(self._key, b"here", answer.nonce))
        except OSError:
            for stream in streams:
                stream.close()
            raise
        limit_s = self._limit_s(least_s)
        if way == OUT:
            return flows.give(line, streams, limit_s)
        return flows.take(line, streams, least_s, limit_s, exactly_so=bool(self.asked.slots))

    def _limit_s(self, least_s: float) -> float:
        return flows.STRETCH * least_s + flows.SILENT_S + flows.SPARE_S

    def _serve(self, line: socket.socket, partner: int) -> None:
        """Do as the visitor says, as long as that makes sense."""
        until = min(self.deadline, time.monotonic() + PAIR_S_MAX)
        while time.monotonic() < until:
            line.settimeout(ALIVE_S)
            word = doors.exactly(line, 1)
            if word == flows.PING:
                line.sendall(word)
            elif word == END:
                line.sendall(word)
                return
            elif word == RATE:
                way, count, least_ms = FLOW.unpack(doors.exactly(line, FLOW.size))
                longest_s = max(flows.LONG_S, SLOT_FLOW_S, self.asked.pair_ms / 1000)
                least_s = min(least_ms / 1000, longest_s)
                self._answer_flow(line, partner, way, min(count, flows.STREAMS), least_s)
            else:
                raise OSError("it says what nobody understands")
        raise TimeoutError("it took too long")

    def _answer_flow(
        self, line: socket.socket, partner: int, way: bytes, count: int, least_s: float
    ) -> None:
        lines = self._door.streams(partner, count, time.monotonic() + ALIVE_S)
        for one in lines:
            self._prove(one)
        streams = [one.socket for one in lines]
        limit_s = self._limit_s(least_s)
        if way == OUT:
            flows.take(line, streams, least_s, limit_s, exactly_so=bool(self.asked.slots))
        else:
            flows.give(line, streams, limit_s)


def tour(asked: Tour, deadline: float) -> CheckResult:
    """What was measured until the deadline, or until somebody ended it."""
    if not asked.key:
        return CheckResult(id="", error="the tour has no key, so nobody could be trusted")
    try:
        journey = Journey(asked, deadline)
    except OSError as error:
        port = asked.hosts[asked.own].port
        text = f"the tour could not listen at port {port}: {error.strerror}"
        return CheckResult(id="", error=text[:NOTE_MAX])
    why, together = "", Found()
    try:
        (journey.run_slots if asked.slots else journey.run)()
        journey.close()
        if asked.collectives:
            from shoal.probes import collectives  # only now: torch takes seconds

            together = collectives.run(asked, deadline)
    except Stopped:
        why = "the tour was ended"
    finally:
        journey.close()
    return CheckResult(
        id="",
        pairs=tuple(journey.slots or journey.pairs.values()),
        collectives=together.rows,
        notes=together.notes,
        weak=together.weak,
        error=why,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tour", type=Path)
    parser.add_argument("--id", default="")
    parser.add_argument("--busy", action="store_true", help="members are running here, too")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    os.nice(NICENESS)
    began = time.monotonic()
    asked = msgspec.json.decode(given.tour.read_bytes(), type=Tour)
    found = tour(asked, began + asked.limit_ms / 1000)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # all that is left is to print
    took_ms = round((time.monotonic() - began) * 1000)
    result = msgspec.structs.replace(found, id=given.id, busy=given.busy, took_ms=took_ms)
    print(msgspec.json.encode(result).decode())


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise Stopped


if __name__ == "__main__":
    main()
