#pragma once
/*
 * The contract of the relay: an epoll HTTP/1.1 proxy that forwards bodies with splice() where it
 * may. Read by engine/build_native.py after ringlab.h, in the same subset of C; times and failures
 * as there. The request channel runs from the client to the origin, the response channel back.
 */

/* ---- decisions: each a question with two answers, switchable while the loop runs ----------- */

enum rl_relay_rule {
    RL_RELAY_RULE_RECV_BEHIND,     /* may recv run while the channel's pipe holds data? */
    RL_RELAY_RULE_EARLY_LEAVE,     /* does leaving the splice loop early count as a full sink? */
    RL_RELAY_RULE_LAST_BLOCK,      /* may less than RL_RELAY_MIN_SPLICE be spliced? */
    RL_RELAY_RULE_SEND_AFTER_READ, /* after a read: no send while write readiness is awaited? */
    RL_RELAY_RULE_ENGINE,          /* level-triggered rather than speculative? */
    RL_RELAY_RULE_SPLICE,          /* recv and send only? */
    RL_RELAY_RULE_READINESS,       /* does a full pipe's EAGAIN clear the source's readiness? */
    RL_RELAY_RULES
};

/* The choice with that index (its answer, 0 or 1) of a rule, or NULL past the last one. */
const rl_choice *rl_relay_choice_at(int rule, int index);

/* Thresholds, in bytes, those of the real system. */
#define RL_RELAY_BUFFER 16384      /* a channel's buffer */
#define RL_RELAY_RESERVE 1024      /* of it, kept free for edited heads while a head is awaited */
#define RL_RELAY_MIN_SPLICE 4096   /* least to_forward for which splice is tried */
#define RL_RELAY_PIPE_ENOUGH 23168 /* the splice loop is left early with this much in the pipe, */
#define RL_RELAY_CALL_ENOUGH 10136 /* or when one call has moved this much */

/* ---- what the loop is made of -------------------------------------------------------------- */

enum rl_side { RL_SIDE_CLIENT, RL_SIDE_ORIGIN, RL_SIDES };

/* What the loop does about one direction of a socket. */
enum rl_interest {
    RL_INTEREST_OFF,    /* not wanted */
    RL_INTEREST_ACTIVE, /* taken as ready: its handler runs every turn, the wait cannot block */
    RL_INTEREST_POLLED, /* epoll says when it is ready */
    RL_INTERESTS
};

/* Where a channel is in its message. */
enum rl_message {
    RL_MESSAGE_HEAD,        /* a head is awaited: to_forward is 0 */
    RL_MESSAGE_LENGTH,      /* in a body of known length */
    RL_MESSAGE_CHUNK_SIZE,  /* a chunk's size line is awaited: to_forward is 0 */
    RL_MESSAGE_CHUNK_DATA,
    RL_MESSAGE_CHUNK_END,   /* the line end after a chunk is awaited: to_forward is 0 */
    RL_MESSAGE_TRAILERS,
    RL_MESSAGE_UNTIL_CLOSE, /* the body ends with the connection: to_forward has no end */
    RL_MESSAGE_DONE,        /* read whole; what of it is not sent yet is in pipe and buffer */
    RL_MESSAGES
};

/* Why a session ended. */
enum rl_close {
    RL_CLOSE_CLIENT,          /* the client closed between requests, or had its last response */
    RL_CLOSE_CLIENT_RESET,
    RL_CLOSE_CLIENT_SHORT,    /* the client closed inside a request */
    RL_CLOSE_CLIENT_TIMEOUT,
    RL_CLOSE_SERVER_TIMEOUT,
    RL_CLOSE_CONNECT_TIMEOUT,
    RL_CLOSE_CONNECT_FAILED,
    RL_CLOSE_ORIGIN_RESET,
    RL_CLOSE_ORIGIN_SHORT,    /* the origin closed inside a response, or before one */
    RL_CLOSE_BAD_REQUEST,
    RL_CLOSE_BAD_RESPONSE,
    RL_CLOSE_EARLY_RESPONSE,  /* answered before the request was read: its rest is not wanted */
    RL_CLOSE_STOPPED,
    RL_CLOSES
};

/* Why a wait was made as it was. ACTIVE and OVERDUE cannot block. */
enum rl_relay_why {
    RL_RELAY_WHY_ACTIVE,   /* a direction is ACTIVE: timeout zero */
    RL_RELAY_WHY_OVERDUE,  /* a deadline has passed already: timeout zero */
    RL_RELAY_WHY_DEADLINE, /* sleeps to the earliest deadline */
    RL_RELAY_WHY_EVENT,    /* no deadline: sleeps until an event */
    RL_RELAY_WHYS
};

typedef struct {
    int32_t why;        /* enum rl_relay_why */
    int32_t can_block;  /* 0: this wait returns at once */
    int64_t timeout_ns; /* -1: none */
} rl_relay_wait;

