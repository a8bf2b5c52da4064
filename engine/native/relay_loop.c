/*
 * The relay's loop, a phase a function. One turn:
 *
 *   top -> decide -> wait -> handlers -> http -> timers -> account
 *
 * relay_decide is the only place that chooses how long the loop may sleep, and it records why.
 */
#include <errno.h>
#include <stdlib.h>

#include "relay_model.h"

#define ACCEPT_BATCH 64
#define ACCEPT_BACKOFF (100 * RL_MS)
#define LINGER (1000 * RL_MS)

int relay_init(struct relay *r)
{
    struct link *lists[] = {&r->free_sessions, &r->ended_sessions, &r->active, &r->changed,
                            &r->run, &r->woken};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        link_init(lists[i]);
    for (int i = 0; i < TIMERS; i++)
        link_init(&r->timed[i]);
    end_init(&r->listener, NULL, RL_SIDE_CLIENT);
    STORE(r->deadline, -1);
    r->sessions = calloc((size_t)r->max_sessions, sizeof(struct session *));
    return r->sessions ? 0 : -ENOMEM;
}

void relay_free(struct relay *r)
{
    for (struct pipe *pipe = r->pipes, *next; pipe; pipe = next) {
        next = pipe->next;
        r->ops->pipe_close(r, pipe);
        free(pipe);
    }
    for (uint32_t i = 0; r->sessions && i < r->slots; i++)
        free(r->sessions[i]);
    free(r->sessions);
}

void relay_begin(struct relay *r)
{
    STORE(r->now, r->ops->now(r));
    STORE(r->level, rule(r, RL_RELAY_RULE_ENGINE, NULL));
    end_want(r, &r->listener, READ);
}

