/* The relay's operations on Linux: epoll, non-blocking sockets, pipes and splice. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* accept4, pipe2, splice */
#endif
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "relay_server.h"

static rl_relay *self_of(struct relay *r) { return r->backend; }

/* ---- the epoll set ------------------------------------------------------------------------- */

int relay_epoll_open(rl_relay *relay, const char **where)
{
    *where = "epoll_create1";
    relay->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (relay->epoll_fd < 0)
        return -errno;
    *where = "eventfd";
    relay->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (relay->wake_fd < 0)
        return -errno;
    *where = "epoll_ctl";
    struct epoll_event event = {.events = EPOLLIN}; /* no end: that is the eventfd */
    if (epoll_ctl(relay->epoll_fd, EPOLL_CTL_ADD, relay->wake_fd, &event))
        return -errno;
    return 0;
}

void relay_epoll_close(rl_relay *relay)
{
    if (relay->wake_fd >= 0)
        close(relay->wake_fd);
    if (relay->epoll_fd >= 0)
        close(relay->epoll_fd);
}

/*
 * epoll reports at once what is ready when a registration changes, edge-triggered or not. That
 * report is of what the source has said EAGAIN about; an edge is what comes after it.
 */
static bool stale_edge(rl_relay *relay, const struct end *e)
{
    for (int i = 0; i < relay->edge_count; i++)
        if (relay->edges[i].end == e)
            return relay->edges[i].wait == relay->wait_number;
    return false;
}

static void add_edge(rl_relay *relay, struct end *e)
{
    if (relay->edge_count == EVENTS)
        return;
    relay->edges[relay->edge_count].end = e;
    relay->edges[relay->edge_count++].wait = relay->wait_number + 1;
}

static int epoll_watch(struct relay *r, struct end *e, uint8_t bits)
{
    rl_relay *relay = self_of(r);
    struct epoll_event event = {.data.ptr = e};
    if (bits & BIT_READ)
        event.events |= EPOLLIN;
    if (bits & BIT_WRITE)
        event.events |= EPOLLOUT;
    if (e->edge && bits & BIT_READ) {
        event.events |= EPOLLET;
        add_edge(relay, e);
    }
    int op = !bits ? EPOLL_CTL_DEL : e->watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    return epoll_ctl(relay->epoll_fd, op, e->fd, &event) ? -errno : 0;
}

static void report(struct relay *r, const struct epoll_event *event)
{
    rl_relay *relay = self_of(r);
    struct end *e = event->data.ptr;
    uint8_t bits = 0;
    if (event->events & (EPOLLIN | EPOLLHUP | EPOLLERR))
        bits |= BIT_READ;
    if (event->events & (EPOLLOUT | EPOLLHUP | EPOLLERR))
        bits |= BIT_WRITE;
    if (bits & BIT_READ && stale_edge(relay, e))
        bits &= (uint8_t)~BIT_READ;
    if (bits)
        end_report(r, e, bits);
}

static int epoll_wait_once(struct relay *r, int64_t timeout_ns)
{
    rl_relay *relay = self_of(r);
    struct epoll_event events[EVENTS];
    int limit = timeout_ns < 0 ? -1 : (int)((timeout_ns + RL_MS - 1) / RL_MS); /* rounded up */
    int n = epoll_wait(relay->epoll_fd, events, EVENTS, limit);
    int reported = 0;
    if (n < 0)
        return -errno;
    relay->wait_number++;
    for (int i = 0; i < n; i++) {
        if (events[i].data.ptr) {
            report(r, &events[i]);
            reported++;
            continue;
        }
        uint64_t value;
        ssize_t got = read(relay->wake_fd, &value, sizeof value);
        (void)got;
        ADD(r->count.wakeups, 1);
    }
    relay->edge_count = 0;
    return reported;
}

/* ---- sockets ------------------------------------------------------------------------------- */

static int epoll_accept(struct relay *r)
{
    int fd = accept4(r->listener.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    return fd < 0 ? -errno : fd;
}

static int epoll_connect(struct relay *r, struct end *e)
{
    rl_relay *relay = self_of(r);
    int on = 1, sndbuf = (int)LOAD(relay->settings[RL_RELAY_SETTING_ORIGIN_SNDBUF]);
    int fd = socket(relay->origin.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (sndbuf)
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &sndbuf, sizeof sndbuf);
    if (connect(fd, &relay->origin.any, relay->origin_size) && errno != EINPROGRESS) {
        int result = -errno;
        close(fd);
        return result;
    }
    STORE(e->fd, fd);
    return -EINPROGRESS; /* it is connected when it takes the first bytes */
}

#define RETRY(call)                                                                                \
    ({                                                                                             \
        ssize_t result_;                                                                           \
        do                                                                                         \
            result_ = (call);                                                                      \
        while (result_ < 0 && errno == EINTR);                                                     \
        result_ < 0 ? -errno : result_;                                                            \
    })

static ssize_t epoll_recv(struct end *e, void *to, size_t size)
{
    return RETRY(recv(e->fd, to, size, 0));
}

static ssize_t epoll_send(struct end *e, const void *from, size_t size)
{
    return RETRY(send(e->fd, from, size, MSG_NOSIGNAL));
}

static ssize_t epoll_splice_in(struct end *e, struct pipe *pipe, size_t size)
{
    return RETRY(splice(e->fd, NULL, pipe->write_fd, NULL, size,
                        SPLICE_F_MOVE | SPLICE_F_NONBLOCK));
}

static ssize_t epoll_splice_out(struct end *e, struct pipe *pipe, size_t size)
{
    return RETRY(splice(pipe->read_fd, NULL, e->fd, NULL, size,
                        SPLICE_F_MOVE | SPLICE_F_NONBLOCK));
}

static int epoll_pipe_open(struct relay *r, struct pipe *pipe)
{
    (void)r;
    int fds[2];
    if (pipe2(fds, O_CLOEXEC | O_NONBLOCK))
        return -errno;
    pipe->read_fd = fds[0];
    pipe->write_fd = fds[1];
    return 0;
}

static void epoll_pipe_close(struct relay *r, struct pipe *pipe)
{
    (void)r;
    close(pipe->read_fd);
    close(pipe->write_fd);
}

static void epoll_finish(struct end *e) { shutdown(e->fd, SHUT_WR); }

static void epoll_reset(struct end *e)
{
    struct linger now = {.l_onoff = 1, .l_linger = 0};
    setsockopt(e->fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
}

/* The last descriptor of a socket takes its registration along. */
static void epoll_close(struct relay *r, struct end *e)
{
    (void)r;
    close(e->fd);
}

static int64_t epoll_now(struct relay *r)
{
    (void)r;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void epoll_wake(struct relay *r)
{
    uint64_t one = 1;
    ssize_t written = write(self_of(r)->wake_fd, &one, sizeof one);
    (void)written; /* a full counter wakes as well */
}

static void epoll_woke(struct relay *r, int64_t from)
{
    sampled_tick(&self_of(r)->sampled, from, r->now);
}

const struct relay_ops relay_epoll_ops = {
    .wait = epoll_wait_once,
    .watch = epoll_watch,
    .accept = epoll_accept,
    .connect = epoll_connect,
    .recv = epoll_recv,
    .send = epoll_send,
    .splice_in = epoll_splice_in,
    .splice_out = epoll_splice_out,
    .pipe_open = epoll_pipe_open,
    .pipe_close = epoll_pipe_close,
    .finish = epoll_finish,
    .reset = epoll_reset,
    .close = epoll_close,
    .now = epoll_now,
    .wake = epoll_wake,
    .woke = epoll_woke,
};
