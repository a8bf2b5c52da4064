/*
 * Figures of the operating system beside a loop's own counters, and the thread that copies both
 * into a ring of timestamped samples. It knows the engines only as blocks of counters, takes no
 * lock that a loop ever takes, and not the GIL: a busy Python process neither disturbs nor misses
 * a measurement.
 */
#include "sampler.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SWITCHES_EVERY UINT64_C(100000000) /* reading status costs ten times what schedstat does */

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec t;
    if (clock_gettime(clock, &t))
        return 0;
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int open_task(int thread_id, const char *name)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/%s", thread_id, name);
    return open(path, O_RDONLY | O_CLOEXEC);
}

/* ---- one loop ------------------------------------------------------------------------------ */

/* On the loop's own thread, before its first iteration. */
void sampled_attach(struct sampled *s, const char *thread_name)
{
    prctl(PR_SET_NAME, thread_name);
    s->thread_id = (int32_t)syscall(SYS_gettid);
    pthread_getcpuclockid(pthread_self(), &s->cpu_clock);
    s->schedstat_fd = open_task(s->thread_id, "schedstat");
    s->status_fd = open_task(s->thread_id, "status");
}

/* On the loop's own thread, as its last act: the clock is gone when the thread is. */
void sampled_ended(struct sampled *s)
{
    __atomic_store_n(&s->final_cpu_ns, clock_ns(CLOCK_THREAD_CPUTIME_ID), __ATOMIC_RELEASE);
}

bool sampled_has_ended(const struct sampled *s)
{
    return __atomic_load_n(&s->final_cpu_ns, __ATOMIC_ACQUIRE) != 0;
}

/* After the thread has ended. */
void sampled_detach(struct sampled *s)
{
    if (s->schedstat_fd >= 0)
        close(s->schedstat_fd);
    if (s->status_fd >= 0)
        close(s->status_fd);
}

