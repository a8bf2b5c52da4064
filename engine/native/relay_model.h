#pragma once
/*
 * The state machine of the relay: its data, the operations it needs from a backend, and the calls
 * between its files. Nothing in relay_end.c, relay_chan.c, relay_head.c, relay_http.c,
 * relay_session.c, relay_loop.c and relay_policy.c makes a system call; relay_epoll.c (epoll,
 * splice) and relay_script.c (no kernel, virtual time) are the two backends.
 *
 * Everything belongs to the relay's one thread. Others read what views and samples show, by relaxed
 * atomics: torn across fields, never torn within one.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "common.h"
#include "ringlab.h"

#include "relay.h"

/* ---- lists: circular, with their head as sentinel ------------------------------------------ */

struct link {
    struct link *prev, *next;
};

static inline void link_init(struct link *l) { l->prev = l->next = l; }
static inline bool linked(const struct link *l) { return l->next != l; }

static inline void unlink_from(struct link *l)
{
    l->prev->next = l->next;
    l->next->prev = l->prev;
    link_init(l);
}

/* At the end of a list; taken off the one it was on. */
static inline void link_to(struct link *list, struct link *l)
{
    unlink_from(l);
    l->prev = list->prev;
    l->next = list;
    list->prev->next = l;
    list->prev = l;
}

#define HOLDER(l, type, member) ((type *)(void *)((char *)(l)-offsetof(type, member)))

/* ---- a socket ------------------------------------------------------------------------------ */

enum dir { READ, WRITE, DIRS };
enum { BIT_READ = 1 << READ, BIT_WRITE = 1 << WRITE };

/* What the loop may come to wait for, each kind with one length for all. */
enum timer { TIMER_NONE, TIMER_CLIENT, TIMER_ORIGIN, TIMER_CONNECT, TIMER_LINGER, TIMERS };

struct session;

struct end {
    int fd;                  /* -1: none */
    struct session *session; /* NULL: the listener */
    uint8_t side;            /* enum rl_side */
    uint8_t interest[DIRS];  /* enum rl_interest */
    uint8_t watched;         /* BIT_* that epoll was told */
    uint8_t edge;            /* its POLLED read is reported for what arrives from now on */
    uint8_t edge_told;
    uint8_t due;             /* BIT_* whose handlers run in this turn */
    uint8_t told;            /* epoll said readable since its read handler last ran */
    uint8_t moved;           /* BIT_*: bytes passed it that way since its timer was looked at */
    uint8_t timer;           /* enum timer that it is under, */
    uint8_t awaited;         /* and the BIT_* whose bytes begin its time anew; 0: none do */
    uint64_t calls;          /* system calls made on it */
    int64_t since;           /* when what the timer awaits was last seen */
    struct link active, changed, run, timed;
};

/* ---- a channel ----------------------------------------------------------------------------- */

#define FORWARD_ALL UINT64_MAX

struct pipe {
    struct pipe *next; /* in the pool of empty ones */
    int read_fd, write_fd;
    uint64_t held; /* what the scripted one holds is in data */
    void *data;
};

/*
 * buffer: [start, start + out) is scheduled for the sink, the in bytes behind wait for the HTTP
 * layer. On output the pipe goes first, so whatever the buffer holds came later.
 */
struct chan {
    struct session *session;
    struct end *from, *to;
    struct pipe *pipe; /* NULL: none held; it is given back when it is empty */
    uint64_t piped;
    uint64_t to_forward; /* FORWARD_ALL: no end */
    uint32_t start, out, in;
    uint8_t message;  /* enum rl_message */
    uint8_t full;     /* the sink-full mark */
    uint8_t fresh;    /* bytes came since the HTTP layer last looked */
    uint8_t eof;
    uint8_t no_splice;
    uint8_t unchunk;  /* its chunks are passed on without their framing */
    int32_t error;    /* how its source was lost, also if a write was told; 0: it was not, or by
                         a plain FIN */
    uint32_t trailers; /* bytes of trailer lines so far */
    uint64_t spliced, copied;
    uint8_t data[RL_RELAY_BUFFER];
};

static inline bool has_output(const struct chan *ch) { return ch->piped || ch->out; }

/* ---- a session ----------------------------------------------------------------------------- */

struct relay;

