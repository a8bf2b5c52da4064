/*
 * The scripted backend: the same state machine with no kernel under it. Completions, short writes,
 * errors, full queues and time come from whoever drives it; each connection's bytes are kept in the
 * order in which the kernel would have taken them, so that a lost or misplaced one shows.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"

struct bytes {
    uint8_t *data;
    size_t size, cap;
};

/* The socket of one connection, and what the driver knows of its requests. */
struct peer {
    struct bytes arrived;   /* sent by the client, not yet taken by a recv */
    struct bytes delivered; /* taken from the server */
    int64_t room;           /* bytes a direct write may still take */
    bool eof, reset, shut;
    struct conn *conn; /* NULL before it is accepted and after it is closed */
    bool recv_armed, recv_submitted, recv_cancelled;
    bool send_armed, send_submitted;
    struct iovec iov[RL_IOV_MAX];
    int iov_count;
    struct request *running; /* by the handler, which then holds the lock */
};

struct rl_script {
    struct worker w;
    int64_t settings[RL_SETTINGS];
    rl_script_config config;
    rl_policy policies[2]; /* the one in force and the one to come */
    int policy_turn;
    struct peer *peers; /* by client number, which is what the state machine takes for the fd */
    int clients, clients_cap;
    struct completion *queue;
    int queued, queue_cap;
    uint8_t **lent; /* received data that the state machine has not given back */
    int lent_cap;
    int sq_used;
    int64_t now;
    int wakes;      /* eventfd writes not yet read */
    bool wake_submitted, accept_submitted;
    bool left;
};

static rl_script *script_of(struct worker *w) { return w->backend; }
static struct peer *peer_of(struct conn *c) { return &script_of(c->worker)->peers[c->fd]; }

/* ---- small things -------------------------------------------------------------------------- */

static bool append(struct bytes *to, const uint8_t *data, size_t size)
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

static void append_iov(struct bytes *to, const struct iovec *iov, int count, uint64_t most)
{
    for (int i = 0; i < count && most; i++) {
        size_t take = iov[i].iov_len < most ? iov[i].iov_len : (size_t)most;
        append(to, iov[i].iov_base, take);
        most -= take;
    }
}

static void post(rl_script *s, struct completion done)
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

static void post_recv(rl_script *s, struct conn *c, struct peer *p, int result, bool more)
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
    post(s, done);
}

static void serve_recv(rl_script *s, struct conn *c, struct peer *p)
{
    if (!p->recv_armed || !p->recv_submitted)
        return;
    if (p->recv_cancelled) {
        p->recv_cancelled = false;
        post_recv(s, c, p, -ECANCELED, false);
    } else if (p->shut) {
        post_recv(s, c, p, 0, false);
    } else if (p->reset) {
        post_recv(s, c, p, -ECONNRESET, false);
    } else if (p->arrived.size) {
        post_recv(s, c, p, (int)p->arrived.size, s->config.multishot_recv != 0);
        serve_recv(s, c, p);
    } else if (p->eof) {
        post_recv(s, c, p, 0, false);
    }
}

static void end_send(rl_script *s, struct conn *c, struct peer *p, int result)
{
    p->send_armed = p->send_submitted = false;
    post(s, (struct completion){.user_data = pack(OP_SEND, c), .result = result, .buffer = -1});
}

