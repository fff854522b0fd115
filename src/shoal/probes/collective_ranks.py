"""One rank of the collectives of a tour: `python -m shoal.probes.collective_ranks SHARE`.

Sizes and bandwidths are those of nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).
Size S of an all-reduce is the buffer of one rank; of an all-gather, what each rank has at the end;
of an all-to-all, what each rank sends in all, its own piece included. The algorithm bandwidth is
S / t, and the bus bandwidth is that times 2(n-1)/n for an all-reduce, and (n-1)/n for the others.
t is the mean over repetitions and ranks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from shoal.model.fabric import NOTE_MAX, Collective, Weak

GROWTH = 8
FLOAT_BYTES = 4
REPEAT_S = 0.2  # of one size, after a first one that warms up
REPEAT_MAX = 20
SPARE_MEMORY = 8  # a buffer takes this part of free memory at most
HALVING_S = 0.25  # of the seconds are left for it
HALVING_BYTES = (8**7, 8**9)  # on CPUs, on GPUs
PAIRS_MAX = 16  # whose median is what is usual
SLOW_FACTOR = 3


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has to know."""

    address: str
    port: int
    nodes: tuple[str, ...]
    ranks_of: tuple[int, ...]  # of each node
    first_rank: int  # its own
    gpus: tuple[str, ...]  # its own GPU; none: on CPUs
    seconds: float
    bytes_max: int
    halve: bool = False


