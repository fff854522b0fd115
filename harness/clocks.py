"""A clock that can be set while processes run: a library that is loaded before the C library adds
the seconds in a file to the time of day, and leaves the monotonic clock alone. So does libfaketime,
but Python's time.sleep fails under its version 0.9.10 on arm64. Needs a C compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

FILE = "SHOAL_TEST_CLOCK"
SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset(void) {
    char text[32] = {0};
    const char *name = getenv("SHOAL_TEST_CLOCK");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return 0;
    long got = read(file, text, sizeof text - 1);
    close(file);
    return got > 0 ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, at);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        at->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    int failed = clock_gettime(CLOCK_REALTIME, &now);
    (void)zone;
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


def missing() -> str:
    """Why no clock can be set here; empty if one can."""
    return "" if shutil.which("cc") else "there is no C compiler: apt-get install gcc"


class SteppedClock:
    """`environment()` is for the processes whose clock it is."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = folder / f"{name}.clock"
        self._library = folder / "clock.so"
        self.set_by(0)
        if not self._library.exists():
            source = folder / "clock.c"
            source.write_text(SOURCE)
            argv = ["cc", "-shared", "-fPIC", "-O2", "-o", str(self._library), str(source), "-ldl"]
            subprocess.run(argv, check=True)

    def set_by(self, seconds: int) -> None:
        """From now on, the time is this much later than the machine's."""
        new = self._file.with_suffix(".new")
        new.write_text(str(seconds))
        os.replace(new, self._file)

    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), FILE: str(self._file)}
