"""Threads that share a client may get their first answers at the same moment."""

from __future__ import annotations

import subprocess
import sys

# msgspec learns a type when it is first used, and crashed when several threads did that at once.
SCRIPT = """
import sys, threading
from shoal.client import caller
from shoal.calls.histories import EventsView

sys.setswitchinterval(1e-6)
together = threading.Barrier(8)

def decode():
    together.wait()
    caller._decoder(EventsView).decode(b'{"events":[],"next_after":0}')

threads = [threading.Thread(target=decode) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_first_answers_in_several_threads_do_not_crash() -> None:
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
