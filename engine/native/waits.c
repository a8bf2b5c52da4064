/* The ways to wait: a table of functions, and what is made ready for any of them. */
#define _GNU_SOURCE /* ppoll */
#include "waits_ways.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "ring_wait.h"

/* Names of a newer liburing and libc; the kernel's own numbers. */
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif
#define FEATURE_MIN_TIMEOUT (1U << 15)
#ifndef SYS_epoll_pwait2
#define SYS_epoll_pwait2 441
#endif

#define ENTRIES 8
#define US INT64_C(1000)
#define MS (1000 * US)
#define SECOND (1000 * MS)
#define MIN_TIMEOUT_US 50

int64_t wait_clock_ns(clockid_t clock)
{
    struct timespec t;
    return clock_gettime(clock, &t) ? 0 : (int64_t)t.tv_sec * SECOND + t.tv_nsec;
}

int waiting_failed(struct waiting *w, int error, const char *where)
{
    snprintf(w->where, sizeof w->where, "%s", where);
    return error;
}

/* libc's -1 as the negative errno. */
static inline int result_of(long result) { return result < 0 ? -errno : (int)result; }

/* ---- io_uring's own waits ------------------------------------------------------------------ */

static int wait_cqe(struct waiting *w, int64_t n)
{
    struct io_uring_cqe *cqe;
    MAKE_WAITS(n, -ETIME, io_uring_wait_cqe_timeout(&w->ring, &cqe, &w->limit));
}

static int submit_and_wait(struct waiting *w, int64_t n)
{
    struct io_uring_cqe *cqe;
    MAKE_WAITS(n, -ETIME,
               io_uring_submit_and_wait_timeout(&w->ring, &cqe, 1, &w->limit, NULL));
}

static int prepare_min_timeout(struct waiting *w)
{
    if (w->ring.features & FEATURE_MIN_TIMEOUT)
        return 0;
    return waiting_failed(w, -EOPNOTSUPP, "this kernel has no min_timeout (Linux 6.12)");
}

/* liburing has the call since 2.8 only; this is what it does. */
static int min_timeout(struct waiting *w, int64_t n)
{
    const struct {
        uint64_t sigmask;
        uint32_t sigmask_size, min_wait_us;
        uint64_t limit;
    } more = {.min_wait_us = MIN_TIMEOUT_US, .limit = (uint64_t)(uintptr_t)&w->limit};
    unsigned int flags = IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG;
    MAKE_WAITS(n, -ETIME, result_of(syscall(__NR_io_uring_enter, w->ring.ring_fd, 0, 1, flags,
                                            &more, sizeof more)));
}

/* ---- ways that do not wait: the cures in user space ----------------------------------------- */

static int get_events(struct waiting *w, int64_t n)
{
    MAKE_WAITS(n, 0, io_uring_get_events(&w->ring) ?: (int)io_uring_cq_ready(&w->ring));
}

static int peek(struct waiting *w, int64_t n)
{
    struct io_uring_cqe *cqe;
    MAKE_WAITS(n, -EAGAIN, io_uring_peek_cqe(&w->ring, &cqe));
}

/* ---- the ring's descriptor, waited for by other calls ---------------------------------------- */

static int prepare_epoll(struct waiting *w)
{
    struct epoll_event event = {.events = EPOLLIN};
    w->fd = epoll_create1(EPOLL_CLOEXEC);
    if (w->fd < 0)
        return waiting_failed(w, -errno, "epoll_create1");
    if (epoll_ctl(w->fd, EPOLL_CTL_ADD, w->ring.ring_fd, &event))
        return waiting_failed(w, -errno, "epoll_ctl");
    return 0;
}

static int epoll_ms(struct waiting *w, int64_t n)
{
    struct epoll_event event;
    int timeout = (int)(w->asked->timeout_ns / MS);
    MAKE_WAITS(n, 0, result_of(epoll_wait(w->fd, &event, 1, timeout)));
}

static int epoll_pwait2_once(struct waiting *w)
{
    struct epoll_event event;
    return result_of(syscall(SYS_epoll_pwait2, w->fd, &event, 1, &w->limit, NULL, 0));
}

static int prepare_epoll_pwait2(struct waiting *w)
{
    int result = prepare_epoll(w);
    if (result == 0 && epoll_pwait2_once(w) == -ENOSYS)
        return waiting_failed(w, -EOPNOTSUPP, "this kernel has no epoll_pwait2 (Linux 5.11)");
    return result;
}

