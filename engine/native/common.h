#pragma once
/* What the loops share: how their state is read by others, and their units. */
#include <stdint.h>

#define LOAD(x) __atomic_load_n(&(x), __ATOMIC_RELAXED)
#define STORE(x, v) __atomic_store_n(&(x), (v), __ATOMIC_RELAXED)
/* One writer, so a plain read and a relaxed store: no locked instruction on the hot path. */
#define ADD(x, v) STORE(x, (x) + (v))

#define RL_MS INT64_C(1000000)
#define RL_CACHE_LINE 64
