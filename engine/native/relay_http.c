/*
 * The HTTP layer: it looks at bytes only where a message's framing asks for it, and lets the rest
 * pass as a count. A session is a row of transactions: a request goes to the origin on a connection
 * of its own, and the next may start as soon as the response has been read whole, though its tail
 * may still be in the pipe towards the client.
 */
#include <errno.h>
#include <string.h>

#include "relay_model.h"

static bool resources(int error)
{
    return error == -EMFILE || error == -ENFILE || error == -ENOMEM || error == -EADDRNOTAVAIL ||
           error == -ENOBUFS || error == -EAGAIN;
}

/* ---- answers of the relay's own ------------------------------------------------------------ */

/* The session ends for that reason; if no response has begun, with that status. */
void http_answer(struct session *s, int32_t status, int32_t reason)
{
    if (s->closing)
        return;
    bool may = !s->begun || !s->busy;
    session_closing(s, reason);
    if (may)
        STORE(s->answer, status);
}

/* Behind what is still on its way to the client, once there is room. */
static void put_answer(struct session *s)
{
    struct chan *ch = &s->response;
    uint8_t text[160];
    size_t size = head_answer(s->answer, text, sizeof text);
    if (!chan_put(ch, 0, ch->in, text, (uint32_t)size))
        return;
    chan_schedule(ch, size);
    STORE(s->answer, 0);
    ADD(s->relay->count.answers, 1);
}

/* ---- framing ------------------------------------------------------------------------------- */

static void set_message(struct chan *ch, int message) { STORE(ch->message, (uint8_t)message); }

/*
 * So many of the awaiting bytes are not passed on. If they were what filled the buffer, no sink
 * will ever move that would make room.
 */
static void leave_out(struct chan *ch, uint32_t bytes)
{
    chan_taken(ch, bytes);
    if (!has_output(ch))
        chan_room_made(ch->session->relay, ch);
}

/* A line of a chunked body's framing. */
static void pass_line(struct chan *ch, uint32_t bytes)
{
    if (ch->unchunk)
        leave_out(ch, bytes);
    else
        chan_schedule(ch, bytes);
}

/* False: these bytes are no chunk. Each step takes a line, or says what the next one awaits. */
static bool chunk_size(struct chan *ch, bool *more)
{
    uint64_t size;
    int64_t line = head_chunk(chan_in(ch), ch->in, &size);
    *more = line > 0;
    if (line <= 0)
        return line == 0;
    if (ch->unchunk)
        leave_out(ch, (uint32_t)line);
    chan_schedule(ch, ch->unchunk ? size : (uint64_t)line + size);
    set_message(ch, size ? RL_MESSAGE_CHUNK_DATA : RL_MESSAGE_TRAILERS);
    ch->trailers = 0;
    return true;
}

static bool chunk_end(struct chan *ch, bool *more)
{
    const uint8_t *in = chan_in(ch);
    *more = ch->in >= 2;
    if ((ch->in && in[0] != '\r') || (ch->in > 1 && in[1] != '\n'))
        return false;
    if (*more) {
        pass_line(ch, 2);
        set_message(ch, RL_MESSAGE_CHUNK_SIZE);
    }
    return true;
}

static bool trailer_line(struct chan *ch, bool *more)
{
    const uint8_t *in = chan_in(ch);
    const uint8_t *end = ch->in ? memchr(in, '\n', ch->in) : NULL;
    uint32_t most = (uint32_t)ch->session->relay->max_head;
    *more = end != NULL;
    if (!end)
        return ch->trailers + ch->in < most;
    uint32_t line = (uint32_t)(end + 1 - in);
    ch->trailers += line;
    if (line < 2 || in[line - 2] != '\r' || ch->trailers > most)
        return false;
    pass_line(ch, line);
    if (line == 2)
        set_message(ch, RL_MESSAGE_DONE);
    return true;
}

