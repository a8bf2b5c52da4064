/*
 * The measuring of one way to wait: calibrate, warm up, time, then count trace events.
 *
 * A reading of the clock costs as much as the cheapest waits, so what is timed is a block of waits
 * long enough to hide it; expensive waits are timed one by one. Trace events are counted
 * afterwards, over waits of their own, so that counting them costs the timed ones nothing.
 */
#define _GNU_SOURCE /* CPU sets, RUSAGE_THREAD */
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

#include "waits_trace.h"
#include "waits_ways.h"

#define CALIBRATED_NS 200000
#define CLOCKS_PER_BLOCK 200 /* a block is as long as this many readings of the clock */
#define MOST_BLOCKS 32768
#define LEAST_BLOCKS 5
#define LONGEST 3 /* times what was asked for, where waits came out slower than calibrated */
#define TRACED_WAITS 500

static int64_t now_ns(void) { return wait_clock_ns(CLOCK_MONOTONIC); }

/* ---- the bench's own cost -------------------------------------------------------------------- */

/* The loop around the waits. That a result is looked at belongs to a wait, as in any program. */
static int no_waits(int64_t n)
{
    MAKE_WAITS(n, 0, ({ __asm__ volatile(""); 0; }));
}

struct own_cost {
    double clock_ns, loop_ns;
};

/* The least of several tries: what disturbs a try only ever adds to it. */
static struct own_cost own_cost(void)
{
    struct own_cost cost = {1e9, 1e9};
    for (int i = 0; i < 5; i++) {
        int64_t start = now_ns();
        for (int j = 0; j < 200; j++)
            now_ns();
        int64_t middle = now_ns();
        no_waits(20000);
        int64_t end = now_ns();
        double clock = (double)(middle - start) / 201, loop = (double)(end - middle) / 20000;
        cost.clock_ns = clock < cost.clock_ns ? clock : cost.clock_ns;
        cost.loop_ns = loop < cost.loop_ns ? loop : cost.loop_ns;
    }
    return cost;
}

/* ---- the thread's figures -------------------------------------------------------------------- */

struct thread_figures {
    int64_t cpu_ns, helper_ns, voluntary, involuntary, not_timed_out;
};

static struct thread_figures figures_now(const struct waiting *w)
{
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return (struct thread_figures){
        .cpu_ns = wait_clock_ns(CLOCK_THREAD_CPUTIME_ID),
        .helper_ns = w->helper.running ? wait_clock_ns(w->helper.cpu_clock) : 0,
        .voluntary = usage.ru_nvcsw, .involuntary = usage.ru_nivcsw,
        .not_timed_out = w->not_timed_out,
    };
}

static void put_figures(const struct thread_figures *a, const struct thread_figures *b,
                        rl_wait_figures *out)
{
    double n = (double)out->waits;
    out->cpu_ns = (double)(b->cpu_ns - a->cpu_ns) / n;
    out->helper_cpu_ns = (double)(b->helper_ns - a->helper_ns) / n;
    out->voluntary = (double)(b->voluntary - a->voluntary) / n;
    out->involuntary = (double)(b->involuntary - a->involuntary) / n;
    out->timed_out = 1 - (double)(b->not_timed_out - a->not_timed_out) / n;
}

/* ---- the parts of a measurement -------------------------------------------------------------- */

static int make_waits(struct waiting *w, int64_t n)
{
    int result = w->way->wait(w, n);
    return result < 0 ? waiting_failed(w, result, w->way->told.name) : 0;
}

/* About how long a wait takes; the tries that find out are part of the warm-up. */
static int calibrate(struct waiting *w, double *wait_ns)
{
    for (int64_t n = 1;; n *= 2) {
        int64_t start = now_ns();
        int result = make_waits(w, n);
        if (result < 0)
            return result;
        int64_t took = now_ns() - start;
        *wait_ns = (double)(took > 0 ? took : 1) / (double)n;
        if (took >= CALIBRATED_NS && n > 1)
            return 0;
        if (took >= 100 * CALIBRATED_NS) /* one long wait tells as much as two */
            return 0;
    }
}

