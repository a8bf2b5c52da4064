/* The ring server's life: start, live settings, views, the modelled stop, and the real end. */
#include <errno.h>
#include <linux/sockios.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "server.h"

#define LEAVE_ROUNDS 400 /* of LEAVE_WAIT: how long a leaving worker waits for completions */
#define LEAVE_WAIT (5 * RL_MS)

_Static_assert(offsetof(rl_sample, c) == sizeof(struct figures), "figures, then counters");

/* ---- the worker's thread ------------------------------------------------------------------- */

static void started(struct ring_worker *rw, int result, const char *where)
{
    rl_server *server = rw->server;
    pthread_mutex_lock(&server->lock);
    server->starting--;
    if (result < 0 && !server->start_error) {
        server->start_error = result;
        server->start_where = where;
    }
    pthread_cond_broadcast(&server->changed);
    pthread_mutex_unlock(&server->lock);
}

static void run_loop(struct ring_worker *rw)
{
    struct worker *w = &rw->w;
    worker_begin(w);
    while (worker_top(w)) {
        worker_decide(w);
        worker_wait(w);
        worker_reap(w);
        worker_drain(w);
        worker_dirty(w);
        worker_house(w);
        worker_account(w);
    }
}

/* After the loop: end every connection, and wait for what the kernel still owes the ring. */
static void leave_loop(struct ring_worker *rw)
{
    struct worker *w = &rw->w;
    const rl_wait wait = {.mode = RL_MODE_TIMED, .timeout_ns = LEAVE_WAIT};
    w->stop_at = w->now; /* nothing is accepted from here on */
    if (w->has_listener)
        w->ops->close_listener(w);
    for (int round = 0; w->count.connections && round < LEAVE_ROUNDS; round++) {
        for (uint32_t i = 0; i < w->slots; i++) {
            struct conn *c = w->conns[i];
            if (!c->open)
                continue;
            conn_close(w, c, !c->lingering);
            conn_finish(w, c);
        }
        if (!w->count.connections)
            break;
        uint64_t enters = w->count.enters;
        w->ops->wait(w, &wait);
        STORE(w->count.enters, enters); /* not the model's */
        worker_reap(w);
        worker_drain(w);
    }
}

static void *worker_main(void *arg)
{
    struct ring_worker *rw = arg;
    const char *where = "";
    sampled_attach(&rw->sampled, "rl-worker");
    rw->info.thread_id = rw->sampled.thread_id;
    int result = ring_open(rw, &where);
    started(rw, result, where);
    if (result < 0)
        return NULL;
    run_loop(rw);
    STORE(rw->w.count.ended, 1);
    leave_loop(rw);
    ring_close(rw);
    sampled_ended(&rw->sampled);
    return NULL;
}

/* ---- start --------------------------------------------------------------------------------- */

static const rl_policy *keep_policy(rl_server *server, const rl_policy *policy)
{
    struct policy_node *node = malloc(sizeof *node);
    if (!node)
        return NULL;
    node->policy = *policy;
    node->next = server->policies; /* kept to the end: a handler may be asking an older one */
    server->policies = node;
    return &node->policy;
}

static void copy_counters(const void *of, uint64_t *to)
{
    const struct worker *w = of;
    rl_counters *out = (rl_counters *)to;
    sampled_copy(&w->count, to, sizeof w->count);
    out->direct_writes = LOAD(w->handled.direct_writes);
    out->direct_short = LOAD(w->handled.direct_short);
    out->direct_eagain = LOAD(w->handled.direct_eagain);
    out->bytes_direct = LOAD(w->handled.bytes_direct);
}

static int prepare_worker(rl_server *server, int index, const rl_policy *policy)
{
    struct ring_worker *rw = &server->workers[index];
    struct worker *w = &rw->w;
    rw->server = server;
    w->ops = &ring_ops;
    w->backend = rw;
    w->settings = server->settings;
    w->max_connections = server->config.max_connections;
    w->max_header = server->config.max_header;
    w->stop_grace_ns = server->config.stop_grace_ms * RL_MS;
    worker_init(w);
    policy_apply(w, policy);
    rw->sampled.copy = copy_counters;
    rw->sampled.of = w;
    rw->sampled.waiting = &w->count.waiting;
    rw->sampled.blocked = &w->count.blocked;
    int result = sampler_add(&server->sampler, index, &rw->sampled, sizeof(rl_sample),
                             server->config.sample_capacity / server->config.workers);
    if (result < 0)
        return result;
    rw->wake_fd = eventfd(0, EFD_CLOEXEC);
    if (rw->wake_fd < 0)
        return -errno;
    return w->conns ? 0 : -ENOMEM;
}

