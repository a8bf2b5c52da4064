/* The driver's side of the scripted backend: what happens outside, when the loop takes a step. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "script.h"

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
    w->could_block = true; /* no wait was made yet that could not */
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
    worker_nudge(&s->w);
    return 0;
}

int rl_script_policy(rl_script *s, const rl_policy *policy)
{
    if (policy_check(policy))
        return -EINVAL;
    rl_policy *wanted = &s->policies[s->w.policy == &s->policies[0]];
    *wanted = *policy;
    s->w.wanted = wanted;
    worker_nudge(&s->w);
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
    script_post(s, (struct completion){.user_data = pack_op(OP_ACCEPT), .result = s->clients,
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
    if (!script_append(&p->arrived, data, size))
        return -ENOMEM;
    script_serve(s);
    return 0;
}

int rl_script_eof(rl_script *s, int client)
{
    struct peer *p = peer_at(s, client);
    if (!p)
        return -EINVAL;
    p->eof = true;
    script_serve(s);
    return 0;
}

int rl_script_reset(rl_script *s, int client)
{
    struct peer *p = peer_at(s, client);
    if (!p)
        return -EINVAL;
    p->reset = true;
    script_serve(s);
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
        script_append_iov(&p->delivered, p->iov, p->iov_count, (uint64_t)result);
    script_end_send(s, p->conn, p, (int)result);
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
    script_post_recv(s, p->conn, p, -ENOBUFS, false);
    return 0;
}

int rl_script_poke(rl_script *s)
{
    script_post(s, (struct completion){.user_data = pack_op(OP_CANCEL), .buffer = -1});
    return 0;
}

int rl_script_stop(rl_script *s)
{
    STORE(s->w.stop_asked, 1);
    worker_nudge(&s->w);
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
    int result = s->w.ops->wait(&s->w, wait);
    STORE(s->w.now, s->now);
    s->w.woke = s->now;
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
