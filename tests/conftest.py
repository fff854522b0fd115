"""What holds for every test."""

from __future__ import annotations

import signal

# A shell starts what it puts into the background with interrupts ignored, and children inherit
# that: the tests that press Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
