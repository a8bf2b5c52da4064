/*
 * The life of a connection, as the worker sees it: input, hand-over to a handler, SEND, completion,
 * close. The worker never frees one that the kernel or a handler may still touch: conn_finish waits
 * until nothing is outstanding.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"

#define INPUT_MOST (1u << 20) /* unread input kept while a connection is paused */
#define INPUT_KEPT 8192       /* of its memory, for the slot's next connection */

/* ---- the two lists ------------------------------------------------------------------------- */

void conn_list(struct worker *w, struct conn *c)
{
    if (c->listed)
        return;
    STORE(c->listed, 1);
    c->list_prev = w->dirty.last;
    c->list_next = NULL;
    *(c->list_prev ? &c->list_prev->list_next : &w->dirty.first) = c;
    w->dirty.last = c;
    w->dirty.length++;
    STORE(w->count.list_length, w->dirty.length);
    ADD(w->count.listings, 1);
}

void conn_unlist(struct worker *w, struct conn *c)
{
    if (!c->listed)
        return;
    STORE(c->listed, 0);
    *(c->list_prev ? &c->list_prev->list_next : &w->dirty.first) = c->list_next;
    *(c->list_next ? &c->list_next->list_prev : &w->dirty.last) = c->list_prev;
    w->dirty.length--;
    STORE(w->count.list_length, w->dirty.length);
}

/* Appended with the newest time, so that the first is always the one that has waited longest. */
static void queue_add(struct worker *w, struct conn_queue *q, struct conn *c)
{
    STORE(c->since, w->now);
    c->queue_prev = q->last;
    c->queue_next = NULL;
    *(c->queue_prev ? &c->queue_prev->queue_next : &q->first) = c;
    q->last = c;
}

static void queue_remove(struct conn_queue *q, struct conn *c)
{
    if (q->first != c && !c->queue_prev)
        return; /* taken off already */
    *(c->queue_prev ? &c->queue_prev->queue_next : &q->first) = c->queue_next;
    *(c->queue_next ? &c->queue_next->queue_prev : &q->last) = c->queue_prev;
    c->queue_prev = c->queue_next = NULL;
}

static void set_sending(struct worker *w, struct conn *c, bool on)
{
    if (c->sending == on)
        return;
    STORE(c->sending, on);
    STORE(w->count.sending, on ? w->count.sending + 1 : w->count.sending - 1);
}

/* ---- open and close ------------------------------------------------------------------------ */

static void arm_recv(struct worker *w, struct conn *c)
{
    if (c->recv_armed || c->eof || c->paused || c->closing)
        return;
    int result = w->ops->arm_recv(w, c);
    STORE(c->owes_recv, result != 0);
    c->recv_armed = result == 0;
    if (result == 0)
        return;
    ADD(w->count.sq_full, 1);
    conn_list(w, c);
}

static struct conn *conn_new(struct worker *w)
{
    struct conn *c = w->free_conns;
    if (c) {
        w->free_conns = c->list_next;
        return c;
    }
    if (w->slots == (uint32_t)w->max_connections || !(c = calloc(1, sizeof *c)))
        return NULL;
    pthread_mutex_init(&c->lock, NULL);
    c->worker = w;
    c->slot = w->slots;
    w->conns[w->slots] = c;
    __atomic_store_n(&w->slots, w->slots + 1, __ATOMIC_RELEASE); /* after it: views may look */
    return c;
}

/* A connection for fd, its first recv armed; NULL: no room, fd was closed. */
struct conn *conn_open(struct worker *w, int fd)
{
    struct conn *c = conn_new(w);
    if (!c) {
        struct conn refused = {.fd = fd, .worker = w, .reset = 1};
        w->ops->close(&refused);
        ADD(w->count.refused, 1);
        return NULL;
    }
    STORE(c->fd, fd);
    STORE(c->open, 1);
    STORE(w->count.connections, w->count.connections + 1);
    arm_recv(w, c);
    return c;
}

/* The connection that a completion speaks of; NULL when that one is gone. */
struct conn *conn_of(struct worker *w, uint64_t user_data)
{
    uint32_t slot = (uint32_t)user_data;
    uint32_t generation = (uint32_t)(user_data >> 32) & 0xffffff;
    if (slot >= w->slots)
        return NULL;
    struct conn *c = w->conns[slot];
    return c->open && (c->generation & 0xffffff) == generation ? c : NULL;
}

/* Begin to end it; conn_finish makes it gone once nothing is outstanding. */
void conn_close(struct worker *w, struct conn *c, bool reset)
{
    if (c->closing)
        return;
    STORE(c->closing, 1);
    c->reset = reset;
    conn_unlist(w, c);
    queue_remove(c->lingering ? &w->lingering : &w->in_flight, c);
    w->ops->shutdown(c);
}

