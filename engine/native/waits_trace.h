#pragma once
/* Counts of trace events, for one thread and the CPU that it is held on. */
#include <stddef.h>
#include <stdint.h>

#include "waits.h"

struct trace {
    int fd[RL_TRACES]; /* -1: not counted, and error and step say why */
    int idle_fd, cpu_fd; /* timer interrupts of the CPU: while it is idle, and all of them */
    int32_t error[RL_TRACES], step[RL_TRACES];
};

void trace_open(struct trace *t, int cpu);
void trace_start(const struct trace *t);
void trace_stop(const struct trace *t, int64_t counts[RL_TRACES], int64_t *strays);
void trace_close(struct trace *t);
