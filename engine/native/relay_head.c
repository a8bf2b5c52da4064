/*
 * Heads that the relay passes on: what of a request or response tells how long its body is, after
 * RFC 9112, and the head as the other side gets it.
 *
 * - A message whose length two readers could understand differently is refused, never repaired:
 *   Content-Length beside Transfer-Encoding, two lengths, any coding but one "chunked".
 * - Fields about one connection (Connection, what it names, Keep-Alive, Proxy-Connection, Upgrade)
 *   are not passed on. So the origin is asked to close after its response, whatever the client
 *   wants, and can switch to no other protocol.
 * - A response is passed on as HTTP/1.1, which is what this relay speaks; a request keeps its own
 *   version, so that an origin which heeds it sends an HTTP/1.0 client no chunks. If it does all
 *   the same, they are passed on without their framing, up to the end of the connection.
 */
#include "http_text.h"

#include "relay_model.h"

enum { MAX_EMPTY_LINES = 4 }; /* before a request line: old clients send one after a body */
enum { LENGTH_DIGITS = 18 };
enum { CHUNK_LINE_MOST = 256 }; /* a chunk's size with its extensions */

/* ---- what the fields say ------------------------------------------------------------------- */

typedef struct {
    int hosts;
    int keep_alive;
    int codings; /* Transfer-Encoding fields */
} field_state;

static int add_options(span value, struct head *out, field_state *state)
{
    while (value.size) {
        span option = trim(cut(&value, ','));
        if (!option.size)
            continue;
        out->close |= IS_NOCASE(option, "close");
        state->keep_alive |= IS_NOCASE(option, "keep-alive");
        if (out->options == CONNECTION_OPTIONS)
            return 400;
        out->option[out->options].at = option.at;
        out->option[out->options++].size = option.size;
    }
    return FINE;
}

static int apply_field(span name, span value, struct head *out, field_state *state)
{
    value = trim(value);
    if (IS_NOCASE(name, "connection"))
        return add_options(value, out, state);
    if (IS_NOCASE(name, "content-length")) {
        int64_t length = number(value, LENGTH_DIGITS, INT64_MAX);
        if (length < 0 || (out->length >= 0 && out->length != length))
            return 400;
        out->length = length;
    } else if (IS_NOCASE(name, "transfer-encoding")) {
        if (state->codings++ || !IS_NOCASE(value, "chunked"))
            return 501;
        out->chunked = 1;
    } else if (IS_NOCASE(name, "host") && state->hosts++) {
        return 400;
    }
    return FINE;
}

static int read_fields(cursor *c, struct head *out)
{
    field_state state = {0};
    for (;;) {
        span name = take(c, TOKEN);
        if (c->at == c->end)
            return NEED_MORE;
        if (name.size == 0)
            break;
        if (*c->at != ':')
            return 400;
        c->at++;
        span value = take_value(c);
        int answer = expect(c, "\r\n", 2);
        if (answer == FINE)
            answer = apply_field(name, value, out, &state);
        if (answer != FINE)
            return answer;
    }
    int answer = expect(c, "\r\n", 2);
    if (answer == FINE && out->chunked && (out->length >= 0 || out->http10))
        return 400;
    out->close |= out->http10 && !state.keep_alive;
    return answer;
}

/* ---- requests ------------------------------------------------------------------------------ */

static int read_request_line(cursor *c, struct head *out)
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
    int major = 0, minor = 0;
    int answer = read_version(c, &major, &minor);
    if (answer != FINE)
        return answer;
    if (major != 1)
        return 505;
    out->http10 = minor == 0;
    out->head_only = IS(method, "HEAD");
    return IS(method, "CONNECT") ? 501 : FINE;
}

int64_t head_request(const uint8_t *data, size_t size, size_t most, struct head *out)
{
    cursor c = {data, data + (size < most ? size : most)};
    *out = (struct head){.length = -1};
    int answer = FINE;
    for (int lines = 0; answer == FINE && c.at < c.end && *c.at == '\r'; lines++)
        answer = lines == MAX_EMPTY_LINES ? 400 : expect(&c, "\r\n", 2);
    out->skip = (uint32_t)(c.at - data);
    if (answer == FINE)
        answer = read_request_line(&c, out);
    if (answer == FINE)
        answer = read_fields(&c, out);
    if (answer == NEED_MORE)
        return size >= most ? -431 : 0;
    return answer == FINE ? c.at - data : -answer;
}

/* ---- responses ----------------------------------------------------------------------------- */

static int read_status_line(cursor *c, struct head *out)
{
    static const char SHAPE[] = "HTTP/1.d ddd";
    const uint8_t *from = c->at;
    for (size_t i = 0; i < sizeof SHAPE - 1; i++) {
        if (from + i == c->end)
            return NEED_MORE;
        if (SHAPE[i] == 'd' ? from[i] < '0' || from[i] > '9' : from[i] != (uint8_t)SHAPE[i])
            return 502;
    }
    out->http10 = from[7] == '0';
    out->status = (from[9] - '0') * 100 + (from[10] - '0') * 10 + (from[11] - '0');
    c->at += sizeof SHAPE - 1;
    if (c->at < c->end && *c->at != ' ' && *c->at != '\r')
        return 502;
    take_value(c);
    return expect(c, "\r\n", 2);
}

