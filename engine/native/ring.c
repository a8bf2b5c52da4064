/* The liburing backend: what the state machine asks for, as io_uring requests of one ring. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "ring_wait.h"
#include "server.h"

/* Names of a newer liburing; the kernel's own numbers, so that headers of 2.3 are enough. */
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

#define BUFFERS 512 /* provided buffers of a worker, a power of two */
#define BUFFER_SIZE 4096
#define BUFFER_GROUP 0
#define PLAIN_SIZE 2048
#define CQ_LEAST 4096

/* Kept for a connection: the message of a SEND in flight, the buffer of a plain recv. */
struct conn_io {
    struct msghdr message;
    struct iovec iov[RL_IOV_MAX];
    uint8_t plain[];
};

static struct ring_worker *ring_of(struct worker *w) { return w->backend; }

static struct conn_io *io_of(struct worker *w, struct conn *c)
{
    if (!c->backend) {
        size_t plain = ring_of(w)->info.buffer_ring ? 0 : PLAIN_SIZE;
        c->backend = calloc(1, sizeof(struct conn_io) + plain);
        STORE(c->backend_bytes, c->backend ? (uint32_t)(sizeof(struct conn_io) + plain) : 0);
    }
    return c->backend;
}

/* ---- set-up -------------------------------------------------------------------------------- */

static int try_setup(struct ring_worker *rw, int setup)
{
    static const uint32_t flags[] = {
        [RL_SETUP_NONE] = 0,
        [RL_SETUP_COOP] = IORING_SETUP_COOP_TASKRUN,
        [RL_SETUP_DEFER] = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
        [RL_SETUP_SQPOLL] = IORING_SETUP_SQPOLL,
    };
    const rl_config *config = &rw->server->config;
    uint32_t entries = (uint32_t)config->entries;
    struct io_uring_params params = {
        .flags = flags[setup] | IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP,
        .cq_entries = entries * 4 > CQ_LEAST ? entries * 4 : CQ_LEAST,
        .sq_thread_idle = (uint32_t)config->sq_idle_ms,
    };
    int result = io_uring_queue_init_params(entries, &rw->ring, &params);
    if (result < 0)
        return result;
    rw->info.setup = setup;
    rw->info.flags = params.flags;
    rw->info.features = params.features;
    rw->info.sq_entries = params.sq_entries;
    rw->info.cq_entries = params.cq_entries;
    io_uring_register_ring_fd(&rw->ring); /* a cheaper enter; older kernels do without */
    return 0;
}

/* The setup asked for, or the best without polling that this kernel takes. */
static int setup_ring(struct ring_worker *rw)
{
    if (rw->server->config.setup != RL_SETUP_AUTO)
        return try_setup(rw, rw->server->config.setup);
    int result = try_setup(rw, RL_SETUP_DEFER);
    if (result == -EINVAL)
        result = try_setup(rw, RL_SETUP_COOP);
    return result == -EINVAL ? try_setup(rw, RL_SETUP_NONE) : result;
}

static void add_buffer(struct ring_worker *rw, int buffer, int offset)
{
    io_uring_buf_ring_add(rw->buffers, rw->buffer_memory + (size_t)buffer * BUFFER_SIZE,
                          BUFFER_SIZE, (unsigned short)buffer, io_uring_buf_ring_mask(BUFFERS),
                          offset);
}

