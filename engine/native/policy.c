/*
 * The decisions: one rule each, with the behaviour that was shipped first and every alternative.
 * A rule is a function of the loop and, for some, of one connection; policy_apply points the worker
 * at the chosen ones, or at ask_caller for those that the caller answers itself.
 */
#include <errno.h>
#include <string.h>

#include "model.h"

#define RULE(name) \
    static int64_t name(const struct worker *w, int decision, const struct conn *c)
#define UNUSED (void)w, (void)decision, (void)c

/* A connection whose SEND is in flight and which owes no recv: 1 stays listed, 0 leaves. */
RULE(membership_listed) { UNUSED; return 1; }
RULE(membership_leave) { UNUSED; return !c->sending || c->owes_recv || c->done; }
RULE(membership_eager) { UNUSED; return 0; }

/* Does the list forbid the wait to sleep? */
RULE(timeout_any) { UNUSED; return w->dirty.length > 0; }
RULE(timeout_movable) { UNUSED; return w->count.movable > 0; }

RULE(yes) { UNUSED; return 1; }
RULE(no) { UNUSED; return 0; }

/* While a SEND is in flight, or a remainder of one waits to be sent again. */
RULE(direct_behind)
{
    UNUSED;
    return !c->sending && !send_buf((struct conn *)(uintptr_t)c)->bytes;
}

RULE(held_park) { UNUSED; return RL_HELD_PARK; }
RULE(held_listed) { UNUSED; return RL_HELD_LISTED; }
RULE(held_unlisted) { UNUSED; return RL_HELD_UNLISTED; }

/* 1 ms, 5 ms, then the cap: short sleeps first, since more work often follows at once. */
RULE(idle_periodic)
{
    UNUSED;
    static const int64_t step[] = {1 * RL_MS, 5 * RL_MS};
    int64_t cap = LOAD(w->settings[RL_SET_CAP_NS]);
    int64_t sleep = w->empty < 2 ? step[w->empty] : cap;
    return sleep < cap ? sleep : cap;
}

RULE(idle_tickless)
{
    UNUSED;
    int64_t deadline = worker_deadline(w);
    if (deadline < 0)
        return -1;
    return deadline > w->now ? deadline - w->now : 0;
}

RULE(expired_kernel) { UNUSED; return RL_EXPIRED_KERNEL; }
RULE(expired_poll) { UNUSED; return RL_EXPIRED_POLL; }

static const struct rule {
    int decision;
    rl_choice choice;
    decide_fn fn;
} rules[] = {
    {RL_MEMBERSHIP, {"membership", "listed",
        "stays on the dirty list until its SEND completes", 1}, membership_listed},
    {RL_MEMBERSHIP, {"membership", "leave",
        "leaves the list while only its SEND's completion can move it", 0}, membership_leave},
    {RL_MEMBERSHIP, {"membership", "eager",
        "leaves the list after one look, whatever it still owes: the mirror fault", 0},
        membership_eager},
    {RL_TIMEOUT, {"timeout", "any-member",
        "a list that is not empty means a timeout of zero", 1}, timeout_any},
    {RL_TIMEOUT, {"timeout", "movable",
        "only members that the worker itself can move mean a timeout of zero", 0},
        timeout_movable},
    {RL_SEND_WAIT, {"send-wait", "untimed",
        "the wait after preparing a SEND has no timeout", 1}, yes},
    {RL_SEND_WAIT, {"send-wait", "timed",
        "the wait after preparing a SEND has the timeout of any other", 0}, no},
    {RL_DIRECT_WRITE, {"direct-write", "at-once",
        "a handler writes at once, also while a SEND is in flight", 1}, yes},
    {RL_DIRECT_WRITE, {"direct-write", "behind-send",
        "a handler's bytes go behind a SEND in flight or its remainder", 0}, direct_behind},
    {RL_HELD, {"held", "park",
        "the worker waits for the handler's lock, however long it runs", 1}, held_park},
    {RL_HELD, {"held", "listed",
        "the completion is kept and the connection stays listed until the lock is free", 0},
        held_listed},
    {RL_HELD, {"held", "unlisted",
        "the completion is kept and the connection is listed again at hand-back", 0},
        held_unlisted},
    {RL_HANDBACK, {"handback", "no-wake",
        "the worker finds a connection handed over at its next timed wake", 1}, no},
    {RL_HANDBACK, {"handback", "wake",
        "a hand-over wakes the worker through an eventfd", 0}, yes},
    {RL_IDLE, {"idle", "periodic",
        "sleeps 1 ms, 5 ms, then the cap, and looks again", 1}, idle_periodic},
    {RL_IDLE, {"idle", "tickless",
        "sleeps to the earliest real deadline; an eventfd wakes it for the rest", 0},
        idle_tickless},
    {RL_EXPIRED, {"expired", "kernel",
        "a zero timeout goes to the kernel's timed wait", 1}, expired_kernel},
    {RL_EXPIRED, {"expired", "poll",
        "a zero timeout arms no timer: run pending task work, look at the queue, return", 0},
        expired_poll},
};

