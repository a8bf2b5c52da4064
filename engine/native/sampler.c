/*
 * Figures of the operating system beside the loop's own counters, and the thread that copies both
 * into a ring of timestamped samples. It takes no lock that the worker ever takes, and not the GIL:
 * a busy Python process neither disturbs nor misses a measurement.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "server.h"

#define SWITCHES_EVERY (100 * RL_MS) /* reading status costs ten times what schedstat does */

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

/* On the worker's own thread. */
void sampler_attach(struct ring_worker *rw)
{
    rw->info.thread_id = (int32_t)syscall(SYS_gettid);
    pthread_getcpuclockid(pthread_self(), &rw->cpu_clock);
    rw->schedstat_fd = open_task(rw->info.thread_id, "schedstat");
    rw->status_fd = open_task(rw->info.thread_id, "status");
}

static bool read_file(int fd, char *text, size_t size)
{
    ssize_t n = fd < 0 ? -1 : pread(fd, text, size - 1, 0);
    if (n <= 0)
        return false;
    text[n] = 0;
    return true;
}

static void read_schedstat(struct ring_worker *rw, rl_sample *out)
{
    char text[96];
    unsigned long long run, queue;
    if (!read_file(rw->schedstat_fd, text, sizeof text) ||
        sscanf(text, "%llu %llu", &run, &queue) != 2)
        return; /* the thread is gone, or the kernel has no schedstats: the last figures stay */
    out->run_ns = run;
    out->queue_ns = queue;
}

static uint64_t field(const char *text, const char *name)
{
    const char *at = strstr(text, name);
    return at ? strtoull(at + strlen(name), NULL, 10) : 0;
}

static void read_switches(struct ring_worker *rw, rl_sample *out)
{
    char text[4096];
    if (!read_file(rw->status_fd, text, sizeof text))
        return;
    out->voluntary_switches = field(text, "\nvoluntary_ctxt_switches:");
    out->involuntary_switches = field(text, "\nnonvoluntary_ctxt_switches:");
}

static void copy_counters(struct worker *w, rl_counters *out)
{
    const uint64_t *from = (const uint64_t *)&w->count;
    uint64_t *to = (uint64_t *)out;
    for (size_t i = 0; i < sizeof *out / sizeof *to; i++)
        to[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
    out->direct_writes = LOAD(w->handled.direct_writes);
    out->direct_short = LOAD(w->handled.direct_short);
    out->direct_eagain = LOAD(w->handled.direct_eagain);
    out->bytes_direct = LOAD(w->handled.bytes_direct);
}

/* Under sample_lock. switches: read them now, whatever their age. */
static void take_sample(struct ring_worker *rw, uint64_t now, bool switches)
{
    rl_sample *last = &rw->last;
    last->t_ns = now;
    last->worker = (uint64_t)(rw - rw->server->workers);
    last->process_cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    copy_counters(&rw->w, &last->c);
    uint64_t cpu = __atomic_load_n(&rw->final_cpu_ns, __ATOMIC_ACQUIRE);
    if (!cpu)
        cpu = clock_ns(rw->cpu_clock); /* 0 when the thread ended meanwhile */
    if (cpu)
        last->thread_cpu_ns = cpu;
    read_schedstat(rw, last);
    if (switches || now - rw->switches_at >= SWITCHES_EVERY) {
        read_switches(rw, last);
        rw->switches_at = now;
    }
}

int rl_server_sample(rl_server *server, int worker, rl_sample *out)
{
    if (worker < 0 || worker >= server->config.workers)
        return -EINVAL;
    struct ring_worker *rw = &server->workers[worker];
    pthread_mutex_lock(&server->sample_lock);
    take_sample(rw, clock_ns(CLOCK_MONOTONIC), true);
    *out = rw->last;
    pthread_mutex_unlock(&server->sample_lock);
    return 0;
}

static void keep_samples(rl_server *server)
{
    struct sampler *s = &server->sampler;
    uint64_t now = clock_ns(CLOCK_MONOTONIC);
    for (int i = 0; i < server->config.workers; i++) {
        take_sample(&server->workers[i], now, false);
        s->ring[s->written++ % s->capacity] = server->workers[i].last;
        if (s->written - s->taken > s->capacity) {
            s->taken++; /* the oldest gives way */
            s->dropped++;
        }
    }
}

static void *sampler_main(void *arg)
{
    rl_server *server = arg;
    struct sampler *s = &server->sampler;
    uint64_t due = clock_ns(CLOCK_MONOTONIC);
    name_thread("rl-sampler");
    pthread_mutex_lock(&server->sample_lock);
    while (!s->closing) {
        if (!s->hz) {
            pthread_cond_wait(&s->tick, &server->sample_lock);
            due = clock_ns(CLOCK_MONOTONIC);
            continue;
        }
        struct timespec limit = {(time_t)(due / 1000000000u), (long)(due % 1000000000u)};
        int result = pthread_cond_timedwait(&s->tick, &server->sample_lock, &limit);
        if (result != ETIMEDOUT)
            continue; /* the rate changed, or it closes */
        keep_samples(server);
        uint64_t now = clock_ns(CLOCK_MONOTONIC);
        due += 1000000000u / (uint64_t)s->hz;
        if (due < now)
            due = now; /* late: go on from here, do not catch up in a burst */
    }
    pthread_mutex_unlock(&server->sample_lock);
    return NULL;
}

int sampler_start(rl_server *server)
{
    struct sampler *s = &server->sampler;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&s->tick, &attributes);
    pthread_condattr_destroy(&attributes);
    s->hz = server->config.sample_hz;
    s->capacity = (uint64_t)server->config.sample_capacity;
    s->ring = calloc(s->capacity, sizeof *s->ring);
    if (!s->ring)
        return -ENOMEM;
    int result = pthread_create(&s->thread, NULL, sampler_main, server);
    s->running = result == 0;
    return -result;
}

void sampler_close(rl_server *server)
{
    struct sampler *s = &server->sampler;
    pthread_mutex_lock(&server->sample_lock);
    s->closing = true;
    pthread_cond_broadcast(&s->tick);
    pthread_mutex_unlock(&server->sample_lock);
    if (s->running)
        pthread_join(s->thread, NULL);
    pthread_cond_destroy(&s->tick);
    free(s->ring);
}

/* After the worker's thread has ended. */
void sampler_detach(struct ring_worker *rw)
{
    if (rw->schedstat_fd >= 0)
        close(rw->schedstat_fd);
    if (rw->status_fd >= 0)
        close(rw->status_fd);
}

int rl_server_sample_rate(rl_server *server, int hz)
{
    if (hz < 0 || hz > 1000)
        return -EINVAL;
    pthread_mutex_lock(&server->sample_lock);
    server->sampler.hz = hz;
    pthread_cond_broadcast(&server->sampler.tick);
    pthread_mutex_unlock(&server->sample_lock);
    return 0;
}

int rl_server_take(rl_server *server, rl_sample *out, int most)
{
    struct sampler *s = &server->sampler;
    int n = 0;
    pthread_mutex_lock(&server->sample_lock);
    while (n < most && s->taken < s->written)
        out[n++] = s->ring[s->taken++ % s->capacity];
    pthread_mutex_unlock(&server->sample_lock);
    return n;
}

uint64_t rl_server_dropped(const rl_server *server)
{
    rl_server *own = (rl_server *)(uintptr_t)server;
    pthread_mutex_lock(&own->sample_lock);
    uint64_t dropped = own->sampler.dropped;
    pthread_mutex_unlock(&own->sample_lock);
    return dropped;
}