static int64_t at_least(double value, int64_t least)
{
    return value > (double)least ? (int64_t)value : least;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The nearest rank of sorted values. */
static double percentile(const double *sorted, int64_t count, double rank)
{
    return sorted[(int64_t)(rank * (double)(count - 1) + 0.5)];
}

static int time_blocks(struct waiting *w, double *each, int64_t planned, rl_wait_figures *out)
{
    const rl_wait_case *asked = w->asked;
    int64_t least = asked->least > LEAST_BLOCKS ? asked->least : LEAST_BLOCKS;
    struct thread_figures before = figures_now(w);
    int64_t start = now_ns(), last = start, done = 0;
    while (done < planned && (done < least || last - start < LONGEST * asked->run_ns)) {
        int result = make_waits(w, out->block);
        if (result < 0)
            return result;
        int64_t now = now_ns();
        each[done++] = (double)(now - last) / (double)out->block;
        last = now;
    }
    struct thread_figures after = figures_now(w);
    out->blocks = done;
    out->waits = done * out->block;
    out->ns_mean = (double)(last - start) / (double)out->waits;
    put_figures(&before, &after, out);
    qsort(each, (size_t)done, sizeof *each, compare);
    out->ns_p50 = percentile(each, done, 0.5);
    out->ns_p99 = percentile(each, done, 0.99);
    return 0;
}

static int count_traced(struct waiting *w, int cpu, rl_wait_figures *out)
{
    struct trace trace;
    trace_open(&trace, cpu);
    int64_t n = out->waits < TRACED_WAITS ? out->waits : TRACED_WAITS;
    int64_t counts[RL_TRACES], strays;
    trace_start(&trace);
    int result = make_waits(w, n);
    trace_stop(&trace, counts, &strays);
    out->strays = strays > 0 ? (double)strays / (double)n : 0;
    for (int i = 0; i < RL_TRACES; i++) {
        out->traced[i] = (double)counts[i] / (double)n;
        out->trace_error[i] = trace.error[i];
        out->trace_step[i] = trace.step[i];
    }
    trace_close(&trace);
    return result;
}

static int measure(struct waiting *w, int cpu, rl_wait_figures *out)
{
    const rl_wait_case *asked = w->asked;
    double wait_ns;
    int result = calibrate(w, &wait_ns);
    if (result < 0)
        return result;
    result = make_waits(w, at_least((double)asked->run_ns / 10 / wait_ns, 1));
    if (result < 0)
        return result;
    struct own_cost own = own_cost();
    double run_ns = (double)asked->run_ns;
    out->block = at_least(own.clock_ns * CLOCKS_PER_BLOCK / wait_ns, 1);
    if (run_ns / wait_ns > (double)(MOST_BLOCKS * out->block))
        out->block = (int64_t)(run_ns / wait_ns / MOST_BLOCKS) + 1;
    int64_t planned = at_least(run_ns / wait_ns / (double)out->block,
                               asked->least > LEAST_BLOCKS ? asked->least : LEAST_BLOCKS);
    double *each = malloc((size_t)planned * sizeof *each);
    if (!each)
        return waiting_failed(w, -ENOMEM, "malloc");
    result = time_blocks(w, each, planned, out);
    free(each);
    out->own_ns = own.clock_ns / (double)out->block + own.loop_ns;
    if (result == 0 && asked->trace)
        result = count_traced(w, cpu, out);
    return result;
}

/* ---- around it: a thread of its own, no signals, one CPU ------------------------------------- */

struct job {
    const rl_wait_case *asked;
    rl_wait_figures *out;
    struct waiting w;
    int result;
};

/*
 * A thread of its own: when a ring is closed the kernel later interrupts the thread that had it,
 * which would end waits of the next measurement; and under SINGLE_ISSUER a ring is its thread's.
 */
static void *measure_main(void *arg)
{
    struct job *job = arg;
    cpu_set_t one;
    int cpu = sched_getcpu();
    job->result = waiting_open(&job->w, job->asked);
    if (job->result == 0) {
        CPU_ZERO(&one); /* after the helper was made, which must not be held there too */
        CPU_SET((unsigned int)(cpu < 0 ? 0 : cpu), &one);
        sched_setaffinity(0, sizeof one, &one);
        job->result = measure(&job->w, cpu, job->out);
    }
    waiting_close(&job->w);
    return NULL;
}

int rl_wait_measure(const rl_wait_case *asked, rl_wait_figures *out, char *where,
                    size_t where_size)
{
    static const int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
    struct job job = {.asked = asked, .out = out};
    pthread_t thread;
    sigset_t all, before;
    *out = (rl_wait_figures){0};
    sigfillset(&all);
    for (size_t i = 0; i < sizeof FAULTS / sizeof *FAULTS; i++)
        sigdelset(&all, FAULTS[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int result = -pthread_create(&thread, NULL, measure_main, &job);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (result < 0) {
        snprintf(where, where_size, "pthread_create");
        return result;
    }
    pthread_join(thread, NULL);
    snprintf(where, where_size, "%s", job.w.where);
    return job.result;
}