/* A decision or a wait failed: the thread leaves its loop at the next top. */
void relay_fail(struct relay *r, int32_t why)
{
    int32_t none = 0;
    __atomic_compare_exchange_n(&r->failed, &none, why, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
    r->ops->wake(r);
}

/* ---- stop ---------------------------------------------------------------------------------- */

void relay_end_all(struct relay *r)
{
    for (uint32_t i = 0; i < r->slots; i++)
        session_end(r->sessions[i], RL_CLOSE_STOPPED);
    session_reap(r);
}

/* What is under way may still end in time; nobody new is let in. */
static void begin_stop(struct relay *r)
{
    r->stop_at = r->now + r->stop_grace_ns;
    r->stop_at += !r->stop_at; /* virtual time begins at 0, which means: not stopping */
    end_close(r, &r->listener);
    for (uint32_t i = 0; i < r->slots; i++) {
        struct session *s = r->sessions[i];
        if (!s->open)
            continue;
        s->last = 1;
        if (!s->busy)
            session_closing(s, RL_CLOSE_STOPPED);
    }
    relay_http(r);
    session_reap(r);
}

/* The top of a turn, the only place that looks at a stop request. False: leave the loop. */
bool relay_top(struct relay *r)
{
    if (__atomic_load_n(&r->quit, __ATOMIC_ACQUIRE) || LOAD(r->failed))
        return false;
    if (LOAD(r->stop_asked) && !r->stop_at)
        begin_stop(r);
    return !r->stop_at || (r->count.sessions && r->now < r->stop_at);
}

/* ---- the wait ------------------------------------------------------------------------------ */

/* How long what a timer awaits may take; 0: for ever. */
int64_t relay_limit(const struct relay *r, enum timer timer)
{
    static const int setting[TIMERS] = {
        [TIMER_CLIENT] = RL_RELAY_SETTING_CLIENT_TIMEOUT_MS,
        [TIMER_ORIGIN] = RL_RELAY_SETTING_SERVER_TIMEOUT_MS,
        [TIMER_CONNECT] = RL_RELAY_SETTING_CONNECT_TIMEOUT_MS,
    };
    return timer == TIMER_LINGER ? LINGER : LOAD(r->settings[setting[timer]]) * RL_MS;
}

static int64_t sooner(int64_t a, int64_t b) { return a < 0 || (b >= 0 && b < a) ? b : a; }

static int64_t earliest(const struct relay *r)
{
    int64_t at = r->stop_at ? r->stop_at : -1;
    at = sooner(at, r->accept_at ? r->accept_at : -1);
    for (enum timer timer = TIMER_CLIENT; timer < TIMERS; timer++) {
        const struct link *list = &r->timed[timer];
        int64_t limit = relay_limit(r, timer);
        if (limit && linked(list)) /* all wait equally long: the first has waited longest */
            at = sooner(at, HOLDER(list->next, struct end, timed)->since + limit);
    }
    return at;
}

static rl_relay_wait decide(struct relay *r)
{
    STORE(r->deadline, earliest(r));
    if (linked(&r->active))
        return (rl_relay_wait){.why = RL_RELAY_WHY_ACTIVE};
    if (r->deadline < 0)
        return (rl_relay_wait){.why = RL_RELAY_WHY_EVENT, .timeout_ns = -1, .can_block = 1};
    if (r->deadline <= r->now)
        return (rl_relay_wait){.why = RL_RELAY_WHY_OVERDUE};
    return (rl_relay_wait){
        .why = RL_RELAY_WHY_DEADLINE, .timeout_ns = r->deadline - r->now, .can_block = 1,
    };
}

void relay_decide(struct relay *r)
{
    bool level = rule(r, RL_RELAY_RULE_ENGINE, NULL);
    STORE(r->level, level);
    if (level)
        end_level(r);
    end_sync(r);
    STORE(r->now, r->ops->now(r));
    rl_relay_wait next = decide(r);
    r->next = next;
    r->could_block = next.can_block;
    r->progress = false;
    ADD(r->count.waits, 1);
    ADD(r->count.why[next.why], 1);
    ADD(r->count.waits_zero, next.timeout_ns == 0);
    STORE(r->count.last_why, (uint64_t)next.why);
    STORE(r->count.last_timeout_ns, next.timeout_ns);
}

/* The wait, and after it whose handlers are due: what was reported, and everything ACTIVE. */
int relay_wait(struct relay *r)
{
    int64_t slept_from = r->now;
    STORE(r->count.waiting, 1);
    int result = r->ops->wait(r, r->next.timeout_ns);
    if (r->could_block)
        STORE(r->now, r->ops->now(r));
    r->ops->woke(r, r->could_block ? slept_from : r->now);
    STORE(r->count.waiting, 0);
    r->roused = !r->could_block || result > 0;
    if (result > 0)
        ADD(r->count.events, (uint64_t)result);
    else
        ADD(r->count.waits_empty, 1);
    if (result < 0 && result != -EINTR && result != -ETIME && result != -EAGAIN)
        relay_fail(r, result);
    for (struct link *l = r->active.next; l != &r->active; l = l->next) {
        struct end *e = HOLDER(l, struct end, active);
        for (enum dir dir = READ; dir < DIRS; dir++)
            if (e->interest[dir] == RL_INTEREST_ACTIVE)
                e->due |= 1 << dir;
        if (!linked(&e->run))
            link_to(&r->run, &e->run);
    }
    return result;
}

/* ---- handlers ------------------------------------------------------------------------------ */

static void accept_some(struct relay *r)
{
    struct end *e = &r->listener;
    for (int i = 0; i < ACCEPT_BATCH; i++) {
        if (r->count.sessions == (uint64_t)r->max_sessions) {
            ADD(r->count.full, 1);
            end_stop(r, e, READ); /* until a session ends: the kernel's queue holds the others */
            return;
        }
        int fd = r->ops->accept(r);
        e->calls++;
        if (fd == -EAGAIN) {
            end_poll(r, e, READ);
            return;
        }
        if (fd >= 0) {
            ADD(r->count.accepts, 1);
            r->progress = true;
            session_open(r, fd);
        } else if (fd != -EINTR && fd != -ECONNABORTED) {
            ADD(r->count.accept_failures, 1);
            r->accept_at = r->now + ACCEPT_BACKOFF; /* at once would fail at once */
            end_stop(r, e, READ);
            return;
        }
    }
}

static void discard(struct relay *r, struct session *s)
{
    ssize_t n = r->ops->recv(&s->client, r->scratch, sizeof r->scratch);
    s->client.calls++;
    ADD(r->count.recv[RL_SIDE_CLIENT], 1);
    if (n == -EAGAIN) {
        ADD(r->count.recv_eagain[RL_SIDE_CLIENT], 1);
        end_poll(r, &s->client, READ);
    } else if (n <= 0) {
        session_end(s, s->reason);
    }
    r->progress |= n > 0;
}

static void run_handler(struct relay *r, struct end *e, enum dir dir)
{
    struct session *s = e->session;
    if (!s)
        accept_some(r);
    else if (dir == READ && s->lingering)
        discard(r, s);
    else if (dir == READ)
        chan_read(r, e == &s->client ? &s->request : &s->response);
    else
        chan_write(r, e == &s->client ? &s->response : &s->request);
    if (s && s->open)
        session_timers(s);
}

static void dispatch(struct relay *r, struct end *e, enum dir dir, rl_relay_step *step)
{
    uint64_t calls = e->calls;
    *step = (rl_relay_step){
        .slot = e->session ? (int32_t)e->session->slot : -1, .side = e->side,
        .write = dir == WRITE, .before = e->interest[dir],
    };
    run_handler(r, e, dir);
    step->calls = (int32_t)(e->calls - calls);
    step->after = e->interest[dir];
    step->noop = !step->calls && step->before == step->after;
    ADD(r->count.dispatches, 1);
    ADD(r->count.noop_dispatches, (uint64_t)step->noop);
}

/*
 * Whose handler runs next, and which: a read before a write of the same socket. What an earlier
 * handler of this turn has stopped is passed over. NULL: none is due.
 */
struct end *relay_due(const struct relay *r, enum dir *dir)
{
    for (struct link *l = r->run.next; l != &r->run; l = l->next) {
        struct end *e = HOLDER(l, struct end, run);
        for (*dir = READ; *dir < DIRS; (*dir)++)
            if (e->due & (1 << *dir) && e->interest[*dir] != RL_INTEREST_OFF)
                return e;
    }
    return NULL;
}

/* Runs the next handler that is due. False: none is. */
bool relay_handler(struct relay *r, rl_relay_step *step)
{
    enum dir dir = READ; /* until relay_due() says */
    struct end *next = relay_due(r, &dir);
    while (linked(&r->run)) {
        struct end *e = HOLDER(r->run.next, struct end, run);
        e->due &= e == next ? (uint8_t)~((2 << dir) - 1) : 0; /* it, and who was passed over */
        if (!e->due)
            unlink_from(&e->run);
        if (e == next) {
            dispatch(r, e, dir, step);
            return true;
        }
    }
    return false;
}

/* ---- the other phases ---------------------------------------------------------------------- */

void relay_http(struct relay *r)
{
    while (linked(&r->woken)) {
        struct session *s = HOLDER(r->woken.next, struct session, woken);
        unlink_from(&s->woken);
        http_run(s);
    }
}

void relay_timers(struct relay *r)
{
    for (enum timer timer = TIMER_CLIENT; timer < TIMERS; timer++) {
        struct link *list = &r->timed[timer];
        int64_t limit = relay_limit(r, timer);
        while (limit && linked(list)) {
            struct end *e = HOLDER(list->next, struct end, timed);
            if (r->now - e->since < limit)
                break;
            e->moved = BIT_READ | BIT_WRITE; /* whatever it does next, its time begins anew */
            session_expired(e->session, timer);
            if (e->session->open)
                session_timers(e->session);
        }
    }
    relay_http(r);
    if (r->accept_at && r->now >= r->accept_at) {
        r->accept_at = 0;
        r->progress = true;
        end_want(r, &r->listener, READ);
    }
}

void relay_account(struct relay *r)
{
    if (linked(&r->ended_sessions)) {
        session_reap(r);
        if (!r->accept_at)
            end_want(r, &r->listener, READ);
    }
    ADD(r->count.iterations, 1);
    if (r->roused && !r->progress)
        ADD(r->count.wasted, 1);
}
