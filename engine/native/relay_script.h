#pragma once
/* The relay's scripted world, shared by its table of operations and its driver's calls. */
#include "relay_model.h"

struct bytes {
    uint8_t *data;
    size_t at, size, cap; /* [at, size) is unread */
};

struct socket {
    struct end *end; /* NULL: not accepted yet, or closed */
    int slot;
    uint8_t side;
    bool closed, finished, accepted, connecting;
    bool broken_off; /* its close was a reset */
    int connect_error; /* what the connect has come to; told by the next send */
    int reset;         /* errno that calls fail with */
    bool fin;
    struct bytes arrived, delivered;
    int64_t room, grain; /* grain 0: no limit */
    int again[DIRS];
    int64_t cut[DIRS]; /* the next call moves so many bytes less; 0: not chosen */
    bool all[DIRS];    /* the next call moves all that it can */
    uint8_t watched;
    bool edge, anew; /* anew: something arrived since the edge was armed */
};

struct rl_relay_script {
    struct relay r;
    rl_relay_script_config config;
    int64_t settings[RL_RELAY_SETTINGS];
    rl_relay_policy policies[2]; /* the one in force and the one to come */
    int policy_turn;
    struct socket **sockets; /* by number, which is what the state machine takes for the fd */
    int count, cap;
    int connect_error, accept_error, pipe_error;
    int64_t now;
    int only; /* the next wait reports this socket alone, plus one; 0: all that are ready */
    bool listener_watched, woken, left;
};

extern const struct relay_ops relay_script_ops;

struct socket *script_socket(const rl_relay_script *s, int number); /* NULL: there is none */
struct socket *script_socket_new(rl_relay_script *s, uint8_t side);
uint8_t script_ready(const rl_relay_script *s, const struct socket *k); /* BIT_* */
bool script_bytes(struct bytes *to, const void *data, size_t size);

static inline size_t unread(const struct bytes *b) { return b->size - b->at; }