/* ---- counters: one writer, all 64 bits, cumulative unless called a gauge ------------------- */

typedef struct {
    uint64_t iterations;
    uint64_t waits;
    uint64_t why[RL_RELAY_WHYS];
    uint64_t waits_zero;       /* waits with a timeout of zero */
    uint64_t waits_empty;      /* waits that returned no event */
    uint64_t events;           /* sockets that waits reported */
    uint64_t watches;          /* epoll_ctl calls */
    uint64_t wakeups;          /* from outside: settings, stop */
    uint64_t wasted;           /* iterations without progress whose wait could not block, or was
                                  ended by an event */
    uint64_t dispatches;       /* handler runs */
    uint64_t noop_dispatches;  /* of those: no system call on its socket, interest unchanged */
    uint64_t accepts;
    uint64_t accept_failures;  /* each is followed by a back-off, never by an immediate retry */
    uint64_t full;             /* times that accepting stopped for max_sessions */
    uint64_t connects;
    uint64_t connect_failures; /* no socket, no port, refused */
    uint64_t pipe_failures;    /* no pipe to be had: that stretch was copied */
    uint64_t requests;         /* whose head was forwarded */
    uint64_t responses;        /* read whole */
    uint64_t answers;          /* made here: 400, 408, 431, 501, 502, 503, 504, 505 */
    uint64_t closes[RL_CLOSES];
    /* System calls by the side whose socket they were made on. */
    uint64_t recv[RL_SIDES];
    uint64_t recv_eagain[RL_SIDES];
    uint64_t send[RL_SIDES];
    uint64_t send_eagain[RL_SIDES];
    uint64_t splice_in[RL_SIDES];
    uint64_t splice_in_eagain[RL_SIDES];
    uint64_t splice_out[RL_SIDES];
    uint64_t splice_out_eagain[RL_SIDES];
    /* Bytes by the side that they came from. */
    uint64_t bytes_spliced[RL_SIDES];
    uint64_t bytes_copied[RL_SIDES];
    uint64_t sink_full;        /* times that reading stopped until the sink moves */
    /* gauges */
    uint64_t sessions;
    uint64_t read_active[RL_SIDES]; /* directions by their interest */
    uint64_t read_polled[RL_SIDES];
    uint64_t write_active[RL_SIDES];
    uint64_t write_polled[RL_SIDES];
    uint64_t piped;            /* bytes in pipes */
    uint64_t buffered;         /* bytes in channels' buffers */
    uint64_t to_forward;       /* of all channels; one without an end counts as none */
    uint64_t pipes;            /* pipes that channels hold */
    uint64_t waiting;          /* 1 while inside the wait */
    uint64_t last_why;         /* enum rl_relay_why of the newest wait */
    int64_t last_timeout_ns;
    uint64_t ended;            /* 1 when the thread has left its loop */
} rl_relay_counters;

typedef struct {
    uint64_t t_ns;                 /* the first eight as in rl_sample */
    uint64_t worker;
    uint64_t thread_cpu_ns;
    uint64_t process_cpu_ns;
    uint64_t run_ns;
    uint64_t queue_ns;
    uint64_t voluntary_switches;
    uint64_t involuntary_switches;
    rl_relay_counters c;
} rl_relay_sample;

/* ---- what can be seen of a session and of the loop ----------------------------------------- */

typedef struct {
    int32_t message;      /* enum rl_message */
    int32_t read;         /* enum rl_interest of its source */
    int32_t write;        /* enum rl_interest of its sink */
    uint8_t sink_full;    /* reading has stopped until the sink moves */
    uint8_t has_pipe;
    uint8_t eof;          /* its source has ended */
    uint8_t splices;      /* 0: splice was refused for this source */
    int64_t to_forward;   /* -1: no end */
    uint64_t scheduled;   /* bytes in the buffer that go to the sink */
    uint64_t awaiting;    /* bytes in the buffer that wait for the HTTP layer */
    uint64_t piped;       /* bytes in the pipe */
    uint64_t spliced;     /* bytes that came through the pipe, since accept */
    uint64_t copied;      /* bytes that came through the buffer, since accept */
} rl_channel_view;

typedef struct {
    uint32_t slot;
    uint32_t generation;
    int32_t client_fd;    /* the socket's number on the scripted backend; -1: none */
    int32_t origin_fd;    /* the same; -1: not connected */
    uint8_t busy;         /* a request is under way */
    uint8_t connecting;
    uint8_t closing;      /* no request is taken any more */
    uint8_t lingering;    /* all is sent; what still arrives is thrown away */
    int32_t answer;       /* a status that this relay answers itself, not yet in the buffer */
    int32_t asked;        /* enum rl_side of the source that a decision is asked about; -1 */
    uint64_t requests;
    uint64_t responses;
    int64_t client_wait_ns; /* since the client last did what is awaited of it; -1: nothing is */
    int64_t origin_wait_ns; /* the same of the origin */
    int64_t outq;         /* SIOCOUTQ of the client's socket; -1 unknown */
    rl_channel_view request;
    rl_channel_view response;
} rl_relay_view;

