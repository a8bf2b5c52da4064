#pragma once
/*
 * The contract between the native engines and Python: every struct and call that both sides
 * see. Written in the subset of C that cffi parses (no includes, no conditionals);
 * engine/build_native.py reads this same file. Times are nanoseconds of CLOCK_MONOTONIC (virtual
 * time on the scripted backend). Every call that can fail returns a negative errno.
 */

/* ---- decisions: one rule each, switchable while the loop runs ------------------------------ */

enum rl_decision {
    RL_MEMBERSHIP,   /* does a connection whose SEND is in flight stay on the dirty list? */
    RL_TIMEOUT,      /* does the list, as it is now, forbid the next wait to sleep? */
    RL_SEND_WAIT,    /* is the wait after preparing a SEND untimed? */
    RL_DIRECT_WRITE, /* may a handler write while a SEND is in flight? */
    RL_HELD,         /* what to do with a connection whose handler holds the lock */
    RL_HANDBACK,     /* does a hand-over to the worker wake it? */
    RL_IDLE,         /* how long to sleep when nothing is to be done */
    RL_EXPIRED,      /* how to make a wait whose timeout is zero */
    RL_DECISIONS
};

/* Answers of the decisions that choose among ways rather than yes (1) or no (0). */
enum rl_held { RL_HELD_PARK, RL_HELD_LISTED, RL_HELD_UNLISTED };
enum rl_expired { RL_EXPIRED_KERNEL, RL_EXPIRED_POLL };

typedef struct {
    const char *decision; /* the decision's name, such as "membership" */
    const char *name;     /* the choice's name, such as "listed" */
    const char *what;     /* one sentence for a person */
    int32_t shipped;      /* 1: what the real system shipped */
} rl_choice;

/* The choice with that index of a decision, or NULL past the last one. */
const rl_choice *rl_choice_at(int decision, int index);

/* ---- the wait ------------------------------------------------------------------------------ */

enum rl_mode {
    RL_MODE_SUBMIT,  /* mode 1: completions ready, submissions pending: enter, returns at once */
    RL_MODE_SKIP,    /* mode 2: completions ready, nothing pending: no system call */
    RL_MODE_UNTIMED, /* mode 3a: nothing ready, a SEND was just prepared: wait without a timeout */
    RL_MODE_TIMED,   /* mode 3b: nothing ready: wait with a timeout (or, tickless, a deadline) */
    RL_MODES
};

/* Why the wait was made as it was. READY, LIST, OVERDUE and OWED cannot block. */
enum rl_why {
    RL_WHY_READY,    /* completions were there already */
    RL_WHY_LIST,     /* the dirty list is not empty: timeout zero */
    RL_WHY_OVERDUE,  /* a deadline has passed already: timeout zero */
    RL_WHY_OWED,     /* the worker owes a re-arm that found the SQ full: timeout zero */
    RL_WHY_SEND,     /* a SEND was just prepared: no timeout, blocks until any completion */
    RL_WHY_IDLE,     /* nothing to do: the periodic timeout */
    RL_WHY_DEADLINE, /* sleeps to the earliest real deadline */
    RL_WHY_EVENT,    /* no deadline at all: sleeps until an event */
    RL_WHYS
};

typedef struct {
    int32_t mode;       /* enum rl_mode */
    int32_t why;        /* enum rl_why */
    int64_t timeout_ns; /* -1: none */
    int32_t can_block;  /* 0: this wait returns at once */
    int32_t way;        /* enum rl_expired, for a timeout of zero */
} rl_wait;

/* ---- counters: one writer each, all 64 bits, cumulative unless called a gauge -------------- */

