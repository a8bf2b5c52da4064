/*
 * Figures of the operating system beside a loop's own counters, copied into a ring of timestamped
 * samples by the loop itself or by who reads them. It knows the engines only as blocks of counters,
 * never makes a loop wait, and does not take the GIL: a busy Python process neither disturbs nor
 * misses a measurement.
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

/* ---- samples: all of this under the loop's lock -------------------------------------------- */

/* The newest figures of one loop. fresh: read the switches now, whatever their age. */
static struct figures *take_sample(struct sampled *s, uint64_t now, bool fresh)
{
    struct figures *last = (struct figures *)s->last;
    last->t_ns = now;
    last->worker = s->index;
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

/* Passes over count of the oldest entry's ticks, which it has. */
static void advance(struct sampled *s, uint64_t count)
{
    uint64_t at = s->taken % s->capacity;
    struct held *held = &s->held[at];
    struct figures *sample = (struct figures *)(s->entries + at * s->unit);
    sample->t_ns += count * held->period;
    sample->process_cpu_ns += (uint64_t)(held->process_step * (double)count);
    s->ticks -= count;
    held->count -= count;
    if (!held->count)
        s->taken++;
}

/* The oldest ticks give way to count new ones. */
static void make_room(struct sampled *s, uint64_t count)
{
    while (s->ticks + count > s->capacity) {
        uint64_t excess = s->ticks + count - s->capacity;
        uint64_t there = s->held[s->taken % s->capacity].count;
        uint64_t gone = excess < there ? excess : there;
        advance(s, gone);
        s->dropped += gone;
    }
}

/*
 * The figures as of now stand for count ticks from first on. Other threads of the process did not
 * sleep with this one: its CPU is drawn as a straight line from the newest tick until now.
 */
static void keep_entry(struct sampled *s, uint64_t first, uint64_t count, uint64_t now)
{
    struct figures *sample = take_sample(s, now, false);
    uint64_t end = sample->process_cpu_ns, last = first + (count - 1) * s->period;
    double line = now > s->base_t && end > s->base_process
                      ? (double)(end - s->base_process) / (double)(now - s->base_t)
                      : 0;
    sample->t_ns = first;
    sample->process_cpu_ns = s->base_process + (uint64_t)(line * (double)(first - s->base_t));
    make_room(s, count);
    uint64_t at = s->written++ % s->capacity;
    s->ticks += count;
    memcpy(s->entries + at * s->unit, sample, s->unit);
    s->held[at] = (struct held){count, s->period, line * (double)s->period};
    s->base_process += (uint64_t)(line * (double)(last - s->base_t));
    s->base_t = last;
}

/* What is due by now, of a loop that sleeps since from (from == now: it does not sleep). */
static void settle(struct sampled *s, uint64_t from, uint64_t now)
{
    uint64_t due = s->due; /* stored under the lock alone */
    if (now < due)
        return;
    uint64_t passed = (now - due) / s->period + 1;
    uint64_t busy = from > due ? (from - due + s->period - 1) / s->period : 0;
    uint64_t count = passed > busy ? passed - busy : 0;
    if (count > s->capacity) { /* a long sleep that nobody read */
        s->dropped += count - s->capacity;
        busy += count - s->capacity;
        count = s->capacity;
    }
    if (count)
        keep_entry(s, due + busy * s->period, count, now);
    else
        keep_entry(s, now, 1, now); /* late: one for all, nothing is caught up in a burst */
    __atomic_store_n(&s->due, due + passed * s->period, __ATOMIC_RELAXED);
}

static bool asleep(const struct sampled *s)
{
    return sampled_has_ended(s) || __atomic_load_n(s->waiting, __ATOMIC_RELAXED) ||
           (s->blocked && __atomic_load_n(s->blocked, __ATOMIC_RELAXED));
}

/* As seen by a reader, who has the lock. */
static void settle_now(struct sampled *s)
{
    uint64_t now = clock_ns(CLOCK_MONOTONIC);
    settle(s, asleep(s) ? s->due : now, now);
}

/* A loop that finds a reader at work comes back in its next iteration, and still knows since when
 * it slept. */
void sampled_keep(struct sampled *s, uint64_t from, uint64_t now)
{
    if (!s->slept_from)
        s->slept_from = from;
    if (pthread_mutex_trylock(&s->lock))
        return;
    settle(s, s->slept_from, now);
    pthread_mutex_unlock(&s->lock);
    s->slept_from = 0;
}

/* The oldest tick not taken before, which there is, into out. */
static void give_one(struct sampled *s, void *out)
{
    memcpy(out, s->entries + s->taken % s->capacity * s->unit, s->unit);
    advance(s, 1);
}

/* ---- its life ------------------------------------------------------------------------------ */

/* Room for count loops, each to be added before any thread of theirs starts. */
int sampler_init(struct sampler *s, int count)
{
    s->sampled = calloc((size_t)count, sizeof *s->sampled);
    s->count = s->sampled ? count : 0;
    return s->sampled ? 0 : -ENOMEM;
}

/* A loop whose samples have unit bytes and of which capacity are kept; none until a rate is set. */
int sampler_add(struct sampler *s, int index, struct sampled *loop, size_t unit, int capacity)
{
    pthread_mutex_init(&loop->lock, NULL);
    loop->index = (uint64_t)index;
    loop->unit = unit;
    loop->due = UINT64_MAX;
    loop->capacity = capacity < 1 ? 1 : (uint64_t)capacity;
    loop->last = calloc(1, unit);
    loop->entries = calloc(loop->capacity, unit);
    loop->held = calloc(loop->capacity, sizeof *loop->held);
    s->sampled[index] = loop;
    return loop->last && loop->entries && loop->held ? 0 : -ENOMEM;
}

/* After the loops' threads have ended. */
void sampler_close(struct sampler *s)
{
    for (int i = 0; i < s->count; i++) {
        struct sampled *loop = s->sampled[i];
        if (!loop)
            continue;
        pthread_mutex_destroy(&loop->lock);
        free(loop->last);
        free(loop->entries);
        free(loop->held);
    }
    free(s->sampled);
}

/* The present figures of one loop, with fresh switch counts. */
int sampler_now(struct sampler *s, int index, void *out)
{
    if (index < 0 || index >= s->count)
        return -EINVAL;
    struct sampled *loop = s->sampled[index];
    pthread_mutex_lock(&loop->lock);
    settle_now(loop); /* a loop that wakes now finds the lock taken, and is late */
    memcpy(out, take_sample(loop, clock_ns(CLOCK_MONOTONIC), true), loop->unit);
    pthread_mutex_unlock(&loop->lock);
    return 0;
}

/* The loop whose oldest tick is the oldest of all; NULL: all were taken. */
static struct sampled *oldest(const struct sampler *s)
{
    struct sampled *found = NULL;
    uint64_t earliest = UINT64_MAX;
    for (int i = 0; i < s->count; i++) {
        struct sampled *loop = s->sampled[i];
        if (loop->taken == loop->written)
            continue;
        uint8_t *entry = loop->entries + loop->taken % loop->capacity * loop->unit;
        uint64_t t = ((struct figures *)entry)->t_ns;
        if (t < earliest) {
            earliest = t;
            found = loop;
        }
    }
    return found;
}

/* Up to most samples not taken before, oldest first, those of now included; their number. */
int sampler_take(struct sampler *s, void *out, int most)
{
    uint8_t *to = out;
    int n = 0;
    for (int i = 0; i < s->count; i++) {
        pthread_mutex_lock(&s->sampled[i]->lock);
        settle_now(s->sampled[i]);
    }
    for (struct sampled *loop; n < most && (loop = oldest(s)); n++)
        give_one(loop, to + (size_t)n * loop->unit);
    for (int i = 0; i < s->count; i++)
        pthread_mutex_unlock(&s->sampled[i]->lock);
    return n;
}

/* From now on at this rate; 0: none. What was due before is kept at the old one. */
int sampler_rate(struct sampler *s, int hz)
{
    if (hz < 0 || hz > 1000)
        return -EINVAL;
    for (int i = 0; i < s->count; i++) {
        struct sampled *loop = s->sampled[i];
        pthread_mutex_lock(&loop->lock);
        settle_now(loop);
        loop->base_t = clock_ns(CLOCK_MONOTONIC);
        loop->base_process = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
        loop->period = hz ? 1000000000u / (uint64_t)hz : 0;
        __atomic_store_n(&loop->due, hz ? loop->base_t : UINT64_MAX, __ATOMIC_RELAXED);
        pthread_mutex_unlock(&loop->lock);
    }
    return 0;
}

/* Samples that gave way to newer ones, of all loops. */
uint64_t sampler_dropped(struct sampler *s)
{
    uint64_t dropped = 0;
    for (int i = 0; i < s->count; i++) {
        pthread_mutex_lock(&s->sampled[i]->lock);
        dropped += s->sampled[i]->dropped;
        pthread_mutex_unlock(&s->sampled[i]->lock);
    }
    return dropped;
}
