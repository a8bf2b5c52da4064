/* The life of a session: two sockets, two channels, what is awaited of each side, and the end. */
#include <errno.h>
#include <stdlib.h>

#include "relay_model.h"

/* ---- open ---------------------------------------------------------------------------------- */

static struct session *session_new(struct relay *r)
{
    if (linked(&r->free_sessions)) {
        struct session *s = HOLDER(r->free_sessions.next, struct session, place);
        unlink_from(&s->place);
        return s;
    }
    struct session *s = r->slots < (uint32_t)r->max_sessions ? calloc(1, sizeof *s) : NULL;
    if (!s)
        return NULL;
    s->relay = r;
    s->slot = r->slots;
    link_init(&s->woken);
    link_init(&s->place);
    end_init(&s->client, s, RL_SIDE_CLIENT);
    end_init(&s->origin, s, RL_SIDE_ORIGIN);
    r->sessions[r->slots] = s;
    __atomic_store_n(&r->slots, r->slots + 1, __ATOMIC_RELEASE); /* after it: views may look */
    return s;
}

static void reset_state(struct session *s)
{
    chan_init(&s->request, s);
    chan_init(&s->response, s);
    s->request.from = s->response.to = &s->client;
    s->request.to = s->response.from = &s->origin;
    STORE(s->busy, 0);
    STORE(s->connecting, 0);
    STORE(s->closing, 0);
    STORE(s->lingering, 0);
    STORE(s->answer, 0);
    STORE(s->requests, 0);
    STORE(s->responses, 0);
    s->deaf = s->head_only = s->last = s->http10 = s->begun = s->by_close = s->again = 0;
    s->reason = 0;
}

/* A session for a client that was accepted; NULL: no memory, fd was closed. */
struct session *session_open(struct relay *r, int fd)
{
    struct session *s = session_new(r);
    if (!s) {
        struct end refused;
        end_init(&refused, NULL, RL_SIDE_CLIENT);
        refused.fd = fd;
        r->ops->close(r, &refused);
        return NULL;
    }
    reset_state(s);
    STORE(s->client.fd, fd);
    STORE(s->open, 1);
    STORE(r->count.sessions, r->count.sessions + 1);
    end_want(r, &s->client, READ);
    session_timers(s);
    return s;
}

void session_wake(struct session *s)
{
    if (!linked(&s->woken))
        link_to(&s->relay->woken, &s->woken);
}

/* ---- what is awaited ----------------------------------------------------------------------- */

/* Where something waits for it, the client is to take that; what it sends meanwhile may wait. */
static void client_timer(struct session *s)
{
    const struct chan *ch = &s->request;
    bool takes = s->answer || has_output(&s->response);
    bool sends = !s->closing && !s->deaf && ch->message != RL_MESSAGE_DONE && !ch->full && !ch->eof;
    if (s->lingering)
        end_timer(s->relay, &s->client, TIMER_LINGER, 0); /* as a whole, whatever still comes */
    else if (takes || sends)
        end_timer(s->relay, &s->client, TIMER_CLIENT, takes ? BIT_WRITE : BIT_READ);
    else
        end_timer(s->relay, &s->client, TIMER_NONE, 0);
}

/*
 * The origin is to take its request, then to answer. One that has begun its answer may leave the
 * rest of the request where it is.
 */
static void origin_timer(struct session *s)
{
    const struct chan *ch = &s->response;
    bool answers = s->deaf || s->begun;
    bool takes = !answers && has_output(&s->request);
    answers |= !takes && s->request.message == RL_MESSAGE_DONE;
    if (s->origin.fd >= 0 && s->connecting)
        end_timer(s->relay, &s->origin, TIMER_CONNECT, 0);
    else if (s->origin.fd >= 0 && (takes || (answers && !ch->full && !ch->eof)))
        end_timer(s->relay, &s->origin, TIMER_ORIGIN, takes ? BIT_WRITE : BIT_READ);
    else
        end_timer(s->relay, &s->origin, TIMER_NONE, 0);
}

void session_timers(struct session *s)
{
    client_timer(s);
    origin_timer(s);
}