typedef struct {
    uint64_t iterations;
    uint64_t waits[RL_MODES];
    uint64_t why[RL_WHYS];
    uint64_t enters;           /* io_uring_enter calls made by the worker */
    uint64_t completions;
    uint64_t etime;            /* waits that ended by their timeout */
    uint64_t wasted;           /* iterations whose wait could not block and that made no progress */
    uint64_t accepts;
    uint64_t refused;          /* accepted and closed at once: max_connections reached */
    uint64_t accept_failures;  /* each is followed by a back-off, never by an immediate re-arm */
    uint64_t closes;
    uint64_t resets;           /* connections ended by the client's reset or a broken pipe */
    uint64_t write_timeouts;
    uint64_t requests;
    uint64_t bad_requests;     /* answered 400, 404, 405, 431 or 505 and closed */
    uint64_t bytes_in;
    uint64_t bytes_sent;       /* by ring SENDs */
    uint64_t sends;            /* ring SENDs submitted */
    uint64_t sends_short;      /* completions that took less than was asked */
    uint64_t send_errors;
    uint64_t listings;         /* times a connection was put on the dirty list */
    uint64_t pass_members;     /* members looked at by dirty passes */
    uint64_t handovers;        /* connections taken from the detach queue */
    uint64_t wakeups;          /* eventfd wake-ups of the modelled loop */
    uint64_t sq_full;          /* preparations that found the SQ full */
    uint64_t no_buffers;       /* recvs that ended for want of a provided buffer */
    uint64_t stale;            /* completions refused by their generation number */
    uint64_t held;             /* completions that found their connection's lock taken */
    uint64_t direct_writes;    /* by handler threads */
    uint64_t direct_short;
    uint64_t direct_eagain;
    uint64_t bytes_direct;
    /* gauges */
    uint64_t connections;
    uint64_t list_length;
    uint64_t sending;          /* connections with a SEND in flight */
    uint64_t held_now;         /* held completions not yet applied */
    uint64_t movable;          /* list members that the worker itself can move */
    uint64_t waiting;          /* 1 while inside the wait */
    uint64_t blocked;          /* 1 while held up outside it, by a handler or by its lock */
    uint64_t last_mode;        /* enum rl_mode of the newest wait */
    uint64_t last_why;         /* enum rl_why of the newest wait */
    int64_t last_timeout_ns;
    uint64_t ended;            /* 1 when the worker has left its loop */
} rl_counters;

typedef struct {
    uint64_t t_ns;
    uint64_t worker;
    uint64_t thread_cpu_ns;        /* the worker's thread CPU clock */
    uint64_t process_cpu_ns;       /* the whole process */
    uint64_t run_ns;               /* schedstat: on a CPU */
    uint64_t queue_ns;             /* schedstat: runnable, waiting for a CPU */
    uint64_t voluntary_switches;   /* refreshed at most ten times a second while sampling */
    uint64_t involuntary_switches;
    rl_counters c;
} rl_sample;

/* ---- what can be seen of a connection and of a loop ---------------------------------------- */

typedef struct {
    uint32_t slot;
    uint32_t generation;
    int32_t fd;              /* -1 on the scripted backend */
    uint8_t sending;         /* one SEND is outstanding */
    uint8_t listed;
    uint8_t owes_recv;
    uint8_t promoted;
    uint8_t held;            /* its SEND completed while its handler held the lock */
    uint8_t handler_running;
    uint8_t queued;          /* on the detach queue */
    uint8_t paused;          /* pipelining depth reached: input is not read */
    uint8_t eof;             /* the client has half-closed */
    uint8_t closing;
    uint64_t write_buf;      /* bytes produced, not handed to the kernel */
    uint64_t send_buf;       /* bytes owned by the outstanding SEND, or a remainder */
    uint64_t sent;           /* bytes the socket has taken since accept */
    uint64_t requests;       /* requests parsed since accept */
    uint64_t outstanding;    /* requests parsed and not yet answered into a buffer */
    int64_t outq;            /* SIOCOUTQ: bytes in the socket not acknowledged; -1 unknown */
    int64_t send_age_ns;     /* since the outstanding SEND last made progress; -1: none */
} rl_conn_view;

typedef struct {
    uint64_t now_ns;
    uint64_t iterations;
    uint64_t empty;          /* empty iterations in a row */
    uint64_t list_length;
    uint64_t movable;
    uint64_t sending;
    uint64_t connections;
    uint64_t sends_pending;  /* a SEND was prepared since the last wait */
    int64_t deadline_ns;     /* the earliest real deadline; -1: none */
    int64_t cap_ns;          /* longest periodic sleep */
} rl_loop_view;

/* A policy of the caller's own. Asked for the decisions whose bit is set in asks; returns the
 * answer (RL_IDLE: nanoseconds, or -1 for no timeout), or RL_POLICY_FAILED to stop the worker. */
typedef int64_t (*rl_decide)(void *self, int decision, const rl_conn_view *conn,
                             const rl_loop_view *loop);