static bool handler_has(struct worker *w, struct conn *c)
{
    if (!c->promoted)
        return false;
    pthread_mutex_lock(&w->detach_lock);
    bool has = c->scheduled || c->queued;
    pthread_mutex_unlock(&w->detach_lock);
    return has;
}

static void conn_reset_state(struct conn *c)
{
    STORE(c->owes_recv, 0);
    STORE(c->promoted, 0);
    STORE(c->paused, 0);
    STORE(c->eof, 0);
    STORE(c->closing, 0);
    STORE(c->lingering, 0);
    STORE(c->done, 0);
    STORE(c->close_after, 0);
    STORE(c->held_mark, 0);
    STORE(c->parsed, 0);
    STORE(c->answered, 0);
    STORE(c->sent, 0);
    STORE(c->buffered, 0);
    c->reset = c->movable = 0;
    c->input_len = 0;
    if (c->input_cap > INPUT_KEPT) { /* of a client that once sent far ahead */
        free(c->input);
        c->input = NULL;
        STORE(c->input_cap, 0);
    }
    out_clear(&c->buf[0]);
    out_clear(&c->buf[1]);
}

bool conn_finish(struct worker *w, struct conn *c)
{
    bool in_flight = c->sending && !c->done;
    if (!c->closing || in_flight || c->recv_armed || handler_has(w, c))
        return false;
    if (c->done)
        STORE(w->count.held_now, w->count.held_now - 1);
    set_sending(w, c, false);
    w->ops->close(c);
    STORE(c->fd, -1);
    STORE(c->open, 0);
    STORE(c->generation, c->generation + 1);
    conn_reset_state(c);
    c->list_next = w->free_conns;
    w->free_conns = c;
    STORE(w->count.connections, w->count.connections - 1);
    ADD(w->count.closes, 1);
    w->progress = true;
    return true;
}

/* ---- the lock shared with the handler ------------------------------------------------------ */

/*
 * Take the connection's lock by the rule for held connections. False: the handler has it, and the
 * rule was not to wait; the connection is then listed, or will be handed back.
 */
static bool acquire(struct worker *w, struct conn *c)
{
    if (!c->promoted || pthread_mutex_trylock(&c->lock) == 0)
        return true;
    int64_t how = ask(w, RL_HELD, c);
    if (how == RL_HELD_PARK) {
        ADD(w->count.held, c->done); /* what waits with the worker is a completion, if any */
        int64_t from = worker_blocks(w);
        w->ops->lock(c); /* a handler's whole run may pass */
        worker_unblocked(w, from);
        return true;
    }
    /* Leave the mark, then try once more: either the handler sees the mark after it unlocks, or
     * the lock is free by now. The fences keep both from missing the other. */
    STORE(c->held_mark, 1);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (pthread_mutex_trylock(&c->lock) == 0) {
        STORE(c->held_mark, 0);
        return true;
    }
    if (how == RL_HELD_LISTED)
        conn_list(w, c);
    else
        conn_unlist(w, c);
    return false;
}

static void release(struct conn *c)
{
    if (c->promoted)
        pthread_mutex_unlock(&c->lock);
}

/* ---- output -------------------------------------------------------------------------------- */

/* Hand what is to be sent to the ring, at most one SEND at a time. The lock is held. */
static void flush(struct worker *w, struct conn *c)
{
    if (c->sending || c->closing)
        return;
    if (!send_buf(c)->bytes) {
        if (!write_buf(c)->bytes)
            return;
        STORE(c->turn, 1 - c->turn);
        STORE(c->buffered, 0);
    }
    if (w->ops->send(w, c)) {
        ADD(w->count.sq_full, 1);
        conn_list(w, c); /* the pass after the next submission tries again */
        return;
    }
    set_sending(w, c, true);
    queue_add(w, &w->in_flight, c);
    STORE(w->sends_pending, 1);
    ADD(w->count.sends, 1);
    w->progress = true;
}

/* The SEND in flight has ended with result bytes or -errno. The lock is held. */
static void apply_send(struct worker *w, struct conn *c, int result)
{
    set_sending(w, c, false);
    queue_remove(&w->in_flight, c);
    if (result == -EAGAIN || result == -EINTR)
        return;
    if (result <= 0) {
        ADD(w->count.send_errors, 1);
        if (result == -ECONNRESET || result == -EPIPE)
            ADD(w->count.resets, 1);
        conn_close(w, c, true);
        return;
    }
    ADD(w->count.bytes_sent, (uint64_t)result);
    STORE(c->sent, c->sent + (uint64_t)result);
    if ((uint64_t)result < send_buf(c)->bytes && (uint64_t)result < out_front(send_buf(c)))
        ADD(w->count.sends_short, 1); /* not merely more pieces than one SEND takes */
    out_consume(send_buf(c), (uint64_t)result);
    w->progress = true;
}

