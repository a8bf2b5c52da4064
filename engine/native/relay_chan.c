/*
 * Bytes through a channel: splice into its pipe and recv into its buffer on one end, splice and
 * send out of them on the other, pipe first. chan_read is the handler that the case is about:
 * under the speculative engine it must consume something, meet EAGAIN, or stop reading, and with
 * the shipped decisions there is a state in which it does none of the three.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "relay_model.h"

#define SPLICE_MOST (UINT64_C(1) << 30) /* a call */
#define PIPE_BACKOFF (100 * RL_MS)
#define SPARE_PIPES 256

/* For a new session. What it holds and has to forward was given up by chan_clear before. */
void chan_init(struct chan *ch, struct session *s)
{
    ch->session = s;
    STORE(ch->message, RL_MESSAGE_HEAD);
    STORE(ch->full, 0);
    STORE(ch->eof, 0);
    STORE(ch->no_splice, 0);
    STORE(ch->spliced, 0);
    STORE(ch->copied, 0);
    ch->fresh = 0;
    ch->error = 0;
    ch->trailers = 0;
    ch->unchunk = 0;
}

/* ---- gauges -------------------------------------------------------------------------------- */

static struct relay *relay_of(const struct chan *ch) { return ch->session->relay; }

static void set_piped(struct chan *ch, uint64_t bytes)
{
    struct relay *r = relay_of(ch);
    STORE(r->count.piped, r->count.piped + bytes - ch->piped);
    STORE(ch->piped, bytes);
}

static void set_held(struct chan *ch, uint32_t out, uint32_t in)
{
    struct relay *r = relay_of(ch);
    STORE(r->count.buffered, r->count.buffered + out + in - ch->out - ch->in);
    STORE(ch->out, out);
    STORE(ch->in, in);
    if (!out && !in)
        ch->start = 0;
}

void chan_set_forward(struct chan *ch, uint64_t bytes)
{
    struct relay *r = relay_of(ch);
    uint64_t was = ch->to_forward == FORWARD_ALL ? 0 : ch->to_forward;
    STORE(r->count.to_forward, r->count.to_forward + (bytes == FORWARD_ALL ? 0 : bytes) - was);
    STORE(ch->to_forward, bytes);
}

static void forwarded(struct chan *ch, uint64_t bytes)
{
    if (ch->to_forward != FORWARD_ALL)
        chan_set_forward(ch, ch->to_forward - bytes);
}

/* ---- buffer -------------------------------------------------------------------------------- */

static void compact(struct chan *ch)
{
    if (ch->start)
        memmove(ch->data, ch->data + ch->start, ch->out + ch->in);
    ch->start = 0;
}

/* Bytes that recv may put behind what is there. */
static uint32_t room(struct chan *ch)
{
    uint32_t most = RL_RELAY_BUFFER;
    uint32_t used = ch->out + ch->in;
    if (ch->to_forward < most - used)
        most -= RL_RELAY_RESERVE; /* a head may follow, and grow when it is edited */
    if (used >= most)
        return 0;
    if (ch->start + used >= most)
        compact(ch);
    return most - used - ch->start;
}

/* Let so many bytes pass without a look: those that are there now, the others as they come. */
void chan_schedule(struct chan *ch, uint64_t bytes)
{
    uint32_t now = ch->in < bytes ? ch->in : (uint32_t)bytes;
    set_held(ch, ch->out + now, ch->in - now);
    if (bytes != FORWARD_ALL)
        bytes -= now;
    chan_set_forward(ch, bytes);
}

void chan_taken(struct chan *ch, uint32_t bytes)
{
    memmove(chan_in(ch), chan_in(ch) + bytes, ch->in - bytes);
    set_held(ch, ch->out, ch->in - bytes);
}

/* Replace gone bytes, at that place among the awaiting ones. False: there is no room. */
bool chan_put(struct chan *ch, uint32_t at, uint32_t gone, const void *with, uint32_t size)
{
    if (ch->out + ch->in - gone + size > RL_RELAY_BUFFER)
        return false;
    compact(ch);
    uint8_t *place = chan_in(ch) + at;
    memmove(place + size, place + gone, ch->in - at - gone);
    memcpy(place, with, size);
    set_held(ch, ch->out, ch->in - gone + size);
    return true;
}

/* ---- pipes --------------------------------------------------------------------------------- */

static bool hold_pipe(struct relay *r, struct chan *ch)
{
    if (ch->pipe)
        return true;
    struct pipe *pipe = r->pipes;
    if (pipe) {
        r->pipes = pipe->next;
        r->spare_pipes--;
    } else {
        if (r->pipe_at && r->now < r->pipe_at)
            return false;
        r->pipe_at = 0;
        pipe = calloc(1, sizeof *pipe);
        if (!pipe || r->ops->pipe_open(r, pipe) < 0) {
            free(pipe);
            ADD(r->count.pipe_failures, 1);
            r->pipe_at = r->now + PIPE_BACKOFF; /* until then bytes are copied */
            return false;
        }
    }
    STORE(ch->pipe, pipe);
    STORE(r->count.pipes, r->count.pipes + 1);
    return true;
}