typedef struct {
    uint64_t now_ns;
    uint64_t iterations;
    uint64_t sessions;
    uint64_t active;      /* sockets with an ACTIVE direction: their handlers run every turn */
    uint64_t pipes;
    int64_t deadline_ns;  /* the earliest deadline; -1: none */
    int32_t engine;       /* the answer of RL_RELAY_RULE_ENGINE in this turn */
} rl_relay_loop_view;

/* A policy of the caller's own, as rl_decide: 0, 1, or RL_POLICY_FAILED. The session is NULL where
 * the rule is about the loop (RL_RELAY_RULE_ENGINE). */
typedef int64_t (*rl_relay_decide)(void *self, int rule, const rl_relay_view *session,
                                   const rl_relay_loop_view *loop);

typedef struct {
    int32_t choice[RL_RELAY_RULES];
    uint32_t asks;                  /* bit r: rule r is asked of decide */
    rl_relay_decide decide;
    void *self;
} rl_relay_policy;

/* ---- the relay ----------------------------------------------------------------------------- */

/* Settings that may be changed while the relay runs, by key. */
enum rl_relay_setting {
    RL_RELAY_SETTING_CLIENT_TIMEOUT_MS,  /* 0: none; at once */
    RL_RELAY_SETTING_SERVER_TIMEOUT_MS,  /* 0: none; at once */
    RL_RELAY_SETTING_CONNECT_TIMEOUT_MS, /* 0: none; at once */
    RL_RELAY_SETTING_SO_SNDBUF,          /* towards clients; 0: the kernel's; next session */
    RL_RELAY_SETTING_ORIGIN_SNDBUF,      /* towards the origin; 0: the kernel's; next request */
    RL_RELAY_SETTINGS
};

typedef struct {
    const char *host;        /* numeric IPv4 or IPv6 address */
    int32_t port;            /* 0: any */
    const char *origin_host; /* numeric too */
    int32_t origin_port;
    int32_t max_sessions;
    int32_t max_head;        /* bytes of a request's or response's head */
    int32_t stop_grace_ms;
    int32_t sample_hz;
    int32_t sample_capacity;
    int64_t settings[RL_RELAY_SETTINGS];
    rl_relay_policy policy;
} rl_relay_config;

typedef struct rl_relay rl_relay;

/* As the calls of the ring server; worker is 0, since one relay is one thread. */
int rl_relay_start(const rl_relay_config *config, rl_relay **out, char *where, size_t where_size);
int rl_relay_port(const rl_relay *relay);
int rl_relay_set(rl_relay *relay, int setting, int64_t value);
int64_t rl_relay_get(const rl_relay *relay, int setting);
int rl_relay_set_policy(rl_relay *relay, const rl_relay_policy *policy);
int rl_relay_sample_now(rl_relay *relay, int worker, rl_relay_sample *out);
int rl_relay_take(rl_relay *relay, rl_relay_sample *out, int most);
uint64_t rl_relay_dropped(const rl_relay *relay);
int rl_relay_sample_rate(rl_relay *relay, int hz);
int rl_relay_sessions(rl_relay *relay, rl_relay_view *out, int most);
int rl_relay_loop(rl_relay *relay, int worker, rl_relay_loop_view *out);
int rl_relay_thread_id(const rl_relay *relay, int worker); /* 0 when it has ended */
int rl_relay_stop(rl_relay *relay);
int rl_relay_running(rl_relay *relay);
int rl_relay_failed(rl_relay *relay);
void rl_relay_close(rl_relay *relay);

/* ---- the scripted backend: the same state machine, no kernel, virtual time ----------------- */

enum rl_relay_phase {
    RL_RELAY_PHASE_DECIDE,   /* how long may it sleep */
    RL_RELAY_PHASE_WAIT,     /* the wait that was decided; time passes to its timeout if need be */
    RL_RELAY_PHASE_DISPATCH, /* every handler that is due; rl_relay_script_handler runs one */
    RL_RELAY_PHASE_HTTP,     /* heads, framing, transactions */
    RL_RELAY_PHASE_TIMERS,   /* timeouts; the turn's account */
    RL_RELAY_PHASES
};

typedef struct {
    int32_t slot;         /* of the session; -1: the listener */
    int32_t side;         /* enum rl_side */
    int32_t write;        /* 0: the read handler, 1: the write handler */
    int32_t calls;        /* system calls it made on its socket */
    int32_t before;       /* enum rl_interest before it ran, */
    int32_t after;        /* and after it */
    int32_t noop;
} rl_relay_step;

