/*
 * The request head parser: HTTP/1.0 and 1.1, GET only, after RFC 9112.
 *
 * A head is read once, from left to right, and every decision is taken at a byte that the decision
 * alone determines: so input that arrives in pieces is answered exactly as the whole would be, and
 * nonsense (a TLS hello, a bare control character) is refused at its first wrong byte instead of
 * after max_header more of them.
 *
 * Where the RFC leaves a choice, and where we depart from it:
 * - Lines end with CRLF. A lone LF, which a recipient may accept, is refused: two readers who
 *   disagree about where a line ends are how requests are smuggled.
 * - HTTP/1.1 without Host is accepted (the RFC asks for 400): one server, one host, and the
 *   shortest client anybody types has none. Two Host fields are refused.
 * - A GET may carry no body: Content-Length is zero or the request is refused; Transfer-Encoding
 *   always refuses it.
 * - An unknown path is 404. Unknown, doubled or out-of-range query fields are 400, not ignored:
 *   a client that misspells "size" would otherwise measure something else than it believes.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "http_text.h"
#include "ringlab.h"

enum { MAX_EMPTY_LINES = 4 }; /* before a request line: old clients send one after a body */
enum { DIGITS = 10 };         /* of a number */

typedef struct {
    int minor;      /* of the version: HTTP/1.minor */
    int hosts;      /* Host fields so far */
    int close;      /* "close" was among the connection options */
    int keep_alive; /* "keep-alive" was */
} head_state;

static int read_query(span query, rl_request *out)
{
    while (query.size) {
        span value = cut(&query, '&');
        span name = cut(&value, '=');
        int64_t *into = IS(name, "size") ? &out->size : IS(name, "ms") ? &out->handler_ms : NULL;
        if (!into || *into != -1)
            return 400;
        *into = number(value, DIGITS, into == &out->size ? RL_MAX_RESPONSE : RL_MAX_HANDLER_MS);
        if (*into < 0)
            return 400;
    }
    return FINE;
}

/* A path with its query, or a whole http:// address of one, which the RFC has servers accept. */
static int read_target(span target, rl_request *out)
{
    if (BEGINS_NOCASE(target, "http://")) {
        target = (span){target.at + 7, target.size - 7};
        size_t host = 0;
        while (host < target.size && target.at[host] != '/' && target.at[host] != '?')
            host++;
        if (host == 0)
            return 400;
        target = (span){target.at + host, target.size - host};
        if (target.size == 0 || target.at[0] == '?')
            return cut(&target, '?').size ? 400 : read_query(target, out);
    }
    span query = target;
    span path = cut(&query, '?');
    if (IS(path, "/sync"))
        out->route = RL_ROUTE_SYNC;
    else if (IS(path, "/async"))
        out->route = RL_ROUTE_ASYNC;
    else if (!IS(path, "/"))
        return path.size && path.at[0] == '/' ? 404 : 400;
    return read_query(query, out);
}

/* Method, target, version. Only a well-formed line is told that its version or method is unknown;
 * the version comes first, so that the preface of HTTP/2 ("PRI * HTTP/2.0") is answered 505. */
static int read_request_line(cursor *c, head_state *state, rl_request *out)
{
    span method = take(c, TOKEN);
    if (c->at == c->end)
        return NEED_MORE;
    if (method.size == 0 || *c->at != ' ')
        return 400;
    c->at++;
    span target = take(c, TARGET);
    if (c->at == c->end)
        return NEED_MORE;
    if (target.size == 0 || *c->at != ' ')
        return 400;
    c->at++;
    int major = 0;
    int answer = read_version(c, &major, &state->minor);
    if (answer != FINE)
        return answer;
    if (major != 1)
        return 505;
    if (!IS(method, "GET"))
        return 405;
    return read_target(target, out);
}

static void read_connection_options(span value, head_state *state)
{
    while (value.size) {
        span option = trim(cut(&value, ','));
        state->close |= IS_NOCASE(option, "close");
        state->keep_alive |= IS_NOCASE(option, "keep-alive");
    }
}

/* The few fields that change how a GET is answered; every other one is passed over. */
static int apply_field(span name, span value, head_state *state)
{
    switch (name.size) {
    case sizeof("host") - 1:
        if (IS_NOCASE(name, "host") && state->hosts++)
            return 400;
        break;
    case sizeof("connection") - 1:
        if (IS_NOCASE(name, "connection"))
            read_connection_options(value, state);
        break;
    case sizeof("content-length") - 1:
        if (IS_NOCASE(name, "content-length") && number(trim(value), DIGITS, 0) != 0)
            return 400;
        break;
    case sizeof("transfer-encoding") - 1:
        if (IS_NOCASE(name, "transfer-encoding"))
            return 400;
        break;
    default:
        break;
    }
    return FINE;
}

/* Field lines up to the empty one. A name ends at its colon: white space before it, and the lines
 * that begin with white space to continue another, are refused by that alone. */
static int read_fields(cursor *c, head_state *state)
{
    for (;;) {
        span name = take(c, TOKEN);
        if (c->at == c->end)
            return NEED_MORE;
        if (name.size == 0)
            return expect(c, "\r\n", 2);
        if (*c->at != ':')
            return 400;
        c->at++;
        span value = take_value(c);
        int answer = expect(c, "\r\n", 2);
        if (answer == FINE)
            answer = apply_field(name, value, state);
        if (answer != FINE)
            return answer;
    }
}

static int skip_empty_lines(cursor *c)
{
    for (int lines = 0; c->at < c->end && *c->at == '\r'; lines++) {
        int answer = lines == MAX_EMPTY_LINES ? 400 : expect(c, "\r\n", 2);
        if (answer != FINE)
            return answer;
    }
    return FINE;
}

int64_t rl_http_parse(const uint8_t *data, size_t size, size_t max_header, rl_request *out)
{
    cursor c = {data, data + (size < max_header ? size : max_header)};
    head_state state = {0};
    rl_request request = {.status = 200, .route = -1, .size = -1, .handler_ms = -1};
    int answer = skip_empty_lines(&c);
    if (answer == FINE)
        answer = read_request_line(&c, &state, &request);
    if (answer == FINE)
        answer = read_fields(&c, &state);
    /* A head that fills the whole window without ending cannot fit, whatever would follow. */
    if (answer == NEED_MORE && size >= max_header)
        answer = 431;
    if (answer == NEED_MORE)
        return 0;
    if (answer != FINE) {
        request = (rl_request){.status = answer, .route = -1, .size = -1, .handler_ms = -1};
        request.close = 1;
        *out = request;
        return -answer;
    }
    request.close = state.close || (state.minor == 0 && !state.keep_alive);
    *out = request;
    return c.at - data;
}
