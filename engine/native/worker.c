/*
 * The worker's loop, a phase a function. One iteration:
 *
 *   top -> decide -> wait -> reap -> drain -> dirty -> house -> account
 *
 * worker_decide is the only place that chooses how long the loop may sleep, and it records why.
 */
#include <errno.h>
#include <stdlib.h>

#include "model.h"

#define REAP_BATCH 64
#define HOUSE_EVERY 4 /* iterations between two looks at the timeouts */
#define ACCEPT_BACKOFF (100 * RL_MS)

void worker_init(struct worker *w)
{
    pthread_mutex_init(&w->detach_lock, NULL);
    w->conns = calloc((size_t)w->max_connections, sizeof *w->conns);
    STORE(w->deadline, -1);
}

void worker_free(struct worker *w)
{
    for (uint32_t i = 0; w->conns && i < w->slots; i++) {
        struct conn *c = w->conns[i];
        for (struct request *r; (r = next_request(c));)
            free(r);
        out_free(&c->buf[0]);
        out_free(&c->buf[1]);
        pthread_mutex_destroy(&c->lock);
        free(c->input);
        free(c->backend);
        free(c);
    }
    free(w->conns);
    pthread_mutex_destroy(&w->detach_lock);
}

/* Arm what the worker itself always keeps armed. False: it owes one, the SQ was full. */
static bool arm_standing(struct worker *w)
{
    if (!w->wake_armed)
        w->wake_armed = w->ops->arm_wake(w) == 0;
    if (w->has_listener && !w->accept_armed && !w->accept_at && !w->stop_at)
        w->accept_armed = w->ops->arm_accept(w) == 0;
    bool owes_accept = w->has_listener && !w->accept_armed && !w->accept_at && !w->stop_at;
    if (w->wake_armed && !owes_accept)
        return true;
    ADD(w->count.sq_full, 1);
    return false;
}

void worker_begin(struct worker *w)
{
    STORE(w->now, w->ops->now(w));
    arm_standing(w);
}

/* ---- stop ---------------------------------------------------------------------------------- */

static void begin_stop(struct worker *w)
{
    w->stop_at = w->now + w->stop_grace_ns;
    if (w->has_listener)
        w->ops->close_listener(w);
    for (uint32_t i = 0; i < w->slots; i++) {
        struct conn *c = w->conns[i];
        if (c->open && !c->closing)
            conn_stop(w, c);
    }
}

/* The top of an iteration, the only place that looks at a stop request. False: leave the loop. */
bool worker_top(struct worker *w)
{
    if (__atomic_load_n(&w->quit, __ATOMIC_ACQUIRE) || LOAD(w->failed))
        return false;
    if (LOAD(w->stop_asked) && !w->stop_at)
        begin_stop(w);
    return !w->stop_at || (w->count.connections && w->now < w->stop_at);
}

/* A decision or a wait failed: the worker leaves its loop at the next top. Any thread. */
void worker_fail(struct worker *w, int32_t why)
{
    int32_t none = 0;
    __atomic_compare_exchange_n(&w->failed, &none, why, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
    w->ops->wake(w);
}

/*
 * A setting, the wanted policy or the stop flag was stored: a loop that sleeps until an event is
 * woken for it; the modelled others look at their next wake. Either the policy in force is seen
 * here, or the worker, having put it in force since, sees what was stored.
 */
void worker_nudge(struct worker *w)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (policy_sleeps(__atomic_load_n(&w->policy, __ATOMIC_ACQUIRE)))
        w->ops->wake(w);
}

/* ---- the wait ------------------------------------------------------------------------------ */

static int64_t earlier(int64_t earliest, int64_t due)
{
    return earliest < 0 || due < earliest ? due : earliest;
}

/* The earliest moment at which the loop itself must act; -1: none. */
int64_t worker_deadline(const struct worker *w)
{
    int64_t earliest = w->stop_at ? w->stop_at : -1;
    int64_t limit = LOAD(w->settings[RL_SET_WRITE_TIMEOUT_MS]) * RL_MS;
    if (limit > 0 && w->in_flight.first)
        earliest = earlier(earliest, w->in_flight.first->since + limit);
    if (w->lingering.first)
        earliest = earlier(earliest, w->lingering.first->since + RL_LINGER);
    return w->accept_at ? earlier(earliest, w->accept_at) : earliest;
}

static rl_wait wait_of(int mode, int why, int64_t timeout_ns)
{
    return (rl_wait){.mode = mode, .why = why, .timeout_ns = timeout_ns,
                     .can_block = timeout_ns != 0};
}

