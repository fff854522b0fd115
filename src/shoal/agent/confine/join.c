/* join [=FOLDER] ENTRANCE... -- PROGRAM [WORD...]
 *
 * Joins the groups whose `cgroup.procs` are given, asks for SIGKILL when the agent dies, and becomes
 * the program, which has to be a path. With =FOLDER it leads a new session, in that folder, without
 * signals that the agent ignores and without files but its streams. A shell and setpriv did the same
 * for 15 times the processor time, before every member. It needs no C library, so that it starts at
 * once and is built for other machines by any compiler: `make join`.
 *
 * join + STEP... -- PROGRAM WORD...
 *
 * For a program of a tenant: the steps, which launcher.py names and orders, give it mounts of its own
 * and take every right from it.
 */
#include <asm/unistd.h>

#define O_WRONLY 1
#if defined(__aarch64__)
#define O_DIRECTORY 040000
#define O_NOFOLLOW 0100000
#else
#define O_DIRECTORY 0200000
#define O_NOFOLLOW 0400000
#endif
#define O_PATH 010000000
#define O_CLOEXEC 02000000 /* nothing opened here outlives it, even without close_range */
#define AT_FDCWD -100
#define PR_SET_PDEATHSIG 1
#define SIGKILL 9
#define SIGPIPE 13
#define SIGXFSZ 25
#define CANCEL 32 /* two signals of the C library: what its posix_spawn starts ignores them */
#define SET_USER 33
#define SIGINT 2
#define PR_SET_NO_NEW_PRIVS 38
#define KEYCTL_JOIN_SESSION_KEYRING 1
#define RLIMIT_CORE 4
#define RLIMIT_NOFILE 7
#define TIOCSCTTY 0x540E
#define CLONE_NEWNS 0x00020000
#define MS_RDONLY 1
#define MS_NOSUID 2
#define MS_NODEV 4
#define MS_REMOUNT 32
#define MS_BIND 4096
#define MS_REC 16384
#define MS_SLAVE (1 << 19)
#define AT_RECURSIVE 0x8000
#define COVER "mode=755,size=1m,nr_inodes=4k"
#define SOURCES_MAX 1024
#define ENOENT 2
#define ENOEXEC 8
#define CANNOT_JOIN 126
#define CANNOT_START 126
#define NOT_THERE 127

/* A test compares this with the source, so that no built file is older than it. */
__attribute__((used)) static const char source[] = "source " SOURCE;

#if defined(__aarch64__)
__asm__(".globl _start\n_start: mov x0, sp\n  b begin\n");
static long call5(long number, long a, long b, long c, long d, long e)
{
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c, x3 __asm__("x3") = d, x4 __asm__("x4") = e;
    __asm__ volatile("svc 0"
                     : "+r"(x0)
                     : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
                     : "memory");
    return x0;
}
#elif defined(__x86_64__)
__asm__(".globl _start\n_start: mov %rsp, %rdi\n  call begin\n");
static long call5(long number, long a, long b, long c, long d, long e)
{
    long result;
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
                     : "rcx", "r11", "memory");
    return result;
}
#endif

static long call(long number, long a, long b, long c, long d)
{
    return call5(number, a, b, c, d, 0);
}

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

static void default_action(int signal)
{
    unsigned long action[4] = {0, 0, 0, 0};
    call(__NR_rt_sigaction, signal, (long)action, 0, 8);
}

