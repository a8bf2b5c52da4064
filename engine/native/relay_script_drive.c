/* The driver's side of the scripted relay: what happens outside, when the loop takes a step. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "relay_script.h"

/* ---- life, settings ------------------------------------------------------------------------ */

rl_relay_script *rl_relay_script_new(const rl_relay_script_config *config)
{
    rl_relay_script *s;
    if (relay_policy_check(&config->policy) || config->max_sessions < 1 || config->max_head < 64 ||
        config->max_head > RL_RELAY_BUFFER - RL_RELAY_RESERVE || config->pipe_size < 1)
        return NULL;
    if (posix_memalign((void **)&s, RL_CACHE_LINE, sizeof *s))
        return NULL;
    memset(s, 0, sizeof *s);
    s->config = *config;
    memcpy(s->settings, config->settings, sizeof s->settings);
    s->policies[0] = config->policy;
    s->r.ops = &relay_script_ops;
    s->r.backend = s;
    s->r.settings = s->settings;
    s->r.max_sessions = config->max_sessions;
    s->r.max_head = config->max_head;
    s->r.stop_grace_ns = config->stop_grace_ms * RL_MS;
    if (relay_init(&s->r)) {
        free(s);
        return NULL;
    }
    s->r.listener.fd = 0;
    relay_policy_apply(&s->r, &s->policies[0]);
    relay_begin(&s->r);
    return s;
}

void rl_relay_script_free(rl_relay_script *s)
{
    relay_end_all(&s->r);
    relay_free(&s->r);
    for (int i = 0; i < s->count; i++) {
        free(s->sockets[i]->arrived.data);
        free(s->sockets[i]->delivered.data);
        free(s->sockets[i]);
    }
    free(s->sockets);
    free(s);
}

int rl_relay_script_set(rl_relay_script *s, int setting, int64_t value)
{
    if (setting < 0 || setting >= RL_RELAY_SETTINGS || value < 0)
        return -EINVAL;
    s->settings[setting] = value;
    return 0;
}

int rl_relay_script_policy(rl_relay_script *s, const rl_relay_policy *policy)
{
    if (relay_policy_check(policy))
        return -EINVAL;
    s->policy_turn = 1 - s->policy_turn;
    s->policies[s->policy_turn] = *policy;
    relay_policy_apply(&s->r, &s->policies[s->policy_turn]);
    return 0;
}

int rl_relay_script_stop(rl_relay_script *s)
{
    STORE(s->r.stop_asked, 1);
    s->r.ops->wake(&s->r);
    return 0;
}

int64_t rl_relay_script_advance(rl_relay_script *s, int64_t ns)
{
    if (ns < 0)
        return -EINVAL;
    s->now += ns;
    return s->now;
}

/* ---- what happens outside ------------------------------------------------------------------ */

int rl_relay_script_accept(rl_relay_script *s)
{
    if (s->r.listener.fd < 0)
        return -ECONNREFUSED;
    return script_socket_new(s, RL_SIDE_CLIENT) ? s->count - 1 : -ENOMEM;
}

int rl_relay_script_input(rl_relay_script *s, int number, const uint8_t *data, size_t size)
{
    struct socket *k = script_socket(s, number);
    if (!k)
        return -EINVAL;
    if (k->closed || k->fin || k->reset)
        return -EPIPE;
    k->anew |= size > 0;
    return script_bytes(&k->arrived, data, size) ? 0 : -ENOMEM;
}

int rl_relay_script_fin(rl_relay_script *s, int number)
{
    struct socket *k = script_socket(s, number);
    if (!k)
        return -EINVAL;
    k->fin = k->anew = true;
    return 0;
}

int rl_relay_script_reset(rl_relay_script *s, int number)
{
    struct socket *k = script_socket(s, number);
    if (!k)
        return -EINVAL;
    k->reset = ECONNRESET;
    k->anew = true;
    return 0;
}

int rl_relay_script_room(rl_relay_script *s, int number, int64_t bytes)
{
    struct socket *k = script_socket(s, number);
    if (!k || bytes < 0)
        return -EINVAL;
    k->room = bytes;
    return 0;
}

int rl_relay_script_grain(rl_relay_script *s, int number, int64_t bytes)
{
    struct socket *k = script_socket(s, number);
    if (!k || bytes < 0)
        return -EINVAL;
    k->grain = bytes;
    return 0;
}

int rl_relay_script_again(rl_relay_script *s, int number, int reads, int writes)
{
    struct socket *k = script_socket(s, number);
    if (!k || reads < 0 || writes < 0)
        return -EINVAL;
    k->again[READ] = reads;
    k->again[WRITE] = writes;
    return 0;
}

int rl_relay_script_next(rl_relay_script *s, int number, int write, int outcome, int64_t bytes)
{
    struct socket *k = script_socket(s, number);
    enum dir dir = write ? WRITE : READ;
    if (!k || outcome < 0 || outcome >= RL_RELAY_OUTCOMES || bytes < 0)
        return -EINVAL;
    k->again[dir] = outcome == RL_RELAY_OUTCOME_EAGAIN;
    k->all[dir] = outcome == RL_RELAY_OUTCOME_FULL;
    k->cut[dir] = outcome == RL_RELAY_OUTCOME_SHORT ? bytes : 0;
    return 0;
}

