#pragma once
/*
 * The state machine of the ring worker: its data, the operations it needs from a backend, and
 * the calls between its files. Nothing in worker.c, conn.c, output.c, handler.c and policy.c makes
 * a system call; ring.c (liburing) and script.c (no kernel, virtual time) are the two backends.
 *
 * Who may touch what:
 *   the worker thread   everything of its worker and connections, except as below
 *   a handler thread    write_buf, the direct write and held_mark, while it holds the connection's
 *                       lock; sending and send_buf it only reads, under that lock
 *   either              queue (requests for the handler) under the server's pool lock; the detach
 *                       queue, queued and scheduled under the worker's detach lock
 *   anybody             reads what views and samples show, by relaxed atomics: torn across fields,
 *                       never torn within one
 */
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "common.h"
#include "ringlab.h"

#define RL_IOV_MAX 8
#define RL_TOO_LONG 4001 /* a status: the 400 of a request that asks for too much handler time */
#define RL_LINGER (5000 * RL_MS) /* see conn_end */

/* ---- bytes on their way out: copied text (heads, small bodies) and slices of the pattern --- */

struct piece {
    const uint8_t *at; /* NULL: the next len bytes of text */
    uint32_t len;
};

struct out {
    uint8_t *text;
    uint32_t text_len, text_cap, text_off; /* text_off: text already consumed */
    struct piece *pieces;
    uint32_t head, count, cap;
    uint64_t bytes; /* not yet consumed; read by views */
};

bool out_text(struct out *out, const uint8_t *data, uint32_t len);
bool out_slice(struct out *out, const uint8_t *at, uint32_t len);
int out_iov(const struct out *out, struct iovec *iov, int most);
uint64_t out_front(const struct out *out); /* bytes in an iovec of the first RL_IOV_MAX pieces */
void out_consume(struct out *out, uint64_t bytes);
void out_clear(struct out *out);
void out_free(struct out *out);
size_t out_memory(const struct out *out);

/* ---- a connection -------------------------------------------------------------------------- */

struct request {
    struct request *next;
    rl_request ask;
    uint64_t seq;
};

struct worker;

struct conn {
    uint32_t slot, generation;
    int fd;
    uint8_t open;
    uint8_t sending, listed, owes_recv, promoted, handler_running, paused, eof, closing;
    uint8_t recv_armed, cancelling;
    uint8_t lingering;   /* its stream has ended; what the client still sends is dropped */
    uint8_t done;        /* a held completion: done_result waits to be applied */
    uint8_t close_after; /* the last response of this connection is in a buffer */
    uint8_t held_mark;   /* the worker was turned away by the lock: tell it at hand-back */
    uint8_t reset;       /* close without lingering */
    uint8_t movable;     /* as found by the last dirty pass */
    uint8_t pooled;      /* with the handler pool; under the pool lock */
    uint8_t scheduled;   /* the same, as the worker may ask it; under the detach lock */
    uint8_t queued;      /* on the detach queue; under the detach lock */
    uint8_t turn;        /* which of buf is the send_buf; the other is the write_buf */
    int done_result;
    uint32_t buffered; /* responses in the write_buf */
    struct out buf[2];
    uint8_t *input; /* bytes of an incomplete head, or unread while paused */
    uint32_t input_len, input_cap;
    uint64_t parsed, answered, sent;
    int64_t since; /* when its SEND last made progress; when it began to linger */
    struct conn *list_prev, *list_next; /* the dirty list */
    struct conn *queue_prev, *queue_next; /* those in flight, or lingering, by since */
    struct conn *detach_next;           /* the detach queue */
    struct conn *pool_next;             /* the handler pool's queue */
    struct request *first, *last;       /* for the handler */
    struct worker *worker;
    pthread_mutex_t lock;
    void *backend; /* what the backend keeps for a SEND in flight */
    uint32_t backend_bytes;
};