/* Sockets are numbered in the order in which they came to be, clients and origins alike. */
typedef struct {
    int32_t side;         /* enum rl_side */
    int32_t slot;         /* of its session; -1: not accepted yet, or closed */
    uint8_t closed;       /* by the relay */
    uint8_t finished;     /* the relay has sent FIN */
    uint8_t broken_off;   /* the relay has reset it */
    uint8_t watched_read; /* as epoll was told */
    uint8_t watched_write;
    uint64_t unread;      /* bytes that have arrived and that the relay has not taken */
    uint64_t delivered;   /* bytes that the relay has sent */
    int64_t room;         /* bytes that it takes before EAGAIN */
    uint8_t ready_read;   /* what a wait would report of it now */
    uint8_t ready_write;
    int32_t next_read;    /* enum rl_relay_outcome of its next recv or splice; -1: not chosen */
    int32_t next_write;   /* of its next send, or splice out of a pipe */
} rl_relay_socket;

/* What one call on a socket comes to, whatever it would come to by itself. */
enum rl_relay_outcome {
    RL_RELAY_OUTCOME_FULL,   /* all that is asked for; of a read: all that has arrived */
    RL_RELAY_OUTCOME_SHORT,  /* so many bytes less, but one at least */
    RL_RELAY_OUTCOME_EAGAIN,
    RL_RELAY_OUTCOMES
};

typedef struct {
    int32_t max_sessions;
    int32_t max_head;
    int32_t stop_grace_ms;
    int32_t pipe_size;       /* bytes that a pipe holds */
    int32_t auto_connect;    /* 1: a connect completes at once, as on loopback */
    int64_t room;            /* of new sockets */
    int64_t settings[RL_RELAY_SETTINGS];
    rl_relay_policy policy;
} rl_relay_script_config;

typedef struct rl_relay_script rl_relay_script;

rl_relay_script *rl_relay_script_new(const rl_relay_script_config *config);
void rl_relay_script_free(rl_relay_script *script);
int rl_relay_script_set(rl_relay_script *script, int setting, int64_t value);
int rl_relay_script_policy(rl_relay_script *script, const rl_relay_policy *policy);
int rl_relay_script_accept(rl_relay_script *script); /* a client connects; its socket's number */
int rl_relay_script_input(rl_relay_script *script, int socket, const uint8_t *data, size_t size);
int rl_relay_script_fin(rl_relay_script *script, int socket);
int rl_relay_script_reset(rl_relay_script *script, int socket);
int rl_relay_script_room(rl_relay_script *script, int socket, int64_t bytes);
int rl_relay_script_grain(rl_relay_script *script, int socket, int64_t bytes); /* most a call */
int rl_relay_script_again(rl_relay_script *script, int socket, int reads, int writes);
    /* so many calls of either direction say EAGAIN first, whatever there is */
/* What the next call of one direction comes to; bytes: how many less, for SHORT. */
int rl_relay_script_next(rl_relay_script *script, int socket, int write, int outcome,
                         int64_t bytes);
/* The next wait reports this socket alone, if it is ready by then; the others stay ready. A client
 * that is not accepted yet stands for the listener. -EAGAIN: it is not ready. */
int rl_relay_script_report(rl_relay_script *script, int socket);
int rl_relay_script_connected(rl_relay_script *script, int socket, int result); /* 0, -errno */
int rl_relay_script_refuse(rl_relay_script *script, int connect_error, int accept_error,
                           int pipe_error); /* what these calls fail with from now on; 0: not */
int rl_relay_script_stop(rl_relay_script *script);
int64_t rl_relay_script_advance(rl_relay_script *script, int64_t ns);
/* One phase. WAIT returns 0, -ETIME, or -EAGAIN: nothing in this script will ever end it.
 * DECIDE returns 1 when the loop was left. wait, if not NULL, is the one decided last. */
int rl_relay_script_phase(rl_relay_script *script, int phase, rl_relay_wait *wait);
int rl_relay_script_handler(rl_relay_script *script, rl_relay_step *out); /* 0: none is due */
int rl_relay_script_due(rl_relay_script *script, rl_relay_step *out); /* the same, not run yet */
int rl_relay_script_sockets(const rl_relay_script *script);
int rl_relay_script_socket(rl_relay_script *script, int socket, rl_relay_socket *out);
int rl_relay_script_session(rl_relay_script *script, int slot, rl_relay_view *out);
int rl_relay_script_loop(rl_relay_script *script, rl_relay_loop_view *out);
int rl_relay_script_counters(rl_relay_script *script, rl_relay_counters *out);
int64_t rl_relay_script_output(rl_relay_script *script, int socket, uint8_t *out, int64_t at,
                               int64_t most);