/* As far through the body as the bytes at hand allow. False: its framing is broken. */
static bool advance(struct chan *ch)
{
    bool more = true, sound = true;
    while (more && sound && !ch->to_forward) {
        switch (ch->message) {
        case RL_MESSAGE_LENGTH: set_message(ch, RL_MESSAGE_DONE); break;
        case RL_MESSAGE_CHUNK_DATA: set_message(ch, RL_MESSAGE_CHUNK_END); break;
        case RL_MESSAGE_CHUNK_SIZE: sound = chunk_size(ch, &more); break;
        case RL_MESSAGE_CHUNK_END: sound = chunk_end(ch, &more); break;
        case RL_MESSAGE_TRAILERS: sound = trailer_line(ch, &more); break;
        default: more = false;
        }
    }
    return sound;
}

/* ---- requests ------------------------------------------------------------------------------ */

static void connect_origin(struct relay *r, struct session *s)
{
    int result = r->ops->connect(r, &s->origin);
    ADD(r->count.connects, 1);
    if (result == 0 || result == -EINPROGRESS) {
        STORE(s->connecting, result != 0);
        if (s->connecting)
            end_poll(r, &s->origin, WRITE);
        return;
    }
    ADD(r->count.connect_failures, 1);
    http_answer(s, resources(result) ? 503 : 502, RL_CLOSE_CONNECT_FAILED);
}

/* Its head, of that size as it is passed on, is the first of the awaiting bytes. */
static void begin(struct relay *r, struct session *s, uint32_t size, const struct head *head)
{
    struct chan *ch = &s->request, *back = &s->response;
    STORE(s->busy, 1);
    s->head_only = head->head_only;
    s->http10 = head->http10;
    s->last |= head->close || head->http10;
    s->begun = s->deaf = 0;
    STORE(s->requests, s->requests + 1);
    ADD(r->count.requests, 1);
    chan_schedule(ch, size + (head->length > 0 ? (uint64_t)head->length : 0));
    set_message(ch, head->chunked ? RL_MESSAGE_CHUNK_SIZE : RL_MESSAGE_LENGTH);
    set_message(back, RL_MESSAGE_HEAD);
    STORE(back->eof, 0);
    STORE(back->no_splice, 0);
    back->error = 0;
    connect_origin(r, s);
}

static void next_request(struct relay *r, struct session *s)
{
    struct chan *ch = &s->request;
    struct head head;
    int64_t n = head_request(chan_in(ch), ch->in, (size_t)r->max_head, &head);
    if (n < 0) {
        http_answer(s, (int32_t)-n, RL_CLOSE_BAD_REQUEST);
        return;
    }
    if (n == 0)
        return;
    size_t size = head_edit(chan_in(ch), (size_t)n, &head, true, r->scratch, sizeof r->scratch);
    if (!size || !chan_put(ch, 0, (uint32_t)n, r->scratch, (uint32_t)size)) {
        http_answer(s, 431, RL_CLOSE_BAD_REQUEST);
        return;
    }
    begin(r, s, (uint32_t)size, &head);
}

static void run_request(struct relay *r, struct session *s)
{
    struct chan *ch = &s->request;
    if (!s->busy && ch->in)
        next_request(r, s);
    if (s->closing)
        return;
    if (s->busy && !s->deaf && !advance(ch)) {
        http_answer(s, 400, RL_CLOSE_BAD_REQUEST);
        return;
    }
    if (!ch->eof || (s->busy && ch->message == RL_MESSAGE_DONE))
        return;
    bool inside = s->busy || ch->in;
    if (inside)
        http_answer(s, 400, RL_CLOSE_CLIENT_SHORT);
    else
        session_closing(s, RL_CLOSE_CLIENT);
}

/* ---- responses ----------------------------------------------------------------------------- */

