/* How the ring worker makes each kind of wait. */
#include "ring_wait.h"

#include <errno.h>

#define ENTERED(enters) \
    __atomic_store_n(enters, __atomic_load_n(enters, __ATOMIC_RELAXED) + 1, __ATOMIC_RELAXED)

/* A zero timeout without a timer: submit, run what the kernel holds back for this task, return. */
static int poll_once(struct io_uring *ring, uint64_t *enters)
{
    int result = 0;
    if (io_uring_sq_ready(ring)) {
        ENTERED(enters);
        result = io_uring_submit(ring);
        if (result < 0 && result != -EBUSY)
            return result;
    }
    ENTERED(enters);
    result = io_uring_get_events(ring);
    return result < 0 ? result : (io_uring_cq_ready(ring) ? 0 : -ETIME);
}

int ring_make_wait(struct io_uring *ring, const rl_wait *wait, uint64_t *enters)
{
    if (wait->mode == RL_MODE_SKIP)
        return 0;
    if (wait->mode == RL_MODE_TIMED && wait->timeout_ns == 0 && wait->way == RL_EXPIRED_POLL)
        return poll_once(ring, enters);
    ENTERED(enters);
    if (wait->mode == RL_MODE_SUBMIT)
        return io_uring_submit(ring);
    if (wait->timeout_ns < 0)
        return io_uring_submit_and_wait(ring, 1);
    struct __kernel_timespec limit = {
        .tv_sec = wait->timeout_ns / 1000000000,
        .tv_nsec = wait->timeout_ns % 1000000000,
    };
    struct io_uring_cqe *cqe;
    int result = io_uring_submit_and_wait_timeout(ring, &cqe, 1, &limit, NULL);
    /* When something was submitted the count comes back even if the time ran out. */
    return result >= 0 && !io_uring_cq_ready(ring) ? -ETIME : result;
}
