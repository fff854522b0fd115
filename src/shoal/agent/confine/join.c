/* join ENTRANCE... -- PROGRAM [WORD...]
 *
 * Joins the groups whose `cgroup.procs` are given, asks for SIGKILL when the agent dies, and becomes
 * the program, which has to be a path. A shell and setpriv did the same for 15 times the processor
 * time, before every member. It needs no C library, so that it starts at once and is built for other
 * machines by any compiler: `make join`.
 */
#include <asm/unistd.h>

#define O_WRONLY 1
#define AT_FDCWD -100
#define PR_SET_PDEATHSIG 1
#define SIGKILL 9
#define ENOENT 2
#define ENOEXEC 8
#define CANNOT_JOIN 126
#define CANNOT_START 126
#define NOT_THERE 127

/* A test compares this with the source, so that no built file is older than it. */
__attribute__((used)) static const char source[] = "source " SOURCE;

#if defined(__aarch64__)
__asm__(".globl _start\n_start: mov x0, sp\n  b begin\n");
static long call(long number, long a, long b, long c, long d)
{
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c, x3 __asm__("x3") = d;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
    return x0;
}
#elif defined(__x86_64__)
__asm__(".globl _start\n_start: mov %rsp, %rdi\n  call begin\n");
static long call(long number, long a, long b, long c, long d)
{
    long result;
    register long r10 __asm__("r10") = d;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10)
                     : "rcx", "r11", "memory");
    return result;
}
#endif

static void say(const char *text)
{
    long length = 0;
    while (text[length])
        length++;
    call(__NR_write, 2, (long)text, length, 0);
}

__attribute__((noreturn)) static void fail(const char *what, const char *which, int code)
{
    say(what);
    say(which);
    say("\n");
    for (;;)
        call(__NR_exit_group, code, 0, 0, 0);
}

static int ends(const char *word)
{
    return word[0] == '-' && word[1] == '-' && !word[2];
}

static void join(const char *entrance)
{
    long file = call(__NR_openat, AT_FDCWD, (long)entrance, O_WRONLY, 0);
    if (file < 0 || call(__NR_write, file, (long)"0", 1, 0) != 1)
        fail("shoal: cannot join ", entrance, CANNOT_JOIN);
    call(__NR_close, file, 0, 0, 0);
}

__attribute__((noreturn, used)) void begin(long *stack)
{
    long count = stack[0], at = 1;
    char **words = (char **)(stack + 1), **environment = words + count + 1;
    while (at < count && !ends(words[at]))
        join(words[at++]);
    if (at + 1 >= count)
        fail("shoal: name a program after --", "", NOT_THERE);
    call(__NR_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0);
    long error = call(__NR_execve, (long)words[at + 1], (long)(words + at + 1), (long)environment, 0);
    if (error == -ENOEXEC) { /* a script without a first line that says so is one of the shell */
        words[at] = "/bin/sh";
        call(__NR_execve, (long)words[at], (long)(words + at), (long)environment, 0);
    }
    fail("shoal: cannot start ", words[at + 1], error == -ENOENT ? NOT_THERE : CANNOT_START);
}