static void *map(size_t size)
{
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

static int setup_buffers(struct ring_worker *rw)
{
    rw->buffers = map(BUFFERS * sizeof(struct io_uring_buf));
    rw->buffer_memory = map((size_t)BUFFERS * BUFFER_SIZE);
    if (!rw->buffers || !rw->buffer_memory)
        return -ENOMEM;
    struct io_uring_buf_reg registration = {
        .ring_addr = (uint64_t)(uintptr_t)rw->buffers,
        .ring_entries = BUFFERS,
        .bgid = BUFFER_GROUP,
    };
    int result = io_uring_register_buf_ring(&rw->ring, &registration, 0);
    if (result < 0)
        return result;
    io_uring_buf_ring_init(rw->buffers);
    for (int i = 0; i < BUFFERS; i++)
        add_buffer(rw, i, i);
    io_uring_buf_ring_advance(rw->buffers, BUFFERS);
    return 0;
}

static void unmap_buffers(struct ring_worker *rw)
{
    if (rw->buffers)
        munmap(rw->buffers, BUFFERS * sizeof(struct io_uring_buf));
    if (rw->buffer_memory)
        munmap(rw->buffer_memory, (size_t)BUFFERS * BUFFER_SIZE);
    rw->buffers = NULL;
    rw->buffer_memory = NULL;
}

/* To be called on the worker's own thread: some setups bind the ring to the task that makes it. */
int ring_open(struct ring_worker *rw, const char **where)
{
    *where = "io_uring_setup";
    int result = setup_ring(rw);
    if (result < 0)
        return result;
    rw->info.multishot_accept = rw->info.multishot_recv = 1; /* until the kernel says -EINVAL */
    if (rw->server->config.recv != RL_RECV_PLAIN) {
        result = setup_buffers(rw);
        rw->info.buffer_ring = result == 0;
        *where = "io_uring_register (provided buffers)";
    }
    if (result < 0 && rw->server->config.recv == RL_RECV_BUFFER_RING) {
        unmap_buffers(rw);
        io_uring_queue_exit(&rw->ring);
        return result;
    }
    rw->info.multishot_recv = rw->info.buffer_ring;
    return 0;
}

void ring_close(struct ring_worker *rw)
{
    io_uring_queue_exit(&rw->ring);
    unmap_buffers(rw);
}

/* ---- the wait ------------------------------------------------------------------------------ */

static int ring_ready(struct worker *w) { return (int)io_uring_cq_ready(&ring_of(w)->ring); }
static int ring_pending(struct worker *w) { return (int)io_uring_sq_ready(&ring_of(w)->ring); }

static int ring_wait(struct worker *w, const rl_wait *wait)
{
    return ring_make_wait(&ring_of(w)->ring, wait, &w->count.enters);
}

/* ---- reap ---------------------------------------------------------------------------------- */

/* What an older kernel refuses is asked for again without multishot. */
static int without_multishot(struct ring_worker *rw, enum op op, int result)
{
    int *multishot = op == OP_ACCEPT ? &rw->info.multishot_accept : &rw->info.multishot_recv;
    if (result != -EINVAL || !*multishot || (op != OP_ACCEPT && op != OP_RECV))
        return result;
    STORE(*multishot, 0);
    return -EINTR;
}

static int ring_reap(struct worker *w, struct completion *out, int most)
{
    struct ring_worker *rw = ring_of(w);
    struct io_uring_cqe *cqe;
    unsigned int head;
    int n = 0;
    io_uring_for_each_cqe(&rw->ring, head, cqe) {
        if (n == most)
            break;
        enum op op = op_of(cqe->user_data);
        struct completion *done = &out[n++];
        *done = (struct completion){
            .user_data = cqe->user_data,
            .result = without_multishot(rw, op, cqe->res),
            .more = cqe->flags & IORING_CQE_F_MORE,
            .buffer = -1,
        };
        if (cqe->flags & IORING_CQE_F_BUFFER) {
            done->buffer = (int)(cqe->flags >> IORING_CQE_BUFFER_SHIFT);
            done->data = rw->buffer_memory + (size_t)done->buffer * BUFFER_SIZE;
        } else if (op == OP_RECV && !rw->info.buffer_ring) {
            struct conn *c = conn_of(w, cqe->user_data);
            done->data = c && c->backend ? ((struct conn_io *)c->backend)->plain : NULL;
        }
    }
    io_uring_cq_advance(&rw->ring, (unsigned int)n);
    return n;
}

static void ring_give_back(struct worker *w, int buffer)
{
    struct ring_worker *rw = ring_of(w);
    add_buffer(rw, buffer, 0);
    io_uring_buf_ring_advance(rw->buffers, 1);
}

/* ---- requests ------------------------------------------------------------------------------ */

static struct io_uring_sqe *next_sqe(struct worker *w)
{
    return io_uring_get_sqe(&ring_of(w)->ring);
}

static void set_data(struct io_uring_sqe *sqe, uint64_t data) { sqe->user_data = data; }

static int ring_arm_accept(struct worker *w)
{
    struct ring_worker *rw = ring_of(w);
    struct io_uring_sqe *sqe = next_sqe(w);
    if (!sqe)
        return -EBUSY;
    if (rw->info.multishot_accept)
        io_uring_prep_multishot_accept(sqe, rw->listener, NULL, NULL, SOCK_CLOEXEC);
    else
        io_uring_prep_accept(sqe, rw->listener, NULL, NULL, SOCK_CLOEXEC);
    set_data(sqe, pack_op(OP_ACCEPT));
    return 0;
}

static int ring_arm_wake(struct worker *w)
{
    struct ring_worker *rw = ring_of(w);
    struct io_uring_sqe *sqe = next_sqe(w);
    if (!sqe)
        return -EBUSY;
    io_uring_prep_read(sqe, rw->wake_fd, &rw->wake_value, sizeof rw->wake_value, 0);
    set_data(sqe, pack_op(OP_WAKE));
    return 0;
}

static int ring_arm_recv(struct worker *w, struct conn *c)
{
    struct ring_worker *rw = ring_of(w);
    if (!rw->info.buffer_ring && !io_of(w, c))
        return -ENOMEM;
    struct io_uring_sqe *sqe = next_sqe(w);
    if (!sqe)
        return -EBUSY;
    if (!rw->info.buffer_ring) {
        io_uring_prep_recv(sqe, c->fd, io_of(w, c)->plain, PLAIN_SIZE, 0);
    } else {
        if (rw->info.multishot_recv)
            io_uring_prep_recv_multishot(sqe, c->fd, NULL, 0, 0);
        else
            io_uring_prep_recv(sqe, c->fd, NULL, BUFFER_SIZE, 0);
        sqe->flags |= IOSQE_BUFFER_SELECT;
        sqe->buf_group = BUFFER_GROUP;
    }
    set_data(sqe, pack(OP_RECV, c));
    return 0;
}

static int ring_cancel_recv(struct worker *w, struct conn *c)
{
    struct io_uring_sqe *sqe = next_sqe(w);
    if (!sqe)
        return -EBUSY;
    io_uring_prep_cancel64(sqe, pack(OP_RECV, c), 0);
    set_data(sqe, pack_op(OP_CANCEL));
    return 0;
}

static int ring_send(struct worker *w, struct conn *c)
{
    struct conn_io *io = io_of(w, c);
    struct io_uring_sqe *sqe = io ? next_sqe(w) : NULL;
    if (!sqe)
        return -EBUSY;
    int n = out_iov(send_buf(c), io->iov, RL_IOV_MAX);
    if (n == 1) {
        io_uring_prep_send(sqe, c->fd, io->iov[0].iov_base, io->iov[0].iov_len, MSG_NOSIGNAL);
    } else {
        io->message = (struct msghdr){.msg_iov = io->iov, .msg_iovlen = (size_t)n};
        io_uring_prep_sendmsg(sqe, c->fd, &io->message, MSG_NOSIGNAL);
    }
    set_data(sqe, pack(OP_SEND, c));
    return 0;
}

/* ---- directly on the socket ---------------------------------------------------------------- */

static ssize_t ring_write(struct conn *c, const struct iovec *iov, int count)
{
    struct msghdr message = {
        .msg_iov = (struct iovec *)(uintptr_t)iov, .msg_iovlen = (size_t)count,
    };
    ssize_t took;
    do
        took = sendmsg(c->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (took < 0 && errno == EINTR);
    return took < 0 ? -errno : took;
}

static void no_linger(const struct conn *c)
{
    if (c->reset) /* what the client did not read is not worth keeping in the kernel */
        setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &(struct linger){1, 0}, sizeof(struct linger));
}

static void ring_shutdown(struct conn *c)
{
    no_linger(c);
    shutdown(c->fd, SHUT_RDWR); /* completes the requests that wait on it */
}

static void ring_end_stream(struct conn *c) { shutdown(c->fd, SHUT_WR); }

static void ring_conn_close(struct conn *c)
{
    no_linger(c);
    close(c->fd);
}

static void ring_close_listener(struct worker *w)
{
    struct ring_worker *rw = ring_of(w);
    w->has_listener = false;
    shutdown(rw->listener, SHUT_RDWR); /* ends the armed accept, which close alone does not */
    close(rw->listener);
    STORE(rw->listener, -1);
}

static void ring_lock(struct conn *c) { pthread_mutex_lock(&c->lock); }

static void ring_wake(struct worker *w)
{
    uint64_t one = 1;
    ssize_t written = write(ring_of(w)->wake_fd, &one, sizeof one);
    (void)written; /* a full counter wakes as well */
}

static int64_t ring_now(struct worker *w)
{
    (void)w;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void ring_woke(struct worker *w, int64_t from)
{
    sampled_tick(&ring_of(w)->sampled, from, w->now);
}

const struct ops ring_ops = {
    .ready = ring_ready,
    .pending = ring_pending,
    .wait = ring_wait,
    .reap = ring_reap,
    .give_back = ring_give_back,
    .arm_accept = ring_arm_accept,
    .arm_wake = ring_arm_wake,
    .arm_recv = ring_arm_recv,
    .cancel_recv = ring_cancel_recv,
    .send = ring_send,
    .write = ring_write,
    .shutdown = ring_shutdown,
    .end_stream = ring_end_stream,
    .close = ring_conn_close,
    .close_listener = ring_close_listener,
    .lock = ring_lock,
    .schedule = pool_schedule,
    .pause = pool_pause,
    .wake = ring_wake,
    .now = ring_now,
    .woke = ring_woke,
};

int rl_probe(rl_ring_info *out)
{
    struct io_uring ring;
    struct io_uring_params params = {0};
    int result = io_uring_queue_init_params(2, &ring, &params);
    if (result < 0)
        return result;
    *out = (rl_ring_info){.features = params.features, .sq_entries = params.sq_entries,
                          .cq_entries = params.cq_entries};
    io_uring_queue_exit(&ring);
    return 0;
}