/* What was awaited did not come in time. */
void session_expired(struct session *s, enum timer timer)
{
    s->relay->progress = true;
    if (timer == TIMER_LINGER)
        session_end(s, s->reason);
    else if (timer == TIMER_CONNECT)
        http_answer(s, 504, RL_CLOSE_CONNECT_TIMEOUT);
    else if (timer == TIMER_ORIGIN)
        http_answer(s, 504, RL_CLOSE_SERVER_TIMEOUT);
    else if (s->closing || has_output(&s->response) || (!s->busy && !s->request.in))
        session_end(s, RL_CLOSE_CLIENT_TIMEOUT);
    else
        http_answer(s, 408, RL_CLOSE_CLIENT_TIMEOUT);
    if (s->open)
        session_wake(s);
}

/* ---- what it does next --------------------------------------------------------------------- */

static void push(struct relay *r, struct chan *ch)
{
    if (has_output(ch) && ch->to->fd >= 0 && ch->to->interest[WRITE] == RL_INTEREST_OFF)
        chan_write(r, ch);
}

/* Reading and writing as the state of the session asks for, after the HTTP layer changed it. */
void session_refresh(struct session *s)
{
    struct relay *r = s->relay;
    push(r, &s->response);
    if (s->open && !s->closing)
        push(r, &s->request);
    if (!s->open)
        return;
    if (s->closing) {
        if (!s->answer && !has_output(&s->response))
            session_linger(s);
        return;
    }
    if (!s->request.eof && !s->request.full && !s->deaf)
        end_want(r, &s->client, READ);
    if (!s->connecting && !s->response.eof && !s->response.full)
        end_want(r, &s->origin, READ);
}

/* ---- the end ------------------------------------------------------------------------------- */

/* It ends once what is on its way to the client is sent; nothing is read any more. */
void session_closing(struct session *s, int32_t reason)
{
    struct relay *r = s->relay;
    if (s->closing)
        return;
    STORE(s->closing, 1);
    s->reason = reason;
    end_close(r, &s->origin);
    end_stop(r, &s->client, READ);
    chan_clear(r, &s->request);
    chan_taken(&s->response, s->response.in);
    chan_set_forward(&s->response, 0);
    STORE(s->connecting, 0);
    session_wake(s);
}

/* Would the client take the end of its connection for the end of a body that is not whole? */
static bool cut_short(const struct session *s)
{
    return s->by_close && (s->response.message != RL_MESSAGE_DONE || has_output(&s->response));
}

/*
 * All is sent, and FIN behind it. Until the client's own FIN, what it still sends is thrown away: a
 * socket that is closed with unread bytes resets the connection, and the client may lose the end of
 * its last response.
 */
void session_linger(struct session *s)
{
    if (s->lingering)
        return;
    if (s->request.eof || cut_short(s)) {
        session_end(s, s->reason);
        return;
    }
    STORE(s->lingering, 1);
    s->relay->ops->finish(&s->client);
    end_want(s->relay, &s->client, READ);
}

void session_end(struct session *s, int32_t reason)
{
    struct relay *r = s->relay;
    if (!s->open)
        return;
    STORE(s->open, 0);
    ADD(r->count.closes[reason], 1);
    r->progress = true;
    end_close(r, &s->origin);
    if (cut_short(s))
        r->ops->reset(&s->client);
    end_close(r, &s->client);
    chan_clear(r, &s->request);
    chan_clear(r, &s->response);
    unlink_from(&s->woken);
    link_to(&r->ended_sessions, &s->place);
}

/* A socket failed while it was written to. */
void session_lost(struct session *s, struct end *e, int error)
{
    struct relay *r = s->relay;
    if (e == &s->client) {
        session_end(s, RL_CLOSE_CLIENT_RESET);
        return;
    }
    if (s->connecting) {
        ADD(r->count.connect_failures, 1);
        http_answer(s, 502, RL_CLOSE_CONNECT_FAILED);
        return;
    }
    /*
     * It takes no more of the request, but may have answered already: its response is read on. A
     * reset is told once, and what is read after it ends as by a FIN; EPIPE: the FIN came first.
     */
    s->deaf = 1;
    if (error != EPIPE)
        s->response.error = error;
    end_stop(r, e, WRITE);
    end_stop(r, &s->client, READ);
    chan_clear(r, &s->request);
    session_wake(s);
}

/* Sessions that have ended are free for others once no handler has them in hand. */
void session_reap(struct relay *r)
{
    while (linked(&r->ended_sessions)) {
        struct session *s = HOLDER(r->ended_sessions.next, struct session, place);
        STORE(s->generation, s->generation + 1);
        link_to(&r->free_sessions, &s->place);
        STORE(r->count.sessions, r->count.sessions - 1);
    }
}