/* Give the pipe back: an empty one is kept for others, one with data is closed. */
static void leave_pipe(struct relay *r, struct chan *ch)
{
    struct pipe *pipe = ch->pipe;
    if (!pipe)
        return;
    STORE(ch->pipe, NULL);
    STORE(r->count.pipes, r->count.pipes - 1);
    if (!ch->piped && r->spare_pipes < SPARE_PIPES) {
        pipe->next = r->pipes;
        r->pipes = pipe;
        r->spare_pipes++;
        return;
    }
    set_piped(ch, 0);
    r->ops->pipe_close(r, pipe);
    free(pipe);
}

void chan_drop(struct relay *r, struct chan *ch)
{
    leave_pipe(r, ch);
    ch->start += ch->out;
    set_held(ch, 0, ch->in);
    chan_set_forward(ch, 0);
}

void chan_clear(struct relay *r, struct chan *ch)
{
    chan_drop(r, ch);
    set_held(ch, 0, 0);
    STORE(ch->full, 0);
}

/* ---- the sink-full mark -------------------------------------------------------------------- */

static void mark_full(struct relay *r, struct chan *ch)
{
    STORE(ch->full, 1);
    ADD(r->count.sink_full, 1);
    end_stop(r, ch->from, READ);
}

/* The sink has moved, or what filled the buffer was taken: reading goes on. */
void chan_room_made(struct relay *r, struct chan *ch)
{
    if (!ch->full)
        return;
    STORE(ch->full, 0);
    if (!ch->eof)
        end_want(r, ch->from, READ);
}

/* ---- reading ------------------------------------------------------------------------------- */

enum after { READ_ON, READ_ENDED }; /* may recv follow in this run of the handler? */

static void source_ended(struct relay *r, struct chan *ch, int error)
{
    STORE(ch->eof, 1);
    if (error)
        ch->error = error;
    r->progress = true;
    end_stop(r, ch->from, READ);
}

static bool may_splice(struct relay *r, struct chan *ch)
{
    if (ch->no_splice || ch->out || ch->in || !ch->to_forward)
        return false; /* a pipe behind a buffer would be sent before it */
    if (ch->to_forward < RL_RELAY_MIN_SPLICE &&
        !(ch->piped && rule(r, RL_RELAY_RULE_LAST_BLOCK, ch)))
        return false;
    return !rule(r, RL_RELAY_RULE_SPLICE, ch) && hold_pipe(r, ch);
}

/*
 * EAGAIN of a splice into the pipe: is the source empty, or the pipe full? It does not say. Nor
 * that it stands before urgent data, which it never passes, though epoll goes on to report the
 * source: so what was reported and does not go into an empty pipe is for recv to take, or to find
 * empty.
 */
static enum after splice_again(struct relay *r, struct chan *ch, bool told)
{
    ADD(r->count.splice_in_eagain[ch->from->side], 1);
    if (!ch->piped && told)
        return READ_ON;
    if (!ch->piped)
        end_poll(r, ch->from, READ);
    else if (rule(r, RL_RELAY_RULE_READINESS, ch))
        end_poll_edge(r, ch->from);
    else
        mark_full(r, ch);
    return READ_ENDED;
}

static enum after splice_some(struct relay *r, struct chan *ch, bool told)
{
    struct end *from = ch->from;
    while (ch->to_forward) {
        uint64_t ask = ch->to_forward < SPLICE_MOST ? ch->to_forward : SPLICE_MOST;
        ssize_t n = r->ops->splice_in(from, ch->pipe, ask);
        from->calls++;
        ADD(r->count.splice_in[from->side], 1);
        if (n == -EAGAIN) {
            return splice_again(r, ch, told);
        }
        if (n == -EINVAL || n == -ENOSYS) {
            STORE(ch->no_splice, 1);
            return READ_ON;
        }
        if (n <= 0) {
            source_ended(r, ch, (int)-n);
            return READ_ENDED;
        }
        set_piped(ch, ch->piped + (uint64_t)n);
        STORE(ch->spliced, ch->spliced + (uint64_t)n);
        ADD(r->count.bytes_spliced[from->side], (uint64_t)n);
        forwarded(ch, (uint64_t)n);
        bool enough = ch->piped >= RL_RELAY_PIPE_ENOUGH || n >= RL_RELAY_CALL_ENOUGH;
        if (!enough || rule(r, RL_RELAY_RULE_READINESS, ch))
            continue; /* who waits for edges reads until EAGAIN */
        if (!rule(r, RL_RELAY_RULE_EARLY_LEAVE, ch))
            return READ_ON;
        mark_full(r, ch);
        return READ_ENDED;
    }
    return READ_ON;
}

