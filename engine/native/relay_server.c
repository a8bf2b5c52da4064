/* The relay's life: start, live settings, views, the modelled stop, and the real end. */
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "relay_server.h"

_Static_assert(offsetof(rl_relay_sample, c) == sizeof(struct figures), "figures, then counters");

/* ---- the thread ---------------------------------------------------------------------------- */

static void run_loop(rl_relay *relay)
{
    struct relay *r = &relay->r;
    rl_relay_step step;
    relay_begin(r);
    while (relay_top(r)) {
        const rl_relay_policy *wanted = __atomic_load_n(&relay->wanted, __ATOMIC_ACQUIRE);
        if (wanted != r->policy)
            relay_policy_apply(r, wanted);
        relay_decide(r);
        relay_wait(r);
        while (relay_handler(r, &step))
            ;
        relay_http(r);
        relay_timers(r);
        relay_account(r);
    }
}

static void *relay_main(void *arg)
{
    rl_relay *relay = arg;
    sampled_attach(&relay->sampled, "rl-relay");
    sem_post(&relay->attached);
    run_loop(relay);
    STORE(relay->r.count.ended, 1);
    pthread_mutex_lock(&relay->lock);
    end_close(&relay->r, &relay->r.listener);
    pthread_mutex_unlock(&relay->lock);
    relay_end_all(&relay->r);
    sampled_ended(&relay->sampled);
    return NULL;
}

/* ---- start --------------------------------------------------------------------------------- */

static const rl_relay_policy *keep_policy(rl_relay *relay, const rl_relay_policy *policy)
{
    struct relay_policy_node *node = malloc(sizeof *node);
    if (!node)
        return NULL;
    node->policy = *policy;
    node->next = relay->policies; /* kept to the end: the loop may be asking an older one */
    relay->policies = node;
    return &node->policy;
}

static void copy_counters(const void *of, uint64_t *to)
{
    const struct relay *r = of;
    sampled_copy(&r->count, to, sizeof r->count);
}

static int open_listener(rl_relay *relay, const char **where)
{
    union address address;
    socklen_t size;
    const rl_relay_config *config = &relay->config;
    *where = "host";
    int result = address_read(config->host, config->port, &address, &size);
    if (result < 0)
        return result;
    result = listener_open(&address, size, false, relay->settings[RL_RELAY_SETTING_SO_SNDBUF],
                           where);
    if (result < 0)
        return result;
    relay->r.listener.fd = result;
    relay->port = listener_port(result);
    return fcntl(result, F_SETFL, O_NONBLOCK) ? -errno : 0;
}

/* Signals belong to the process's own threads: Python's main thread must be the one interrupted. */
static int start_thread(rl_relay *relay, const char **where)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    *where = "pthread_create";
    int result = -pthread_create(&relay->thread, NULL, relay_main, relay);
    relay->started = result == 0;
    while (relay->started && sem_wait(&relay->attached)) /* a sample needs what it attached */
        ;
    if (result == 0)
        result = sampler_rate(&relay->sampler, relay->config.sample_hz);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return result;
}

static rl_relay *relay_new(const rl_relay_config *config)
{
    rl_relay *relay;
    if (posix_memalign((void **)&relay, RL_CACHE_LINE, sizeof *relay))
        return NULL;
    memset(relay, 0, sizeof *relay);
    relay->config = *config;
    memcpy(relay->settings, config->settings, sizeof relay->settings);
    relay->epoll_fd = relay->wake_fd = -1;
    relay->sampled.schedstat_fd = relay->sampled.status_fd = -1;
    relay->sampled.copy = copy_counters;
    relay->sampled.of = &relay->r;
    relay->sampled.waiting = &relay->r.count.waiting;
    relay->r.ops = &relay_epoll_ops;
    relay->r.backend = relay;
    relay->r.settings = relay->settings;
    relay->r.max_sessions = config->max_sessions;
    relay->r.max_head = config->max_head;
    relay->r.stop_grace_ns = config->stop_grace_ms * RL_MS;
    pthread_mutex_init(&relay->lock, NULL);
    sem_init(&relay->attached, 0, 0);
    return relay;
}

static int prepare(rl_relay *relay, const char **where)
{
    const rl_relay_config *config = &relay->config;
    int result = relay_init(&relay->r);
    const rl_relay_policy *policy = keep_policy(relay, &config->policy);
    if (result < 0 || !policy)
        return -ENOMEM;
    relay_policy_apply(&relay->r, policy);
    relay->wanted = policy;
    result = sampler_init(&relay->sampler, 1);
    if (result == 0)
        result = sampler_add(&relay->sampler, 0, &relay->sampled, sizeof(rl_relay_sample),
                             config->sample_capacity);
    if (result < 0)
        return result;
    *where = "origin_host";
    result = address_read(config->origin_host, config->origin_port, &relay->origin,
                          &relay->origin_size);
    if (result == 0)
        result = relay_epoll_open(relay, where);
    return result == 0 ? open_listener(relay, where) : result;
}

