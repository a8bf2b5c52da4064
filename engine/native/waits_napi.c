/* Busy polling of a network queue from a ring's wait, and what it does to a round trip. */
#define _GNU_SOURCE /* CPU sets */
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "waits_ways.h"

#define REGISTER_NAPI 27
#ifndef SO_INCOMING_NAPI_ID
#define SO_INCOMING_NAPI_ID 56
#endif
#define MOST_PINGS 100000
#define WARM_PINGS 200
#define LIMIT_S 2 /* of one round trip; loopback devices take microseconds */

/* The kernel's struct io_uring_napi, which liburing has since 2.6 only. */
struct napi_registration {
    uint32_t busy_poll_us;
    uint8_t prefer_busy_poll;
    uint8_t pad[3];
    uint64_t reserved;
};

/* -EOPNOTSUPP where the kernel knows no such registration. */
int napi_register(struct io_uring *ring, uint32_t busy_poll_us, bool prefer)
{
    struct napi_registration asked = {busy_poll_us, prefer, {0}, 0};
    if (!syscall(__NR_io_uring_register, ring->ring_fd, REGISTER_NAPI, &asked, 1))
        return 0;
    return errno == EINVAL ? -EOPNOTSUPP : -errno;
}

/* The nth of the CPUs that this thread may use, and it alone. */
static void hold_on(const cpu_set_t *allowed, int nth)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, allowed) || nth--)
            continue;
        CPU_SET(cpu, &one);
        sched_setaffinity(0, sizeof one, &one);
        return;
    }
}

struct echo {
    int socket;
    cpu_set_t cpus;
};

static void *echo_main(void *arg)
{
    const struct echo *e = arg;
    int socket = e->socket;
    char byte;
    hold_on(&e->cpus, 1);
    while (recv(socket, &byte, 1, 0) == 1)
        if (send(socket, &byte, 1, MSG_NOSIGNAL) != 1)
            break;
    return NULL;
}

static int ping(struct io_uring *ring, int socket)
{
    struct __kernel_timespec limit = {.tv_sec = LIMIT_S};
    struct io_uring_sqe *sqe = io_uring_get_sqe(ring);
    struct io_uring_cqe *cqe;
    char byte = 'p';
    if (!sqe)
        return -EBUSY;
    io_uring_prep_recv(sqe, socket, &byte, 1, 0);
    int result = io_uring_submit(ring);
    if (result < 0)
        return result;
    if (send(socket, &byte, 1, MSG_NOSIGNAL) != 1)
        return -errno;
    result = io_uring_wait_cqe_timeout(ring, &cqe, &limit);
    if (result < 0)
        return result;
    result = cqe->res;
    io_uring_cqe_seen(ring, cqe);
    return result == 1 ? 0 : (result < 0 ? result : -ECONNRESET);
}

static int compare(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static int pings(struct io_uring *ring, const rl_ping_case *asked, int64_t *each,
                 rl_ping_figures *out)
{
    int result = 0;
    for (int i = 0; i < WARM_PINGS && result == 0; i++)
        result = ping(ring, asked->sockets[0]);
    int64_t cpu = wait_clock_ns(CLOCK_THREAD_CPUTIME_ID);
    int64_t start = wait_clock_ns(CLOCK_MONOTONIC), last = start;
    int64_t n = 0;
    while (result == 0 && n < MOST_PINGS && last - start < asked->run_ns) {
        result = ping(ring, asked->sockets[0]);
        int64_t now = wait_clock_ns(CLOCK_MONOTONIC);
        each[n++] = now - last;
        last = now;
    }
    if (result < 0 || !n)
        return result < 0 ? result : -EINVAL;
    out->cpu_ns = (double)(wait_clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu) / (double)n;
    qsort(each, (size_t)n, sizeof *each, compare);
    out->pings = n;
    out->ns_p50 = (double)each[n / 2];
    out->ns_p99 = (double)each[(n * 99) / 100];
    socklen_t size = sizeof out->napi_id;
    getsockopt(asked->sockets[0], SOL_SOCKET, SO_INCOMING_NAPI_ID, &out->napi_id, &size);
    return 0;
}

static int ping_on(struct io_uring *ring, const rl_ping_case *asked, rl_ping_figures *out,
                   const char **where)
{
    pthread_t thread;
    struct echo echo = {.socket = asked->sockets[1]};
    if (asked->napi_us) {
        *where = "io_uring_register (NAPI)";
        int result = napi_register(ring, (uint32_t)asked->napi_us, asked->prefer);
        if (result < 0)
            return result;
    }
    *where = "ping-pong";
    int64_t *each = malloc(MOST_PINGS * sizeof *each);
    /* Each end on a CPU of its own, as two machines would be; else they share one now and then. */
    sched_getaffinity(0, sizeof echo.cpus, &echo.cpus);
    int result = each ? -pthread_create(&thread, NULL, echo_main, &echo) : -ENOMEM;
    if (result == 0) {
        hold_on(&echo.cpus, 0);
        result = pings(ring, asked, each, out);
        sched_setaffinity(0, sizeof echo.cpus, &echo.cpus);
        shutdown(asked->sockets[0], SHUT_WR); /* the echo ends */
        pthread_join(thread, NULL);
    }
    free(each);
    return result;
}

int rl_ping_measure(const rl_ping_case *asked, rl_ping_figures *out, char *where,
                    size_t where_size)
{
    static const uint32_t flags[] = {
        [RL_WAIT_NONE] = 0,
        [RL_WAIT_COOP] = 1U << 8,
        [RL_WAIT_DEFER] = (1U << 12) | (1U << 13),
    };
    struct io_uring ring;
    const char *step = "io_uring_setup";
    *out = (rl_ping_figures){0};
    if (asked->setup < RL_WAIT_NONE || asked->setup > RL_WAIT_DEFER)
        return -EINVAL;
    int result = io_uring_queue_init(8, &ring, flags[asked->setup]);
    if (result == 0) {
        result = ping_on(&ring, asked, out, &step);
        io_uring_queue_exit(&ring);
    }
    snprintf(where, where_size, "%s", step);
    return result;
}