/* ---- what a backend does ------------------------------------------------------------------- */

/* Handing write_buf over to a SEND swaps the two: what a SEND in flight points at never moves. */
static inline struct out *send_buf(struct conn *c) { return &c->buf[LOAD(c->turn)]; }
static inline struct out *write_buf(struct conn *c) { return &c->buf[1 - LOAD(c->turn)]; }

enum op { OP_ACCEPT = 1, OP_RECV, OP_SEND, OP_WAKE, OP_CANCEL };

struct completion {
    uint64_t user_data;
    int result;
    bool more;           /* the multishot request that posted it stays armed */
    const uint8_t *data; /* OP_RECV: what was received */
    int buffer;          /* to give back once data was used; -1: none */
};

struct ops {
    int (*ready)(struct worker *w);   /* completions that can be reaped without a system call */
    int (*pending)(struct worker *w); /* prepared and not yet submitted */
    int (*wait)(struct worker *w, const rl_wait *wait);
    int (*reap)(struct worker *w, struct completion *out, int most);
    void (*give_back)(struct worker *w, int buffer);
    /* Prepare a request: 0, or -EBUSY when the SQ is full. */
    int (*arm_accept)(struct worker *w);
    int (*arm_wake)(struct worker *w);
    int (*arm_recv)(struct worker *w, struct conn *c);
    int (*cancel_recv)(struct worker *w, struct conn *c);
    int (*send)(struct worker *w, struct conn *c);
    /* Directly on the socket, not through the ring. */
    ssize_t (*write)(struct conn *c, const struct iovec *iov, int count);
    void (*shutdown)(struct conn *c); /* every outstanding request of it completes soon after */
    void (*end_stream)(struct conn *c); /* ends the sending half alone */
    void (*close)(struct conn *c);
    void (*close_listener)(struct worker *w);
    void (*lock)(struct conn *c); /* waits for the handler, however long it runs */
    void (*schedule)(struct conn *c, struct request *request); /* to the handler pool; takes it */
    void (*pause)(struct worker *w, int64_t ms); /* a handler's time; cut short when closing */
    void (*wake)(struct worker *w);
    int64_t (*now)(struct worker *w);
    /* A sleep, in a wait or elsewhere, is over: w->now is its end. It slept since from;
     * from == w->now: not at all. */
    void (*woke)(struct worker *w, int64_t from);
};

/* ---- a worker ------------------------------------------------------------------------------ */

typedef int64_t (*decide_fn)(const struct worker *w, int decision, const struct conn *c);

/* What handler threads count, on a line of its own: they are many writers. */
struct handler_counters {
    uint64_t direct_writes, direct_short, direct_eagain, bytes_direct;
} __attribute__((aligned(RL_CACHE_LINE)));

struct conn_queue {
    struct conn *first, *last;
};

struct conn_list {
    struct conn *first, *last;
    uint64_t length;
};

struct worker {
    rl_counters count __attribute__((aligned(RL_CACHE_LINE)));
    struct handler_counters handled;
    const struct ops *ops;
    void *backend;
    int64_t *settings; /* RL_SETTINGS of them, shared, read relaxed */
    decide_fn decide[RL_DECISIONS];
    const rl_policy *policy; /* the one in force; never changed once it was put here */
    const rl_policy *wanted; /* put here by whoever sets it, taken before the next drain */
    int32_t max_connections, max_header;
    int64_t stop_grace_ns;

    struct conn **conns; /* by slot; allocated once each, reused */
    struct conn *free_conns;
    uint32_t slots;
    struct conn_list dirty;
    struct conn_queue in_flight; /* by age of their SEND */
    struct conn_queue lingering;

    pthread_mutex_t detach_lock;
    struct conn *detach_first, *detach_last;
    uint8_t detach_flag;