struct session {
    struct relay *relay;
    uint32_t slot, generation;
    uint8_t open;
    uint8_t busy;       /* a request is under way */
    uint8_t connecting;
    uint8_t deaf;       /* the origin takes no more of the request: its rest is not read */
    uint8_t head_only;  /* the request is a HEAD */
    uint8_t last;       /* the session ends after this response */
    uint8_t http10;     /* the client speaks HTTP/1.0 */
    uint8_t begun;      /* bytes of this response's final head were scheduled */
    uint8_t by_close;   /* its body's end is told by the end of the client's connection */
    uint8_t closing;    /* ends once everything is sent */
    uint8_t lingering;  /* everything is sent, FIN too */
    uint8_t again;      /* the HTTP layer has more to do */
    int32_t answer;     /* a status to answer here once there is room; 0: none */
    int32_t reason;     /* enum rl_close, once closing */
    uint64_t requests, responses;
    struct end client, origin;
    struct chan request, response;
    struct link woken, place; /* place: among the free ones */
};

/* ---- what a backend does ------------------------------------------------------------------- */

struct relay_ops {
    /* Until something is ready or the time is up: calls end_report for each end; their number, or
     * -errno. timeout_ns -1: none. */
    int (*wait)(struct relay *r, int64_t timeout_ns);
    /* Tell epoll what of an end is POLLED: BIT_*; with e->edge, reads are reported only for what
     * arrives after this call. */
    int (*watch)(struct relay *r, struct end *e, uint8_t bits);
    int (*accept)(struct relay *r);                /* a socket, or -errno */
    int (*connect)(struct relay *r, struct end *e); /* sets e->fd: 0, -EINPROGRESS or -errno */
    ssize_t (*recv)(struct end *e, void *to, size_t size);
    ssize_t (*send)(struct end *e, const void *from, size_t size);
    ssize_t (*splice_in)(struct end *e, struct pipe *pipe, size_t size);
    ssize_t (*splice_out)(struct end *e, struct pipe *pipe, size_t size);
    int (*pipe_open)(struct relay *r, struct pipe *pipe);
    void (*pipe_close)(struct relay *r, struct pipe *pipe);
    void (*finish)(struct end *e); /* sends FIN; reading goes on */
    void (*reset)(struct end *e);  /* its close will be a reset */
    void (*close)(struct relay *r, struct end *e);
    int64_t (*now)(struct relay *r);
    void (*wake)(struct relay *r); /* any thread */
    /* A wait is over: r->now is its end. It slept since from; from == r->now: not at all. */
    void (*woke)(struct relay *r, int64_t from);
};

/* ---- the relay ----------------------------------------------------------------------------- */

enum { ASKED = -1 }; /* in answers: the caller's own policy decides */

struct relay {
    rl_relay_counters count __attribute__((aligned(RL_CACHE_LINE)));
    const struct relay_ops *ops;
    void *backend;
    int64_t *settings; /* RL_RELAY_SETTINGS of them, shared, read relaxed */
    int32_t answers[RL_RELAY_RULES]; /* of each rule: 0, 1 or ASKED */
    const rl_relay_policy *policy;   /* the one in force; never changed once it was put here */
    int32_t max_sessions, max_head;
    int64_t stop_grace_ns;

    struct session **sessions; /* by slot; allocated once each, reused */
    uint32_t slots;
    struct link free_sessions, ended_sessions;
    struct end listener;
    struct pipe *pipes; /* empty ones, kept for the next channel */
    uint32_t spare_pipes;

    struct link active;  /* ends with an ACTIVE direction */
    struct link changed; /* ends that epoll must be told about */
    struct link run;     /* ends whose handlers are due in this turn */
    struct link woken;   /* sessions that the HTTP layer must look at */
    struct link timed[TIMERS];
    uint64_t active_ends;

    bool level; /* the engine of this turn */
    bool could_block, progress;
    bool roused; /* this turn's wait could not block, or an event ended it */
    int64_t now;
    int64_t accept_at; /* accept again then; 0: not backing off */
    int64_t pipe_at;   /* ask for a pipe again then */
    int64_t stop_at;   /* leave the loop then; 0: not stopping */
    int64_t deadline;  /* as of the last decision, for views; -1: none */
    uint8_t stop_asked, quit;
    int32_t failed; /* 0, 1: a policy failed, or the negative errno of a wait */
    rl_relay_wait next;
    uint8_t scratch[RL_RELAY_BUFFER];
};

/* ---- relay_policy.c ------------------------------------------------------------------------ */

int relay_policy_check(const rl_relay_policy *policy);
void relay_policy_apply(struct relay *r, const rl_relay_policy *policy); /* policy outlives it */
int32_t relay_ask_caller(struct relay *r, int rule, const struct chan *ch);
void relay_view_session(const struct session *s, rl_relay_view *out);
void relay_view_loop(const struct relay *r, rl_relay_loop_view *out);

/* The answer to a rule; ch is the channel it is about, NULL where it is about the loop. */
static inline bool rule(struct relay *r, int rule, const struct chan *ch)
{
    int32_t answer = LOAD(r->answers[rule]);
    return answer == ASKED ? relay_ask_caller(r, rule, ch) : answer;
}

