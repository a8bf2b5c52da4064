/*
 * Tracepoints as counters of perf. Their numbers stand in tracefs, which need not be mounted: where
 * it is not, this process makes a mount of it that is attached nowhere, so that nobody else sees it
 * and nothing is left of it.
 */
#include "waits_trace.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/perf_event.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Of linux/mount.h, which older libcs do not bring along with sys/mount.h. */
#define FSCONFIG_CREATE 6
#define CLOSE_ON_EXEC 1 /* FSOPEN_CLOEXEC and FSMOUNT_CLOEXEC */
#ifndef SYS_fsopen
#define SYS_fsopen 430
#define SYS_fsconfig 431
#define SYS_fsmount 432
#endif

static const char *const EVENTS[RL_TRACES] = {
    [RL_TRACE_TIMER_STARTS] = "events/timer/hrtimer_start/id",
    [RL_TRACE_TIMER_INTERRUPTS] = "events/irq_vectors/local_timer_entry/id",
    [RL_TRACE_SWITCHES] = "events/sched/sched_switch/id",
};
/* While the thread sleeps its timer interrupts the idle task. If another program runs there, that
 * one's own timers cannot be told from ours: its interrupts are strays, and counted apart. */
#define WHILE_IDLE "common_pid == 0"
#define ALWAYS "common_pid >= 0"

static int detached_tracefs(void)
{
    int context = (int)syscall(SYS_fsopen, "tracefs", CLOSE_ON_EXEC);
    if (context < 0)
        return -errno;
    int result = syscall(SYS_fsconfig, context, FSCONFIG_CREATE, NULL, NULL, 0) ? -errno : 0;
    if (result == 0) {
        result = (int)syscall(SYS_fsmount, context, CLOSE_ON_EXEC, 0);
        result = result < 0 ? -errno : result;
    }
    close(context);
    return result;
}

/* A descriptor of tracefs' root, or a negative errno. */
static int open_tracefs(void)
{
    static const char *const MOUNTS[] = {"/sys/kernel/tracing", "/sys/kernel/debug/tracing"};
    int refused = 0;
    for (size_t i = 0; i < sizeof MOUNTS / sizeof *MOUNTS; i++) {
        int fd = open(MOUNTS[i], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd >= 0 && faccessat(fd, "events", R_OK | X_OK, AT_EACCESS) == 0)
            return fd;
        if (fd < 0 && errno == EACCES)
            refused = -EACCES;
        if (fd >= 0)
            close(fd);
    }
    int fd = detached_tracefs();
    return fd < 0 && refused ? refused : fd;
}

static int64_t event_number(int tracefs, const char *path)
{
    char text[32];
    int fd = openat(tracefs, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    ssize_t n = read(fd, text, sizeof text - 1);
    int64_t result = n < 0 ? -errno : 0;
    close(fd);
    if (n <= 0)
        return result;
    text[n] = 0;
    return strtoll(text, NULL, 10);
}

/* Of the calling thread, or, with a filter, of whatever runs on one CPU and passes it. */
static int open_counter(uint64_t number, int cpu, const char *filter)
{
    struct perf_event_attr attributes = {
        .type = PERF_TYPE_TRACEPOINT, .size = sizeof attributes, .config = number, .disabled = 1,
    };
    int fd = (int)syscall(SYS_perf_event_open, &attributes, filter ? -1 : 0, filter ? cpu : -1, -1,
                          PERF_FLAG_FD_CLOEXEC);
    if (fd < 0)
        return -errno;
    if (filter && ioctl(fd, PERF_EVENT_IOC_SET_FILTER, filter)) {
        int error = -errno;
        close(fd);
        return error;
    }
    return fd;
}

static int open_event(struct trace *t, int trace, int tracefs, int cpu)
{
    t->step[trace] = RL_TRACE_TRACEFS;
    if (tracefs < 0)
        return tracefs;
    t->step[trace] = RL_TRACE_EVENT;
    int64_t number = event_number(tracefs, EVENTS[trace]);
    if (number < 0)
        return (int)number;
    t->step[trace] = RL_TRACE_PERF;
    if (trace == RL_TRACE_TIMER_INTERRUPTS) {
        t->idle_fd = open_counter((uint64_t)number, cpu, WHILE_IDLE);
        t->cpu_fd = open_counter((uint64_t)number, cpu, ALWAYS);
        if (t->idle_fd < 0 || t->cpu_fd < 0)
            return t->idle_fd < 0 ? t->idle_fd : t->cpu_fd;
    }
    return open_counter((uint64_t)number, cpu, NULL);
}

/* For the calling thread; whatever cannot be counted says so and is left out. */
void trace_open(struct trace *t, int cpu)
{
    int tracefs = open_tracefs();
    t->idle_fd = t->cpu_fd = -1;
    for (int i = 0; i < RL_TRACES; i++) {
        int result = open_event(t, i, tracefs, cpu);
        t->fd[i] = result < 0 ? -1 : result;
        t->error[i] = result < 0 ? result : 0;
    }
    if (tracefs >= 0)
        close(tracefs);
}

static pthread_mutex_t hold_lock = PTHREAD_MUTEX_INITIALIZER;
static struct trace held;
static int holders;

void rl_trace_hold(void)
{
    pthread_mutex_lock(&hold_lock);
    if (!holders++)
        trace_open(&held, 0); /* never started: it counts nothing and costs next to nothing */
    pthread_mutex_unlock(&hold_lock);
}

void rl_trace_release(void)
{
    pthread_mutex_lock(&hold_lock);
    if (!--holders)
        trace_close(&held);
    pthread_mutex_unlock(&hold_lock);
}

static void start(int fd)
{
    if (fd < 0)
        return;
    ioctl(fd, PERF_EVENT_IOC_RESET, 0);
    ioctl(fd, PERF_EVENT_IOC_ENABLE, 0);
}

static int64_t stop(int fd)
{
    int64_t count = 0;
    if (fd < 0)
        return 0;
    ioctl(fd, PERF_EVENT_IOC_DISABLE, 0);
    return read(fd, &count, sizeof count) == sizeof count ? count : 0;
}

void trace_start(const struct trace *t)
{
    start(t->cpu_fd);
    start(t->idle_fd);
    for (int i = 0; i < RL_TRACES; i++)
        start(t->fd[i]);
}

/* The events since trace_start; strays: timer interrupts that hit others than thread and idle. */
void trace_stop(const struct trace *t, int64_t counts[RL_TRACES], int64_t *strays)
{
    for (int i = 0; i < RL_TRACES; i++)
        counts[i] = stop(t->fd[i]);
    counts[RL_TRACE_TIMER_INTERRUPTS] += stop(t->idle_fd);
    *strays = stop(t->cpu_fd) - counts[RL_TRACE_TIMER_INTERRUPTS];
}

static void close_counter(int fd)
{
    if (fd >= 0)
        close(fd);
}

void trace_close(struct trace *t)
{
    close_counter(t->cpu_fd);
    close_counter(t->idle_fd);
    for (int i = 0; i < RL_TRACES; i++)
        close_counter(t->fd[i]);
}