static const struct rule *rule_at(int decision, int index)
{
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (rules[i].decision == decision && index-- == 0)
            return &rules[i];
    return NULL;
}

const rl_choice *rl_choice_at(int decision, int index)
{
    const struct rule *rule = index < 0 ? NULL : rule_at(decision, index);
    return rule ? &rule->choice : NULL;
}

/* Ask the caller; an answer that it could not give stops the worker at its next iteration. */
RULE(ask_caller)
{
    const rl_policy *own = __atomic_load_n(&w->policy, __ATOMIC_ACQUIRE);
    /* A handler may ask between the two stores of policy_apply: the newer policy answers itself. */
    if (!(own->asks & (1u << decision)))
        return rule_at(decision, own->choice[decision])->fn(w, decision, c);
    rl_conn_view conn = {0};
    rl_loop_view loop;
    if (c)
        view_conn(c, &conn);
    view_loop(w, &loop);
    int64_t answer = own->decide(own->self, decision, c ? &conn : NULL, &loop);
    if (answer != RL_POLICY_FAILED)
        return answer;
    worker_fail((struct worker *)(uintptr_t)w, 1);
    return 0;
}

/* 0, or -EINVAL when a choice is not in the table. */
int policy_check(const rl_policy *policy)
{
    for (int d = 0; d < RL_DECISIONS; d++)
        if (!rl_choice_at(d, policy->choice[d]))
            return -EINVAL;
    return policy->asks && !policy->decide ? -EINVAL : 0;
}

/*
 * Under the detach lock, and on the worker just before it drains the queue: a hand-over either
 * asked the older policy and is found by that drain, or asks this one. The fence pairs with
 * worker_nudge.
 */
void policy_apply(struct worker *w, const rl_policy *policy)
{
    pthread_mutex_lock(&w->detach_lock);
    __atomic_store_n(&w->policy, policy, __ATOMIC_RELEASE);
    for (int d = 0; d < RL_DECISIONS; d++) {
        bool asked = policy->asks & (1u << d);
        decide_fn fn = asked ? ask_caller : rule_at(d, policy->choice[d])->fn;
        __atomic_store_n(&w->decide[d], fn, __ATOMIC_RELEASE);
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&w->detach_lock);
}

bool policy_sleeps(const rl_policy *policy)
{
    bool own = policy->asks & (1u << RL_IDLE);
    return own || rule_at(RL_IDLE, policy->choice[RL_IDLE])->fn == idle_tickless;
}

void view_conn(const struct conn *c, rl_conn_view *out)
{
    struct conn *own = (struct conn *)(uintptr_t)c;
    *out = (rl_conn_view){
        .slot = c->slot, .generation = LOAD(c->generation), .fd = LOAD(c->fd),
        .sending = LOAD(c->sending), .listed = LOAD(c->listed),
        .owes_recv = LOAD(c->owes_recv), .promoted = LOAD(c->promoted), .held = LOAD(c->done),
        .handler_running = LOAD(c->handler_running), .queued = LOAD(c->queued),
        .paused = LOAD(c->paused), .eof = LOAD(c->eof),
        .closing = LOAD(c->closing) || LOAD(c->lingering),
        .write_buf = LOAD(write_buf(own)->bytes), .send_buf = LOAD(send_buf(own)->bytes),
        .sent = LOAD(c->sent), .requests = LOAD(c->parsed),
        .outstanding = LOAD(c->parsed) - LOAD(c->answered), .outq = -1,
        .send_age_ns = LOAD(c->sending) ? LOAD(c->worker->now) - LOAD(c->since) : -1,
    };
}

void view_loop(const struct worker *w, rl_loop_view *out)
{
    *out = (rl_loop_view){
        .now_ns = (uint64_t)LOAD(w->now), .iterations = LOAD(w->count.iterations),
        .empty = LOAD(w->empty), .list_length = LOAD(w->count.list_length),
        .movable = LOAD(w->count.movable), .sending = LOAD(w->count.sending),
        .connections = LOAD(w->count.connections), .sends_pending = LOAD(w->sends_pending),
        .deadline_ns = LOAD(w->deadline), .cap_ns = LOAD(w->settings[RL_SET_CAP_NS]),
    };
}