int rl_relay_start(const rl_relay_config *config, rl_relay **out, char *where, size_t where_size)
{
    const char *at = "memory";
    if (config->max_sessions < 1 || config->max_head < 64 ||
        config->max_head > RL_RELAY_BUFFER - RL_RELAY_RESERVE ||
        relay_policy_check(&config->policy))
        return -EINVAL;
    rl_relay *relay = relay_new(config);
    int result = relay ? prepare(relay, &at) : -ENOMEM;
    if (result == 0)
        result = start_thread(relay, &at);
    if (result < 0) {
        snprintf(where, where_size, "%s", at);
        if (relay)
            rl_relay_close(relay);
        return result;
    }
    relay->config.host = relay->config.origin_host = NULL; /* the caller's memory */
    *out = relay;
    return 0;
}

/* ---- live settings ------------------------------------------------------------------------- */

int rl_relay_port(const rl_relay *relay) { return relay->port; }

int rl_relay_set(rl_relay *relay, int setting, int64_t value)
{
    if (setting < 0 || setting >= RL_RELAY_SETTINGS || value < 0)
        return -EINVAL;
    STORE(relay->settings[setting], value);
    int result = 0;
    pthread_mutex_lock(&relay->lock);
    int listener = LOAD(relay->r.listener.fd);
    if (setting == RL_RELAY_SETTING_SO_SNDBUF && listener >= 0)
        result = listener_sndbuf(listener, value);
    pthread_mutex_unlock(&relay->lock);
    relay->r.ops->wake(&relay->r);
    return result;
}

int64_t rl_relay_get(const rl_relay *relay, int setting)
{
    bool known = setting >= 0 && setting < RL_RELAY_SETTINGS;
    return known ? LOAD(relay->settings[setting]) : -EINVAL;
}

int rl_relay_set_policy(rl_relay *relay, const rl_relay_policy *policy)
{
    int result = relay_policy_check(policy);
    if (result < 0)
        return result;
    pthread_mutex_lock(&relay->lock);
    const rl_relay_policy *kept = keep_policy(relay, policy);
    if (kept)
        __atomic_store_n(&relay->wanted, kept, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&relay->lock);
    relay->r.ops->wake(&relay->r);
    return kept ? 0 : -ENOMEM;
}

/* ---- views --------------------------------------------------------------------------------- */

int rl_relay_sessions(rl_relay *relay, rl_relay_view *out, int most)
{
    struct relay *r = &relay->r;
    uint32_t slots = __atomic_load_n(&r->slots, __ATOMIC_ACQUIRE);
    int n = 0;
    for (uint32_t slot = 0; slot < slots && n < most; slot++) {
        const struct session *s = r->sessions[slot];
        if (!LOAD(s->open))
            continue;
        rl_relay_view *view = &out[n];
        int queued = 0;
        relay_view_session(s, view);
        if (view->client_fd >= 0 && ioctl(view->client_fd, SIOCOUTQ, &queued) == 0)
            view->outq = queued;
        n += LOAD(s->open) && LOAD(s->generation) == view->generation;
    }
    return n;
}

int rl_relay_loop(rl_relay *relay, int worker, rl_relay_loop_view *out)
{
    if (worker)
        return -EINVAL;
    relay_view_loop(&relay->r, out);
    return 0;
}

int rl_relay_thread_id(const rl_relay *relay, int worker)
{
    if (worker)
        return -EINVAL;
    return sampled_has_ended(&relay->sampled) ? 0 : LOAD(relay->sampled.thread_id);
}

int rl_relay_sample_now(rl_relay *relay, int worker, rl_relay_sample *out)
{
    return sampler_now(&relay->sampler, worker, out);
}

int rl_relay_take(rl_relay *relay, rl_relay_sample *out, int most)
{
    return sampler_take(&relay->sampler, out, most);
}

int rl_relay_sample_rate(rl_relay *relay, int hz) { return sampler_rate(&relay->sampler, hz); }

uint64_t rl_relay_dropped(const rl_relay *relay)
{
    return sampler_dropped((struct sampler *)(uintptr_t)&relay->sampler);
}

/* ---- stop and close ------------------------------------------------------------------------ */

int rl_relay_stop(rl_relay *relay)
{
    STORE(relay->r.stop_asked, 1);
    relay->r.ops->wake(&relay->r);
    return 0;
}

int rl_relay_running(rl_relay *relay) { return !LOAD(relay->r.count.ended); }

int rl_relay_failed(rl_relay *relay) { return LOAD(relay->r.failed); }

/* Everything of it is gone when this returns, whatever its loop was doing. */
void rl_relay_close(rl_relay *relay)
{
    struct relay *r = &relay->r;
    __atomic_store_n(&r->quit, 1, __ATOMIC_RELEASE);
    if (relay->started) {
        r->ops->wake(r);
        pthread_join(relay->thread, NULL);
    } else if (r->listener.fd >= 0) {
        close(r->listener.fd);
    }
    sampler_close(&relay->sampler);
    sampled_detach(&relay->sampled);
    relay_free(r);
    relay_epoll_close(relay);
    for (struct relay_policy_node *node = relay->policies, *next; node; node = next) {
        next = node->next;
        free(node);
    }
    sem_destroy(&relay->attached);
    pthread_mutex_destroy(&relay->lock);
    free(relay);
}