/* Mode 3b: how long may it sleep, and why. */
static rl_wait decide_timed(struct worker *w)
{
    STORE(w->now, w->ops->now(w));
    if (ask(w, RL_TIMEOUT, NULL))
        return wait_of(RL_MODE_TIMED, RL_WHY_LIST, 0);
    int64_t sleep = ask(w, RL_IDLE, NULL);
    int64_t deadline = worker_deadline(w);
    if (w->stop_at && (sleep < 0 || w->now + sleep > w->stop_at)) /* stopping overrides */
        sleep = w->stop_at > w->now ? w->stop_at - w->now : 0;
    if (sleep < 0)
        return wait_of(RL_MODE_TIMED, RL_WHY_EVENT, -1);
    if (sleep == 0)
        return wait_of(RL_MODE_TIMED, RL_WHY_OVERDUE, 0);
    bool due = deadline >= 0 && w->now + sleep == deadline;
    return wait_of(RL_MODE_TIMED, due ? RL_WHY_DEADLINE : RL_WHY_IDLE, sleep);
}

/*
 * May the wait after preparing a SEND do without a timeout? Not while a member owes what the full
 * SQ did not take: this wait makes the room, and nobody would come back to use it. If what is owed
 * is the recv of a client that has just connected, nobody would ever hear that client.
 */
static bool waits_for_send(const struct worker *w)
{
    return w->sends_pending && !w->stop_at && !w->count.movable && ask(w, RL_SEND_WAIT, NULL);
}

static rl_wait decide_wait(struct worker *w)
{
    bool owed = !arm_standing(w);
    if (w->ops->ready(w))
        return wait_of(w->ops->pending(w) ? RL_MODE_SUBMIT : RL_MODE_SKIP, RL_WHY_READY, 0);
    if (owed)
        return wait_of(RL_MODE_TIMED, RL_WHY_OWED, 0);
    if (waits_for_send(w))
        return wait_of(RL_MODE_UNTIMED, RL_WHY_SEND, -1);
    return decide_timed(w);
}

void worker_decide(struct worker *w)
{
    rl_wait next = decide_wait(w);
    if (next.mode == RL_MODE_TIMED && !next.can_block)
        next.way = (int32_t)ask(w, RL_EXPIRED, NULL);
    w->next = next;
    w->could_block = next.can_block;
    w->progress = false;
    STORE(w->sends_pending, 0);
    STORE(w->deadline, worker_deadline(w));
    ADD(w->count.waits[next.mode], 1);
    ADD(w->count.why[next.why], 1);
    STORE(w->count.last_mode, (uint64_t)next.mode);
    STORE(w->count.last_why, (uint64_t)next.why);
    STORE(w->count.last_timeout_ns, next.timeout_ns);
}

/* The worker is about to be held up outside its wait, from what is returned on. */
int64_t worker_blocks(struct worker *w)
{
    STORE(w->now, w->ops->now(w));
    STORE(w->count.blocked, 1);
    return w->now;
}

void worker_unblocked(struct worker *w, int64_t from)
{
    STORE(w->now, w->ops->now(w));
    w->ops->woke(w, from);
    STORE(w->count.blocked, 0);
}

void worker_wait(struct worker *w)
{
    int64_t slept_from = w->now;
    STORE(w->count.waiting, 1);
    int result = w->ops->wait(w, &w->next);
    STORE(w->now, w->ops->now(w));
    w->ops->woke(w, w->could_block ? slept_from : w->now);
    STORE(w->count.waiting, 0);
    w->woke = w->now;
    if (result == -ETIME)
        ADD(w->count.etime, 1);
    else if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY)
        worker_fail(w, result);
}

/* ---- reap ---------------------------------------------------------------------------------- */

static void accept_done(struct worker *w, const struct completion *done)
{
    if (!done->more)
        w->accept_armed = false;
    if (done->result >= 0) {
        ADD(w->count.accepts, 1);
        w->progress = true;
        struct conn *c = conn_open(w, done->result);
        if (c && w->stop_at) /* accepted as the worker began to stop */
            conn_stop(w, c);
        else if (c)
            conn_settle(w, c);
        return;
    }
    bool passing = done->result == -ECANCELED || done->result == -ECONNABORTED ||
                   done->result == -EINTR;
    if (passing || !w->has_listener)
        return; /* the next decision arms it again, unless the worker stops */
    ADD(w->count.accept_failures, 1);
    w->accept_at = w->now + ACCEPT_BACKOFF; /* at once would fail at once: a spin of class D */
}

