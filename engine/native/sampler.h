#pragma once
/* Timestamped samples of loops: the operating system's figures, then the loop's own counters. */
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

/* One loop, on a thread of its own. copy reads its counters, relaxed, into the sample. */
struct sampled {
    void (*copy)(const void *of, uint64_t *to);
    const void *of;
    int32_t thread_id;
    clockid_t cpu_clock;
    int schedstat_fd, status_fd;
    uint64_t switches_at;
    uint64_t final_cpu_ns; /* the thread clock when the loop was left; 0: it runs */
};

struct sampler {
    pthread_mutex_t lock;
    pthread_cond_t tick;
    pthread_t thread;
    bool running, closing;
    int hz, count;
    struct sampled **sampled;
    size_t unit; /* bytes of one sample */
    uint8_t *last, *ring;
    uint64_t capacity, written, taken, dropped;
};

void sampled_attach(struct sampled *s, const char *thread_name);
void sampled_ended(struct sampled *s);
bool sampled_has_ended(const struct sampled *s);
void sampled_detach(struct sampled *s);
void sampled_copy(const void *counters, uint64_t *to, size_t size);

int sampler_init(struct sampler *s, int count, size_t unit, int capacity);
int sampler_run(struct sampler *s, int hz);
void sampler_close(struct sampler *s);
int sampler_now(struct sampler *s, int index, void *out);
int sampler_take(struct sampler *s, void *out, int most);
int sampler_rate(struct sampler *s, int hz);
uint64_t sampler_dropped(struct sampler *s);