void conn_send_done(struct worker *w, struct conn *c, int result)
{
    if (c->closing) {
        set_sending(w, c, false);
        conn_finish(w, c);
        return;
    }
    queue_remove(&w->in_flight, c);
    STORE(c->done, 1); /* before the lock is tried: whoever hands it back finds this */
    c->done_result = result;
    if (!acquire(w, c)) {
        ADD(w->count.held, 1);
        STORE(w->count.held_now, w->count.held_now + 1);
        return;
    }
    STORE(c->done, 0);
    apply_send(w, c, result);
    flush(w, c);
    release(c);
    conn_settle(w, c);
}

/* All that the worker itself can do for a listed connection. False: turned away by the lock. */
bool conn_move(struct worker *w, struct conn *c)
{
    if (!acquire(w, c))
        return false;
    if (c->done) {
        STORE(c->done, 0);
        STORE(w->count.held_now, w->count.held_now - 1);
        apply_send(w, c, c->done_result);
    }
    if (c->owes_recv) {
        arm_recv(w, c);
        w->progress |= c->recv_armed;
    }
    flush(w, c);
    release(c);
    conn_settle(w, c);
    return true;
}

/* ---- input --------------------------------------------------------------------------------- */

/* Requests whose response no SEND has yet taken on. */
static uint64_t backlog(struct conn *c)
{
    return c->parsed - LOAD(c->answered) + LOAD(c->buffered);
}

static bool keep_input(struct worker *w, struct conn *c, const uint8_t *data, uint32_t len)
{
    if (c->input_len + len > INPUT_MOST) {
        conn_close(w, c, true);
        return false;
    }
    if (c->input_len + len > c->input_cap) {
        uint32_t cap = c->input_cap ? c->input_cap : 512;
        while (cap < c->input_len + len)
            cap *= 2;
        uint8_t *bigger = realloc(c->input, cap);
        if (!bigger) {
            conn_close(w, c, true);
            return false;
        }
        c->input = bigger;
        STORE(c->input_cap, cap);
    }
    memcpy(c->input + c->input_len, data, len);
    c->input_len += len;
    return true;
}

static void promote(struct worker *w, struct conn *c)
{
    if (c->promoted)
        return;
    flush(w, c); /* what was produced here goes first; from now on the lock guards the buffers */
    STORE(c->promoted, 1);
}

static void take_request(struct worker *w, struct conn *c, const rl_request *asked)
{
    rl_request ask = *asked;
    if (ask.route < 0)
        ask.route = (int32_t)LOAD(w->settings[RL_SET_ROUTE]);
    if (ask.size < 0)
        ask.size = LOAD(w->settings[RL_SET_RESPONSE_SIZE]);
    if (ask.handler_ms < 0)
        ask.handler_ms = LOAD(w->settings[RL_SET_HANDLER_MS]);
    uint64_t seq = c->parsed;
    STORE(c->parsed, seq + 1);
    ADD(w->count.requests, 1);
    if (ask.status != 200)
        ADD(w->count.bad_requests, 1);
    if (ask.close)
        STORE(c->close_after, 1);
    if (c->promoted || (ask.status == 200 && ask.route == RL_ROUTE_ASYNC)) {
        struct request *request = malloc(sizeof *request);
        if (!request) {
            conn_close(w, c, true);
            return;
        }
        *request = (struct request){.ask = ask, .seq = seq};
        promote(w, c);
        w->ops->schedule(c, request);
        return;
    }
    if (ask.handler_ms && ask.status == 200) {
        int64_t from = worker_blocks(w);
        w->ops->pause(w, ask.handler_ms); /* a sync handler runs here: everybody waits */
        worker_unblocked(w, from);
    }
    if (!respond(c, &ask, seq))
        conn_close(w, c, true);
}

/* SQ full: the input that still arrives is kept, and each arrival tries again. */
static void stop_reading(struct worker *w, struct conn *c)
{
    if (c->recv_armed && !c->cancelling)
        c->cancelling = w->ops->cancel_recv(w, c) == 0;
}

/* Take the requests at data, as many as the depth allows; the bytes used. */
static uint32_t parse(struct worker *w, struct conn *c, const uint8_t *data, uint32_t len)
{
    uint32_t used = 0;
    uint64_t depth = (uint64_t)LOAD(w->settings[RL_SET_MAX_PIPELINE]);
    while (used < len && !c->closing && !c->close_after) {
        if (backlog(c) >= depth) {
            STORE(c->paused, 1);
            stop_reading(w, c);
            break;
        }
        rl_request ask;
        int64_t n = rl_http_parse(data + used, len - used, (size_t)w->max_header, &ask);
        if (n == 0)
            break;
        if (n < 0)
            ask = (rl_request){.status = (int32_t)-n, .close = 1};
        else if (ask.handler_ms > LOAD(w->settings[RL_SET_MAX_HANDLER_MS]))
            ask = (rl_request){.status = RL_TOO_LONG, .close = 1};
        used = n < 0 ? len : used + (uint32_t)n;
        take_request(w, c, &ask);
    }
    return c->close_after ? len : used; /* what follows the last request is not read */
}

