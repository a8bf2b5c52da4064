#pragma once
/* One wait under measurement: what every way needs of it, and the table of ways. */
#include <liburing.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "waits.h"

#define WHERE_SIZE 96

/* The thread that signals before the deadline (waits_helper.c). */
struct helper {
    pthread_t thread;
    bool running, spin;
    int event_fd;
    uint32_t turn;       /* futex: counts the waits begun */
    int64_t deadline_ns; /* of the newest wait; read after turn */
    bool closing;
    clockid_t cpu_clock;
    uint64_t value;      /* what the armed read of event_fd fills */
};

struct waiting {
    const rl_wait_case *asked;
    const struct way *way;
    struct io_uring ring;
    bool has_ring;
    struct __kernel_timespec limit; /* the timeout, for io_uring */
    struct timespec span;           /* the same, for libc */
    int fd;                         /* an epoll set or a timer, for the ways that have one */
    struct pollfd polled;
    uint64_t enters;
    uint8_t received[64];
    struct helper helper;
    int64_t not_timed_out;          /* waits that ended otherwise, for the ways that allow it */
    char where[WHERE_SIZE];
};

/* wait makes n waits and returns 0, or the first result that is none of a timed-out wait. */
struct way {
    rl_way told;
    int (*prepare)(struct waiting *w);
    int (*wait)(struct waiting *w, int64_t n);
    void (*tear_down)(struct waiting *w);
};

const struct way *way_at(int index);

int waiting_open(struct waiting *w, const rl_wait_case *asked);
void waiting_close(struct waiting *w);
int waiting_failed(struct waiting *w, int error, const char *where);
int64_t wait_clock_ns(clockid_t clock);

/* waits_napi.c */
int napi_register(struct io_uring *ring, uint32_t busy_poll_us, bool prefer);

/* waits_helper.c */
int helper_prepare_sleep(struct waiting *w);
int helper_prepare_spin(struct waiting *w);
int helper_wait(struct waiting *w, int64_t n);
void helper_tear_down(struct waiting *w);

/*
 * n waits, each of which must end as good. The loop stands inside the way, unrolled, so that a wait
 * of ten nanoseconds is not measured together with a call through a pointer or a count of turns.
 */
#define MAKE_WAIT(good, wait) \
    { \
        int got = (wait); \
        if (__builtin_expect(got != (good), 0)) \
            return got < 0 ? got : -EBADMSG; \
    }
#define MAKE_WAITS(n, good, wait) \
    int64_t left = (n); \
    for (; left >= 16; left -= 16) \
        _Pragma("GCC unroll 16") for (int turn = 0; turn < 16; turn++) MAKE_WAIT(good, wait) \
    for (; left > 0; left--) \
        MAKE_WAIT(good, wait) \
    return 0
