"""Measures collectives over the hosts of a tour: all-reduce, all-gather and all-to-all by size.

First the hosts meet (`meeting_of_hosts`): each says whether it has torch and how many GPUs are
free, and all learn who takes part. Then every host starts its ranks (`collective_ranks.py`) as
processes of their own, because a rank that waits for a host that is gone can only be killed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from shoal.model.fabric import NOTE_MAX, Host, Tour
from shoal.probes.collective_ranks import Found, Share

MEET_S_MAX = 30.0
MEASURE_S_MAX = 120.0
RETRY_S = 0.1
LINE_MAX = 1 << 20
HELLO = b"shoal-collectives "
MORE_S = 3.0  # a rank ends by itself before it is killed
CPU_BYTES_MAX = 8**9  # 128 MiB
GPU_BYTES_MAX = 8**10  # 1 GiB
RANK = (sys.executable, "-m", "shoal.probes.collective_ranks")


class Guest(msgspec.Struct, frozen=True):
    """What a host says about itself."""

    place: int
    gpus: int
    torch: bool


class Invited(msgspec.Struct, frozen=True):
    """Who takes part, in the order of ranks, and what the host where they met noted."""

    guests: tuple[Guest, ...]
    notes: tuple[str, ...]


def run(asked: Tour, deadline: float, bytes_max: int = 0) -> Found:
    """`deadline` of the monotonic clock. The host of the first rank reports the figures, and the
    other hosts report only their own trouble. `bytes_max`: 0 for the default."""
    own = Guest(
        asked.own,
        len(free_gpus()) if asked.gpus else 0,
        importlib.util.find_spec("torch") is not None,
    )
    try:
        invited = meet(asked.hosts, own, deadline)
    except OSError as error:
        there, me = asked.hosts[0].node, asked.hosts[asked.own].node
        return _note(f"collectives: {me} could not meet the others at {there}: {error}")
    guests, notes = invited.guests, invited.notes
    if own not in guests:
        return Found(notes=notes)
    first = guests[0] == own
    if len(guests) < 2:
        here = asked.hosts[guests[0].place].node
        return Found(notes=(*notes, f"collectives: only {here} could take part"))
    on_gpus = all(guest.gpus for guest in guests)
    if not on_gpus and any(guest.gpus for guest in guests):
        without = _names(asked.hosts, (guest.place for guest in guests if not guest.gpus))
        notes = (*notes, f"collectives: on CPUs, because no GPU is free on {without}")
    found = _measure(asked, guests, own, deadline, on_gpus=on_gpus, bytes_max=bytes_max)
    return msgspec.structs.replace(found, notes=(*notes, *found.notes)) if first else found


def meet(hosts: Sequence[Host], own: Guest, deadline: float) -> Invited:
    """At the first host, on the port above its own, because on its own the tour may be under way.
    Raises OSError."""
    until = min(deadline, time.monotonic() + MEET_S_MAX)
    if own.place == 0:
        return _host(hosts, own, until)
    with _line_to(hosts[0], until) as line:
        line.sendall(HELLO + msgspec.json.encode(own) + b"\n")
        # The host waits for others until its own time is up, and it may have begun later.
        line.settimeout(max(1.0, deadline - time.monotonic()))
        try:
            return msgspec.json.decode(_read(line), type=Invited)
        except msgspec.DecodeError:
            raise OSError("it came too late") from None


def _host(hosts: Sequence[Host], own: Guest, until: float) -> Invited:
    guests, lines = {0: own}, []
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(socket.create_server(("", meeting_port(hosts[0])), backlog=1024))
        while len(guests) < len(hosts) and (left := until - time.monotonic()) > 0:
            door.settimeout(left)
            try:
                line = stack.enter_context(door.accept()[0])
                line.settimeout(min(5.0, left))
                if not (said := _read(line)).startswith(HELLO):
                    continue
                guest = msgspec.json.decode(said.removeprefix(HELLO), type=Guest)
            except (OSError, msgspec.DecodeError):
                continue  # somebody else, or too late
            if 0 < guest.place < len(hosts):
                guests[guest.place] = guest
                lines.append(line)
        invited = _invite(hosts, guests)
        for line in lines:
            with contextlib.suppress(OSError):  # it is gone: the ranks will not hear of it either
                line.sendall(msgspec.json.encode(invited) + b"\n")
    return invited


def _invite(hosts: Sequence[Host], guests: dict[int, Guest]) -> Invited:
    notes = []
    if missing := [place for place in range(len(hosts)) if place not in guests]:
        notes.append(f"collectives: without {_names(hosts, missing)}, which did not come")
    if without := [place for place, guest in sorted(guests.items()) if not guest.torch]:
        notes.append(f"collectives: torch is not installed on {_names(hosts, without)}")
    able = tuple(guest for _, guest in sorted(guests.items()) if guest.torch)
    return Invited(able, tuple(note[:NOTE_MAX] for note in notes))


def meeting_port(host: Host) -> int:
    return host.port % 65_535 + 1


def _line_to(host: Host, until: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((host.address, meeting_port(host)), timeout=5)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(RETRY_S)


def _read(line: socket.socket) -> bytes:
    with line.makefile("rb") as lines:
        return lines.readline(LINE_MAX)


def _names(hosts: Sequence[Host], places: Any) -> str:
    names = [hosts[place].node for place in places]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _note(text: str) -> Found:
    return Found(notes=(text[:NOTE_MAX],))


def _measure(
    asked: Tour,
    guests: Sequence[Guest],
    own: Guest,
    deadline: float,
    *,
    on_gpus: bool,
    bytes_max: int,
) -> Found:
    """The first guest's meeting port is where torch's processes meet: nobody else has it now."""
    ranks_of = [guest.gpus if on_gpus else 1 for guest in guests]
    place = guests.index(own)
    until = min(deadline - MORE_S, time.monotonic() + MEASURE_S_MAX)
    # Nodes on one machine share its cores: more of them are slower, and no link is to blame.
    addresses = {asked.hosts[guest.place].address for guest in guests}
    share = Share(
        address=asked.hosts[guests[0].place].address,
        port=meeting_port(asked.hosts[guests[0].place]),
        nodes=tuple(asked.hosts[guest.place].node for guest in guests),
        ranks_of=tuple(ranks_of),
        first_rank=sum(ranks_of[:place]),
        gpus=tuple(free_gpus()[: own.gpus]) if on_gpus else (),
        seconds=max(1.0, until - time.monotonic()),
        bytes_max=bytes_max or (GPU_BYTES_MAX if on_gpus else CPU_BYTES_MAX),
        halve=len(addresses) == len(guests),
    )
    here = asked.hosts[asked.own].address
    found = ranks_of_host(share, here, ranks_of[place], deadline)
    return found if place == 0 else Found()


def ranks_of_host(share: Share, address: str, many: int, deadline: float) -> Found:
    """Starts them and waits; what the first of them said."""
    with _ranks(share, address, many) as ranks:
        late = False
        for rank in ranks:
            try:
                rank.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late = True
                rank.kill()
        said, _ = ranks[0].communicate()
        return _last(said, ranks[0].returncode, late=late)


def _last(said: bytes, code: int, *, late: bool) -> Found:
    """What the first rank said last, and what became of it."""
    notes = ["collectives: they did not end in time: a host or its network hangs"] if late else []
    try:
        found = msgspec.json.decode(said.splitlines()[-1] if said else b"", type=Found)
    except msgspec.DecodeError:
        found = Found()
        notes = notes or [f"collectives: the first rank ended with code {code}"]
    return msgspec.structs.replace(found, notes=(*found.notes, *notes))


@contextlib.contextmanager
def _ranks(share: Share, address: str, many: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """None of them outlives this."""
    started: list[subprocess.Popen[bytes]] = []
    env = {**os.environ, **_interfaces(address)}
    try:
        for number in range(many):
            one = msgspec.structs.replace(share, first_rank=share.first_rank + number)
            if share.gpus:
                one = msgspec.structs.replace(one, gpus=(share.gpus[number],))
            words = [*RANK, msgspec.json.encode(one).decode()]
            started.append(
                subprocess.Popen(
                    words,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL if number else subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            )
        yield started
    finally:
        for rank in started:
            rank.kill()
        for rank in started:
            rank.wait()
            if rank.stdout is not None:
                rank.stdout.close()


def _interfaces(address: str) -> dict[str, str]:
    """Otherwise gloo and NCCL take the interface of the host's name, often the loopback."""
    try:
        known = {entry[4][0] for entry in socket.getaddrinfo(address, None)}
    except OSError:
        return {}
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address in known for one in addresses):
            wanted = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
            return {key: value for key, value in wanted.items() if key not in os.environ}
    return {}


def free_gpus() -> list[str]:
    """Ids of real GPUs that no process uses, among those that are visible here."""
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        return []
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, or no driver: NVML has an exception for each
        return []
    try:
        found = []
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        for number in range(int(pynvml.nvmlDeviceGetCount())):
            device = pynvml.nvmlDeviceGetHandleByIndex(number)
            uuid = pynvml.nvmlDeviceGetUUID(device)
            if visible is not None and not {str(number), uuid} & set(visible.split(",")):
                continue
            if not pynvml.nvmlDeviceGetComputeRunningProcesses(device):
                found.append(uuid)
        return found
    except Exception:
        return []
    finally:
        pynvml.nvmlShutdown()
