/*
 * The production workaround of the founding document: a thread that signals an eventfd just before
 * the deadline, so that the wait ends by an event and not by its timeout. Each wait arms a read of
 * the eventfd on the ring and tells the thread its deadline.
 */
#include <errno.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "waits_ways.h"

#define SLEEPS_TO_NS 20000 /* before the deadline */
#define SPINS_TO_NS 5000
#define SECOND INT64_C(1000000000)

static void futex(uint32_t *word, int operation, uint32_t value)
{
    syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static void sleep_until(int64_t at)
{
    const struct timespec when = {at / SECOND, at % SECOND};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, NULL) == EINTR)
        continue;
}

static void *helper_main(void *arg)
{
    struct helper *h = arg;
    uint32_t turn = 0;
    prctl(PR_SET_NAME, "rl-wait-helper");
    prctl(PR_SET_TIMERSLACK, 1UL); /* the usual slack of 50 us would miss the deadline */
    for (;;) {
        uint32_t newest;
        while ((newest = __atomic_load_n(&h->turn, __ATOMIC_ACQUIRE)) == turn)
            if (!h->spin)
                futex(&h->turn, FUTEX_WAIT, turn);
        turn = newest;
        if (__atomic_load_n(&h->closing, __ATOMIC_RELAXED))
            return NULL;
        int64_t deadline = __atomic_load_n(&h->deadline_ns, __ATOMIC_RELAXED);
        if (!h->spin)
            sleep_until(deadline - SLEEPS_TO_NS);
        while (h->spin && wait_clock_ns(CLOCK_MONOTONIC) < deadline - SPINS_TO_NS)
            continue;
        eventfd_write(h->event_fd, 1);
    }
}

static void next_turn(struct helper *h)
{
    __atomic_add_fetch(&h->turn, 1, __ATOMIC_RELEASE);
    if (!h->spin)
        futex(&h->turn, FUTEX_WAKE, 1);
}

static int prepare(struct waiting *w, bool spin)
{
    struct helper *h = &w->helper;
    h->spin = spin;
    h->event_fd = eventfd(0, EFD_CLOEXEC);
    if (h->event_fd < 0)
        return waiting_failed(w, -errno, "eventfd");
    int result = -pthread_create(&h->thread, NULL, helper_main, h);
    h->running = result == 0;
    if (result < 0) {
        close(h->event_fd);
        return waiting_failed(w, result, "pthread_create");
    }
    pthread_getcpuclockid(h->thread, &h->cpu_clock);
    return 0;
}

int helper_prepare_sleep(struct waiting *w) { return prepare(w, false); }
int helper_prepare_spin(struct waiting *w) { return prepare(w, true); }

static int reap(struct waiting *w, struct io_uring_cqe *cqe)
{
    int result = cqe->res;
    io_uring_cqe_seen(&w->ring, cqe);
    return result == sizeof w->helper.value ? 0 : (result < 0 ? result : -EBADMSG);
}

static int one_wait(struct waiting *w)
{
    struct helper *h = &w->helper;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&w->ring);
    struct io_uring_cqe *cqe;
    if (!sqe)
        return -EBUSY;
    io_uring_prep_read(sqe, h->event_fd, &h->value, sizeof h->value, 0);
    int64_t now = wait_clock_ns(CLOCK_MONOTONIC);
    __atomic_store_n(&h->deadline_ns, now + w->asked->timeout_ns, __ATOMIC_RELAXED);
    next_turn(h);
    int result = io_uring_submit_and_wait_timeout(&w->ring, &cqe, 1, &w->limit, NULL);
    if (result < 0 && result != -ETIME)
        return result;
    if (io_uring_cq_ready(&w->ring)) {
        w->not_timed_out++;
        result = io_uring_peek_cqe(&w->ring, &cqe);
        return result < 0 ? result : reap(w, cqe);
    }
    /* The signal comes too late; it must not end the next wait. */
    result = io_uring_wait_cqe(&w->ring, &cqe);
    return result < 0 ? result : reap(w, cqe);
}

int helper_wait(struct waiting *w, int64_t n) { MAKE_WAITS(n, 0, one_wait(w)); }

void helper_tear_down(struct waiting *w)
{
    struct helper *h = &w->helper;
    if (!h->running)
        return;
    __atomic_store_n(&h->closing, true, __ATOMIC_RELAXED);
    next_turn(h);
    pthread_join(h->thread, NULL);
    close(h->event_fd);
}