/* Signals belong to the process's own threads: Python's main thread must be the one interrupted. */
static int start_threads(rl_server *server, const char **where)
{
    /* Not those of a fault: a blocked one kills without a word from faulthandler or a sanitizer. */
    static const int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
    sigset_t all, before;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof FAULTS / sizeof *FAULTS; i++)
        sigdelset(&all, FAULTS[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    *where = "pthread_create";
    int result = pool_start(&server->pool, server->config.handlers);
    for (int i = 0; result == 0 && i < server->config.workers; i++) {
        struct ring_worker *rw = &server->workers[i];
        pthread_mutex_lock(&server->lock); /* the workers before this one count down already */
        server->starting++;
        pthread_mutex_unlock(&server->lock);
        result = -pthread_create(&rw->thread, NULL, worker_main, rw);
        rw->started = result == 0;
        if (result < 0) {
            pthread_mutex_lock(&server->lock);
            server->starting--;
            pthread_mutex_unlock(&server->lock);
        }
    }
    pthread_mutex_lock(&server->lock);
    while (server->starting)
        pthread_cond_wait(&server->changed, &server->lock);
    if (result == 0 && server->start_error) {
        result = server->start_error;
        *where = server->start_where;
    }
    pthread_mutex_unlock(&server->lock);
    if (result == 0)
        result = sampler_rate(&server->sampler, server->config.sample_hz);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return result;
}

static rl_server *server_new(const rl_config *config)
{
    rl_server *server = calloc(1, sizeof *server);
    if (!server)
        return NULL;
    server->config = *config;
    memcpy(server->settings, config->settings, sizeof server->settings);
    size_t size = (size_t)config->workers * sizeof *server->workers;
    if (posix_memalign((void **)&server->workers, RL_CACHE_LINE, size)) {
        free(server);
        return NULL;
    }
    memset(server->workers, 0, size);
    for (int i = 0; i < config->workers; i++) {
        struct ring_worker *rw = &server->workers[i];
        rw->listener = rw->wake_fd = rw->sampled.schedstat_fd = rw->sampled.status_fd = -1;
    }
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&server->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&server->lock, NULL);
    return server;
}

int rl_server_start(const rl_config *config, rl_server **out, char *where, size_t where_size)
{
    const char *at = "memory";
    if (config->workers < 1 || config->entries < 1 || config->handlers < 1 ||
        config->max_connections < 1 || policy_check(&config->policy))
        return -EINVAL;
    rl_pattern();
    rl_server *server = server_new(config);
    const rl_policy *policy = server ? keep_policy(server, &config->policy) : NULL;
    int result = policy ? 0 : -ENOMEM;
    if (result == 0)
        result = sampler_init(&server->sampler, config->workers);
    for (int i = 0; result == 0 && i < config->workers; i++)
        result = prepare_worker(server, i, policy);
    if (result == 0)
        result = listeners_open(server, &at);
    if (result == 0)
        result = start_threads(server, &at);
    if (result < 0) {
        snprintf(where, where_size, "%s", at);
        if (server)
            rl_server_close(server);
        return result;
    }
    server->config.host = NULL; /* the caller's memory */
    *out = server;
    return 0;
}

/* ---- live settings ------------------------------------------------------------------------- */

int rl_server_port(const rl_server *server) { return server->port; }

static void nudge_all(rl_server *server)
{
    for (int i = 0; i < server->config.workers; i++)
        worker_nudge(&server->workers[i].w);
}

int rl_server_set(rl_server *server, int setting, int64_t value)
{
    if (setting < 0 || setting >= RL_SETTINGS || value < 0)
        return -EINVAL;
    STORE(server->settings[setting], value);
    int result = 0;
    pthread_mutex_lock(&server->lock);
    for (int i = 0; setting == RL_SET_SO_SNDBUF && i < server->config.workers; i++) {
        int listener = LOAD(server->workers[i].listener);
        if (listener >= 0 && result == 0)
            result = listener_sndbuf(listener, value);
    }
    pthread_mutex_unlock(&server->lock);
    nudge_all(server);
    return result;
}

int64_t rl_server_get(const rl_server *server, int setting)
{
    return setting < 0 || setting >= RL_SETTINGS ? -EINVAL : LOAD(server->settings[setting]);
}

int rl_server_policy(rl_server *server, const rl_policy *policy)
{
    int result = policy_check(policy);
    if (result < 0)
        return result;
    pthread_mutex_lock(&server->lock);
    const rl_policy *kept = keep_policy(server, policy);
    for (int i = 0; kept && i < server->config.workers; i++)
        __atomic_store_n(&server->workers[i].w.wanted, kept, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&server->lock);
    nudge_all(server);
    return kept ? 0 : -ENOMEM;
}

/* ---- views --------------------------------------------------------------------------------- */

int rl_server_connections(rl_server *server, rl_conn_view *out, int most)
{
    int n = 0;
    for (int i = 0; i < server->config.workers; i++) {
        struct worker *w = &server->workers[i].w;
        uint32_t slots = __atomic_load_n(&w->slots, __ATOMIC_ACQUIRE);
        for (uint32_t slot = 0; slot < slots && n < most; slot++) {
            struct conn *c = w->conns[slot];
            if (!LOAD(c->open))
                continue;
            rl_conn_view *view = &out[n];
            int queued = 0;
            view_conn(c, view);
            if (view->fd >= 0 && ioctl(view->fd, SIOCOUTQ, &queued) == 0)
                view->outq = queued;
            n += LOAD(c->open) && LOAD(c->generation) == view->generation;
        }
    }
    return n;
}