void conn_input(struct worker *w, struct conn *c, const uint8_t *data, uint32_t len)
{
    ADD(w->count.bytes_in, len);
    w->progress = true;
    if (c->input_len || c->paused) {
        if (c->paused)
            stop_reading(w, c);
        if (!keep_input(w, c, data, len) || c->paused)
            return;
        data = c->input;
        len = c->input_len;
    }
    uint32_t used = parse(w, c, data, len);
    if (c->closing)
        return;
    if (data == c->input) {
        c->input_len -= used;
        memmove(c->input, c->input + used, c->input_len);
    } else if (used < len) {
        keep_input(w, c, data + used, len - used);
    }
}

static void resume(struct worker *w, struct conn *c)
{
    STORE(c->paused, 0);
    w->progress = true;
    uint32_t used = c->input_len ? parse(w, c, c->input, c->input_len) : 0;
    if (used) {
        c->input_len -= used;
        memmove(c->input, c->input + used, c->input_len);
    }
    arm_recv(w, c);
    if (!c->promoted)
        flush(w, c);
}

static bool drained(struct worker *w, struct conn *c)
{
    return !handler_has(w, c) && !c->sending && !c->done && !LOAD(send_buf(c)->bytes) &&
           !LOAD(write_buf(c)->bytes) && c->parsed == LOAD(c->answered);
}

/*
 * All that was asked is answered. A client that may still be sending first gets the end of the
 * stream alone: to close with bytes of its own unread resets the connection, and what it has not
 * read yet would be lost. What it sends is dropped, until it closes or RL_LINGER is over.
 */
static void conn_end(struct worker *w, struct conn *c)
{
    if (c->eof) {
        conn_close(w, c, false);
    } else if (!c->lingering) {
        STORE(c->lingering, 1);
        queue_add(w, &w->lingering, c);
        w->ops->end_stream(c);
        w->progress = true;
    }
}

/* After anything happened to it: let it go, or read on, when that is due. The lock is not held. */
void conn_settle(struct worker *w, struct conn *c)
{
    if (c->paused && !c->closing) {
        handler_has(w, c); /* its lock orders our paused before the handler's last look */
        if (backlog(c) < (uint64_t)LOAD(w->settings[RL_SET_MAX_PIPELINE]))
            resume(w, c);
    }
    if (!c->closing && !c->paused && (c->eof || c->close_after) && drained(w, c))
        conn_end(w, c);
    if (c->closing)
        conn_finish(w, c);
}

/* The worker stops: what is under way may still end in time, and who waits for nothing goes. */
void conn_stop(struct worker *w, struct conn *c)
{
    STORE(c->close_after, 1);
    if (!c->closing && !c->lingering && !c->paused && drained(w, c))
        conn_close(w, c, false);
    conn_settle(w, c);
}

static bool recv_fatal(int result)
{
    return result < 0 && result != -ENOBUFS && result != -ECANCELED && result != -EAGAIN &&
           result != -EINTR;
}

void conn_recv_done(struct worker *w, struct conn *c, const struct completion *done)
{
    if (!done->more)
        c->recv_armed = c->cancelling = 0;
    if (c->closing) {
        conn_finish(w, c);
        return;
    }
    if (done->result > 0) {
        conn_input(w, c, done->data, (uint32_t)done->result);
    } else if (done->result == 0) {
        STORE(c->eof, 1);
        w->progress = true;
    } else if (done->result == -ENOBUFS) {
        ADD(w->count.no_buffers, 1); /* buffers come back within this reap: armed again below */
    } else if (recv_fatal(done->result)) {
        ADD(w->count.resets, 1);
        conn_close(w, c, true);
    }
    arm_recv(w, c);
    if (!c->promoted)
        flush(w, c);
    conn_settle(w, c);
}

size_t conn_memory(const struct conn *c)
{
    /* The two are read while others count, or begin anew: the difference must not wrap. */
    uint64_t parsed = LOAD(c->parsed), answered = LOAD(c->answered);
    uint64_t queued = LOAD(c->promoted) && parsed > answered ? parsed - answered : 0;
    return sizeof *c + out_memory(&c->buf[0]) + out_memory(&c->buf[1]) + LOAD(c->input_cap) +
           LOAD(c->backend_bytes) + queued * sizeof(struct request);
}
