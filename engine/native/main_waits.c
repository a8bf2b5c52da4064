/*
 * The wait bench as a program of its own, for a kernel that has nothing else: as /init of an
 * initramfs it mounts what it needs, lets the machine settle, measures, and powers off.
 *
 *   waits [ways=a,b] [timeouts=0,50000] [setups=none,defer] [run_us=N] [settle_s=N]
 *
 * Prints one line a row, "ringlab row " and JSON, then "ringlab done" or "ringlab failed".
 */
#include <errno.h>
#include <liburing.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include "waits.h"

#define MOST 16

struct plan {
    const char *ways, *timeouts, *setups;
    int64_t run_us, settle_s;
};

static const char *const SETUPS[] = {[RL_WAIT_NONE] = "none", "coop", "defer"};
static const char *const TRACES[RL_TRACES] = {
    [RL_TRACE_TIMER_STARTS] = "timer_starts",
    [RL_TRACE_TIMER_INTERRUPTS] = "timer_interrupts",
    [RL_TRACE_SWITCHES] = "traced_switches",
};

/* Whether a comma-separated list has the name; one that was not given has every name. */
static int listed(const char *list, const char *name)
{
    size_t length = strlen(name);
    if (!list)
        return 1;
    for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (!strncmp(at, name, length) && (at[length] == ',' || !at[length]))
            return 1;
    return 0;
}

static int numbers(const char *list, int64_t *out, int most)
{
    int n = 0;
    while (*list && n < most) {
        char *end;
        out[n++] = strtoll(list, &end, 10);
        list = *end == ',' ? end + 1 : "";
    }
    return n;
}

static void print_row(const rl_wait_case *c, const rl_wait_figures *f)
{
    printf("ringlab row {\"way\": \"%s\", \"timeout_ns\": %lld, \"flags\": \"%s\", \"napi_us\": 0, "
           "\"waits\": %lld, \"ns_p50\": %.3f, \"ns_p99\": %.3f, \"ns_mean\": %.3f, "
           "\"cpu_ns\": %.3f, \"voluntary\": %.4f, \"involuntary\": %.4f, \"timed_out\": %.4f, "
           "\"helper_cpu_ns\": %.3f",
           rl_way_at(c->way)->name, (long long)c->timeout_ns, SETUPS[c->setup],
           (long long)f->waits, f->ns_p50, f->ns_p99, f->ns_mean, f->cpu_ns, f->voluntary,
           f->involuntary, f->timed_out, f->helper_cpu_ns);
    for (int i = 0; i < RL_TRACES; i++) {
        if (f->trace_error[i])
            printf(", \"%s\": null", TRACES[i]);
        else
            printf(", \"%s\": %.4f", TRACES[i], f->traced[i]);
    }
    printf("}\n");
}

static int print_measured(const rl_wait_case *c)
{
    rl_wait_figures figures;
    char where[96];
    int result = rl_wait_measure(c, &figures, where, sizeof where);
    if (result == 0)
        print_row(c, &figures);
    else
        printf("ringlab absent {\"way\": \"%s\", \"timeout_ns\": %lld, \"flags\": \"%s\", "
               "\"napi_us\": 0, \"error\": %d, \"where\": \"%s\"}\n", rl_way_at(c->way)->name,
               (long long)c->timeout_ns, SETUPS[c->setup], result, where);
    fflush(stdout);
    return result == -EOPNOTSUPP ? 0 : result;
}

static int measure_plan(const struct plan *plan)
{
    int64_t timeouts[MOST];
    int count = numbers(plan->timeouts, timeouts, MOST), failed = 0;
    const rl_way *way;
    for (int setup = RL_WAIT_NONE; setup <= RL_WAIT_DEFER; setup++)
        for (int i = 0; (way = rl_way_at(i)); i++)
            for (int j = 0; j < count; j++) {
                int64_t timeout = timeouts[j];
                if (!listed(plan->setups, SETUPS[setup]) || !listed(plan->ways, way->name) ||
                    (timeout && way->untimed) || timeout % way->step_ns ||
                    timeout < way->least_ns || (!way->ring && setup != RL_WAIT_NONE))
                    continue;
                rl_wait_case c = {.way = i, .setup = setup, .timeout_ns = timeout, .socket = -1,
                                  .run_ns = plan->run_us * 1000, .least = 20, .trace = 1};
                failed |= print_measured(&c);
            }
    return failed;
}

static void mount_all(void)
{
    mkdir("/proc", 0755);
    mkdir("/sys", 0755);
    mount("proc", "/proc", "proc", 0, NULL);
    mount("sysfs", "/sys", "sysfs", 0, NULL);
    mount("tracefs", "/sys/kernel/tracing", "tracefs", 0, NULL);
}

static void read_arguments(struct plan *plan, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        char *value = strchr(argv[i], '=');
        if (!value)
            continue;
        *value++ = 0;
        if (!strcmp(argv[i], "ways"))
            plan->ways = value;
        else if (!strcmp(argv[i], "timeouts"))
            plan->timeouts = value;
        else if (!strcmp(argv[i], "setups"))
            plan->setups = value;
        else if (!strcmp(argv[i], "run_us"))
            plan->run_us = atoll(value);
        else if (!strcmp(argv[i], "settle_s"))
            plan->settle_s = atoll(value);
    }
}

/* What kernel and program this is. */
static void print_kernel(void)
{
    struct utsname name;
    struct io_uring ring;
    struct io_uring_params params = {0};
    uname(&name);
    printf("ringlab kernel {\"release\": \"%s\", \"version\": \"%s\", \"machine\": \"%s\"",
           name.release, name.version, name.machine);
#ifdef IO_URING_VERSION_MAJOR
    printf(", \"liburing\": \"%d.%d\"", IO_URING_VERSION_MAJOR, IO_URING_VERSION_MINOR);
#else
    printf(", \"liburing\": \"2.3\""); /* the last that did not say so */
#endif
    if (io_uring_queue_init_params(2, &ring, &params) == 0) {
        printf(", \"features\": %u", params.features);
        io_uring_queue_exit(&ring);
    }
    printf("}\n");
    fflush(stdout);
}

int main(int argc, char **argv)
{
    struct plan plan = {NULL, "0,1,1000,10000,50000,200000,1000000", "none", 2000, 0};
    int is_init = getpid() == 1;
    read_arguments(&plan, argc, argv);
    if (is_init)
        mount_all();
    print_kernel();
    /* Until its clock has settled, a young kernel runs its timers at the tick. */
    nanosleep(&(struct timespec){.tv_sec = plan.settle_s}, NULL);
    rl_trace_hold();
    int failed = measure_plan(&plan);
    rl_trace_release();
    puts(failed ? "ringlab failed" : "ringlab done");
    fflush(stdout);
    if (is_init) {
        sync();
        reboot(RB_POWER_OFF);
    }
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
