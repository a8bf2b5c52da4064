/*
 * Fuzzes the request head parser: libFuzzer gives the input, this states what must hold for any.
 *
 * With -DRINGLAB_REPLAY it is a plain program that puts each file named on its command line through
 * the same checks: how the corpus runs where there is no libFuzzer.
 *
 * The first byte of an input chooses the largest head allowed, the rest is what a client sent.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ringlab.h"

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);

/* Not assert(): the checks stay in whatever NDEBUG says. */
#define MUST(holds)                                                                                \
    do {                                                                                           \
        if (!(holds)) {                                                                            \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #holds);             \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static const size_t LIMITS[] = {8192, 256, 64, 16};

/* Parses a copy of exactly this size, so that the address sanitizer sees a read past its end. */
static int64_t parse_copy(const uint8_t *data, size_t size, size_t limit, rl_request *out)
{
    uint8_t *copy = malloc(size ? size : 1);
    MUST(copy);
    memcpy(copy, data, size);
    int64_t answer = rl_http_parse(copy, size, limit, out);
    free(copy);
    return answer;
}

static void check_fields(int64_t answer, const rl_request *request)
{
    if (answer < 0) {
        MUST(answer == -400 || answer == -404 || answer == -405 || answer == -431 ||
             answer == -505);
        MUST(request->status == -answer);
        MUST(request->close == 1);
    } else {
        MUST(request->status == 200);
    }
    MUST(request->route == -1 || request->route == RL_ROUTE_SYNC ||
         request->route == RL_ROUTE_ASYNC);
    MUST(request->size >= -1 && request->size <= RL_MAX_RESPONSE);
    MUST(request->handler_ms >= -1 && request->handler_ms <= RL_MAX_HANDLER_MS);
    MUST(request->close == 0 || request->close == 1);
}

static int same(const rl_request *a, const rl_request *b)
{
    return a->status == b->status && a->route == b->route && a->size == b->size &&
           a->handler_ms == b->handler_ms && a->close == b->close;
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
    if (size == 0)
        return 0;
    size_t limit = LIMITS[input[0] % (sizeof(LIMITS) / sizeof(LIMITS[0]))];
    const uint8_t *data = input + 1;
    size--;

    rl_request whole, part;
    memset(&whole, 0x5a, sizeof(whole));
    int64_t answer = parse_copy(data, size, limit, &whole);
    MUST(answer <= (int64_t)size && answer <= (int64_t)limit);
    if (answer == 0)
        MUST(size < limit);
    else
        check_fields(answer, &whole);

    /* However the input is cut, a piece of it is either undecided or answered like the whole. */
    for (size_t cut = 0; cut < size; cut++) {
        memset(&part, 0xa5, sizeof(part));
        int64_t early = parse_copy(data, cut, limit, &part);
        if (early == 0) {
            MUST(answer <= 0 || cut < (size_t)answer);
            continue;
        }
        MUST(early == answer);
        MUST(same(&part, &whole));
    }
    return 0;
}

#ifdef RINGLAB_REPLAY
int main(int argc, char **argv)
{
    static uint8_t input[1 << 16];
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        if (!file) {
            perror(argv[i]);
            return 1;
        }
        LLVMFuzzerTestOneInput(input, fread(input, 1, sizeof(input), file));
        fclose(file);
    }
    printf("fuzz_http: %d inputs hold\n", argc - 1);
    return 0;
}
#endif
