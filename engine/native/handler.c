/*
 * What a handler does with a request: build the response, write it directly if the rule allows,
 * leave the rest to the worker. Also the hand-over in both directions. Makes no system call itself.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"

#define COPY_MOST 4096 /* a body up to this is copied behind its head: one buffer, one plain SEND */
#define HEAD_MOST 160

static const char *phrase(int status)
{
    switch (status) {
    case 200: return "200 OK";
    case 404: return "404 Not Found";
    case 405: return "405 Method Not Allowed";
    case 431: return "431 Request Header Fields Too Large";
    case RL_TOO_LONG: return "400 Bad Request: ms Is Over The Limit";
    case 505: return "505 HTTP Version Not Supported";
    default: return "400 Bad Request";
    }
}

static uint32_t put(uint8_t *at, const char *text)
{
    size_t len = strlen(text);
    memcpy(at, text, len);
    return (uint32_t)len;
}

static uint32_t put_number(uint8_t *at, uint64_t value)
{
    uint8_t digits[20];
    uint32_t n = 0;
    do
        digits[n++] = (uint8_t)('0' + value % 10);
    while (value /= 10);
    for (uint32_t i = 0; i < n; i++)
        at[i] = digits[n - 1 - i];
    return n;
}

static uint32_t put_head(uint8_t *at, const rl_request *ask)
{
    uint32_t n = put(at, "HTTP/1.1 ");
    n += put(at + n, phrase(ask->status));
    if (ask->status == 405)
        n += put(at + n, "\r\nAllow: GET");
    n += put(at + n, "\r\nContent-Type: application/octet-stream\r\nContent-Length: ");
    n += put_number(at + n, ask->status == 200 ? (uint64_t)ask->size : 0);
    n += put(at + n, ask->close ? "\r\nConnection: close\r\n\r\n" : "\r\n\r\n");
    return n;
}

/* Append the response to write_buf: the head copied, a large body as slices of the pattern. */
bool respond(struct conn *c, const rl_request *ask, uint64_t seq)
{
    uint8_t head[HEAD_MOST];
    struct out *out = write_buf(c);
    uint64_t left = ask->status == 200 ? (uint64_t)ask->size : 0;
    uint64_t at = rl_pattern_phase(seq);
    bool ok = out_text(out, head, put_head(head, ask));
    if (left <= COPY_MOST) {
        ok = ok && (!left || out_text(out, rl_pattern() + at, (uint32_t)left));
        left = 0;
    }
    while (ok && left) {
        uint64_t most = 2 * RL_PATTERN_PERIOD - at;
        uint32_t take = (uint32_t)(left < most ? left : most);
        ok = out_slice(out, rl_pattern() + at, take);
        at = (at + take) % RL_PATTERN_PERIOD;
        left -= take;
    }
    STORE(c->buffered, c->buffered + 1);
    STORE(c->answered, c->answered + 1);
    return ok;
}

static void write_directly(struct conn *c)
{
    struct handler_counters *count = &c->worker->handled;
    struct iovec iov[RL_IOV_MAX];
    struct out *out = write_buf(c);
    while (out->bytes) {
        int n = out_iov(out, iov, RL_IOV_MAX);
        uint64_t asked = 0;
        for (int i = 0; i < n; i++)
            asked += iov[i].iov_len;
        __atomic_fetch_add(&count->direct_writes, 1, __ATOMIC_RELAXED);
        ssize_t took = c->worker->ops->write(c, iov, n);
        if (took < 0) { /* -EAGAIN: full; any other error the worker's recv will meet as well */
            if (took == -EAGAIN)
                __atomic_fetch_add(&count->direct_eagain, 1, __ATOMIC_RELAXED);
            return;
        }
        out_consume(out, (uint64_t)took);
        STORE(c->sent, c->sent + (uint64_t)took);
        __atomic_fetch_add(&count->bytes_direct, (uint64_t)took, __ATOMIC_RELAXED);
        if ((uint64_t)took < asked) {
            __atomic_fetch_add(&count->direct_short, 1, __ATOMIC_RELAXED);
            return;
        }
    }
    STORE(c->buffered, 0);
}

/* Answer one request. The connection's lock is held for the whole of it, as in the real system. */
void handle_locked(struct conn *c, const struct request *request)
{
    const rl_request *ask_for = &request->ask;
    STORE(c->handler_running, 1);
    if (ask_for->handler_ms && ask_for->status == 200)
        c->worker->ops->pause(c->worker, ask_for->handler_ms);
    if (LOAD(c->closing)) {
        STORE(c->answered, c->answered + 1);
        return;
    }
    bool may_write = !write_buf(c)->bytes && ask(c->worker, RL_DIRECT_WRITE, c);
    if (respond(c, ask_for, request->seq) && may_write)
        write_directly(c);
}

/* Something that only the worker can do for it now, seen from the handler. */
static bool worker_must_look(struct conn *c)
{
    return LOAD(c->paused) || LOAD(c->eof) || LOAD(c->close_after) || LOAD(c->closing);
}

/* End of a handler's run. True: the worker must hear of the connection. */
bool handler_unlock(struct conn *c)
{
    bool left = write_buf(c)->bytes > 0;
    STORE(c->handler_running, 0);
    pthread_mutex_unlock(&c->lock);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* pairs with the one in acquire() */
    bool turned_away = __atomic_exchange_n(&c->held_mark, 0, __ATOMIC_RELAXED);
    return left || turned_away;
}

/*
 * Give the connection back to its worker. more: the handler keeps it for another request. Under the
 * detach lock the flags are looked at again: the worker sets them before it takes that lock, so one
 * of the two always sees the other.
 */
void hand_back(struct conn *c, bool more, bool needs_worker)
{
    struct worker *w = c->worker;
    pthread_mutex_lock(&w->detach_lock);
    if (!more)
        STORE(c->scheduled, 0);
    needs_worker = needs_worker || worker_must_look(c);
    bool wake = needs_worker && ask(w, RL_HANDBACK, c); /* within the lock: see policy_apply */
    if (needs_worker && !c->queued) {
        STORE(c->queued, 1);
        c->detach_next = NULL;
        *(w->detach_last ? &w->detach_last->detach_next : &w->detach_first) = c;
        w->detach_last = c;
        __atomic_store_n(&w->detach_flag, 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&w->detach_lock);
    if (wake)
        w->ops->wake(w);
}

void queue_request(struct conn *c, struct request *request)
{
    request->next = NULL;
    *(c->last ? &c->last->next : &c->first) = request;
    c->last = request;
}

struct request *next_request(struct conn *c)
{
    struct request *request = c->first;
    if (request && !(c->first = request->next))
        c->last = NULL;
    return request;
}
