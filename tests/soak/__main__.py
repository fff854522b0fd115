"""`make soak`: hurt a whole cluster for some minutes, then see whether it has kept its word.

SOAK_MINUTES=30 SOAK_SEED=1 python -m tests.soak [--heads 2] [--only WORDS]

The seed decides which faults come when. Each is printed with its time, so that a run can be
repeated. The last line is JSON. Needs root, iproute2, PostgreSQL and a C compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import time
import traceback

import msgspec
from harness.hosts import missing

from tests.soak.faults import Fault, all_faults
from tests.soak.verify import FOUND_MAX, Span, Verdict, after_close, calm, finish, leftovers, verify
from tests.soak.work import Work
from tests.soak.world import World

BETWEEN_S = (1.0, 6.0)
TOGETHER = 0.25  # of the faults that begin while another lasts
OPERATOR_S = 40.0
RECOVER_S = 12.0  # now and then without faults, so that whatever waits gets on


class Soak:
    def __init__(self, seed: int, heads: int, only: str) -> None:
        self.began = time.monotonic()
        self.dice = random.Random(seed)
        self.world = World(heads, self.say)
        self.only = only
        self.spans: list[Span] = []
        self.troubles: list[str] = []

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:7.1f} s  {text}", flush=True)

    def hurt(self, seconds: float) -> None:
        """Faults in turn, some of them together, until the time is over."""
        makers = [make for make in all_faults(self.world) if self._wanted(make)]
        deadline, deck = time.monotonic() + seconds, list[int]()
        while time.monotonic() < deadline:
            faults = []
            for _ in range(2 if self.dice.random() < TOGETHER else 1):
                if not deck:
                    deck = self.dice.sample(range(len(makers)), len(makers))
                faults.append(makers[deck.pop()](self.dice))
            self._together(faults)
            quiet = RECOVER_S if self.dice.random() < 0.2 else self.dice.uniform(*BETWEEN_S)
            time.sleep(min(quiet, max(0.0, deadline - time.monotonic())))

    def _wanted(self, make: object) -> bool:
        return self.only in make(random.Random(0)).name  # type: ignore[operator]

    def _together(self, faults: list[Fault]) -> None:
        if len({name for one in faults for name in one.hurts}) < len(faults):
            faults = faults[:1]  # two faults of one host would undo each other
        begun: list[tuple[Fault, float]] = []
        try:
            for fault in faults:
                self.say(fault.name)
                begun.append((fault, time.time()))
                self._do(fault.begin, fault.name)
                time.sleep(self.dice.uniform(*fault.last_s) / len(faults))
        finally:  # Ctrl-C, too
            for fault, _ in reversed(begun):
                self._do(fault.end, f"end of {fault.name}")
            for fault, at in begun:
                self._patiently(fault)
                self.spans.append(Span(fault.name, at, time.time(), fault.hurts))
                self.say(f"    over: {fault.name}")

    def _patiently(self, fault: Fault) -> None:
        """What it needs may be on its way up itself, so an operator tries more than once."""
        deadline = time.monotonic() + OPERATOR_S
        while time.monotonic() < deadline:
            try:
                fault.again()
                return
            except Exception as error:
                self.say(f"    not yet: {error}")
            time.sleep(2)
        self._do(fault.again, f"start after {fault.name}")

    def _do(self, act: object, name: str) -> None:
        try:
            act()  # type: ignore[operator]
        except Exception as error:
            text = f"{name}: {error}"
            self.say(f"    FAILED: {text}")
            self.troubles.append(text)

    def down(self, verdict: Verdict) -> None:
        for host in self.world.nodes.values():
            self._do(lambda host=host: self.world.shoal(host, "leave", "--now"), "leave")
        for head in reversed(self.world.heads):
            self._do(lambda head=head: self.world.shoal(head, "down"), "down")
        verdict.add("left running", leftovers(self.world))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--heads", type=int, choices=(1, 2), default=2)
    parser.add_argument("--only", default="", help="faults whose name has these words")
    asked = parser.parse_args()
    minutes = float(os.environ.get("SOAK_MINUTES", "30"))
    seed = int(os.environ.get("SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    if reason := missing():
        print(f"no soak: {reason}")
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background ignores the first
        signal.signal(number, signal.default_int_handler)
    print(f"SOAK_SEED={seed} SOAK_MINUTES={minutes:g}, {asked.heads} heads", flush=True)
    soak, verdict = Soak(seed, asked.heads, asked.only), Verdict()
    interrupted = False
    try:
        soak.world.start()
        soak.say("the cluster is up")
        work = Work(soak.world, seed)
        work.start()
        soak.hurt(minutes * 60)
        soak.say("no more faults")
        calm(soak.world, verdict)
        work.end()
        finish(soak.world, work, verdict)
        verify(soak.world, work, soak.spans, verdict)
        soak.down(verdict)
    except KeyboardInterrupt:
        interrupted = True
    except Exception:
        verdict.add("the soak itself", [traceback.format_exc()])
    finally:
        soak.say("clearing up")
        with contextlib.suppress(KeyboardInterrupt):
            soak.world.close()
    verdict.add("what an operator could not mend", soak.troubles)
    verdict.add("left on the machine", after_close(soak.world))
    return 1 if interrupted else report(seed, minutes, soak, verdict)


def report(seed: int, minutes: float, soak: Soak, verdict: Verdict) -> int:
    for name, count in verdict.counts.items():
        print(f"{count:8d}  {name}")
    for kind, texts in verdict.found.items():
        for text in texts[:FOUND_MAX]:
            print(f"WRONG  {kind}: {text}")
    wrong = {kind: len(texts) for kind, texts in verdict.found.items() if texts}
    figures = {
        "seed": seed,
        "minutes": minutes,
        "heads": len(soak.world.heads),
        "faults": len(soak.spans),
        "counts": verdict.counts,
        "wrong": wrong,
    }
    print(msgspec.json.encode(figures).decode())
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