static int epoll_ns(struct waiting *w, int64_t n) { MAKE_WAITS(n, 0, epoll_pwait2_once(w)); }

static int prepare_ppoll(struct waiting *w)
{
    w->polled = (struct pollfd){.fd = w->ring.ring_fd, .events = POLLIN};
    return 0;
}

static int ppoll_ns(struct waiting *w, int64_t n)
{
    MAKE_WAITS(n, 0, result_of(ppoll(&w->polled, 1, &w->span, NULL)));
}

/* ---- timers as events ------------------------------------------------------------------------ */

static int prepare_timer(struct waiting *w)
{
    w->fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
    return w->fd < 0 ? waiting_failed(w, -errno, "timerfd_create") : 0;
}

/* A timer of zero would be disarmed: zero is asked for as a moment long past. */
static int timer(struct waiting *w, int64_t n)
{
    bool past = w->asked->timeout_ns == 0;
    const struct itimerspec when = {.it_value = past ? (struct timespec){0, 1} : w->span};
    int flags = past ? TFD_TIMER_ABSTIME : 0;
    uint64_t expirations;
    MAKE_WAITS(n, sizeof expirations,
               timerfd_settime(w->fd, flags, &when, NULL)
                   ? -errno
                   : result_of(read(w->fd, &expirations, sizeof expirations)));
}

static int expired_op_once(struct waiting *w)
{
    static struct __kernel_timespec past; /* the clock's zero */
    struct io_uring_sqe *sqe = io_uring_get_sqe(&w->ring);
    struct io_uring_cqe *cqe;
    if (!sqe)
        return -EBUSY;
    io_uring_prep_timeout(sqe, &past, 0, IORING_TIMEOUT_ABS);
    int result = io_uring_submit_and_wait(&w->ring, 1);
    if (result < 0)
        return result;
    result = io_uring_peek_cqe(&w->ring, &cqe);
    if (result < 0)
        return result;
    result = cqe->res;
    io_uring_cqe_seen(&w->ring, cqe);
    return result;
}

static int expired_op(struct waiting *w, int64_t n) { MAKE_WAITS(n, -ETIME, expired_op_once(w)); }

/* ---- the ring worker's own two choices ------------------------------------------------------- */

static int prepare_worker(struct waiting *w)
{
    io_uring_register_ring_fd(&w->ring); /* as the worker does; older kernels do without */
    return 0;
}

static int worker_kernel(struct waiting *w, int64_t n)
{
    const rl_wait wait = {.mode = RL_MODE_TIMED, .timeout_ns = w->asked->timeout_ns,
                          .way = RL_EXPIRED_KERNEL};
    MAKE_WAITS(n, -ETIME, ring_make_wait(&w->ring, &wait, &w->enters));
}

static int worker_poll(struct waiting *w, int64_t n)
{
    const rl_wait wait = {.mode = RL_MODE_TIMED, .way = RL_EXPIRED_POLL};
    MAKE_WAITS(n, -ETIME, ring_make_wait(&w->ring, &wait, &w->enters));
}

/* ---- the table ------------------------------------------------------------------------------- */

static const struct way WAYS[] = {
    {{"epoll_wait", "epoll_wait() on an epoll set that holds the ring; counts in milliseconds",
      1, 0, MS, 0}, prepare_epoll, epoll_ms, NULL},
    {{"epoll_pwait2", "epoll_pwait2() on the same set; counts in nanoseconds",
      1, 0, 1, 0}, prepare_epoll_pwait2, epoll_ns, NULL},
    {{"ppoll", "ppoll() on the ring's descriptor", 1, 0, 1, 0}, prepare_ppoll, ppoll_ns, NULL},
    {{"io_uring_wait_cqe_timeout", "the wait of the founding document",
      1, 0, 1, 0}, NULL, wait_cqe, NULL},
    {{"io_uring_submit_and_wait_timeout", "the same wait, in one call with the submission",
      1, 0, 1, 0}, NULL, submit_and_wait, NULL},
    {{"io_uring_submit_and_wait_min_timeout", "the same with a min_timeout of 50 us",
      1, 0, 1, 0}, prepare_min_timeout, min_timeout, NULL},
    {{"io_uring_get_events", "enters the kernel to run what it holds back, then looks at the CQ",
      1, 1, 1, 0}, NULL, get_events, NULL},
    {{"io_uring_peek_cqe", "looks at the CQ; sees nothing that the kernel holds back",
      1, 1, 1, 0}, NULL, peek, NULL},
    {{"timerfd", "timerfd_settime() and a read() that waits for it",
      0, 0, 1, 0}, prepare_timer, timer, NULL},
    {{"expired_timeout_op", "an IORING_OP_TIMEOUT whose moment has passed, submitted and reaped",
      1, 1, 1, 0}, NULL, expired_op, NULL},
    {{"eventfd_workaround", "another thread sleeps to 20 us before the deadline and writes an "
      "eventfd that the ring reads", 1, 0, 1, 100 * US},
     helper_prepare_sleep, helper_wait, helper_tear_down},
    {{"eventfd_workaround_spin", "the same, but that thread spins to 5 us before the deadline",
      1, 0, 1, 100 * US}, helper_prepare_spin, helper_wait, helper_tear_down},
    {{"ring_worker_kernel", "the ring worker's wait under expired=kernel",
      1, 0, 1, 0}, prepare_worker, worker_kernel, NULL},
    {{"ring_worker_poll", "the ring worker's wait under expired=poll",
      1, 1, 1, 0}, prepare_worker, worker_poll, NULL},
};

