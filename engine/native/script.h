#pragma once
/* The scripted backend's world, shared by its table of operations and its driver's calls. */
#include "model.h"

struct bytes {
    uint8_t *data;
    size_t size, cap;
};

/* The socket of one connection, and what the driver knows of its requests. */
struct peer {
    struct bytes arrived;   /* sent by the client, not yet taken by a recv */
    struct bytes delivered; /* taken from the server */
    int64_t room;           /* bytes a direct write may still take */
    bool eof, reset, shut;
    struct conn *conn; /* NULL before it is accepted and after it is closed */
    bool recv_armed, recv_submitted, recv_cancelled;
    bool send_armed, send_submitted;
    struct iovec iov[RL_IOV_MAX];
    int iov_count;
    struct request *running; /* by the handler, which then holds the lock */
};

struct rl_script {
    struct worker w;
    int64_t settings[RL_SETTINGS];
    rl_script_config config;
    rl_policy policies[2]; /* the one in force and the one to come */
    struct peer *peers; /* by client number, which is what the state machine takes for the fd */
    int clients, clients_cap;
    struct completion *queue;
    int queued, queue_cap;
    uint8_t **lent; /* received data that the state machine has not given back */
    int lent_cap;
    int sq_used;
    int64_t now;
    int wakes;      /* eventfd writes not yet read */
    bool wake_submitted, accept_submitted;
    bool left;
};

extern const struct ops script_ops;

bool script_append(struct bytes *to, const uint8_t *data, size_t size);
void script_append_iov(struct bytes *to, const struct iovec *iov, int count, uint64_t most);
void script_post(rl_script *s, struct completion done);
void script_post_recv(rl_script *s, struct conn *c, struct peer *p, int result, bool more);
void script_end_send(rl_script *s, struct conn *c, struct peer *p, int result);
void script_serve(rl_script *s); /* post what is due by now */
