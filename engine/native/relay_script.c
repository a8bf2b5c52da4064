/*
 * The relay's scripted backend: the same state machine with no kernel under it. What arrives,
 * what a sink takes, what a connect says and when, come from whoever drives it; each socket
 * keeps the bytes that it was sent in their order, so that a lost or misplaced one shows.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "relay_script.h"

static rl_relay_script *script_of(struct relay *r) { return r->backend; }

struct socket *script_socket(const rl_relay_script *s, int number)
{
    return number < 0 || number >= s->count ? NULL : s->sockets[number];
}

static struct socket *socket_of(struct end *e)
{
    return script_socket(script_of(e->session->relay), e->fd);
}

/* ---- bytes --------------------------------------------------------------------------------- */

bool script_bytes(struct bytes *to, const void *data, size_t size)
{
    if (to->size + size > to->cap) {
        size_t cap = to->cap ? to->cap : 1024;
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

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* The state machine has taken the number for a session: now the socket knows its end. */
static struct socket *bound(struct end *e)
{
    struct socket *k = socket_of(e);
    k->end = e;
    k->slot = (int)e->session->slot;
    return k;
}

/* ---- readiness ----------------------------------------------------------------------------- */

static bool readable(const struct socket *k)
{
    return !k->connecting && (unread(&k->arrived) || k->fin || k->reset || k->connect_error);
}

static bool writable(const struct socket *k)
{
    return !k->connecting && (k->room > 0 || k->reset || k->connect_error);
}

static uint8_t ready_bits(const struct socket *k)
{
    uint8_t bits = 0;
    if (readable(k) && (!k->edge || k->anew))
        bits |= BIT_READ;
    if (writable(k))
        bits |= BIT_WRITE;
    bits &= k->watched;
    if (k->watched && (k->reset || k->connect_error)) /* epoll reports these unasked */
        bits = BIT_READ | BIT_WRITE;
    return bits;
}

static bool unaccepted(const struct socket *k)
{
    return k->side == RL_SIDE_CLIENT && !k->accepted;
}

static bool waits_for_accept(const rl_relay_script *s)
{
    for (int i = 0; i < s->count; i++)
        if (unaccepted(s->sockets[i]))
            return true;
    return false;
}

static bool listener_ready(const rl_relay_script *s)
{
    return s->listener_watched && (waits_for_accept(s) || s->accept_error);
}

uint8_t script_ready(const rl_relay_script *s, const struct socket *k)
{
    if (unaccepted(k))
        return listener_ready(s) ? BIT_READ : 0;
    return k->end ? ready_bits(k) : 0;
}

/* Whom this wait may report; NULL: all. A choice that is not ready any more does not hold. */
static const struct socket *chosen(rl_relay_script *s)
{
    const struct socket *k = s->only ? s->sockets[s->only - 1] : NULL;
    s->only = 0;
    return k && script_ready(s, k) ? k : NULL;
}

static int report_ready(rl_relay_script *s)
{
    int n = 0;
    const struct socket *only = chosen(s);
    if (listener_ready(s) && (!only || unaccepted(only))) {
        end_report(&s->r, &s->r.listener, BIT_READ);
        n++;
    }
    for (int i = 0; i < s->count; i++) {
        struct socket *k = s->sockets[i];
        uint8_t bits = k->end && (!only || k == only) ? ready_bits(k) : 0;
        if (!bits)
            continue;
        k->anew = false; /* an edge is told once */
        end_report(&s->r, k->end, bits);
        n++;
    }
    return n;
}

/* ---- the table of operations --------------------------------------------------------------- */

static int op_wait(struct relay *r, int64_t timeout_ns)
{
    rl_relay_script *s = script_of(r);
    int n = report_ready(s);
    if (s->woken) {
        s->woken = false;
        ADD(r->count.wakeups, 1);
        return n;
    }
    if (n || timeout_ns == 0)
        return n;
    if (timeout_ns < 0)
        return -EAGAIN; /* it sleeps until somebody acts */
    s->now += timeout_ns;
    return -ETIME;
}

static int op_watch(struct relay *r, struct end *e, uint8_t bits)
{
    rl_relay_script *s = script_of(r);
    if (!e->session) {
        s->listener_watched = bits & BIT_READ;
        return 0;
    }
    struct socket *k = bound(e);
    k->watched = bits;
    k->edge = e->edge;
    k->anew = false;
    return 0;
}

static int op_accept(struct relay *r)
{
    rl_relay_script *s = script_of(r);
    for (int i = 0; i < s->count; i++) {
        if (!unaccepted(s->sockets[i]))
            continue;
        if (s->accept_error)
            return -s->accept_error;
        s->sockets[i]->accepted = true;
        return i;
    }
    return -EAGAIN;
}

struct socket *script_socket_new(rl_relay_script *s, uint8_t side)
{
    if (s->count == s->cap) {
        int cap = s->cap ? 2 * s->cap : 16;
        struct socket **bigger = realloc(s->sockets, (size_t)cap * sizeof(struct socket *));
        if (!bigger)
            return NULL;
        s->sockets = bigger;
        s->cap = cap;
    }
    struct socket *k = calloc(1, sizeof *k);
    if (!k)
        return NULL;
    k->side = side;
    k->slot = -1;
    k->room = s->config.room;
    s->sockets[s->count++] = k;
    return k;
}

static int op_connect(struct relay *r, struct end *e)
{
    rl_relay_script *s = script_of(r);
    if (s->connect_error)
        return -s->connect_error;
    struct socket *k = script_socket_new(s, RL_SIDE_ORIGIN);
    if (!k)
        return -ENOMEM;
    k->accepted = true;
    k->connecting = !s->config.auto_connect;
    STORE(e->fd, s->count - 1);
    bound(e);
    return -EINPROGRESS;
}

/*
 * After a reset, as on Linux: what has arrived is read first; then one call is told of it, a write
 * at once; and what is read after that ends as if a FIN had come.
 */
static int lost(struct socket *k, enum dir dir)
{
    if (dir == READ && (unread(&k->arrived) || k->fin))
        return 0;
    int error = k->fin ? EPIPE : k->reset;
    k->fin = true;
    return -error;
}

/* Whether a call of that direction fails, before any byte is looked at. */
static int refusal(struct socket *k, enum dir dir)
{
    if (k->again[dir]) {
        k->again[dir]--;
        return -EAGAIN;
    }
    if (k->connecting)
        return -EAGAIN;
    if (k->connect_error)
        return -k->connect_error;
    return k->reset ? lost(k, dir) : 0;
}

/* So many bytes as whoever drives this lets the call have: it was chosen for one call. */
static size_t allowed(struct socket *k, enum dir dir, size_t n)
{
    size_t cut = (size_t)k->cut[dir];
    if (k->grain && !k->all[dir] && n > (size_t)k->grain)
        n = (size_t)k->grain;
    k->cut[dir] = 0;
    k->all[dir] = false;
    return n > cut ? n - cut : n > 0;
}

static ssize_t readable_now(struct socket *k, size_t size)
{
    int refused = refusal(k, READ);
    if (refused)
        return refused;
    size_t n = least(size, unread(&k->arrived));
    return n ? (ssize_t)n : k->fin ? 0 : -EAGAIN;
}

static ssize_t op_recv(struct end *e, void *to, size_t size)
{
    struct socket *k = bound(e);
    ssize_t n = readable_now(k, size);
    if (n > 0) {
        n = (ssize_t)allowed(k, READ, (size_t)n);
        memcpy(to, k->arrived.data + k->arrived.at, (size_t)n);
        k->arrived.at += (size_t)n;
    }
    return n;
}

static ssize_t deliver(struct socket *k, const uint8_t *from, size_t size)
{
    int refused = refusal(k, WRITE);
    if (refused)
        return refused;
    if (k->all[WRITE] && k->room < (int64_t)size)
        k->room = (int64_t)size;
    if (k->room <= 0)
        return -EAGAIN;
    size_t n = allowed(k, WRITE, least(size, (size_t)k->room));
    if (!script_bytes(&k->delivered, from, n))
        return -ENOMEM;
    k->room -= (int64_t)n;
    return (ssize_t)n;
}

static ssize_t op_send(struct end *e, const void *from, size_t size)
{
    return deliver(bound(e), from, size);
}

static ssize_t op_splice_in(struct end *e, struct pipe *pipe, size_t size)
{
    struct socket *k = bound(e);
    struct bytes *held = pipe->data;
    size_t space = (size_t)script_of(e->session->relay)->config.pipe_size - unread(held);
    ssize_t n = readable_now(k, size);
    if (n <= 0)
        return n;
    if (!space)
        return -EAGAIN;
    n = (ssize_t)allowed(k, READ, least((size_t)n, space));
    if (!script_bytes(held, k->arrived.data + k->arrived.at, (size_t)n))
        return -ENOMEM;
    k->arrived.at += (size_t)n;
    return n;
}

static ssize_t op_splice_out(struct end *e, struct pipe *pipe, size_t size)
{
    struct bytes *held = pipe->data;
    ssize_t n = deliver(bound(e), held->data + held->at, least(size, unread(held)));
    if (n > 0)
        held->at += (size_t)n;
    if (held->at == held->size)
        held->at = held->size = 0;
    return n;
}

static int op_pipe_open(struct relay *r, struct pipe *pipe)
{
    if (script_of(r)->pipe_error)
        return -script_of(r)->pipe_error;
    pipe->data = calloc(1, sizeof(struct bytes));
    return pipe->data ? 0 : -ENOMEM;
}

static void op_pipe_close(struct relay *r, struct pipe *pipe)
{
    (void)r;
    struct bytes *held = pipe->data;
    free(held->data);
    free(held);
}

static void op_finish(struct end *e) { bound(e)->finished = true; }

static void op_reset(struct end *e) { bound(e)->broken_off = true; }

static void op_close(struct relay *r, struct end *e)
{
    rl_relay_script *s = script_of(r);
    if (e == &r->listener) {
        s->listener_watched = false;
        return;
    }
    struct socket *k = script_socket(s, e->fd);
    k->closed = true;
    k->finished |= !k->broken_off;
    k->end = NULL;
    k->watched = 0;
}

static int64_t op_now(struct relay *r) { return script_of(r)->now; }
static void op_wake(struct relay *r) { script_of(r)->woken = true; }

static void op_woke(struct relay *r, int64_t from)
{
    (void)r, (void)from; /* a script is looked at between its steps */
}

const struct relay_ops relay_script_ops = {
    .wait = op_wait,
    .watch = op_watch,
    .accept = op_accept,
    .connect = op_connect,
    .recv = op_recv,
    .send = op_send,
    .splice_in = op_splice_in,
    .splice_out = op_splice_out,
    .pipe_open = op_pipe_open,
    .pipe_close = op_pipe_close,
    .finish = op_finish,
    .reset = op_reset,
    .close = op_close,
    .now = op_now,
    .wake = op_wake,
    .woke = op_woke,
};
