/*
 * The scripted backend: the same state machine with no kernel under it. Completions, short writes,
 * errors, full queues and time come from whoever drives it; each connection's bytes are kept in the
 * order in which the kernel would have taken them, so that a lost or misplaced one shows.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "script.h"

static rl_script *script_of(struct worker *w) { return w->backend; }
static struct peer *peer_of(struct conn *c) { return &script_of(c->worker)->peers[c->fd]; }

/* ---- small things -------------------------------------------------------------------------- */

bool script_append(struct bytes *to, const uint8_t *data, size_t size)
{
    if (to->size + size > to->cap) {
        size_t cap = to->cap ? to->cap : 256;
        while (cap < to->size + size)
            cap *= 2;
        uint8_t *bigger = realloc(to->data, cap);
        if (!bigger)
            return false;
        to->data = bigger;
        to->cap = cap;
    }
    if (size)
        memcpy(to->data + to->size, data, size);
    to->size += size;
    return true;
}

static void take_front(struct bytes *from, size_t size)
{
    from->size -= size;
    if (from->size)
        memmove(from->data, from->data + size, from->size);
}

void script_append_iov(struct bytes *to, const struct iovec *iov, int count, uint64_t most)
{
    for (int i = 0; i < count && most; i++) {
        size_t take = iov[i].iov_len < most ? iov[i].iov_len : (size_t)most;
        script_append(to, iov[i].iov_base, take);
        most -= take;
    }
}

void script_post(rl_script *s, struct completion done)
{
    if (s->queued == s->queue_cap) {
        int cap = s->queue_cap ? 2 * s->queue_cap : 64;
        struct completion *bigger = realloc(s->queue, (size_t)cap * sizeof *bigger);
        if (!bigger)
            return;
        s->queue = bigger;
        s->queue_cap = cap;
    }
    s->queue[s->queued++] = done;
}

static int use_sqe(struct worker *w)
{
    rl_script *s = script_of(w);
    if (s->sq_used >= s->config.sq_entries)
        return -EBUSY;
    s->sq_used++;
    return 0;
}

static int lend(rl_script *s, uint8_t *data)
{
    int i = 0;
    while (i < s->lent_cap && s->lent[i])
        i++;
    if (i == s->lent_cap) {
        int cap = s->lent_cap ? 2 * s->lent_cap : 16;
        uint8_t **bigger = realloc(s->lent, (size_t)cap * sizeof *bigger);
        if (!bigger)
            return -1;
        memset(bigger + s->lent_cap, 0, (size_t)(cap - s->lent_cap) * sizeof *bigger);
        s->lent = bigger;
        s->lent_cap = cap;
    }
    s->lent[i] = data;
    return i;
}

/* ---- what the kernel would do with what was submitted -------------------------------------- */

void script_post_recv(rl_script *s, struct conn *c, struct peer *p, int result, bool more)
{
    struct completion done = {.user_data = pack(OP_RECV, c), .result = result, .more = more,
                              .buffer = -1};
    if (result > 0) {
        uint8_t *copy = malloc((size_t)result);
        memcpy(copy, p->arrived.data, (size_t)result);
        take_front(&p->arrived, (size_t)result);
        done.data = copy;
        done.buffer = lend(s, copy);
    }
    if (!more)
        p->recv_armed = p->recv_submitted = false;
    script_post(s, done);
}

static void serve_recv(rl_script *s, struct conn *c, struct peer *p)
{
    if (!p->recv_armed || !p->recv_submitted)
        return;
    if (p->recv_cancelled) {
        p->recv_cancelled = false;
        script_post_recv(s, c, p, -ECANCELED, false);
    } else if (p->shut) {
        script_post_recv(s, c, p, 0, false);
    } else if (p->reset) {
        script_post_recv(s, c, p, -ECONNRESET, false);
    } else if (p->arrived.size) {
        script_post_recv(s, c, p, (int)p->arrived.size, s->config.multishot_recv != 0);
        serve_recv(s, c, p);
    } else if (p->eof) {
        script_post_recv(s, c, p, 0, false);
    }
}

void script_end_send(rl_script *s, struct conn *c, struct peer *p, int result)
{
    p->send_armed = p->send_submitted = false;
    const uint64_t of = pack(OP_SEND, c);
    script_post(s, (struct completion){.user_data = of, .result = result, .buffer = -1});
}

void script_serve(rl_script *s)
{
    for (int client = 0; client < s->clients; client++) {
        struct peer *p = &s->peers[client];
        struct conn *c = p->conn;
        if (!c)
            continue;
        serve_recv(s, c, p);
        if (p->send_armed && p->send_submitted && (p->shut || p->reset))
            script_end_send(s, c, p, p->reset ? -ECONNRESET : -EPIPE);
    }
    if (s->wakes && s->wake_submitted) {
        s->wakes = 0;
        s->wake_submitted = false;
        const uint64_t of = pack_op(OP_WAKE);
        script_post(s, (struct completion){.user_data = of, .result = 8, .buffer = -1});
    }
}