static void serve(rl_script *s)
{
    for (int client = 0; client < s->clients; client++) {
        struct peer *p = &s->peers[client];
        struct conn *c = p->conn;
        if (!c)
            continue;
        serve_recv(s, c, p);
        if (p->send_armed && p->send_submitted && (p->shut || p->reset))
            end_send(s, c, p, p->reset ? -ECONNRESET : -EPIPE);
    }
    if (s->wakes && s->wake_submitted) {
        s->wakes = 0;
        s->wake_submitted = false;
        post(s, (struct completion){.user_data = pack_op(OP_WAKE), .buffer = -1, .result = 8});
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
    serve(s);
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
    append_iov(&p->delivered, iov, count, take);
    p->room -= (int64_t)take;
    return (ssize_t)take;
}

static void op_shutdown(struct conn *c)
{
    peer_of(c)->shut = true;
    serve(script_of(c->worker));
}

static void op_close(struct conn *c)
{
    peer_of(c)->conn = NULL;
    peer_of(c)->shut = true;
}

static void op_close_listener(struct worker *w) { w->has_listener = false; }
static void op_wake(struct worker *w)
{
    script_of(w)->wakes++;
    serve(script_of(w));
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

static const struct ops script_ops = {
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
    .close = op_close,
    .close_listener = op_close_listener,
    .lock = op_lock,
    .schedule = op_schedule,
    .pause = op_pause,
    .wake = op_wake,
    .now = op_now,
};

/* ---- the driver's calls -------------------------------------------------------------------- */

rl_script *rl_script_new(const rl_script_config *config)
{
    if (policy_check(&config->policy) || config->max_connections < 1 || config->sq_entries < 1)
        return NULL;
    rl_script *s;
    if (posix_memalign((void **)&s, RL_CACHE_LINE, sizeof *s))
        return NULL;
    memset(s, 0, sizeof *s);
    s->config = *config;
    memcpy(s->settings, config->settings, sizeof s->settings);
    s->policies[0] = config->policy;
    struct worker *w = &s->w;
    w->ops = &script_ops;
    w->backend = s;
    w->settings = s->settings;
    w->max_connections = config->max_connections;
    w->max_header = config->max_header;
    w->stop_grace_ns = config->stop_grace_ms * RL_MS;
    w->has_listener = true;
    worker_init(w);
    policy_apply(w, &s->policies[0]);
    worker_begin(w);
    return s;
}

void rl_script_free(rl_script *s)
{
    for (int i = 0; i < s->clients; i++) {
        struct peer *p = &s->peers[i];
        if (p->running && p->conn)
            pthread_mutex_unlock(&p->conn->lock);
        free(p->running);
        free(p->arrived.data);
        free(p->delivered.data);
    }
    for (int i = 0; i < s->lent_cap; i++)
        free(s->lent[i]);
    free(s->lent);
    free(s->peers);
    free(s->queue);
    worker_free(&s->w);
    free(s);
}

int rl_script_set(rl_script *s, int setting, int64_t value)
{
    if (setting < 0 || setting >= RL_SETTINGS || value < 0)
        return -EINVAL;
    s->settings[setting] = value;
    return 0;
}

int rl_script_policy(rl_script *s, const rl_policy *policy)
{
    if (policy_check(policy))
        return -EINVAL;
    s->policy_turn = 1 - s->policy_turn;
    s->policies[s->policy_turn] = *policy;
    policy_apply(&s->w, &s->policies[s->policy_turn]);
    return 0;
}

static struct peer *peer_at(rl_script *s, int client)
{
    return client < 0 || client >= s->clients ? NULL : &s->peers[client];
}

int rl_script_accept(rl_script *s)
{
    if (!s->w.has_listener)
        return -ECONNREFUSED;
    if (s->clients == s->clients_cap) {
        int cap = s->clients_cap ? 2 * s->clients_cap : 16;
        struct peer *bigger = realloc(s->peers, (size_t)cap * sizeof *bigger);
        if (!bigger)
            return -ENOMEM;
        s->peers = bigger;
        s->clients_cap = cap;
    }
    s->peers[s->clients] = (struct peer){0};
    post(s, (struct completion){.user_data = pack_op(OP_ACCEPT), .result = s->clients,
                                .more = true, .buffer = -1});
    return s->clients++;
}

int rl_script_input(rl_script *s, int client, const uint8_t *data, size_t size)
{
    struct peer *p = peer_at(s, client);
    if (!p)
        return -EINVAL;
    if (p->eof || p->reset || p->shut)
        return -EPIPE;
    if (!append(&p->arrived, data, size))
        return -ENOMEM;
    serve(s);
    return 0;
}

int rl_script_eof(rl_script *s, int client)
{
    struct peer *p = peer_at(s, client);
    if (!p)
        return -EINVAL;
    p->eof = true;
    serve(s);
    return 0;
}

int rl_script_reset(rl_script *s, int client)
{
    struct peer *p = peer_at(s, client);
    if (!p)
        return -EINVAL;
    p->reset = true;
    serve(s);
    return 0;
}

int rl_script_room(rl_script *s, int client, int64_t bytes)
{
    struct peer *p = peer_at(s, client);
    if (!p || bytes < 0)
        return -EINVAL;
    p->room = bytes;
    return 0;
}

int rl_script_send_done(rl_script *s, int client, int64_t result)
{
    struct peer *p = peer_at(s, client);
    if (!p || !p->conn || !p->send_armed)
        return -ENOENT;
    if (!p->send_submitted)
        return -EAGAIN; /* the loop has not handed it to the kernel yet */
    int64_t asked = 0;
    for (int i = 0; i < p->iov_count; i++)
        asked += (int64_t)p->iov[i].iov_len;
    if (result > asked || result == 0)
        return -EINVAL;
    if (result > 0)
        append_iov(&p->delivered, p->iov, p->iov_count, (uint64_t)result);
    end_send(s, p->conn, p, (int)result);
    return 0;
}

int rl_script_handler_begin(rl_script *s, int client)
{
    struct peer *p = peer_at(s, client);
    if (!p)
        return -EINVAL;
    if (!p->conn || p->running || !p->conn->first)
        return 0;
    if (pthread_mutex_trylock(&p->conn->lock))
        return -EBUSY;
    p->running = next_request(p->conn);
    STORE(p->conn->handler_running, 1);
    return 1;
}

int rl_script_handler_end(rl_script *s, int client)
{
    struct peer *p = peer_at(s, client);
    if (!p || !p->running)
        return -ENOENT;
    struct conn *c = p->conn;
    handle_locked(c, p->running);
    free(p->running);
    p->running = NULL;
    bool needs_worker = handler_unlock(c);
    if (c->closing)
        for (struct request *dropped; (dropped = next_request(c));)
            free(dropped);
    hand_back(c, c->first != NULL, needs_worker);
    return 0;
}

int rl_script_lose_recv(rl_script *s, int client)
{
    struct peer *p = peer_at(s, client);
    if (!p || !p->conn || !p->recv_armed || !p->recv_submitted)
        return -ENOENT;
    post_recv(s, p->conn, p, -ENOBUFS, false);
    return 0;
}

int rl_script_poke(rl_script *s)
{
    post(s, (struct completion){.user_data = pack_op(OP_CANCEL), .buffer = -1});
    return 0;
}

int rl_script_stop(rl_script *s)
{
    STORE(s->w.stop_asked, 1);
    const rl_choice *idle = rl_choice_at(RL_IDLE, s->w.policy->choice[RL_IDLE]);
    if (strcmp(idle->name, "tickless") == 0)
        op_wake(&s->w);
    return 0;
}

int64_t rl_script_advance(rl_script *s, int64_t ns)
{
    s->now += ns > 0 ? ns : 0;
    STORE(s->w.now, s->now);
    return s->now;
}

int rl_script_phase(rl_script *s, int phase, rl_wait *wait)
{
    static void (*const run[])(struct worker *) = {
        [RL_PHASE_REAP] = worker_reap, [RL_PHASE_DRAIN] = worker_drain,
        [RL_PHASE_DIRTY] = worker_dirty, [RL_PHASE_HOUSE] = worker_house,
    };
    if (phase < 0 || phase > RL_PHASE_DECIDE)
        return -EINVAL;
    if (phase != RL_PHASE_DECIDE) {
        run[phase](&s->w);
        STORE(s->w.count.list_length, s->w.dirty.length);
        return 0;
    }
    worker_account(&s->w);
    s->left = s->left || !worker_top(&s->w);
    if (!s->left)
        worker_decide(&s->w);
    *wait = s->w.next;
    return s->left;
}

int rl_script_iterate(rl_script *s, rl_wait *wait)
{
    for (int phase = RL_PHASE_REAP; phase < RL_PHASE_DECIDE; phase++)
        rl_script_phase(s, phase, wait);
    return rl_script_phase(s, RL_PHASE_DECIDE, wait);
}

int rl_script_wait(rl_script *s, rl_wait *wait)
{
    *wait = s->w.next;
    int result = op_wait(&s->w, wait);
    STORE(s->w.now, s->now);
    if (result == -ETIME)
        ADD(s->w.count.etime, 1);
    return result;
}

int rl_script_conn(rl_script *s, int client, rl_conn_view *out)
{
    struct peer *p = peer_at(s, client);
    if (!p)
        return -EINVAL;
    if (!p->conn)
        return -ENOTCONN;
    view_conn(p->conn, out);
    return 0;
}

int rl_script_loop(rl_script *s, rl_loop_view *out)
{
    view_loop(&s->w, out);
    return 0;
}

int rl_script_counters(rl_script *s, rl_counters *out)
{
    *out = s->w.count;
    out->direct_writes = s->w.handled.direct_writes;
    out->direct_short = s->w.handled.direct_short;
    out->direct_eagain = s->w.handled.direct_eagain;
    out->bytes_direct = s->w.handled.bytes_direct;
    out->ended = s->left;
    return 0;
}

int rl_script_pending(rl_script *s, int client, int64_t *send_bytes)
{
    struct peer *p = peer_at(s, client);
    if (!p)
        return -EINVAL;
    *send_bytes = 0;
    if (!p->conn)
        return 0;
    for (int i = 0; p->send_armed && i < p->iov_count; i++)
        *send_bytes += (int64_t)p->iov[i].iov_len;
    bool recv = p->recv_armed && p->recv_submitted, send = p->send_armed && p->send_submitted;
    return (recv ? 1 : 0) | (send ? 2 : 0);
}

int64_t rl_script_output(rl_script *s, int client, uint8_t *out, int64_t at, int64_t most)
{
    struct peer *p = peer_at(s, client);
    if (!p || at < 0)
        return -EINVAL;
    int64_t left = (int64_t)p->delivered.size - at;
    int64_t take = left < most ? left : most;
    if (take > 0 && out)
        memcpy(out, p->delivered.data + at, (size_t)take);
    return take > 0 ? take : 0;
}
