/*
 * Fuzzes the relay. The first byte of an input says what the rest is: a head, which must be read
 * alike however it is cut and mean the same once it was edited; or a play, whose bytes are what
 * clients, origins and the kernel do to a scripted relay.
 *
 * With -DRINGLAB_REPLAY it is a plain program that puts each file named on its command line through
 * the same checks.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "relay_model.h"

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);

/* Not assert(): the checks stay in whatever NDEBUG says. */
#define MUST(holds)                                                                                \
    do {                                                                                           \
        if (!(holds)) {                                                                            \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #holds);             \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

#define MOST_HEAD 512
#define QUIET_TURNS 200

/* ---- heads --------------------------------------------------------------------------------- */

typedef int64_t (*reader)(const uint8_t *data, size_t size, size_t most, struct head *out);

/* Reads a copy of exactly this size, so that the address sanitizer sees a read past its end. */
static int64_t read_copy(reader read, const uint8_t *data, size_t size, struct head *out)
{
    uint8_t *copy = malloc(size ? size : 1);
    MUST(copy);
    memcpy(copy, data, size);
    int64_t answer = read(copy, size, MOST_HEAD, out);
    out->options = 0; /* they point into the copy */
    free(copy);
    return answer;
}

static void check_head(reader read, const uint8_t *data, size_t size)
{
    struct head whole, part, again;
    uint8_t edited[2 * MOST_HEAD];
    int64_t answer = read_copy(read, data, size, &whole);
    MUST(answer <= (int64_t)size && answer <= MOST_HEAD);
    for (size_t cut = 0; cut < size; cut++) {
        int64_t early = read_copy(read, data, cut, &part);
        MUST(early == 0 ? answer <= 0 || cut < (size_t)answer : early == answer);
    }
    if (answer <= 0)
        return;
    read(data, size, MOST_HEAD, &whole);
    bool close = data[0] & 1;
    size_t length = head_edit(data, (size_t)answer, &whole, close, edited, sizeof edited);
    MUST(length > 0 && length <= (size_t)answer + 19);
    MUST(read(edited, length, sizeof edited, &again) == (int64_t)length);
    MUST(again.length == whole.length && again.chunked == whole.chunked);
    MUST(again.status == whole.status && again.head_only == whole.head_only);
    MUST(again.options == close); /* nothing about one connection is left but ours */
    whole.unchunk = 1; /* as for a client of HTTP/1.0 */
    length = head_edit(data, (size_t)answer, &whole, close, edited, sizeof edited);
    MUST(read(edited, length, sizeof edited, &again) == (int64_t)length);
    MUST(!again.chunked && again.length == whole.length);
}

/* ---- a play -------------------------------------------------------------------------------- */

struct play {
    const uint8_t *at, *end;
    rl_relay_script *script;
};

static const char *const LINES[] = {
    "GET / HTTP/1.1\r\nHost: o\r\n\r\n",
    "HEAD / HTTP/1.1\r\n\r\n",
    "POST / HTTP/1.1\r\nContent-Length: 9000\r\n\r\n",
    "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
    "GET / HTTP/1.0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nContent-Length: 30000\r\n\r\n",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    "HTTP/1.1 200 OK\r\n\r\n",
    "HTTP/1.1 100 Continue\r\n\r\n",
    "HTTP/1.1 204 No Content\r\n\r\n",
    "1388\r\n",
    "\r\n",
    "0\r\n\r\n",
    "0\r\nX: 1\r\n\r\n",
    "HTTP/1.1 200 OK\r\nConnection: x, close\r\nX: 1\r\nContent-Length: 0\r\n\r\n",
    "rubbish",
};

static uint8_t next(struct play *p) { return p->at < p->end ? *p->at++ : 0; }

static void input_filler(struct play *p, int socket, size_t size)
{
    static uint8_t filler[20000];
    rl_relay_script_input(p->script, socket, filler, size);
}

static void input_raw(struct play *p, int socket)
{
    size_t left = (size_t)(p->end - p->at), size = next(p) % 16u;
    size = size < left ? size : left ? left - 1 : 0;
    rl_relay_script_input(p->script, socket, p->at, size);
    p->at += size;
}

static void turn(struct play *p)
{
    for (int phase = 0; phase < RL_RELAY_PHASES; phase++)
        rl_relay_script_phase(p->script, phase, NULL);
}

static void act_on(struct play *p, uint8_t what, int socket)
{
    static const int64_t SIZES[] = {0, 1, 37, 1448, 4096, 10136, 23168, 1 << 30};
    static const uint8_t WHOLE = sizeof LINES / sizeof *LINES - 1;
    int64_t size = SIZES[next(p) % 8];
    switch (what) {
    case 0: case 1: case 2: {
        const char *line = LINES[next(p) & WHOLE];
        rl_relay_script_input(p->script, socket, (const uint8_t *)line, strlen(line));
        break;
    }
    case 3: case 4: input_filler(p, socket, (size_t)(size < 20000 ? size : 20000)); break;
    case 5: input_raw(p, socket); break;
    case 6: rl_relay_script_room(p->script, socket, size); break;
    case 7: rl_relay_script_grain(p->script, socket, size); break;
    case 8: rl_relay_script_again(p->script, socket, next(p) & 3, next(p) & 3); break;
    case 9: rl_relay_script_fin(p->script, socket); break;
    case 10: rl_relay_script_reset(p->script, socket); break;
    default:
        rl_relay_script_connected(p->script, socket, next(p) & 1 ? -ECONNREFUSED : 0);
    }
}

static void act(struct play *p)
{
    uint8_t what = next(p) & 31;
    int sockets = rl_relay_script_sockets(p->script);
    if (what < 4)
        turn(p);
    else if (what == 4 && sockets < 24)
        rl_relay_script_accept(p->script);
    else if (what == 5)
        rl_relay_script_advance(p->script, next(p) * RL_MS);
    else if (what == 6)
        rl_relay_script_refuse(p->script, next(p) & 1 ? EMFILE : 0, next(p) & 1 ? EMFILE : 0,
                               next(p) & 1 ? EMFILE : 0);
    else if (what == 7)
        rl_relay_script_set(p->script, next(p) % RL_RELAY_SETTINGS, next(p));
    else if (what == 8)
        rl_relay_script_stop(p->script);
    else if (sockets)
        act_on(p, (uint8_t)(what % 12), next(p) % sockets);
}

/* What no channel may come to, whatever was done to it. */
static void check_sessions(struct play *p)
{
    rl_relay_view view;
    for (int slot = 0; slot < 4; slot++) {
        if (rl_relay_script_session(p->script, slot, &view))
            continue;
        const rl_channel_view *channels[] = {&view.request, &view.response};
        for (int i = 0; i < 2; i++) {
            const rl_channel_view *ch = channels[i];
            MUST(ch->scheduled + ch->awaiting <= RL_RELAY_BUFFER);
            MUST(ch->piped <= 20000 && (ch->has_pipe || !ch->piped));
            MUST(!ch->sink_full || ch->read == RL_INTEREST_OFF);
            MUST(!ch->awaiting || !ch->to_forward);
        }
    }
}

/* With recv behind the pipe, while nothing happens outside no handler does nothing for ever. */
static void check_quiet(struct play *p)
{
    rl_relay_counters before, after;
    int row = 0;
    for (int i = 0; i < QUIET_TURNS; i++) {
        rl_relay_script_counters(p->script, &before);
        turn(p);
        rl_relay_script_counters(p->script, &after);
        row = after.noop_dispatches > before.noop_dispatches ? row + 1 : 0;
        MUST(row < 4);
    }
}

static void perform(const uint8_t *input, size_t size)
{
    struct play p = {input, input + size, NULL};
    uint8_t shape = next(&p);
    rl_relay_script_config config = {
        .max_sessions = shape & 1 ? 4 : 1, .max_head = MOST_HEAD, .stop_grace_ms = 250,
        .pipe_size = 20000, .auto_connect = !(shape & 2),
        .room = shape & 4 ? 5000 : INT64_C(1) << 40,
    };
    uint8_t answers = next(&p);
    for (int i = 0; i < RL_RELAY_RULES; i++)
        config.policy.choice[i] = answers >> i & 1;
    p.script = rl_relay_script_new(&config);
    MUST(p.script);
    rl_relay_script_accept(p.script);
    while (p.at < p.end) {
        act(&p);
        check_sessions(&p);
    }
    if (config.policy.choice[RL_RELAY_RULE_RECV_BEHIND])
        check_quiet(&p);
    rl_relay_script_free(p.script);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
    if (size < 2)
        return 0;
    if (input[0] % 4 == 0)
        check_head(head_request, input + 1, size - 1);
    else if (input[0] % 4 == 1)
        check_head(head_response, input + 1, size - 1);
    else
        perform(input + 1, size - 1);
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
    printf("fuzz_relay: %d inputs hold\n", argc - 1);
    return 0;
}
#endif
