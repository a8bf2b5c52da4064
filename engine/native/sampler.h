#pragma once
/*
 * Timestamped samples of loops: the operating system's figures, then the loop's own counters.
 *
 * No thread takes them. A loop that runs looks at the time once an iteration anyway, and takes its
 * own sample when one is due. A loop that sleeps has nothing new to say: what stands when it wakes
 * held at every tick it slept through, and is kept as one entry with a count. Whoever reads
 * settles what is due by then. So sampling wakes nobody, which a tool that counts wake-ups owes.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

/* How every sample struct of the contract begins. */
struct figures {
    uint64_t t_ns, worker, thread_cpu_ns, process_cpu_ns, run_ns, queue_ns;
    uint64_t voluntary_switches, involuntary_switches;
};

/* The samples of count ticks in a row, which differ in their time and the process's CPU alone. */
struct held {
    uint64_t count, period;
    double process_step; /* ns of the process's CPU from one tick to the next */
};

/* One loop, on a thread of its own. copy reads its counters, relaxed, into the sample. */
struct sampled {
    void (*copy)(const void *of, uint64_t *to);
    const void *of;
    const uint64_t *waiting; /* the loop's own gauge: 1 while it is inside its wait */
    const uint64_t *blocked; /* another: 1 while it sleeps elsewhere; NULL: it never does */
    int32_t thread_id;
    clockid_t cpu_clock;
    int schedstat_fd, status_fd;
    uint64_t switches_at;
    uint64_t final_cpu_ns; /* the thread clock when the loop was left; 0: it runs */
    uint64_t due;          /* the next tick; UINT64_MAX: none. Read by the loop without the lock */
    uint64_t slept_from;   /* the loop's own: of a sleep whose ticks were not kept yet; 0: none */
    /* From here on under the lock, which the loop tries and never waits for. */
    pthread_mutex_t lock;
    uint64_t index, period;
    uint64_t base_t, base_process; /* of the newest tick that was kept */
    size_t unit;                   /* bytes of one sample */
    uint8_t *last, *entries;
    struct held *held;
    uint64_t capacity; /* entries, and ticks of them */
    uint64_t written, taken, ticks, dropped;
};

struct sampler {
    int count;
    struct sampled **sampled;
};

void sampled_attach(struct sampled *s, const char *thread_name);
void sampled_ended(struct sampled *s);
bool sampled_has_ended(const struct sampled *s);
void sampled_detach(struct sampled *s);
void sampled_copy(const void *counters, uint64_t *to, size_t size);
void sampled_keep(struct sampled *s, uint64_t from, uint64_t now);

/* On the loop's own thread, as its wait, or whatever else it slept in, returns at now. It slept
 * since from; from == now: not at all. */
static inline void sampled_tick(struct sampled *s, int64_t from, int64_t now)
{
    if ((uint64_t)now >= __atomic_load_n(&s->due, __ATOMIC_RELAXED))
        sampled_keep(s, (uint64_t)from, (uint64_t)now);
}

int sampler_init(struct sampler *s, int count);
int sampler_add(struct sampler *s, int index, struct sampled *loop, size_t unit, int capacity);
void sampler_close(struct sampler *s);
int sampler_now(struct sampler *s, int index, void *out);
int sampler_take(struct sampler *s, void *out, int most);
int sampler_rate(struct sampler *s, int hz);
uint64_t sampler_dropped(struct sampler *s);