/* ---- relay_end.c: interest ----------------------------------------------------------------- */

void end_init(struct end *e, struct session *s, int side);
void end_want(struct relay *r, struct end *e, enum dir dir); /* if it is not wanted yet */
void end_stop(struct relay *r, struct end *e, enum dir dir);
void end_poll(struct relay *r, struct end *e, enum dir dir); /* it said EAGAIN */
void end_poll_edge(struct relay *r, struct end *e);          /* the mirror fault */
void end_close(struct relay *r, struct end *e);
void end_timer(struct relay *r, struct end *e, enum timer timer, uint8_t awaited);
void end_sync(struct relay *r);  /* tell epoll what has changed */
void end_report(struct relay *r, struct end *e, uint8_t bits); /* epoll says: ready, BIT_* */
void end_level(struct relay *r); /* the engine has become level-triggered */

/* ---- relay_chan.c: bytes ------------------------------------------------------------------- */

void chan_init(struct chan *ch, struct session *s);
void chan_read(struct relay *r, struct chan *ch);
void chan_write(struct relay *r, struct chan *ch);
void chan_schedule(struct chan *ch, uint64_t bytes); /* let so many pass without a look */
void chan_room_made(struct relay *r, struct chan *ch);
bool chan_put(struct chan *ch, uint32_t at, uint32_t gone, const void *with, uint32_t size);
void chan_drop(struct relay *r, struct chan *ch);  /* forget what is meant for the sink */
void chan_clear(struct relay *r, struct chan *ch); /* forget all that it holds */
void chan_set_forward(struct chan *ch, uint64_t bytes);
void chan_taken(struct chan *ch, uint32_t bytes); /* so many of the awaiting bytes are gone */

static inline uint8_t *chan_in(struct chan *ch) { return ch->data + ch->start + ch->out; }

/* ---- relay_head.c: heads ------------------------------------------------------------------- */

enum { CONNECTION_OPTIONS = 16 };

struct head {
    int32_t status;  /* of a response */
    uint8_t head_only, http10, close, chunked;
    uint8_t unchunk; /* its Transfer-Encoding is not passed on */
    int64_t length;  /* Content-Length; -1: none */
    uint32_t skip;   /* empty lines before a request */
    struct {
        const uint8_t *at;
        size_t size;
    } option[CONNECTION_OPTIONS]; /* of Connection: fields of these names are not passed on */
    uint32_t options;
};

/* Bytes of the head at data; 0: not complete yet; -status to refuse it. */
int64_t head_request(const uint8_t *data, size_t size, size_t most, struct head *out);
int64_t head_response(const uint8_t *data, size_t size, size_t most, struct head *out);
/* The head of that size as it is passed on; its size, 0 when it does not fit. */
size_t head_edit(const uint8_t *data, size_t size, const struct head *head, bool close,
                 uint8_t *to, size_t most);
/* A chunk's size line: its bytes, 0: not complete, -1: none. */
int64_t head_chunk(const uint8_t *data, size_t size, uint64_t *chunk);
size_t head_answer(int32_t status, uint8_t *to, size_t most);

/* ---- relay_http.c, relay_session.c --------------------------------------------------------- */

void http_run(struct session *s);
void http_answer(struct session *s, int32_t status, int32_t reason); /* if none has begun */

struct session *session_open(struct relay *r, int fd);
void session_wake(struct session *s);
void session_timers(struct session *s);
void session_refresh(struct session *s); /* reading, writing as its state now asks */
void session_closing(struct session *s, int32_t reason); /* once everything is sent */
void session_end(struct session *s, int32_t reason);     /* now */
void session_lost(struct session *s, struct end *e, int error);
void session_linger(struct session *s);
void session_expired(struct session *s, enum timer timer);
void session_reap(struct relay *r);

/* ---- relay_loop.c: the phases of a turn ---------------------------------------------------- */

int relay_init(struct relay *r);
void relay_free(struct relay *r);
void relay_begin(struct relay *r);
bool relay_top(struct relay *r);    /* false: leave the loop */
void relay_decide(struct relay *r); /* the one place that decides the wait: into r->next */
int relay_wait(struct relay *r);
struct end *relay_due(const struct relay *r, enum dir *dir);
bool relay_handler(struct relay *r, rl_relay_step *step); /* the next that is due; false: none */
void relay_http(struct relay *r);
void relay_timers(struct relay *r);
void relay_account(struct relay *r);
void relay_end_all(struct relay *r);
void relay_fail(struct relay *r, int32_t why);
int64_t relay_limit(const struct relay *r, enum timer timer);
