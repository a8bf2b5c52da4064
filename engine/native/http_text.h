#pragma once
/*
 * What the parsers of HTTP heads are made of: a cursor over bytes, the classes of bytes that
 * RFC 9110 and 9112 name, and moves that stop exactly where a decision can be taken. Nothing here
 * allocates or reads past the cursor's end.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { NEED_MORE = -1, FINE = 0 }; /* else a status that refuses the head */

typedef struct {
    const uint8_t *at;
    const uint8_t *end;
} cursor;

typedef struct {
    const uint8_t *at;
    size_t size;
} span;

/* What a byte may be part of. */
enum { TOKEN = 1, VALUE = 2, TARGET = 4 };

#define T (TOKEN | VALUE | TARGET) /* letters, digits and the token marks that a URI has too */
#define K (TOKEN | VALUE)          /* token marks that a URI must escape */
#define U (VALUE | TARGET)         /* URI marks that end a token */
#define V VALUE
static const uint8_t CLASS[256] = {
    [' '] = V,  ['\t'] = V, ['!'] = T,  ['"'] = V,  ['#'] = K,  ['$'] = T,  ['%'] = T,
    ['&'] = T,  ['\''] = T, ['('] = U,  [')'] = U,  ['*'] = T,  ['+'] = T,  [','] = U,
    ['-'] = T,  ['.'] = T,  ['/'] = U,  ['0' ... '9'] = T,      [':'] = U,  [';'] = U,
    ['<'] = V,  ['='] = U,  ['>'] = V,  ['?'] = U,  ['@'] = U,  ['A' ... 'Z'] = T,
    ['['] = U,  ['\\'] = V, [']'] = U,  ['^'] = K,  ['_'] = T,  ['`'] = K,  ['a' ... 'z'] = T,
    ['{'] = V,  ['|'] = K,  ['}'] = V,  ['~'] = T,  [0x80 ... 0xff] = V,
};
#undef T
#undef K
#undef U
#undef V

/* Moves over bytes of a class; what was passed. The cursor may stand at its end afterwards. */
static inline span take(cursor *c, uint8_t class)
{
    const uint8_t *from = c->at;
    const uint8_t *at = from;
    while (at < c->end && (CLASS[*at] & class))
        at++;
    c->at = at;
    return (span){from, (size_t)(at - from)};
}

/* Whether any of eight bytes is a control character: below 0x20, or 0x7f. */
static inline int has_control(uint64_t bytes)
{
    const uint64_t ones = 0x0101010101010101u;
    uint64_t deleted = bytes ^ (0x7f * ones);
    uint64_t below = (bytes - 0x20 * ones) & ~bytes;
    uint64_t is_delete = (deleted - ones) & ~deleted;
    return ((below | is_delete) & (0x80 * ones)) != 0;
}

/* take(VALUE), eight bytes at a time while it can: values are most of what a browser sends. */
static inline span take_value(cursor *c)
{
    const uint8_t *from = c->at;
    uint64_t bytes;
    for (; (size_t)(c->end - c->at) >= sizeof(bytes); c->at += sizeof(bytes)) {
        memcpy(&bytes, c->at, sizeof(bytes));
        if (has_control(bytes))
            break;
    }
    take(c, VALUE);
    return (span){from, (size_t)(c->at - from)};
}

/* Moves over exactly these bytes; a piece of them at the end of input needs more. */
static inline int expect(cursor *c, const char *text, size_t size)
{
    size_t left = (size_t)(c->end - c->at);
    size_t known = left < size ? left : size;
    if (memcmp(c->at, text, known) != 0)
        return 400;
    if (known < size)
        return NEED_MORE;
    c->at += size;
    return FINE;
}

static inline int is(span s, const char *text, size_t size)
{
    return s.size == size && memcmp(s.at, text, size) == 0;
}

/* Whether s begins with a lower-case text, in any case. Not strncasecmp, which asks the locale; the
 * bit alone would take CR for '-', but no span holds control characters. */
static inline int begins_nocase(span s, const char *text, size_t size)
{
    if (s.size < size)
        return 0;
    for (size_t i = 0; i < size; i++)
        if ((s.at[i] | 0x20) != text[i])
            return 0;
    return 1;
}

#define IS(s, text) is(s, text, sizeof(text) - 1)
#define BEGINS_NOCASE(s, text) begins_nocase(s, text, sizeof(text) - 1)
#define IS_NOCASE(s, text) ((s).size == sizeof(text) - 1 && BEGINS_NOCASE(s, text))

static inline span trim(span s)
{
    while (s.size && (s.at[0] == ' ' || s.at[0] == '\t'))
        s = (span){s.at + 1, s.size - 1};
    while (s.size && (s.at[s.size - 1] == ' ' || s.at[s.size - 1] == '\t'))
        s.size--;
    return s;
}

/* The piece of s before the mark (all of it without one); s becomes what follows the mark. */
static inline span cut(span *s, char mark)
{
    const uint8_t *found = s->size ? memchr(s->at, mark, s->size) : NULL;
    span before = {s->at, found ? (size_t)(found - s->at) : s->size};
    size_t gone = before.size + (found != NULL);
    *s = (span){s->at + gone, s->size - gone};
    return before;
}

/* Decimal digits and nothing else, at most so many and at most the limit; -1 for anything other. */
static inline int64_t number(span s, size_t digits, int64_t limit)
{
    if (s.size == 0 || s.size > digits)
        return -1;
    int64_t value = 0;
    for (size_t i = 0; i < s.size; i++) {
        if (s.at[i] < '0' || s.at[i] > '9')
            return -1;
        value = value * 10 + (s.at[i] - '0');
    }
    return value <= limit ? value : -1;
}

/* "HTTP/1.1" and the end of its line; which major version it is is told apart from its syntax. */
static inline int read_version(cursor *c, int *major, int *minor)
{
    int answer = expect(c, "HTTP/", 5);
    if (answer != FINE)
        return answer;
    static const char SHAPE[] = "d.d\r\n";
    const uint8_t *from = c->at;
    for (size_t i = 0; i < sizeof(SHAPE) - 1; i++) {
        if (from + i == c->end)
            return NEED_MORE;
        if (SHAPE[i] == 'd' ? from[i] < '0' || from[i] > '9' : from[i] != (uint8_t)SHAPE[i])
            return 400;
    }
    *major = from[0] - '0';
    *minor = from[2] - '0';
    c->at += sizeof(SHAPE) - 1;
    return FINE;
}
