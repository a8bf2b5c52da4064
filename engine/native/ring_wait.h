#pragma once
/* The ring worker's wait, alone: the server makes it and the wait bench times it. */
#include <liburing.h>

#include "ringlab.h"

/* Makes the wait that was decided. The number submitted or 0, -ETIME when its time ran out, or
 * another negative errno. enters counts the io_uring_enter calls; it has one writer. */
int ring_make_wait(struct io_uring *ring, const rl_wait *wait, uint64_t *enters);