static struct ring_worker *worker_at(const rl_server *server, int worker)
{
    return worker < 0 || worker >= server->config.workers ? NULL : &server->workers[worker];
}

int rl_server_loop(rl_server *server, int worker, rl_loop_view *out)
{
    struct ring_worker *rw = worker_at(server, worker);
    if (!rw)
        return -EINVAL;
    view_loop(&rw->w, out);
    return 0;
}

int rl_server_ring(const rl_server *server, int worker, rl_ring_info *out)
{
    struct ring_worker *rw = worker_at(server, worker);
    if (!rw)
        return -EINVAL;
    *out = rw->info;
    out->multishot_accept = LOAD(rw->info.multishot_accept);
    out->multishot_recv = LOAD(rw->info.multishot_recv);
    if (sampled_has_ended(&rw->sampled))
        out->thread_id = 0;
    return 0;
}

int rl_server_memory(rl_server *server, uint64_t *connection_bytes)
{
    *connection_bytes = 0;
    for (int i = 0; i < server->config.workers; i++) {
        struct worker *w = &server->workers[i].w;
        uint32_t slots = __atomic_load_n(&w->slots, __ATOMIC_ACQUIRE);
        for (uint32_t slot = 0; slot < slots; slot++)
            *connection_bytes += conn_memory(w->conns[slot]);
    }
    return 0;
}

int rl_server_sample(rl_server *server, int worker, rl_sample *out)
{
    return sampler_now(&server->sampler, worker, out);
}

int rl_server_take(rl_server *server, rl_sample *out, int most)
{
    return sampler_take(&server->sampler, out, most);
}

int rl_server_sample_rate(rl_server *server, int hz) { return sampler_rate(&server->sampler, hz); }

uint64_t rl_server_dropped(const rl_server *server)
{
    return sampler_dropped((struct sampler *)(uintptr_t)&server->sampler);
}

/* ---- stop and close ------------------------------------------------------------------------ */

int rl_server_stop(rl_server *server)
{
    for (int i = 0; i < server->config.workers; i++)
        STORE(server->workers[i].w.stop_asked, 1);
    nudge_all(server);
    return 0;
}

int rl_server_running(rl_server *server)
{
    int running = 0;
    for (int i = 0; i < server->config.workers; i++)
        running += server->workers[i].started && !LOAD(server->workers[i].w.count.ended);
    return running;
}

int rl_server_failed(rl_server *server)
{
    for (int i = 0; i < server->config.workers; i++)
        if (LOAD(server->workers[i].w.failed))
            return LOAD(server->workers[i].w.failed);
    return 0;
}

static void end_threads(rl_server *server)
{
    pthread_mutex_lock(&server->lock);
    server->closing = true; /* cuts handlers' pauses short */
    pthread_cond_broadcast(&server->changed);
    pthread_mutex_unlock(&server->lock);
    for (int i = 0; i < server->config.workers; i++) {
        struct ring_worker *rw = &server->workers[i];
        __atomic_store_n(&rw->w.quit, 1, __ATOMIC_RELEASE);
        if (rw->wake_fd >= 0 && rw->started)
            rw->w.ops->wake(&rw->w);
    }
    for (int i = 0; i < server->config.workers; i++)
        if (server->workers[i].started)
            pthread_join(server->workers[i].thread, NULL);
    if (server->pool.threads)
        pool_close(&server->pool);
    sampler_close(&server->sampler);
}

static void free_worker(struct ring_worker *rw)
{
    struct worker *w = &rw->w;
    for (uint32_t i = 0; w->conns && i < w->slots; i++)
        if (w->conns[i]->open) /* a handler had it until now */
            close(w->conns[i]->fd);
    if (rw->listener >= 0)
        close(rw->listener);
    if (rw->wake_fd >= 0)
        close(rw->wake_fd);
    sampled_detach(&rw->sampled);
    if (w->ops)
        worker_free(w);
}

/* Everything of it is gone when this returns, whatever its loops were doing. */
void rl_server_close(rl_server *server)
{
    end_threads(server);
    for (int i = 0; i < server->config.workers; i++)
        free_worker(&server->workers[i]);
    for (struct policy_node *node = server->policies, *next; node; node = next) {
        next = node->next;
        free(node);
    }
    pthread_cond_destroy(&server->changed);
    pthread_mutex_destroy(&server->lock);
    free(server->workers);
    free(server);
}

const char *rl_liburing_version(void)
{
#ifdef IO_URING_VERSION_MAJOR
#define TEXT(x) #x
#define VERSION(major, minor) TEXT(major) "." TEXT(minor)
    return VERSION(IO_URING_VERSION_MAJOR, IO_URING_VERSION_MINOR);
#else
    return "2.3"; /* the first that says its version is 2.4; older ones do not build */
#endif
}
