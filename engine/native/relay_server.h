#pragma once
/* The relay around its state machine: a thread, a listener, an epoll set, the sampler. */
#include <pthread.h>
#include <semaphore.h>

#include "listener.h"
#include "relay_model.h"
#include "sampler.h"

enum { EVENTS = 256 }; /* that one wait returns */

struct relay_policy_node {
    struct relay_policy_node *next;
    rl_relay_policy policy;
};

struct rl_relay {
    struct relay r; /* first: its backend pointer leads back here */
    rl_relay_config config;
    int64_t settings[RL_RELAY_SETTINGS];
    int port;
    int epoll_fd, wake_fd;
    union address origin;
    socklen_t origin_size;
    uint64_t wait_number; /* of the present wait, for edges */
    struct {
        struct end *end;
        uint64_t wait;
    } edges[EVENTS]; /* ends whose first report would be of what was there before */
    int edge_count;
    const rl_relay_policy *wanted; /* put here by rl_relay_set_policy, taken at the next turn */
    struct relay_policy_node *policies;
    pthread_mutex_t lock; /* policies, the listener */
    pthread_t thread;
    bool started;
    sem_t attached; /* posted once by the thread: its clock can be read */
    struct sampled sampled;
    struct sampler sampler;
};

/* relay_epoll.c */
int relay_epoll_open(rl_relay *relay, const char **where);
void relay_epoll_close(rl_relay *relay);
extern const struct relay_ops relay_epoll_ops;