int64_t head_response(const uint8_t *data, size_t size, size_t most, struct head *out)
{
    cursor c = {data, data + (size < most ? size : most)};
    *out = (struct head){.length = -1};
    int answer = read_status_line(&c, out);
    if (answer == FINE)
        answer = read_fields(&c, out);
    if (answer == NEED_MORE)
        return size >= most ? -502 : 0;
    /* 101 answers an Upgrade that was never passed on. */
    bool strange = answer != FINE || out->status < 100 || out->status == 101;
    return strange ? -502 : c.at - data;
}

/* ---- the head as it is passed on ----------------------------------------------------------- */

typedef struct {
    uint8_t *at, *end;
} sink;

static bool put(sink *to, const void *from, size_t size)
{
    if ((size_t)(to->end - to->at) < size)
        return false;
    memcpy(to->at, from, size);
    to->at += size;
    return true;
}

static bool same_name(span a, const uint8_t *at, size_t size)
{
    if (a.size != size)
        return false;
    for (size_t i = 0; i < size; i++) {
        uint8_t x = a.at[i], y = at[i];
        x |= x >= 'A' && x <= 'Z' ? 0x20 : 0;
        y |= y >= 'A' && y <= 'Z' ? 0x20 : 0;
        if (x != y)
            return false;
    }
    return true;
}

/* Fields that a message cannot lose, even if Connection names them. */
static bool is_end_to_end(span name)
{
    return IS_NOCASE(name, "host") || IS_NOCASE(name, "content-length") ||
           IS_NOCASE(name, "transfer-encoding");
}

static bool is_hop_by_hop(span name, const struct head *head)
{
    if (IS_NOCASE(name, "connection") || IS_NOCASE(name, "keep-alive") ||
        IS_NOCASE(name, "proxy-connection") || IS_NOCASE(name, "upgrade"))
        return true;
    if (head->unchunk && (IS_NOCASE(name, "transfer-encoding") || IS_NOCASE(name, "trailer")))
        return true;
    for (uint32_t i = 0; i < head->options; i++)
        if (same_name(name, head->option[i].at, head->option[i].size))
            return !is_end_to_end(name);
    return false;
}

/* The head, which was read as such before, from its first line on. */
size_t head_edit(const uint8_t *data, size_t size, const struct head *head, bool close,
                 uint8_t *to, size_t most)
{
    sink out = {to, to + most};
    cursor c = {data + head->skip, data + size};
    const uint8_t *end = memchr(c.at, '\n', (size_t)(c.end - c.at));
    bool fits = end && put(&out, c.at, (size_t)(end + 1 - c.at));
    if (fits && head->status)
        to[7] = '1'; /* of HTTP/1.x */
    c.at = end ? end + 1 : c.end;
    while (fits && c.at < c.end && *c.at != '\r') {
        const uint8_t *line = c.at;
        span name = take(&c, TOKEN);
        end = memchr(c.at, '\n', (size_t)(c.end - c.at));
        c.at = end ? end + 1 : c.end;
        if (!is_hop_by_hop(name, head))
            fits = put(&out, line, (size_t)(c.at - line));
    }
    if (fits && close)
        fits = put(&out, "Connection: close\r\n", 19);
    return fits && put(&out, "\r\n", 2) ? (size_t)(out.at - to) : 0;
}

/* ---- chunks, and answers of the relay's own ------------------------------------------------ */

static int hex_value(uint8_t byte)
{
    if (byte >= '0' && byte <= '9')
        return byte - '0';
    byte |= 0x20;
    return byte >= 'a' && byte <= 'f' ? byte - 'a' + 10 : -1;
}

int64_t head_chunk(const uint8_t *data, size_t size, uint64_t *chunk)
{
    cursor c = {data, data + (size < CHUNK_LINE_MOST ? size : CHUNK_LINE_MOST)};
    int digits = 0;
    *chunk = 0;
    for (; c.at < c.end && hex_value(*c.at) >= 0; c.at++) {
        if (++digits > 15)
            return -1;
        *chunk = *chunk * 16 + (uint64_t)hex_value(*c.at);
    }
    bool goes_on = size < CHUNK_LINE_MOST;
    if (c.at == c.end)
        return goes_on ? 0 : -1;
    if (!digits || (*c.at != ';' && *c.at != ' ' && *c.at != '\t' && *c.at != '\r'))
        return -1;
    take_value(&c);
    int answer = expect(&c, "\r\n", 2);
    if (answer == NEED_MORE)
        return goes_on ? 0 : -1;
    return answer == FINE ? c.at - data : -1;
}

static const char *phrase(int32_t status)
{
    switch (status) {
    case 408: return "408 Request Timeout";
    case 431: return "431 Request Header Fields Too Large";
    case 501: return "501 Not Implemented";
    case 502: return "502 Bad Gateway";
    case 503: return "503 Service Unavailable";
    case 504: return "504 Gateway Timeout";
    case 505: return "505 HTTP Version Not Supported";
    default: return "400 Bad Request";
    }
}

size_t head_answer(int32_t status, uint8_t *to, size_t most)
{
    sink out = {to, to + most};
    const char *text = phrase(status);
    static const char REST[] = "\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    bool fits = put(&out, "HTTP/1.1 ", 9) && put(&out, text, strlen(text)) &&
                put(&out, REST, sizeof REST - 1);
    return fits ? (size_t)(out.at - to) : 0;
}