enum rl_policy_answer { RL_POLICY_FAILED = -2 };

typedef struct {
    int32_t choice[RL_DECISIONS]; /* index into the table of choices */
    uint32_t asks;                /* bit d: decision d is asked of decide */
    rl_decide decide;
    void *self;
} rl_policy;

/* ---- the ring server ----------------------------------------------------------------------- */

enum rl_setup { RL_SETUP_AUTO, RL_SETUP_NONE, RL_SETUP_COOP, RL_SETUP_DEFER, RL_SETUP_SQPOLL };
enum rl_recv { RL_RECV_AUTO, RL_RECV_BUFFER_RING, RL_RECV_PLAIN };
enum rl_route { RL_ROUTE_SYNC, RL_ROUTE_ASYNC };

/* Settings that may be changed while the server runs, by key. */
enum rl_setting {
    RL_SET_RESPONSE_SIZE,    /* bytes of body, for a request that names none; next request */
    RL_SET_HANDLER_MS,       /* handler time, for a request that names none; next request */
    RL_SET_ROUTE,            /* enum rl_route of a request to /; next request */
    RL_SET_WRITE_TIMEOUT_MS, /* 0: none; next iteration */
    RL_SET_CAP_NS,           /* longest periodic sleep; next iteration */
    RL_SET_MAX_PIPELINE,     /* requests outstanding per connection; next request */
    RL_SET_MAX_HANDLER_MS,   /* that a request may ask for; next request */
    RL_SET_SO_SNDBUF,        /* 0: the kernel's choice; next connection */
    RL_SETTINGS
};

typedef struct {
    const char *host;        /* numeric IPv4 or IPv6 address */
    int32_t port;            /* 0: any */
    int32_t workers;
    int32_t entries;         /* SQ entries of each ring */
    int32_t setup;           /* enum rl_setup */
    int32_t recv;            /* enum rl_recv */
    int32_t sq_idle_ms;      /* SQPOLL: idle time before its thread sleeps */
    int32_t handlers;        /* handler threads */
    int32_t max_connections; /* per worker */
    int32_t max_header;      /* bytes of a request head */
    int32_t stop_grace_ms;   /* after a stop request, for responses under way */
    int32_t sample_hz;       /* 0: no samples are kept */
    int32_t sample_capacity; /* samples kept; the oldest give way */
    int64_t settings[RL_SETTINGS];
    rl_policy policy;
} rl_config;

typedef struct {
    int32_t setup;           /* enum rl_setup that the kernel took */
    uint32_t flags;          /* IORING_SETUP_* */
    uint32_t features;       /* IORING_FEAT_* */
    uint32_t sq_entries;
    uint32_t cq_entries;
    int32_t multishot_accept;
    int32_t multishot_recv;
    int32_t buffer_ring;
    int32_t thread_id;       /* of the worker; 0 when it has ended */
} rl_ring_info;

typedef struct rl_server rl_server;

/* Where a failed start failed, in words ("io_uring_setup", "bind"), is left in where. */
int rl_server_start(const rl_config *config, rl_server **out, char *where, size_t where_size);
int rl_server_port(const rl_server *server);
int rl_server_set(rl_server *server, int setting, int64_t value);
int64_t rl_server_get(const rl_server *server, int setting);
int rl_server_policy(rl_server *server, const rl_policy *policy);
int rl_server_sample(rl_server *server, int worker, rl_sample *out);
int rl_server_take(rl_server *server, rl_sample *out, int most); /* samples, oldest first */
uint64_t rl_server_dropped(const rl_server *server); /* samples overwritten before taken */
int rl_server_sample_rate(rl_server *server, int hz);
int rl_server_connections(rl_server *server, rl_conn_view *out, int most);
int rl_server_loop(rl_server *server, int worker, rl_loop_view *out);
int rl_server_ring(const rl_server *server, int worker, rl_ring_info *out);
int rl_server_stop(rl_server *server);    /* the modelled stop: a flag, seen when the loop looks */
int rl_server_running(rl_server *server); /* workers that have not left their loop */
/* 0, 1: a policy failed, or the negative errno of a wait. */
int rl_server_failed(rl_server *server);
int rl_server_memory(rl_server *server, uint64_t *connection_bytes); /* bytes held by connections */
void rl_server_close(rl_server *server);  /* ends and frees everything, whatever the loop does */

