/*
 * The relay's decisions. Each is a question with two answers, what the real system shipped
 * first, so that a policy is a row of answers; and what a caller's own policy is shown.
 */
#include <errno.h>

#include "relay_model.h"

enum { ANSWERS = 2 };

static const rl_choice choices[RL_RELAY_RULES][ANSWERS] = {
    [RL_RELAY_RULE_RECV_BEHIND] = {
        {"recv-behind", "forbidden", "recv is not tried while the channel's pipe holds data", 1},
        {"recv-behind", "allowed", "what splice does not take, recv must, behind the pipe", 0},
    },
    [RL_RELAY_RULE_EARLY_LEAVE] = {
        {"early-leave", "no-mark", "leaving the splice loop early leaves no mark", 1},
        {"early-leave", "sink-full",
         "leaving the splice loop early counts as a full sink: reading stops until it moves", 0},
    },
    [RL_RELAY_RULE_LAST_BLOCK] = {
        {"last-block", "copied", "what is left below the least size is never spliced", 1},
        {"last-block", "spliced", "it is spliced if the pipe is in use already", 0},
    },
    [RL_RELAY_RULE_SEND_AFTER_READ] = {
        {"send-after-read", "at-once", "after a read the pipe is always offered to the sink", 1},
        {"send-after-read", "skipped", "not while write readiness is already awaited", 0},
    },
    [RL_RELAY_RULE_ENGINE] = {
        {"engine", "speculative",
         "a wanted direction is taken as ready until it says EAGAIN: its handler runs every turn",
         1},
        {"engine", "level-triggered", "epoll says each turn which wanted direction is ready", 0},
    },
    [RL_RELAY_RULE_SPLICE] = {
        {"splice", "on", "bodies go through a pipe where they may", 1},
        {"splice", "off", "recv and send only", 0},
    },
    [RL_RELAY_RULE_READINESS] = {
        {"readiness", "kept", "an EAGAIN that finds data in the pipe is the pipe's", 1},
        {"readiness", "cleared",
         "splices until EAGAIN and takes it for the source's, which is asked again only when more"
         " arrives: the mirror fault", 0},
    },
};

const rl_choice *rl_relay_choice_at(int which, int index)
{
    if (which < 0 || which >= RL_RELAY_RULES || index < 0 || index >= ANSWERS)
        return NULL;
    return &choices[which][index];
}

/* 0, or -EINVAL when a choice is not in the table. */
int relay_policy_check(const rl_relay_policy *policy)
{
    for (int i = 0; i < RL_RELAY_RULES; i++)
        if (!rl_relay_choice_at(i, policy->choice[i]))
            return -EINVAL;
    return policy->asks && !policy->decide ? -EINVAL : 0;
}

void relay_policy_apply(struct relay *r, const rl_relay_policy *policy)
{
    __atomic_store_n(&r->policy, policy, __ATOMIC_RELEASE);
    for (int i = 0; i < RL_RELAY_RULES; i++)
        STORE(r->answers[i], policy->asks & (1u << i) ? ASKED : policy->choice[i]);
}

/* Ask the caller; an answer that it could not give stops the relay at its next turn. */
int32_t relay_ask_caller(struct relay *r, int which, const struct chan *ch)
{
    rl_relay_view session;
    rl_relay_loop_view loop;
    if (ch) {
        relay_view_session(ch->session, &session);
        session.asked = ch == &ch->session->request ? RL_SIDE_CLIENT : RL_SIDE_ORIGIN;
    }
    relay_view_loop(r, &loop);
    const rl_relay_policy *own = __atomic_load_n(&r->policy, __ATOMIC_ACQUIRE);
    int64_t answer = own->decide(own->self, which, ch ? &session : NULL, &loop);
    if (answer == 0 || answer == 1)
        return (int32_t)answer;
    relay_fail(r, 1);
    return 0;
}

/* ---- views --------------------------------------------------------------------------------- */

static void view_channel(const struct chan *ch, const struct end *from, const struct end *to,
                         rl_channel_view *out)
{
    uint64_t left = LOAD(ch->to_forward);
    *out = (rl_channel_view){
        .message = LOAD(ch->message), .read = LOAD(from->interest[READ]),
        .write = LOAD(to->interest[WRITE]), .sink_full = LOAD(ch->full),
        .has_pipe = LOAD(ch->pipe) != NULL, .eof = LOAD(ch->eof), .splices = !LOAD(ch->no_splice),
        .to_forward = left == FORWARD_ALL ? -1 : (int64_t)left, .scheduled = LOAD(ch->out),
        .awaiting = LOAD(ch->in), .piped = LOAD(ch->piped), .spliced = LOAD(ch->spliced),
        .copied = LOAD(ch->copied),
    };
}

static int64_t waited(const struct session *s, const struct end *e)
{
    return LOAD(e->timer) ? LOAD(s->relay->now) - LOAD(e->since) : -1;
}

void relay_view_session(const struct session *s, rl_relay_view *out)
{
    *out = (rl_relay_view){
        .slot = s->slot, .generation = LOAD(s->generation), .client_fd = LOAD(s->client.fd),
        .origin_fd = LOAD(s->origin.fd), .busy = LOAD(s->busy),
        .connecting = LOAD(s->connecting), .closing = LOAD(s->closing),
        .lingering = LOAD(s->lingering), .answer = LOAD(s->answer), .asked = -1,
        .requests = LOAD(s->requests), .responses = LOAD(s->responses),
        .client_wait_ns = waited(s, &s->client), .origin_wait_ns = waited(s, &s->origin),
        .outq = -1,
    };
    view_channel(&s->request, &s->client, &s->origin, &out->request);
    view_channel(&s->response, &s->origin, &s->client, &out->response);
}

void relay_view_loop(const struct relay *r, rl_relay_loop_view *out)
{
    *out = (rl_relay_loop_view){
        .now_ns = (uint64_t)LOAD(r->now), .iterations = LOAD(r->count.iterations),
        .sessions = LOAD(r->count.sessions), .active = LOAD(r->active_ends),
        .pipes = LOAD(r->count.pipes), .deadline_ns = LOAD(r->deadline),
        .engine = LOAD(r->level),
    };
}