class Found(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    rows: tuple[Collective, ...] = ()
    notes: tuple[str, ...] = ()
    weak: tuple[Weak, ...] = ()


def factor(name: str, ranks: int) -> float:
    """Bus bandwidth divided by algorithm bandwidth."""
    return (2 if name == "all-reduce" else 1) * (ranks - 1) / ranks


def row(name: str, size: int, ranks: int, seconds: float, backend: str) -> Collective:
    algorithm = size / 1e6 / seconds
    return Collective(
        name=name,
        size_bytes=size,
        ranks=ranks,
        took_us=round(seconds * 1e6),
        algorithm_mbs=round(algorithm),
        bus_mbs=round(algorithm * factor(name, ranks)),
        backend=backend,
    )


class Rank:
    def __init__(self, share: Share, torch: Any) -> None:
        self._share, self._torch, self._dist = share, torch, torch.distributed
        self.rank, self.ranks = share.first_rank, sum(share.ranks_of)
        self._until = time.monotonic() + share.seconds
        self.backend = "nccl" if share.gpus else "gloo"
        self._device = "cuda" if share.gpus else "cpu"
        self._groups: dict[tuple[int, ...], Any] = {}
        self.notes: list[str] = []

    def meet(self) -> None:
        wait = timedelta(seconds=self._share.seconds)
        store = self._dist.TCPStore(
            self._share.address,
            self._share.port,
            self.ranks,
            is_master=self.rank == 0,
            timeout=wait,
        )
        self._dist.init_process_group(
            self.backend, store=store, rank=self.rank, world_size=self.ranks, timeout=wait
        )

    def measure(self) -> list[Collective]:
        rows: list[Collective] = []
        kinds = (
            ("all-reduce", self._reduce),
            ("all-gather", self._gather),
            ("all-to-all", self._all),
        )
        many = len(self._share.nodes)
        keep = self._share.seconds * HALVING_S if many > 2 else 0.0
        for number, (name, prepare) in enumerate(kinds):
            self.say(rows)
            left = self._agreed(self._until - time.monotonic() - keep, least=True)
            ends = time.monotonic() + left / (len(kinds) - number)
            try:
                rows += self._by_size(name, prepare, ends)
            except RuntimeError as error:
                text = str(error).strip().partition("\n")[0]
                self.notes.append(f"{name}: {self.backend} cannot: {text}"[:NOTE_MAX])
        return rows

    def say(self, rows: Sequence[Collective], weak: tuple[Weak, ...] = ()) -> None:
        """Everything so far: the last line counts, also if this process is killed."""
        if rows or self.notes:
            found = Found(rows=tuple(rows), notes=tuple(self.notes), weak=weak)
            print(msgspec.json.encode(found).decode(), flush=True)

    def _by_size(
        self, name: str, prepare: Callable[[int], tuple[int, Callable[[], Any]]], ends: float
    ) -> list[Collective]:
        rows = []
        most = min(self._share.bytes_max, int(self._agreed(self._room(), least=True)))
        size, took = GROWTH, 0.0
        while size <= most:
            left = self._agreed(ends - time.monotonic(), least=True)
            if took * GROWTH * 3 > left:
                self.notes.append(f"{name}: no time left for {size} bytes and more")
                break
            real, act = prepare(size)
            took = self._timed(act)
            rows.append(row(name, real, self.ranks, took, self.backend))
            size *= GROWTH
        return rows

    def _room(self) -> float:
        """Bytes that a buffer may have."""
        if self._share.gpus:
            free, _ = self._torch.cuda.mem_get_info()
        else:
            import psutil

            free = psutil.virtual_memory().available
        return float(free // SPARE_MEMORY)

    def _timed(self, act: Callable[[], Any], group: Any = None) -> float:
        """Seconds of one, as the mean over repetitions and the ranks of the group."""
        act()
        first = self._agreed(self._repeat(act, 1), group=group)
        times = min(REPEAT_MAX, max(1, int(REPEAT_S / max(first, 1e-9))))
        took = self._repeat(act, times)
        ranks = self._dist.get_world_size(group) if group is not None else self.ranks
        return max(1e-9, self._sum(took, group) / ranks)

    def _repeat(self, act: Callable[[], Any], times: int) -> float:
        self._wait()
        began = time.perf_counter()
        for _ in range(times):
            act()
        self._wait()
        return (time.perf_counter() - began) / times

    def _wait(self) -> None:
        if self._share.gpus:
            self._torch.cuda.synchronize()

    def _sum(self, value: float, group: Any) -> float:
        all_of = self._torch.tensor([value], dtype=self._torch.float64, device=self._device)
        self._dist.all_reduce(all_of, group=group)
        return float(all_of.item())

    def _agreed(self, value: float, *, least: bool = False, group: Any = None) -> float:
        """The largest of all ranks, or the least; so all decide alike."""
        best = self._torch.tensor([value], dtype=self._torch.float64, device=self._device)
        kind = self._dist.ReduceOp.MIN if least else self._dist.ReduceOp.MAX
        self._dist.all_reduce(best, op=kind, group=group)
        return float(best.item())

    def _floats(self, many: int) -> Any:
        return self._torch.zeros(many, dtype=self._torch.float32, device=self._device)

    def _reduce(self, size: int, group: Any = None) -> tuple[int, Callable[[], Any]]:
        whole = self._floats(size // FLOAT_BYTES)
        return size, lambda: self._dist.all_reduce(whole, group=group)

    def _gather(self, size: int) -> tuple[int, Callable[[], Any]]:
        piece = max(1, size // FLOAT_BYTES // self.ranks)
        mine, whole = self._floats(piece), self._floats(piece * self.ranks)
        real = piece * self.ranks * FLOAT_BYTES
        return real, lambda: self._dist.all_gather_into_tensor(whole, mine)

    def _all(self, size: int) -> tuple[int, Callable[[], Any]]:
        many = max(1, size // FLOAT_BYTES // self.ranks) * self.ranks
        sent, received = self._floats(many), self._floats(many)
        return many * FLOAT_BYTES, lambda: self._dist.all_to_all_single(received, sent)

    def halve(self) -> tuple[Weak, ...]:
        """If an all-reduce over all is slow beside that of pairs: which nodes, which links?"""
        hosts = tuple(range(len(self._share.nodes)))
        if len(hosts) < 3 or not self._share.halve:
            return ()
        size = min(self._share.bytes_max, HALVING_BYTES[bool(self._share.gpus)])
        pairs = tuple((host, host + 1) for host in hosts[: 2 * PAIRS_MAX : 2] if host + 1 in hosts)
        whole = self._rates((hosts,), size)[0]
        among = sorted(self._rates(pairs, size))
        usual = among[len(among) // 2] if len(among) > 2 else among[-1]
        if usual < SLOW_FACTOR * whole:
            return ()
        seen = {hosts: whole}

        def measure(groups: tuple[Hosts, ...]) -> list[bool]:
            if self._agreed(self._until - time.monotonic(), least=True) < 0:
                raise TimeoutError
            rates = self._rates(groups, size)
            seen.update(zip(groups, rates, strict=True))
            return [usual > SLOW_FACTOR * rate for rate in rates]

        try:
            found = locate(hosts, measure)
        except TimeoutError:
            self.notes.append("no time left to find out which host makes all-reduce slow")
            return ()
        weak, notes = conclusions(self._share.nodes, found, seen, usual)
        self.notes += notes
        return weak

    def _rates(self, groups: tuple[Hosts, ...], size: int) -> list[float]:
        """Bus bandwidth of each in MB/s; they are measured at the same time."""
        begins = [sum(self._share.ranks_of[:host]) for host in range(len(self._share.nodes))]
        mine, rate = None, 0.0
        for number, hosts in enumerate(groups):
            ranks = tuple(
                begins[host] + one for host in hosts for one in range(self._share.ranks_of[host])
            )
            if ranks not in self._groups:
                self._groups[ranks] = self._dist.new_group(list(ranks))
            if self.rank in ranks:
                mine = number, ranks
        self._dist.barrier()
        if mine is not None:
            number, ranks = mine
            group = self._groups[ranks]
            _, act = self._reduce(size, group)
            took = self._timed(act, group)
            rate = size / 1e6 / took * factor("all-reduce", len(ranks))
        told = self._torch.zeros(len(groups), dtype=self._torch.float64, device=self._device)
        if mine is not None:
            told[mine[0]] = rate
        self._dist.all_reduce(told, op=self._dist.ReduceOp.MAX)
        return [float(one) for one in told.tolist()]


def conclusions(
    nodes: tuple[str, ...], found: Located, seen: dict[Hosts, float], usual: float
) -> tuple[tuple[Weak, ...], list[str]]:
    """In words. `seen`: the bus bandwidth of each set that was measured."""
    whole = seen[tuple(range(len(nodes)))]
    slower = usual / max(whole, 1e-9)
    weak, notes = [], []
    begin = f"all-reduce over all {len(nodes)} is {slower:.0f} times slower than"
    for host in found.nodes:
        without = max((group for group in seen if host not in group), key=lambda one: seen[one])
        over = "the half" if len(without) >= len(nodes) // 2 else f"{len(without)}"
        notes.append(f"{begin} over {over} without {nodes[host]}: {nodes[host]}")
        rate = min(seen[group] for group in seen if host in group and len(group) == 2)
        weak.append(Weak(node=nodes[host], mbs=round(rate), usual_mbs=round(usual), why=notes[-1]))
    for one, two in found.pairs:
        notes.append(
            f"{begin} without {nodes[one]} or {nodes[two]}: the link between {nodes[one]} and "
            f"{nodes[two]}"
        )
        rate = seen.get((one, two), whole)
        weak.append(
            Weak(
                node=nodes[one],
                peer=nodes[two],
                mbs=round(rate),
                usual_mbs=round(usual),
                why=notes[-1],
            )
        )
    for left, right in found.between:
        ends = [f"{nodes[side[0]]} to {nodes[side[-1]]}" for side in (left, right)]
        notes.append(f"{begin} in parts: the network between {ends[0]} and {ends[1]}")
    return tuple(weak)[:256], [note[:NOTE_MAX] for note in notes]


def main() -> None:
    share = msgspec.json.decode(sys.argv[1], type=Share)
    if share.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = share.gpus[0]
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    rank = Rank(share, torch)
    rows: list[Collective] = []
    weak: tuple[Weak, ...] = ()
    try:
        rank.meet()
        rows = rank.measure()
        rank.say(rows)
        weak = rank.halve()
    except Exception as error:  # torch has an exception for each trouble
        text = str(error).strip().partition("\n")[0]
        rank.notes.append(f"collectives: {type(error).__name__}: {text}"[:NOTE_MAX])
    rank.say(rows, weak)
    os._exit(0)  # the process groups' threads may wait for hosts that are gone


# Locates bad nodes and links with collectives, in about 2 log2(n) rounds instead of n.
#
# A collective is as slow as its slowest member. So if one over a set of hosts is slow, both halves
# are measured at the same time: a slow half holds a bad host; if neither is slow, the link between
# a host of the one and a host of the other is bad, or the whole way between the halves is.


Hosts = tuple[int, ...]
# Measures disjoint sets of hosts at the same time, and says of each whether it was slow.
Measure = Callable[[tuple[Hosts, ...]], Sequence[bool]]
Search = Generator[tuple[Hosts, ...], tuple[bool, ...], None]


class Located(NamedTuple):
    """`between`: slow only together, without a single pair to blame."""

    nodes: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    between: tuple[tuple[Hosts, Hosts], ...] = ()
    rounds: int = 0


def locate(hosts: Iterable[int], measure: Measure) -> Located:
    """`hosts`: known to be slow together. Every asked set has two hosts or more."""
    return _Halving(tuple(hosts)).run(measure)


class _Halving:
    def __init__(self, hosts: Hosts) -> None:
        self._all = hosts
        self._well: dict[int, None] = {}  # hosts of sets that were not slow
        self._bad: dict[int, None] = {}
        self._pairs: dict[tuple[int, int], None] = {}
        self._between: list[tuple[Hosts, Hosts]] = []
        self._searches: list[Search] = [self._halve(hosts)]

    def run(self, measure: Measure) -> Located:
        """All searches go on at the same time, as far as they measure different hosts."""
        waiting = self._advance([(search, None) for search in self._take()])
        rounds = 0
        while waiting:
            now, later, taken = [], [], set[int]()
            for search, asked in waiting:
                members = {host for group in asked for host in group}
                if members & taken:
                    later.append((search, asked))
                else:
                    now.append((search, asked))
                    taken |= members
            groups = tuple(group for _, asked in now for group in asked)
            slow = tuple(measure(groups))
            rounds += 1
            for group, was_slow in zip(groups, slow, strict=True):
                if not was_slow:
                    self._well.update(dict.fromkeys(group))
            answered, at = [], 0
            for search, asked in now:
                answered.append((search, slow[at : at + len(asked)]))
                at += len(asked)
            waiting = later + self._advance([*answered, *((one, None) for one in self._take())])
        return Located(
            tuple(sorted(self._bad)), tuple(sorted(self._pairs)), tuple(self._between), rounds
        )

    def _take(self) -> list[Search]:
        taken, self._searches = self._searches, []
        return taken

    def _advance(
        self, answered: Sequence[tuple[Search, tuple[bool, ...] | None]]
    ) -> list[tuple[Search, tuple[Hosts, ...]]]:
        """Each with its answer, until it asks again; and searches that begin because of them."""
        asking = []
        for search, answer in answered:
            try:
                asked = next(search) if answer is None else search.send(answer)
                asking.append((search, asked))
            except StopIteration:
                pass
        while new := self._take():
            asking += self._advance([(search, None) for search in new])
        return asking

    def _halve(self, hosts: Hosts) -> Search:
        """`hosts` are slow together."""
        if len(hosts) == 2:
            yield from self._which_of_two(hosts[0], hosts[1])
            return
        middle = (len(hosts) + 1) // 2
        left, right = hosts[:middle], hosts[middle:]
        if len(right) == 1:
            yield from self._odd(left, right[0])
            return
        slow_left, slow_right = yield left, right
        for half, slow in ((left, slow_left), (right, slow_right)):
            if slow:
                self._searches.append(self._halve(half))
        if not slow_left and not slow_right:
            self._searches.append(self._across(left, right))

    def _odd(self, two: Hosts, third: int) -> Search:
        """Three hosts: one half is a single host, which needs a partner."""
        (slow,) = yield (two,)
        if slow:
            self._searches.append(self._halve(two))
        yield from self._with_partner(third, avoid=two)
        if third not in self._bad and not slow:
            self._searches.append(self._across(two, (third,)))

    def _which_of_two(self, one: int, two: int) -> Search:
        """Each with a partner that is well; if both are well then, the link between them is bad."""
        for host in (one, two):
            yield from self._with_partner(host, avoid=(one, two))
        if one not in self._bad and two not in self._bad:
            self._pairs[min(one, two), max(one, two)] = None

    def _with_partner(self, host: int, avoid: Hosts) -> Search:
        """A second partner, because the link to the first may be the bad one."""
        asked: list[int] = []
        while len(asked) < 2:
            choice = [
                *(one for one in self._well if one not in self._bad),
                *(one for one in self._all if one not in self._well and one not in self._bad),
            ]
            partner = next((one for one in choice if one not in (*avoid, host, *asked)), None)
            if partner is None:
                break
            (slow,) = yield ((host, partner),)
            if not slow:
                return
            asked.append(partner)
        if asked and host not in self._well:
            self._bad[host] = None

    def _across(self, left: Hosts, right: Hosts) -> Search:
        """Slow together, and neither alone: narrows both sides at the same time."""
        while len(left) > 1 or len(right) > 1:
            halves = [
                (side[: (len(side) + 1) // 2], side[(len(side) + 1) // 2 :])
                for side in (left, right)
            ]
            (a, b), (c, d) = halves
            found: list[tuple[Hosts, Hosts]] = []
            for crossing in (((a, c), (b, d)), ((a, d), (b, c))):
                asked = [(one, two) for one, two in crossing if one and two]
                if not asked:
                    continue
                slow = yield tuple(one + two for one, two in asked)
                found += [pair for pair, was in zip(asked, slow, strict=True) if was]
                if found:
                    break
            if len(found) != 1:  # none alone, or several: the way between the halves
                self._between.append((left, right))
                return
            left, right = found[0]
        self._pairs[min(left[0], right[0]), max(left[0], right[0])] = None


if __name__ == "__main__":
    main()