/* Whether this process may use io_uring: 0, or the negative errno of io_uring_setup. */
int rl_probe(rl_ring_info *out);
const char *rl_liburing_version(void);

/* ---- HTTP and the body pattern ------------------------------------------------------------- */

typedef struct {
    int32_t status;      /* 200, or the refusal: 400, 404, 405, 431, 505 */
    int32_t route;       /* enum rl_route, -1: the server's default */
    int64_t size;        /* body bytes asked for, -1: the server's default */
    int64_t handler_ms;  /* -1: the server's default */
    int32_t close;       /* 1: the connection ends after this response */
} rl_request;

#define RL_MAX_RESPONSE 1073741824
#define RL_MAX_HANDLER_MS 60000

/* Bytes of one request head at data, 0 when it is not complete yet, or -status to refuse it. */
int64_t rl_http_parse(const uint8_t *data, size_t size, size_t max_header, rl_request *out);

/* The bodies are slices of one periodic pattern: record k of 16 bytes spells its own offset. The
 * body of response number seq of a connection (from 0) begins at rl_pattern_phase(seq). */
#define RL_PATTERN_PERIOD 1048576
const uint8_t *rl_pattern(void); /* two periods */
uint64_t rl_pattern_phase(uint64_t seq);

/* ---- the scripted backend: the same state machine, no kernel, virtual time ----------------- */

enum rl_phase { RL_PHASE_REAP, RL_PHASE_DRAIN, RL_PHASE_DIRTY, RL_PHASE_HOUSE, RL_PHASE_DECIDE };

/* Clients are numbered in the order of rl_script_accept; slot means that number here. */
typedef struct rl_script rl_script;

typedef struct {
    int32_t sq_entries;
    int32_t max_connections;
    int32_t max_header;
    int32_t multishot_recv;  /* 0: each recv is armed anew */
    int32_t stop_grace_ms;
    int64_t settings[RL_SETTINGS];
    rl_policy policy;
} rl_script_config;

rl_script *rl_script_new(const rl_script_config *config);
void rl_script_free(rl_script *script);
int rl_script_set(rl_script *script, int setting, int64_t value);
int rl_script_policy(rl_script *script, const rl_policy *policy);
int rl_script_accept(rl_script *script);                       /* posts; the connection's slot */
int rl_script_input(rl_script *script, int slot, const uint8_t *data, size_t size);
int rl_script_eof(rl_script *script, int slot);                /* the client half-closes */
int rl_script_reset(rl_script *script, int slot);              /* the client resets */
int rl_script_room(rl_script *script, int slot, int64_t bytes);/* that a direct write may take */
int rl_script_send_done(rl_script *script, int slot, int64_t result); /* bytes or -errno */
int rl_script_handler_begin(rl_script *script, int slot);      /* takes the lock; 0: none to run */
int rl_script_handler_end(rl_script *script, int slot);        /* answers, unlocks, hands back */
int rl_script_lose_recv(rl_script *script, int slot);          /* recv ends with -ENOBUFS */
int rl_script_poke(rl_script *script);                         /* a completion of nobody's */
int rl_script_stop(rl_script *script);
int64_t rl_script_advance(rl_script *script, int64_t ns);      /* virtual time; returns now */
int rl_script_phase(rl_script *script, int phase, rl_wait *wait); /* run one phase */
int rl_script_iterate(rl_script *script, rl_wait *wait); /* reap..decide; wait is the next one.
    Returns 1 when the worker has left its loop. */
int rl_script_wait(rl_script *script, rl_wait *wait); /* make the wait last decided: submits;
    time passes to its timeout when nothing is ready: 0, -ETIME, or -EAGAIN: it sleeps for ever */
int rl_script_conn(rl_script *script, int slot, rl_conn_view *out);
int rl_script_loop(rl_script *script, rl_loop_view *out);
int rl_script_counters(rl_script *script, rl_counters *out);
/* Bit 0: a recv is armed; bit 1: a SEND is, of send_bytes. */
int rl_script_pending(rl_script *script, int slot, int64_t *send_bytes);
int64_t rl_script_output(rl_script *script, int slot, uint8_t *out, int64_t at, int64_t most);