    bool accept_armed, wake_armed, has_listener;
    uint8_t sends_pending;
    bool could_block, progress; /* of this iteration */
    uint64_t empty;
    int64_t now;
    int64_t woke;      /* the end of the last wait: what had completed by then was reaped */
    int64_t accept_at; /* re-arm the accept then; 0: not backing off */
    int64_t stop_at;   /* leave the loop then; 0: not stopping */
    int64_t deadline;  /* as of the last decision, for views; -1: none */
    uint8_t stop_asked;
    uint8_t quit;
    int32_t failed; /* 0, 1: a policy failed, or the negative errno of a wait */
    rl_wait next;
};

/* user_data: operation, generation, slot: a completion of an earlier life is refused. */
static inline uint64_t pack(enum op op, const struct conn *c)
{
    return ((uint64_t)op << 56) | ((uint64_t)(c->generation & 0xffffff) << 32) | c->slot;
}
static inline uint64_t pack_op(enum op op) { return (uint64_t)op << 56; }
static inline enum op op_of(uint64_t user_data) { return (enum op)(user_data >> 56); }

static inline int64_t ask(const struct worker *w, int decision, const struct conn *c)
{
    decide_fn fn = __atomic_load_n(&w->decide[decision], __ATOMIC_ACQUIRE);
    return fn(w, decision, c);
}

/* ---- worker.c: the phases of an iteration -------------------------------------------------- */

void worker_init(struct worker *w);
void worker_begin(struct worker *w);
bool worker_top(struct worker *w);    /* false: leave the loop */
void worker_decide(struct worker *w); /* the one place that decides the wait: into w->next */
void worker_wait(struct worker *w);
int64_t worker_blocks(struct worker *w);
void worker_unblocked(struct worker *w, int64_t from);
void worker_reap(struct worker *w);
void worker_drain(struct worker *w);
void worker_dirty(struct worker *w);
void worker_house(struct worker *w);
void worker_account(struct worker *w);
void worker_free(struct worker *w);
int64_t worker_deadline(const struct worker *w);
void worker_fail(struct worker *w, int32_t why);
void worker_nudge(struct worker *w); /* something was stored for it: wake it if it would sleep on */

/* ---- conn.c: the life of a connection ------------------------------------------------------ */

struct conn *conn_open(struct worker *w, int fd);
struct conn *conn_of(struct worker *w, uint64_t user_data);
void conn_input(struct worker *w, struct conn *c, const uint8_t *data, uint32_t len);
void conn_recv_done(struct worker *w, struct conn *c, const struct completion *done);
void conn_send_done(struct worker *w, struct conn *c, int result);
bool conn_move(struct worker *w, struct conn *c); /* all that the worker can do for it */
void conn_settle(struct worker *w, struct conn *c); /* close when drained, resume input */
void conn_close(struct worker *w, struct conn *c, bool reset);
void conn_stop(struct worker *w, struct conn *c);
bool conn_finish(struct worker *w, struct conn *c); /* true: it is gone */
void conn_list(struct worker *w, struct conn *c);
void conn_unlist(struct worker *w, struct conn *c);
size_t conn_memory(const struct conn *c);

/* ---- handler.c: what a handler does with a request ----------------------------------------- */

bool respond(struct conn *c, const rl_request *ask, uint64_t seq);
void handle_locked(struct conn *c, const struct request *request);
bool handler_unlock(struct conn *c); /* true: the worker must hear of this connection */
void hand_back(struct conn *c, bool more, bool needs_worker); /* c may be gone afterwards */
void queue_request(struct conn *c, struct request *request);
struct request *next_request(struct conn *c);

/* ---- policy.c ------------------------------------------------------------------------------ */

int policy_check(const rl_policy *policy);
void policy_apply(struct worker *w, const rl_policy *policy); /* policy outlives the worker */
bool policy_sleeps(const rl_policy *policy); /* may it sleep until an event? */
void view_conn(const struct conn *c, rl_conn_view *out);
void view_loop(const struct worker *w, rl_loop_view *out);