static void dispatch(struct worker *w, const struct completion *done)
{
    enum op op = op_of(done->user_data);
    if (op == OP_ACCEPT) {
        accept_done(w, done);
    } else if (op == OP_WAKE) {
        w->wake_armed = false;
        ADD(w->count.wakeups, 1);
    } else if (op == OP_RECV || op == OP_SEND) {
        struct conn *c = conn_of(w, done->user_data);
        if (!c)
            ADD(w->count.stale, 1);
        else if (op == OP_RECV)
            conn_recv_done(w, c, done);
        else
            conn_send_done(w, c, done->result);
    }
    if (done->buffer >= 0)
        w->ops->give_back(w, done->buffer);
}

void worker_reap(struct worker *w)
{
    struct completion batch[REAP_BATCH];
    int n;
    do {
        n = w->ops->reap(w, batch, REAP_BATCH);
        ADD(w->count.completions, (uint64_t)n);
        for (int i = 0; i < n; i++)
            dispatch(w, &batch[i]);
    } while (n == REAP_BATCH);
}

/* ---- drain the detach queue ---------------------------------------------------------------- */

static struct conn *detach_pop(struct worker *w)
{
    pthread_mutex_lock(&w->detach_lock);
    struct conn *c = w->detach_first;
    if (c) {
        w->detach_first = c->detach_next;
        if (!c->detach_next)
            w->detach_last = NULL;
        STORE(c->queued, 0);
    } else {
        STORE(w->detach_flag, 0);
    }
    pthread_mutex_unlock(&w->detach_lock);
    return c;
}

static void take_policy(struct worker *w)
{
    const rl_policy *wanted = __atomic_load_n(&w->wanted, __ATOMIC_ACQUIRE);
    if (wanted && wanted != w->policy)
        policy_apply(w, wanted);
}

void worker_drain(struct worker *w)
{
    take_policy(w);
    if (!__atomic_load_n(&w->detach_flag, __ATOMIC_ACQUIRE))
        return;
    for (struct conn *c; (c = detach_pop(w));) {
        ADD(w->count.handovers, 1);
        w->progress = true;
        if (c->closing)
            conn_finish(w, c);
        else
            conn_list(w, c);
    }
}

/* ---- the dirty pass ------------------------------------------------------------------------ */

static bool owes_something(struct conn *c)
{
    return c->sending || c->owes_recv || c->done || LOAD(send_buf(c)->bytes) ||
           LOAD(write_buf(c)->bytes);
}

/* Look at one member: move what can be moved, then decide whether it stays. */
static void pass_member(struct worker *w, struct conn *c)
{
    c->movable = 0;
    bool in_flight = c->sending && !c->done;
    if (!in_flight || c->owes_recv) {
        bool moved = conn_move(w, c);
        if (!c->listed)
            return; /* it closed, or it waits for its handler's hand-back */
        if (!moved)
            return; /* the handler has the lock: it stays, and nothing here can move it */
    }
    if (!owes_something(c) || !ask(w, RL_MEMBERSHIP, c)) {
        conn_unlist(w, c);
        return;
    }
    c->movable = !c->done && (!c->sending || c->owes_recv);
    ADD(w->count.movable, c->movable);
}

void worker_dirty(struct worker *w)
{
    STORE(w->count.movable, 0);
    for (struct conn *c = w->dirty.first, *next; c; c = next) {
        next = c->list_next;
        ADD(w->count.pass_members, 1);
        pass_member(w, c);
    }
}

/* ---- housekeeping -------------------------------------------------------------------------- */

/* Write timeouts are judged as of the wake-up: SENDs may have completed since, in a long pass. */
void worker_house(struct worker *w)
{
    bool due = w->next.why == RL_WHY_DEADLINE || w->next.why == RL_WHY_OVERDUE;
    if (w->count.iterations % HOUSE_EVERY && !due)
        return;
    int64_t limit = LOAD(w->settings[RL_SET_WRITE_TIMEOUT_MS]) * RL_MS;
    struct conn *c;
    while (limit > 0 && (c = w->in_flight.first) && w->woke - c->since >= limit) {
        ADD(w->count.write_timeouts, 1);
        w->progress = true;
        conn_close(w, c, true); /* takes it off the list of those sending */
        conn_finish(w, c);
    }
    while ((c = w->lingering.first) && w->woke - c->since >= RL_LINGER) {
        conn_close(w, c, false);
        conn_finish(w, c);
    }
    if (w->accept_at && w->now >= w->accept_at) {
        w->accept_at = 0; /* the next decision arms it again */
        w->progress = true;
    }
}

void worker_account(struct worker *w)
{
    ADD(w->count.iterations, 1);
    if (!w->could_block && !w->progress)
        ADD(w->count.wasted, 1);
    STORE(w->empty, w->progress ? 0 : w->empty + 1);
}
