#pragma once
/*
 * The wait bench's contract: what one wait costs, by way to wait, timeout, ring flags and NAPI.
 * Read by C and, after ringlab.h, by cffi, in the subset that it parses. No Python and nothing of
 * the ring server behind it: main_waits.c makes a stand-alone program of the same files.
 */

typedef struct {
    const char *name; /* after the call: "io_uring_wait_cqe_timeout" */
    const char *what; /* one sentence for a person */
    int32_t ring;     /* 0: no ring is involved, so ring flags and NAPI make no difference */
    int32_t untimed;  /* 1: has no timeout, so it is measured for a timeout of zero only */
    int64_t step_ns;  /* the finest timeout it can be given */
    int64_t least_ns; /* the shortest timeout it makes sense for */
} rl_way;

/* The way with that index, or NULL past the last one. */
const rl_way *rl_way_at(int index);

/* Ring flags to wait under; the values are those of enum rl_setup. */
enum rl_wait_setup { RL_WAIT_NONE = 1, RL_WAIT_COOP = 2, RL_WAIT_DEFER = 3 };

typedef struct {
    int32_t way;         /* index of the table of ways */
    int32_t setup;       /* enum rl_wait_setup */
    int64_t timeout_ns;  /* a multiple of the way's step_ns */
    int32_t napi_us;     /* busy_poll_to registered on the ring; 0: none */
    int32_t socket;      /* a connected socket to keep a recv posted on; -1: none */
    int64_t run_ns;      /* how long to measure, about; the warm-up and calibration come first */
    int32_t least;       /* blocks to measure at least, though it take longer */
    int32_t trace;       /* 1: count trace events */
} rl_wait_case;

/* What is counted by tracepoints, of the waiting thread; timer interrupts also of its CPU while it
 * is idle, since a thread that sleeps is not the one that is interrupted. */
enum rl_trace { RL_TRACE_TIMER_STARTS, RL_TRACE_TIMER_INTERRUPTS, RL_TRACE_SWITCHES, RL_TRACES };
enum rl_trace_step { RL_TRACE_NOT_ASKED, RL_TRACE_TRACEFS, RL_TRACE_EVENT, RL_TRACE_PERF };

typedef struct {
    int64_t waits;         /* measured, not counting the warm-up */
    int64_t block;         /* waits between two readings of the clock */
    int64_t blocks;
    double ns_p50;         /* of a wait; percentiles over the blocks */
    double ns_p99;
    double ns_mean;
    double cpu_ns;         /* CPU time of the waiting thread per wait */
    double voluntary;      /* context switches of the waiting thread per wait */
    double involuntary;
    double timed_out;      /* fraction of the waits that ended by their timeout */
    double helper_cpu_ns;  /* CPU time of the helping thread per wait; 0: there is none */
    double own_ns;         /* the bench's own cost in one wait: clock and loop */
    double strays;         /* timer interrupts per wait that hit another program on the CPU */
    double traced[RL_TRACES];       /* per wait */
    int32_t trace_error[RL_TRACES]; /* 0, or the negative errno for which it was not counted */
    int32_t trace_step[RL_TRACES];  /* enum rl_trace_step: where that came from */
} rl_wait_figures;

/* Measures on a thread made for it, which stays on one CPU and takes no signals; the caller waits.
 * A wait may only end as one that timed out does: another result is returned as the negative errno
 * (-EBADMSG for a success), with the call that gave it in where. -EOPNOTSUPP: this kernel lacks the
 * way, its flags, or NAPI; where says which. */
int rl_wait_measure(const rl_wait_case *asked, rl_wait_figures *out, char *where,
                    size_t where_size);

/* The first counter of a trace event and the closing of the last one each take the kernel tens of
 * milliseconds. Between these two calls, which nest, one counter of each is kept open. */
void rl_trace_hold(void);
void rl_trace_release(void);

typedef struct {
    int32_t sockets[2];  /* the two ends of a TCP connection */
    int32_t setup;       /* enum rl_wait_setup of the pinging end's ring */
    int32_t napi_us;     /* busy_poll_to registered on it; 0: none */
    int32_t prefer;      /* prefer_busy_poll */
    int64_t run_ns;
} rl_ping_case;

typedef struct {
    int64_t pings;
    double ns_p50; /* of a round trip of one byte */
    double ns_p99;
    double cpu_ns; /* of the pinging thread per round trip */
    int32_t napi_id;
} rl_ping_figures;

/* Ping-pong: this thread waits on a ring, another echoes with blocking calls. */
int rl_ping_measure(const rl_ping_case *asked, rl_ping_figures *out, char *where,
                    size_t where_size);