static void submit(rl_script *s)
{
    s->sq_used = 0;
    for (int client = 0; client < s->clients; client++) {
        struct peer *p = &s->peers[client];
        p->recv_submitted = p->recv_armed;
        p->send_submitted = p->send_armed;
    }
    s->wake_submitted = s->w.wake_armed;
    s->accept_submitted = s->w.accept_armed;
    script_serve(s);
}

/* ---- the table of operations --------------------------------------------------------------- */

static int op_ready(struct worker *w) { return script_of(w)->queued; }
static int op_pending(struct worker *w) { return script_of(w)->sq_used; }

static int op_wait(struct worker *w, const rl_wait *wait)
{
    rl_script *s = script_of(w);
    if (wait->mode == RL_MODE_SKIP)
        return 0;
    ADD(w->count.enters, 1);
    submit(s);
    if (s->queued || wait->mode == RL_MODE_SUBMIT)
        return 0;
    if (wait->timeout_ns < 0)
        return -EAGAIN; /* it sleeps until somebody acts */
    s->now += wait->timeout_ns;
    return -ETIME;
}

static int op_reap(struct worker *w, struct completion *out, int most)
{
    rl_script *s = script_of(w);
    int n = s->queued < most ? s->queued : most;
    memcpy(out, s->queue, (size_t)n * sizeof *out);
    s->queued -= n;
    memmove(s->queue, s->queue + n, (size_t)s->queued * sizeof *s->queue);
    return n;
}

static void op_give_back(struct worker *w, int buffer)
{
    rl_script *s = script_of(w);
    free(s->lent[buffer]);
    s->lent[buffer] = NULL;
}

static int op_arm_accept(struct worker *w) { return use_sqe(w); }
static int op_arm_wake(struct worker *w) { return use_sqe(w); }

static int op_arm_recv(struct worker *w, struct conn *c)
{
    if (use_sqe(w))
        return -EBUSY;
    struct peer *p = peer_of(c);
    p->conn = c; /* its first recv is armed when it is accepted */
    p->recv_armed = true;
    p->recv_submitted = false;
    return 0;
}

static int op_cancel_recv(struct worker *w, struct conn *c)
{
    if (use_sqe(w))
        return -EBUSY;
    peer_of(c)->recv_cancelled = peer_of(c)->recv_armed;
    return 0;
}

static int op_send(struct worker *w, struct conn *c)
{
    if (use_sqe(w))
        return -EBUSY;
    struct peer *p = peer_of(c);
    p->iov_count = out_iov(send_buf(c), p->iov, RL_IOV_MAX);
    p->send_armed = true;
    p->send_submitted = false;
    return 0;
}

static ssize_t op_write(struct conn *c, const struct iovec *iov, int count)
{
    struct peer *p = peer_of(c);
    if (p->reset || p->shut)
        return -EPIPE;
    if (p->room <= 0)
        return -EAGAIN;
    uint64_t asked = 0;
    for (int i = 0; i < count; i++)
        asked += iov[i].iov_len;
    uint64_t take = asked < (uint64_t)p->room ? asked : (uint64_t)p->room;
    script_append_iov(&p->delivered, iov, count, take);
    p->room -= (int64_t)take;
    return (ssize_t)take;
}

static void op_shutdown(struct conn *c)
{
    peer_of(c)->shut = true;
    script_serve(script_of(c->worker));
}

static void op_end_stream(struct conn *c) { (void)c; /* the client sees that it is closing */ }

static void op_close(struct conn *c)
{
    peer_of(c)->conn = NULL;
    peer_of(c)->shut = true;
}

static void op_close_listener(struct worker *w) { w->has_listener = false; }
static void op_wake(struct worker *w)
{
    script_of(w)->wakes++;
    script_serve(script_of(w));
}
static int64_t op_now(struct worker *w) { return script_of(w)->now; }
static void op_pause(struct worker *w, int64_t ms) { script_of(w)->now += ms * RL_MS; }

static void op_schedule(struct conn *c, struct request *request)
{
    queue_request(c, request);
    STORE(c->scheduled, 1);
}

/* The worker waits for the lock: the handler's whole run passes first. */
static void op_lock(struct conn *c)
{
    rl_script_handler_end(script_of(c->worker), c->fd);
    pthread_mutex_lock(&c->lock);
}

static void op_woke(struct worker *w, int64_t from)
{
    (void)w, (void)from; /* a script is looked at between its steps */
}

const struct ops script_ops = {
    .ready = op_ready,
    .pending = op_pending,
    .wait = op_wait,
    .reap = op_reap,
    .give_back = op_give_back,
    .arm_accept = op_arm_accept,
    .arm_wake = op_arm_wake,
    .arm_recv = op_arm_recv,
    .cancel_recv = op_cancel_recv,
    .send = op_send,
    .write = op_write,
    .shutdown = op_shutdown,
    .end_stream = op_end_stream,
    .close = op_close,
    .close_listener = op_close_listener,
    .lock = op_lock,
    .schedule = op_schedule,
    .pause = op_pause,
    .wake = op_wake,
    .now = op_now,
    .woke = op_woke,
};