const struct way *way_at(int index)
{
    int count = sizeof WAYS / sizeof *WAYS;
    return index >= 0 && index < count ? &WAYS[index] : NULL;
}

const rl_way *rl_way_at(int index)
{
    const struct way *way = way_at(index);
    return way ? &way->told : NULL;
}

/* ---- opening and closing --------------------------------------------------------------------- */

static int open_ring(struct waiting *w)
{
    static const uint32_t flags[] = {
        [RL_WAIT_NONE] = 0,
        [RL_WAIT_COOP] = IORING_SETUP_COOP_TASKRUN,
        [RL_WAIT_DEFER] = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
    };
    uint32_t asked = flags[w->asked->setup];
    int result = io_uring_queue_init(ENTRIES, &w->ring, asked);
    if (result == -EINVAL && asked)
        return waiting_failed(w, -EOPNOTSUPP, asked == IORING_SETUP_COOP_TASKRUN
            ? "this kernel has no COOP_TASKRUN (Linux 5.19)"
            : "this kernel has no DEFER_TASKRUN (Linux 6.1)");
    if (result < 0)
        return waiting_failed(w, result, "io_uring_setup");
    w->has_ring = true;
    return 0;
}

/* A recv that waits: its poll tells io_uring which NAPI queue there is to poll. */
static int post_recv(struct waiting *w)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&w->ring);
    io_uring_prep_recv(sqe, w->asked->socket, w->received, sizeof w->received, 0);
    int result = io_uring_submit(&w->ring);
    return result == 1 ? 0 : waiting_failed(w, result < 0 ? result : -EBADMSG, "io_uring_submit");
}

static int open_napi(struct waiting *w)
{
    int result = napi_register(&w->ring, (uint32_t)w->asked->napi_us, false);
    if (result == -EOPNOTSUPP)
        return waiting_failed(w, result, "this kernel has no IORING_REGISTER_NAPI (Linux 6.9, "
                                         "CONFIG_NET_RX_BUSY_POLL)");
    return result < 0 ? waiting_failed(w, result, "io_uring_register (NAPI)") : 0;
}

int waiting_open(struct waiting *w, const rl_wait_case *asked)
{
    int64_t timeout = asked->timeout_ns;
    *w = (struct waiting){
        .asked = asked, .way = way_at(asked->way), .fd = -1,
        .limit = {timeout / SECOND, timeout % SECOND}, .span = {timeout / SECOND, timeout % SECOND},
    };
    if (!w->way || asked->setup < RL_WAIT_NONE || asked->setup > RL_WAIT_DEFER || timeout < 0)
        return waiting_failed(w, -EINVAL, "rl_wait_measure");
    const rl_way *told = &w->way->told;
    if ((timeout && told->untimed) || timeout % told->step_ns || timeout < told->least_ns)
        return waiting_failed(w, -EINVAL, told->name);
    int result = told->ring ? open_ring(w) : 0;
    if (result == 0 && told->ring && asked->napi_us)
        result = open_napi(w);
    if (result == 0 && told->ring && asked->socket >= 0)
        result = post_recv(w);
    if (result == 0 && w->way->prepare)
        result = w->way->prepare(w);
    return result;
}

void waiting_close(struct waiting *w)
{
    if (w->way && w->way->tear_down)
        w->way->tear_down(w);
    if (w->fd >= 0)
        close(w->fd);
    if (w->has_ring)
        io_uring_queue_exit(&w->ring);
}
