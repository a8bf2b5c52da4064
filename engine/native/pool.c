/* The handler threads: they take connections with requests in turn, one request at a time. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>

#include "server.h"

static struct pool *pool_of(struct conn *c)
{
    struct ring_worker *rw = c->worker->backend;
    return &rw->server->pool;
}

static void pool_push(struct pool *pool, struct conn *c)
{
    c->pool_next = NULL;
    *(pool->last ? &pool->last->pool_next : &pool->first) = c;
    pool->last = c;
    pthread_cond_signal(&pool->work);
}

/* Called by the worker: request is the pool's from here on. */
void pool_schedule(struct conn *c, struct request *request)
{
    struct pool *pool = pool_of(c);
    pthread_mutex_lock(&pool->lock);
    bool idle = !c->pooled;
    queue_request(c, request);
    if (idle) {
        c->pooled = 1;
        pthread_mutex_lock(&c->worker->detach_lock);
        STORE(c->scheduled, 1);
        pthread_mutex_unlock(&c->worker->detach_lock);
        pool_push(pool, c);
    }
    pthread_mutex_unlock(&pool->lock);
}

static struct conn *pool_take(struct pool *pool, struct request **request)
{
    pthread_mutex_lock(&pool->lock);
    while (!pool->first && !pool->closing)
        pthread_cond_wait(&pool->work, &pool->lock);
    struct conn *c = pool->closing ? NULL : pool->first;
    if (c) {
        pool->first = c->pool_next;
        if (!pool->first)
            pool->last = NULL;
        *request = next_request(c);
    }
    pthread_mutex_unlock(&pool->lock);
    return c;
}

/* After a request: again to the end of the queue, or back to the worker for good. */
static void pool_give_up(struct pool *pool, struct conn *c, bool needs_worker)
{
    pthread_mutex_lock(&pool->lock);
    if (LOAD(c->closing))
        for (struct request *dropped; (dropped = next_request(c));)
            free(dropped);
    bool more = c->first != NULL;
    if (more)
        pool_push(pool, c);
    else
        c->pooled = 0;
    hand_back(c, more, needs_worker); /* within the lock: a new request cannot slip in between */
    pthread_mutex_unlock(&pool->lock);
}

static void *pool_main(void *arg)
{
    struct pool *pool = arg;
    struct request *request;
    prctl(PR_SET_NAME, "rl-handler");
    for (struct conn *c; (c = pool_take(pool, &request));) {
        pthread_mutex_lock(&c->lock);
        handle_locked(c, request);
        bool needs_worker = handler_unlock(c);
        free(request);
        pool_give_up(pool, c, needs_worker);
    }
    return NULL;
}

int pool_start(struct pool *pool, int threads)
{
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pool->threads = calloc((size_t)threads, sizeof *pool->threads);
    if (!pool->threads)
        return -ENOMEM;
    for (; pool->count < threads; pool->count++) {
        int result = pthread_create(&pool->threads[pool->count], NULL, pool_main, pool);
        if (result)
            return -result;
    }
    return 0;
}

/* Ends the threads after the request each is at; what is still queued is left to worker_free. */
void pool_close(struct pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->closing = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->count; i++)
        pthread_join(pool->threads[i], NULL);
    free(pool->threads);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
}

/* A handler's time. Cut short when the server is being closed: closing never waits for it. */
void pool_pause(struct worker *w, int64_t ms)
{
    struct ring_worker *rw = w->backend;
    rl_server *server = rw->server;
    int64_t until = w->ops->now(w) + ms * RL_MS;
    struct timespec limit = {until / 1000000000, until % 1000000000};
    pthread_mutex_lock(&server->lock);
    while (!server->closing)
        if (pthread_cond_timedwait(&server->changed, &server->lock, &limit) == ETIMEDOUT)
            break;
    pthread_mutex_unlock(&server->lock);
}