/* It was read whole: its connection ends, the next request may start. */
static void response_done(struct relay *r, struct session *s)
{
    bool unread = s->deaf || s->request.message != RL_MESSAGE_DONE;
    STORE(s->responses, s->responses + 1);
    ADD(r->count.responses, 1);
    end_close(r, &s->origin);
    STORE(s->busy, 0);
    STORE(s->connecting, 0);
    chan_drop(r, &s->request);
    chan_taken(&s->response, s->response.in); /* what follows a response answers nothing */
    chan_set_forward(&s->response, 0);
    STORE(s->response.full, 0);
    if (unread || s->last) {
        session_closing(s, unread ? RL_CLOSE_EARLY_RESPONSE : RL_CLOSE_CLIENT);
        return;
    }
    set_message(&s->request, RL_MESSAGE_HEAD);
    chan_room_made(r, &s->request);
    s->again = 1;
}

static void frame_response(struct session *s, const struct head *head, uint32_t size, bool until)
{
    struct chan *ch = &s->response;
    bool final = head->status >= 200;
    bool empty = !final || s->head_only || head->status == 204 || head->status == 304;
    s->begun |= final;
    ch->unchunk = head->unchunk;
    s->by_close |= until || (head->unchunk && !empty);
    if (until) {
        chan_schedule(ch, FORWARD_ALL);
        set_message(ch, RL_MESSAGE_UNTIL_CLOSE);
        return;
    }
    uint64_t body = empty || head->chunked || head->length < 0 ? 0 : (uint64_t)head->length;
    chan_schedule(ch, size + body);
    if (!final)
        s->again = 1; /* 100, 103: the final head is still to come */
    else
        set_message(ch, !empty && head->chunked ? RL_MESSAGE_CHUNK_SIZE : RL_MESSAGE_LENGTH);
}

static void response_head(struct relay *r, struct session *s)
{
    struct chan *ch = &s->response;
    struct head head;
    int64_t n = head_response(chan_in(ch), ch->in, (size_t)r->max_head, &head);
    if (n == 0)
        return;
    if (n > 0 && head.status < 200 && s->http10) {
        leave_out(ch, (uint32_t)n); /* HTTP/1.0 has no interim responses */
        s->again = 1;
        return;
    }
    head.unchunk = n > 0 && s->http10 && head.chunked;
    bool until = n > 0 && head.status >= 200 && !s->head_only && head.status != 204 &&
                 head.status != 304 && !head.chunked && head.length < 0;
    s->last |= until; /* the client sees the end of such a body by the end of its connection */
    size_t size = 0;
    if (n > 0)
        size = head_edit(chan_in(ch), (size_t)n, &head, head.status >= 200 && s->last, r->scratch,
                         sizeof r->scratch);
    if (!size || !chan_put(ch, 0, (uint32_t)n, r->scratch, (uint32_t)size)) {
        http_answer(s, 502, RL_CLOSE_BAD_RESPONSE);
        return;
    }
    frame_response(s, &head, (uint32_t)size, until);
}

static void run_response(struct relay *r, struct session *s)
{
    struct chan *ch = &s->response;
    if (ch->message == RL_MESSAGE_HEAD && ch->in)
        response_head(r, s);
    if (s->closing || s->again)
        return;
    if (!advance(ch)) {
        http_answer(s, 502, RL_CLOSE_BAD_RESPONSE);
        return;
    }
    if (ch->message == RL_MESSAGE_UNTIL_CLOSE && ch->eof && !ch->error)
        set_message(ch, RL_MESSAGE_DONE);
    if (ch->message == RL_MESSAGE_DONE)
        response_done(r, s);
    else if (ch->eof)
        http_answer(s, 502, ch->error ? RL_CLOSE_ORIGIN_RESET : RL_CLOSE_ORIGIN_SHORT);
}

/* Everything that the bytes and ends at hand allow. */
void http_run(struct session *s)
{
    struct relay *r = s->relay;
    s->request.fresh = s->response.fresh = 0;
    do {
        s->again = 0;
        if (!s->closing)
            run_request(r, s);
        if (!s->closing && s->busy)
            run_response(r, s);
        if (s->answer)
            put_answer(s);
    } while (s->again);
    session_refresh(s);
    if (s->open)
        session_timers(s);
}