static void take_received(struct relay *r, struct chan *ch, uint32_t n)
{
    uint32_t passes = n < ch->to_forward ? n : (uint32_t)ch->to_forward;
    set_held(ch, ch->out + passes, ch->in + n - passes);
    forwarded(ch, passes);
    STORE(ch->copied, ch->copied + n);
    ADD(r->count.bytes_copied[ch->from->side], n);
}

static void recv_some(struct relay *r, struct chan *ch)
{
    struct end *from = ch->from;
    for (;;) {
        uint32_t ask = room(ch);
        if (!ask) {
            mark_full(r, ch);
            return;
        }
        ssize_t n = r->ops->recv(from, chan_in(ch) + ch->in, ask);
        from->calls++;
        ADD(r->count.recv[from->side], 1);
        if (n == -EAGAIN) {
            ADD(r->count.recv_eagain[from->side], 1);
            end_poll(r, from, READ);
            return;
        }
        if (n <= 0) {
            source_ended(r, ch, (int)-n);
            return;
        }
        take_received(r, ch, (uint32_t)n);
        if (n < ask)
            return; /* that was what there is; if there is more, the next run takes it */
    }
}

/*
 * Bytes just read are offered to the sink at once. What a pipe holds is offered whether or not the
 * sink's readiness is already awaited, unless the rule says otherwise.
 */
static void send_after_read(struct relay *r, struct chan *ch)
{
    if (!ch->fresh || !has_output(ch) || ch->session->connecting || ch->to->fd < 0)
        return;
    bool awaited = ch->to->interest[WRITE] != RL_INTEREST_OFF;
    if (awaited && (!ch->piped || rule(r, RL_RELAY_RULE_SEND_AFTER_READ, ch)))
        return;
    chan_write(r, ch);
}

/* The read handler. */
void chan_read(struct relay *r, struct chan *ch)
{
    uint64_t before = ch->spliced + ch->copied;
    bool told = ch->from->told;
    ch->from->told = 0;
    enum after after = may_splice(r, ch) ? splice_some(r, ch, told) : READ_ON;
    if (ch->pipe && !ch->piped)
        leave_pipe(r, ch);
    if (after == READ_ON && (!ch->piped || rule(r, RL_RELAY_RULE_RECV_BEHIND, ch)))
        recv_some(r, ch);
    bool read = ch->spliced + ch->copied != before;
    if (read) {
        ch->fresh = 1;
        ch->from->moved |= BIT_READ;
        r->progress = true;
    }
    if (ch->in || ch->eof || (read && !ch->to_forward))
        session_wake(ch->session);
    if (ch->error && ch->from->side == RL_SIDE_CLIENT)
        session_end(ch->session, RL_CLOSE_CLIENT_RESET); /* nobody is left to answer */
    else
        send_after_read(r, ch);
}

/* ---- writing ------------------------------------------------------------------------------- */

/* 0: all went; else what the socket said last: -EAGAIN, or how it was lost. */
static int drain_pipe(struct relay *r, struct chan *ch)
{
    struct end *to = ch->to;
    while (ch->piped) {
        ssize_t n = r->ops->splice_out(to, ch->pipe, ch->piped);
        to->calls++;
        ADD(r->count.splice_out[to->side], 1);
        if (n <= 0) {
            ADD(r->count.splice_out_eagain[to->side], n == -EAGAIN);
            return n ? (int)n : -EPIPE;
        }
        set_piped(ch, ch->piped - (uint64_t)n);
        to->moved |= BIT_WRITE;
    }
    leave_pipe(r, ch);
    return 0;
}

static int drain_buffer(struct relay *r, struct chan *ch)
{
    struct end *to = ch->to;
    while (ch->out) {
        ssize_t n = r->ops->send(to, ch->data + ch->start, ch->out);
        to->calls++;
        ADD(r->count.send[to->side], 1);
        if (n <= 0) {
            ADD(r->count.send_eagain[to->side], n == -EAGAIN);
            return n ? (int)n : -EPIPE;
        }
        ch->start += (uint32_t)n;
        set_held(ch, ch->out - (uint32_t)n, ch->in);
        to->moved |= BIT_WRITE;
    }
    return 0;
}

/* The write handler: as much as the sink takes, and its interest as that ends. */
void chan_write(struct relay *r, struct chan *ch)
{
    struct end *to = ch->to;
    uint64_t before = ch->piped + ch->out;
    int result = drain_pipe(r, ch);
    if (result == 0)
        result = drain_buffer(r, ch);
    bool moved = ch->piped + ch->out < before;
    if (result == 0)
        end_stop(r, to, WRITE);
    else if (result == -EAGAIN)
        end_poll(r, to, WRITE);
    else {
        session_lost(ch->session, to, -result);
        return;
    }
    if (moved) {
        r->progress = true;
        if (ch->session->connecting && to->side == RL_SIDE_ORIGIN) {
            STORE(ch->session->connecting, 0); /* it takes bytes: it is connected */
            session_wake(ch->session);
        }
        chan_room_made(r, ch);
        if (ch->in || ch->session->answer || ch->session->closing)
            session_wake(ch->session);
    }
}