void sampled_copy(const void *counters, uint64_t *to, size_t size)
{
    const uint64_t *from = counters;
    for (size_t i = 0; i < size / sizeof *to; i++)
        to[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
}

static bool read_file(int fd, char *text, size_t size)
{
    ssize_t n = fd < 0 ? -1 : pread(fd, text, size - 1, 0);
    if (n <= 0)
        return false;
    text[n] = 0;
    return true;
}

static void read_schedstat(const struct sampled *s, struct figures *out)
{
    char text[96], *end;
    if (!read_file(s->schedstat_fd, text, sizeof text))
        return; /* the thread is gone, or the kernel has no schedstats: the last figures stay */
    out->run_ns = strtoull(text, &end, 10);
    out->queue_ns = strtoull(end, NULL, 10);
}

static uint64_t field(const char *text, const char *name)
{
    const char *at = strstr(text, name);
    return at ? strtoull(at + strlen(name), NULL, 10) : 0;
}

static void read_switches(const struct sampled *s, struct figures *out)
{
    char text[4096];
    if (!read_file(s->status_fd, text, sizeof text))
        return;
    out->voluntary_switches = field(text, "\nvoluntary_ctxt_switches:");
    out->involuntary_switches = field(text, "\nnonvoluntary_ctxt_switches:");
}

/* ---- samples: all of this under the sampler's lock ----------------------------------------- */

/* The newest sample of one loop. fresh: read the switches now, whatever their age. */
static void *take_sample(struct sampler *all, int index, uint64_t now, bool fresh)
{
    struct sampled *s = all->sampled[index];
    struct figures *last = (struct figures *)(all->last + (size_t)index * all->unit);
    last->t_ns = now;
    last->worker = (uint64_t)index;
    last->process_cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    s->copy(s->of, (uint64_t *)(last + 1));
    uint64_t cpu = __atomic_load_n(&s->final_cpu_ns, __ATOMIC_ACQUIRE);
    if (!cpu)
        cpu = clock_ns(s->cpu_clock); /* 0 when the thread ended meanwhile */
    if (cpu)
        last->thread_cpu_ns = cpu;
    read_schedstat(s, last);
    if (fresh || now - s->switches_at >= SWITCHES_EVERY) {
        read_switches(s, last);
        s->switches_at = now;
    }
    return last;
}

static uint8_t *slot(struct sampler *s, uint64_t number)
{
    return s->ring + number % s->capacity * s->unit;
}

static void keep_samples(struct sampler *s)
{
    uint64_t now = clock_ns(CLOCK_MONOTONIC);
    for (int i = 0; i < s->count; i++) {
        memcpy(slot(s, s->written++), take_sample(s, i, now, false), s->unit);
        if (s->written - s->taken > s->capacity) {
            s->taken++; /* the oldest gives way */
            s->dropped++;
        }
    }
}

static void *sampler_main(void *arg)
{
    struct sampler *s = arg;
    uint64_t due = clock_ns(CLOCK_MONOTONIC);
    prctl(PR_SET_NAME, "rl-sampler");
    pthread_mutex_lock(&s->lock);
    while (!s->closing) {
        if (!s->hz) {
            pthread_cond_wait(&s->tick, &s->lock);
            due = clock_ns(CLOCK_MONOTONIC);
            continue;
        }
        struct timespec limit = {(time_t)(due / 1000000000u), (long)(due % 1000000000u)};
        if (pthread_cond_timedwait(&s->tick, &s->lock, &limit) != ETIMEDOUT || !s->hz)
            continue; /* the rate changed (perhaps as the time came), or it closes */
        keep_samples(s);
        uint64_t now = clock_ns(CLOCK_MONOTONIC);
        due += 1000000000u / (uint64_t)s->hz;
        if (due < now)
            due = now; /* late: go on from here, do not catch up in a burst */
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* ---- its life ------------------------------------------------------------------------------ */

/* Room for count loops whose samples have unit bytes; the caller fills sampled. */
int sampler_init(struct sampler *s, int count, size_t unit, int capacity)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&s->tick, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&s->lock, NULL);
    s->count = count;
    s->unit = unit;
    s->capacity = capacity < count ? (uint64_t)count : (uint64_t)capacity;
    s->sampled = calloc((size_t)count, sizeof *s->sampled);
    s->last = calloc((size_t)count, unit);
    s->ring = calloc(s->capacity, unit);
    return s->sampled && s->last && s->ring ? 0 : -ENOMEM;
}

int sampler_run(struct sampler *s, int hz)
{
    s->hz = hz;
    int result = pthread_create(&s->thread, NULL, sampler_main, s);
    s->running = result == 0;
    return -result;
}

void sampler_close(struct sampler *s)
{
    pthread_mutex_lock(&s->lock);
    s->closing = true;
    pthread_cond_broadcast(&s->tick);
    pthread_mutex_unlock(&s->lock);
    if (s->running)
        pthread_join(s->thread, NULL);
    pthread_cond_destroy(&s->tick);
    pthread_mutex_destroy(&s->lock);
    free(s->sampled);
    free(s->last);
    free(s->ring);
}

/* The present figures of one loop, with fresh switch counts. */
int sampler_now(struct sampler *s, int index, void *out)
{
    if (index < 0 || index >= s->count)
        return -EINVAL;
    pthread_mutex_lock(&s->lock);
    memcpy(out, take_sample(s, index, clock_ns(CLOCK_MONOTONIC), true), s->unit);
    pthread_mutex_unlock(&s->lock);
    return 0;
}

/* Up to most samples not taken before, oldest first; their number. */
int sampler_take(struct sampler *s, void *out, int most)
{
    uint8_t *to = out;
    int n = 0;
    pthread_mutex_lock(&s->lock);
    for (; n < most && s->taken < s->written; n++)
        memcpy(to + (size_t)n * s->unit, slot(s, s->taken++), s->unit);
    pthread_mutex_unlock(&s->lock);
    return n;
}

int sampler_rate(struct sampler *s, int hz)
{
    if (hz < 0 || hz > 1000)
        return -EINVAL;
    pthread_mutex_lock(&s->lock);
    s->hz = hz;
    pthread_cond_broadcast(&s->tick);
    pthread_mutex_unlock(&s->lock);
    return 0;
}

uint64_t sampler_dropped(struct sampler *s)
{
    pthread_mutex_lock(&s->lock);
    uint64_t dropped = s->dropped;
    pthread_mutex_unlock(&s->lock);
    return dropped;
}