static void lead(const char *folder)
{
    call(__NR_setsid, 0, 0, 0, 0);
    call(__NR_close_range, 3, ~0U, 0, 0);
    default_action(SIGPIPE);
    default_action(SIGXFSZ);
    if (call(__NR_chdir, (long)folder, 0, 0, 0) < 0)
        fail("shoal: cannot enter ", folder, CANNOT_START);
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

/* What keeps a tenant's program in. */

/* As the C library would say it. */
static const char *reason(long error)
{
    switch (error) {
    case -1:
        return "Operation not permitted";
    case -2:
        return "No such file or directory";
    case -13:
        return "Permission denied";
    case -20:
        return "Not a directory";
    case -28:
        return "No space left on device";
    case -38:
        return "this kernel is too old";
    case -40:
        return "Too many levels of symbolic links";
    default:
        return "the kernel refuses it";
    }
}

static long must(long result, const char *what, const char *which)
{
    if (result < 0) {
        say(what);
        say(which);
        fail(": ", reason(result), CANNOT_START);
    }
    return result;
}

static long number(const char *digits)
{
    long value = 0;
    while (*digits)
        value = 10 * value + (*digits++ - '0');
    return value;
}

/* The path of an open file: what is mounted cannot be exchanged for a link meanwhile. */
static char *name(char *place, long file)
{
    static const char folder[] = "/proc/self/fd/";
    char digits[8], *end = place;
    int count = 0;
    for (const char *at = folder; *at;)
        *end++ = *at++;
    do
        digits[count++] = '0' + file % 10;
    while (file /= 10);
    while (count)
        *end++ = digits[--count];
    *end = 0;
    return place;
}

static void mount(const char *from, const char *to, const char *kind, long flags, const char *data)
{
    must(call5(__NR_mount, (long)from, (long)to, (long)kind, flags, (long)data),
         "shoal: cannot mount ", to);
}

static long opened(const char *path)
{
    return must(call(__NR_openat, AT_FDCWD, (long)path, O_PATH | O_NOFOLLOW | O_CLOEXEC, 0),
                "shoal: cannot open ", path);
}

/* A folder, made with those around it. No link is followed: a member that runs already may have put
 * one there. */
static long made(char *path)
{
    long here = opened("/");
    for (char *at = path + 1, *part = at;; at++) {
        if (*at && *at != '/')
            continue;
        char end = *at;
        *at = 0;
        if (at > part) {
            call(__NR_mkdirat, here, (long)part, 0755, 0);
            long inner = call(__NR_openat, here, (long)part,
                              O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
            must(inner, "shoal: cannot make ", path);
            call(__NR_close, here, 0, 0, 0);
            here = inner;
        }
        *at = end;
        if (!end)
            return here;
        part = at + 1;
    }
}

/* `source` appears at `path`; `file`: it is one, such as a device. */
static void show(long source, char *path, long flags, int file)
{
    char from[32], to[32];
    long target = file ? opened(path) : made(path);
    mount(name(from, source), name(to, target), 0, MS_BIND, 0);
    mount(0, path, 0, MS_REMOUNT | MS_BIND | MS_NOSUID | flags | (file ? 0 : MS_NODEV), 0);
    call(__NR_close, target, 0, 0, 0);
}

/* Not through a link, which a member that runs already may have put into its /tmp. */
static void cover(const char *path, long flags)
{
    char to[32];
    long target = opened(path);
    mount("shoal", name(to, target), "tmpfs", flags, COVER);
    call(__NR_close, target, 0, 0, 0);
}

static void hold(const char *volume)
{
    unsigned long attributes[4] = {MS_RDONLY, 0, 0, 0};
    mount(volume, volume, 0, MS_BIND | MS_REC, 0);
    must(call5(__NR_mount_setattr, AT_FDCWD, (long)volume, AT_RECURSIVE, (long)attributes,
               sizeof attributes),
         "shoal: a volume cannot be kept read-only on this node: ", volume);
}

static void limit(int which, unsigned long most)
{
    unsigned long limits[2];
    must(call(__NR_prlimit64, 0, which, 0, (long)limits), "shoal: no limits", "");
    limits[0] = most < limits[0] ? most : limits[0];
    limits[1] = most;
    must(call(__NR_prlimit64, 0, which, (long)limits, 0), "shoal: cannot set its limits", "");
}

/* Bounded, alone in its keyring, and without any right that its user does not have. */
static void drop(const char *user, const char *files, const char *agent, const char *terminal,
                 const char *folder)
{
    long uid = number(user);
    call(__NR_setsid, 0, 0, 0, 0);
    if (terminal[0])
        must(call(__NR_ioctl, 0, TIOCSCTTY, 0, 0), "shoal: no terminal", "");
    call(__NR_close_range, 3, ~0U, 0, 0);
    limit(RLIMIT_NOFILE, number(files));
    limit(RLIMIT_CORE, 0);
    call(__NR_umask, 077, 0, 0, 0);
    call(__NR_keyctl, KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0);
    must(call(__NR_setgroups, 0, 0, 0, 0), "shoal: cannot leave its groups", "");
    must(call(__NR_setresgid, uid, uid, uid, 0), "shoal: cannot become group ", user);
    must(call(__NR_setresuid, uid, uid, uid, 0), "shoal: cannot become user ", user);
    must(call(__NR_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0), "shoal: no_new_privs", "");
    must(call(__NR_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0), "shoal: parent death signal", "");
    if (call(__NR_getppid, 0, 0, 0, 0) != number(agent))
        fail("shoal: its agent is gone", "", CANNOT_START);
    default_action(SIGINT);
    default_action(SIGPIPE);
    default_action(SIGXFSZ);
    if (call(__NR_chdir, (long)folder, 0, 0, 0) < 0) {
        say("shoal: the tenant's user ");
        say(user);
        fail(" cannot enter ", folder, CANNOT_START);
    }
}

static void separate(void)
{
    must(call(__NR_unshare, CLONE_NEWNS, 0, 0, 0), "shoal: no mount namespace", "");
    mount(0, "/", 0, MS_REC | MS_SLAVE, 0);
}

/* Returns where the steps end. */
static char **confine(char **words)
{
    long sources[SOURCES_MAX], opens = 0;
    const long held = MS_NOSUID | MS_NODEV;
    char from[32];
    for (; *words && !ends(*words); words++)
        switch (words[0][0]) {
        case 'j':
            join(*++words);
            break;
        case 's':
            separate();
            break;
        case 'o':
            if (opens == SOURCES_MAX)
                fail("shoal: too many folders", "", CANNOT_START);
            sources[opens++] = opened(*++words);
            break;
        case 'p': /* a place of its own, as /tmp */
            mount(name(from, sources[number(words[1])]), words[2], 0, MS_BIND, 0);
            mount(0, words[2], 0, MS_REMOUNT | MS_BIND | held, 0);
            words += 2;
            break;
        case 'c': /* an empty folder in memory over another */
            cover(*++words, held);
            break;
        case 'k': /* nothing is added to it any more */
            mount(0, *++words, 0, MS_REMOUNT | MS_RDONLY | held, COVER);
            break;
        case 'w':
        case 'r':
            show(sources[number(words[1])], words[2], words[0][0] == 'r' ? MS_RDONLY : 0, 0);
            words += 2;
            break;
        case 'f':
            show(sources[number(words[1])], words[2], 0, 1);
            words += 2;
            break;
        case 'v':
            hold(*++words);
            break;
        case 'u':
            drop(words[1], words[2], words[3], words[4], words[5]);
            words += 5;
            break;
        default:
            fail("shoal: an unknown step: ", words[0], CANNOT_START);
        }
    return words;
}

__attribute__((noreturn)) static void become(char *program, char **words, char **environment)
{
    long error = call(__NR_execve, (long)program, (long)words, (long)environment, 0);
    if (error == -ENOEXEC) { /* a script without a first line that says so is one of the shell */
        words[0] = program;
        words[-1] = "/bin/sh"; /* in the place of the word before */
        call(__NR_execve, (long)words[-1], (long)(words - 1), (long)environment, 0);
    }
    fail("shoal: cannot start ", program, error == -ENOENT ? NOT_THERE : CANNOT_START);
}

__attribute__((noreturn, used)) void begin(long *stack)
{
    long count = stack[0], at = 1, apart = 0;
    char **words = (char **)(stack + 1), **environment = words + count + 1;
    default_action(CANCEL);
    default_action(SET_USER);
    if (at < count && words[at][0] == '+' && !words[at][1]) {
        at = confine(words + 2) - words;
        apart = 1; /* its first word is not its path */
    } else if (at < count && words[at][0] == '=') {
        lead(words[at++] + 1);
    }
    while (at < count && !ends(words[at]))
        join(words[at++]);
    if (at + 1 + apart >= count)
        fail("shoal: name a program after --", "", NOT_THERE);
    call(__NR_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0);
    become(words[at + 1], words + at + 1 + apart, environment);
}
