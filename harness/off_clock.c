/* A wall clock that is off by $CLOCK_OFF_S seconds, for a process that preloads this. The other
   clocks, and sleeping, are left alone: libfaketime breaks the sleep of newer Pythons. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long off(void) {
    const char *text = getenv("CLOCK_OFF_S");
    return text ? atol(text) : 0;
}

int clock_gettime(clockid_t which, struct timespec *out) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(which, out);
    if (!code && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) out->tv_sec += off();
    return code;
}

int gettimeofday(struct timeval *out, void *zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int code = real(out, zone);
    if (!code) out->tv_sec += off();
    return code;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