int rl_relay_script_report(rl_relay_script *s, int number)
{
    const struct socket *k = script_socket(s, number);
    if (!k)
        return -EINVAL;
    if (!script_ready(s, k))
        return -EAGAIN;
    s->only = number + 1;
    return 0;
}

int rl_relay_script_connected(rl_relay_script *s, int number, int result)
{
    struct socket *k = script_socket(s, number);
    if (!k || !k->connecting || result > 0)
        return -EINVAL;
    k->connecting = false;
    k->connect_error = -result;
    return 0;
}

int rl_relay_script_refuse(rl_relay_script *s, int connect_error, int accept_error, int pipe_error)
{
    if (connect_error < 0 || accept_error < 0 || pipe_error < 0)
        return -EINVAL;
    s->connect_error = connect_error;
    s->accept_error = accept_error;
    s->pipe_error = pipe_error;
    return 0;
}

/* ---- what the loop does -------------------------------------------------------------------- */

static int decide_phase(rl_relay_script *s)
{
    if (s->left)
        return 1;
    if (relay_top(&s->r)) {
        relay_decide(&s->r);
        return 0;
    }
    STORE(s->r.count.ended, 1);
    s->left = true;
    end_close(&s->r, &s->r.listener);
    relay_end_all(&s->r);
    return 1;
}

int rl_relay_script_phase(rl_relay_script *s, int phase, rl_relay_wait *wait)
{
    rl_relay_step step;
    int result = 0;
    if (phase == RL_RELAY_PHASE_DECIDE)
        result = decide_phase(s);
    else if (s->left)
        return 0;
    else if (phase == RL_RELAY_PHASE_WAIT)
        result = relay_wait(&s->r);
    else if (phase == RL_RELAY_PHASE_DISPATCH)
        while (relay_handler(&s->r, &step))
            result++;
    else if (phase == RL_RELAY_PHASE_HTTP)
        relay_http(&s->r);
    else if (phase == RL_RELAY_PHASE_TIMERS) {
        relay_timers(&s->r);
        relay_account(&s->r);
    } else
        return -EINVAL;
    if (wait)
        *wait = s->r.next;
    return result;
}

int rl_relay_script_handler(rl_relay_script *s, rl_relay_step *out)
{
    return !s->left && relay_handler(&s->r, out);
}

int rl_relay_script_due(rl_relay_script *s, rl_relay_step *out)
{
    enum dir dir;
    const struct end *e = s->left ? NULL : relay_due(&s->r, &dir);
    if (!e)
        return 0;
    *out = (rl_relay_step){
        .slot = e->session ? (int32_t)e->session->slot : -1, .side = e->side,
        .write = dir == WRITE, .before = e->interest[dir], .after = e->interest[dir],
    };
    return 1;
}

/* ---- what can be seen ---------------------------------------------------------------------- */

int rl_relay_script_sockets(const rl_relay_script *s) { return s->count; }

/* What was chosen for its next call of that direction; -1: nothing. */
static int32_t outcome(const struct socket *k, enum dir dir)
{
    if (k->again[dir])
        return RL_RELAY_OUTCOME_EAGAIN;
    return k->cut[dir] ? RL_RELAY_OUTCOME_SHORT : k->all[dir] ? RL_RELAY_OUTCOME_FULL : -1;
}

int rl_relay_script_socket(rl_relay_script *s, int number, rl_relay_socket *out)
{
    const struct socket *k = script_socket(s, number);
    if (!k)
        return -EINVAL;
    const uint8_t ready = script_ready(s, k);
    *out = (rl_relay_socket){
        .side = k->side, .slot = k->end ? k->slot : -1, .closed = k->closed,
        .finished = k->finished, .broken_off = k->closed && k->broken_off,
        .watched_read = (k->watched & BIT_READ) != 0,
        .watched_write = (k->watched & BIT_WRITE) != 0, .unread = unread(&k->arrived),
        .delivered = k->delivered.size, .room = k->room, .ready_read = (ready & BIT_READ) != 0,
        .ready_write = (ready & BIT_WRITE) != 0, .next_read = outcome(k, READ),
        .next_write = outcome(k, WRITE),
    };
    return 0;
}

int rl_relay_script_session(rl_relay_script *s, int slot, rl_relay_view *out)
{
    if (slot < 0 || (uint32_t)slot >= s->r.slots || !s->r.sessions[slot]->open)
        return -ENOTCONN;
    relay_view_session(s->r.sessions[slot], out);
    return 0;
}

int rl_relay_script_loop(rl_relay_script *s, rl_relay_loop_view *out)
{
    relay_view_loop(&s->r, out);
    return 0;
}

int rl_relay_script_counters(rl_relay_script *s, rl_relay_counters *out)
{
    *out = s->r.count;
    return 0;
}

int64_t rl_relay_script_output(rl_relay_script *s, int number, uint8_t *out, int64_t at,
                               int64_t most)
{
    const struct socket *k = script_socket(s, number);
    if (!k || at < 0 || most < 0)
        return -EINVAL;
    if ((size_t)at >= k->delivered.size)
        return 0;
    size_t n = k->delivered.size - (size_t)at;
    if (n > (size_t)most)
        n = (size_t)most;
    memcpy(out, k->delivered.data + at, n);
    return (int64_t)n;
}
