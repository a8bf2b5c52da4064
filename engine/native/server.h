#pragma once
/* The ring server around the state machine: threads, listeners, handler pool, sampler. */
#include <liburing.h>

#include "listener.h"
#include "model.h"
#include "sampler.h"

struct policy_node {
    struct policy_node *next;
    rl_policy policy;
};

struct ring_worker {
    struct worker w; /* first: its backend pointer leads back here */
    rl_server *server;
    struct io_uring ring;
    rl_ring_info info;
    int listener, wake_fd;
    uint64_t wake_value; /* what the armed read of wake_fd fills */
    struct io_uring_buf_ring *buffers;
    uint8_t *buffer_memory;
    pthread_t thread;
    bool started;
    struct sampled sampled;
};

struct pool {
    pthread_mutex_t lock;
    pthread_cond_t work;
    struct conn *first, *last;
    pthread_t *threads;
    int count;
    bool closing;
};

struct rl_server {
    rl_config config;
    int64_t settings[RL_SETTINGS];
    int port;
    struct ring_worker *workers;
    struct pool pool;
    struct sampler sampler;
    pthread_mutex_t lock; /* policies, start-up, pauses, failed */
    pthread_cond_t changed;
    struct policy_node *policies;
    int starting, start_error;
    const char *start_where;
    bool closing;
};

/* ring.c */
int ring_open(struct ring_worker *rw, const char **where);
void ring_close(struct ring_worker *rw);
extern const struct ops ring_ops;

/* pool.c */
int pool_start(struct pool *pool, int threads);
void pool_close(struct pool *pool);
void pool_schedule(struct conn *c, struct request *request);
void pool_pause(struct worker *w, int64_t ms);

/* listener.c */
int listeners_open(rl_server *server, const char **where);
