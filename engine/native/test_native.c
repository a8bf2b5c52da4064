/*
 * The native tests, through the public header alone: what the sanitizers run.
 *
 * The scripted part checks the state machine's founding fixture; the server part puts every thread
 * that can meet (workers, handlers, sampler, clients, a policy switcher, readers, stop, close) to
 * work at once. Exits 0, or 77 (skipped) where this process may not use io_uring.
 *
 * RINGLAB_ROUNDS in the environment sets how many connections each client makes.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "ringlab.h"

enum { CLIENTS = 6, DEPTH = 8, SKIPPED = 77, LIMIT_SECONDS = 240, CLIENT_TIMEOUT_SECONDS = 20 };
#define MS 1000000

#define CHECK(holds)                                                                               \
    do {                                                                                           \
        if (!(holds)) {                                                                            \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #holds);             \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static int rounds(void)
{
    const char *asked = getenv("RINGLAB_ROUNDS");
    return asked ? atoi(asked) : 30;
}

static void sleep_ms(long ms)
{
    struct timespec left = {ms / 1000, ms % 1000 * MS};
    while (nanosleep(&left, &left) && errno == EINTR)
        ;
}

/* ---- policies, by the names of their choices ----------------------------------------------- */

static void choose(rl_policy *policy, const char *decision, const char *name)
{
    for (int d = 0; d < RL_DECISIONS; d++) {
        const rl_choice *choice;
        for (int i = 0; (choice = rl_choice_at(d, i)); i++) {
            if (strcmp(choice->decision, decision) == 0 && strcmp(choice->name, name) == 0) {
                policy->choice[d] = i;
                return;
            }
        }
    }
    fprintf(stderr, "no choice %s=%s\n", decision, name);
    abort();
}

static rl_policy fixed_policy(void)
{
    rl_policy policy = {0};
    choose(&policy, "membership", "leave");
    choose(&policy, "timeout", "any-member");
    choose(&policy, "send-wait", "timed");
    choose(&policy, "direct-write", "behind-send");
    choose(&policy, "held", "unlisted");
    choose(&policy, "handback", "no-wake");
    choose(&policy, "idle", "periodic");
    choose(&policy, "expired", "kernel");
    return policy;
}

static rl_policy tickless_policy(void)
{
    rl_policy policy = fixed_policy();
    choose(&policy, "handback", "wake");
    choose(&policy, "idle", "tickless");
    choose(&policy, "expired", "poll");
    return policy;
}

/* The n-th of a few policies under which every byte arrives, in order, whoever else is there. */
static rl_policy complete_policy(unsigned n)
{
    rl_policy policy = n & 1 ? tickless_policy() : fixed_policy();
    switch (n / 2 % 4) {
    case 0:
        choose(&policy, "held", "listed");
        break;
    case 1:
        choose(&policy, "held", "park");
        choose(&policy, "timeout", "movable");
        break;
    case 2:
        choose(&policy, "membership", "listed");
        break;
    default:
        break;
    }
    return policy;
}

/* Answers as complete_policy(0) would: a caller's policy meets every thread that asks one. */
static int64_t own_decision(void *self, int decision, const rl_conn_view *conn,
                            const rl_loop_view *loop)
{
    atomic_fetch_add((atomic_long *)self, 1);
    CHECK(loop != NULL);
    switch (decision) {
    case RL_MEMBERSHIP:
        return !conn->sending || conn->owes_recv || conn->held;
    case RL_TIMEOUT:
        return loop->list_length > 0;
    case RL_DIRECT_WRITE:
        return !conn->sending && conn->send_buf == 0;
    case RL_HELD:
        return RL_HELD_UNLISTED;
    case RL_IDLE:
        return loop->cap_ns;
    default:
        return 0;
    }
}

/* ---- the scripted backend ------------------------------------------------------------------ */

static void say(rl_script *script, int slot, const char *text)
{
    CHECK(rl_script_input(script, slot, (const uint8_t *)text, strlen(text)) >= 0);
}

static void turn(rl_script *script, rl_wait *wait)
{
    CHECK(rl_script_wait(script, wait) <= 0);
    CHECK(rl_script_iterate(script, wait) == 0);
}

/* A handler's response of which the socket takes `room` bytes; the rest becomes a SEND. */
static int stalled(rl_script *script, const char *request, rl_wait *wait)
{
    int slot = rl_script_accept(script);
    CHECK(slot >= 0);
    turn(script, wait);
    say(script, slot, request);
    turn(script, wait);
    CHECK(rl_script_room(script, slot, 1000) >= 0);
    CHECK(rl_script_handler_begin(script, slot) == 1);
    CHECK(rl_script_handler_end(script, slot) >= 0);
    CHECK(rl_script_iterate(script, wait) == 0);
    return slot;
}

/* The founding fixture: after the worker's work the connection is sending, and still listed. */
static void test_fixture(const rl_policy *policy, int listed)
{
    rl_script_config config = {.sq_entries = 8, .max_connections = 4, .max_header = 8192,
                               .multishot_recv = 1, .policy = *policy};
    config.settings[RL_SET_CAP_NS] = 25 * MS;
    config.settings[RL_SET_MAX_PIPELINE] = DEPTH;
    config.settings[RL_SET_MAX_HANDLER_MS] = RL_MAX_HANDLER_MS;
    rl_script *script = rl_script_new(&config);
    CHECK(script);
    rl_wait wait;
    rl_conn_view conn;
    int slot = stalled(script, "GET /async?size=4000 HTTP/1.1\r\n\r\n", &wait);
    CHECK(rl_script_conn(script, slot, &conn) >= 0);
    CHECK(conn.sending && conn.listed == listed && conn.write_buf == 0 && conn.send_buf > 0);
    uint64_t rest = conn.send_buf;

    say(script, slot, "GET /async?size=24 HTTP/1.1\r\n\r\n");
    CHECK(rl_script_wait(script, &wait) <= 0);
    CHECK(rl_script_iterate(script, &wait) == 0);
    CHECK(rl_script_handler_begin(script, slot) == 1);
    CHECK(rl_script_handler_end(script, slot) >= 0);
    CHECK(rl_script_iterate(script, &wait) == 0);
    CHECK(rl_script_conn(script, slot, &conn) >= 0);
    CHECK(conn.sending && conn.listed == listed && conn.write_buf > 24);
    CHECK(listed ? wait.timeout_ns == 0 : wait.can_block);
    uint64_t second = conn.write_buf;

    CHECK(rl_script_send_done(script, slot, (int64_t)rest) >= 0);
    CHECK(rl_script_iterate(script, &wait) == 0);
    CHECK(rl_script_wait(script, &wait) <= 0); /* submits: before that no SEND can complete */
    CHECK(rl_script_send_done(script, slot, (int64_t)second) >= 0);
    CHECK(rl_script_iterate(script, &wait) == 0);
    CHECK(rl_script_conn(script, slot, &conn) >= 0);
    CHECK(!conn.sending && conn.write_buf == 0 && conn.send_buf == 0);
    CHECK(conn.sent == 1000 + rest + second);
    rl_script_free(script);
}

static void test_script(void)
{
    rl_policy fixed = fixed_policy();
    rl_policy shipped = fixed;
    choose(&shipped, "membership", "listed");
    test_fixture(&shipped, 1);
    test_fixture(&fixed, 0);
}

/* ---- clients ------------------------------------------------------------------------------- */

typedef struct {
    int fd;
    uint64_t seq; /* of the next response */
    char buffer[1 << 14];
    size_t at, filled;
} client;

static void connect_to(client *c, int port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    struct timeval timeout = {.tv_sec = CLIENT_TIMEOUT_SECONDS};
    int small = 4096;
    *c = (client){.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    CHECK(c->fd >= 0);
    CHECK(setsockopt(c->fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout)) == 0);
    CHECK(setsockopt(c->fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small)) == 0);
    CHECK(connect(c->fd, (struct sockaddr *)&to, sizeof(to)) == 0);
}

static void send_all(client *c, const char *text)
{
    size_t left = strlen(text);
    while (left) {
        ssize_t sent = send(c->fd, text, left, MSG_NOSIGNAL);
        CHECK(sent > 0);
        text += sent;
        left -= (size_t)sent;
    }
}

/* The next byte, or -1 at the end of the stream. */
static int next_byte(client *c)
{
    if (c->at == c->filled) {
        ssize_t got = recv(c->fd, c->buffer, sizeof(c->buffer), 0);
        if (got < 0)
            fprintf(stderr, "a client waits in vain for response %lu: %s\n",
                    (unsigned long)c->seq, strerror(errno));
        CHECK(got >= 0);
        if (got == 0)
            return -1;
        c->at = 0;
        c->filled = (size_t)got;
    }
    return (uint8_t)c->buffer[c->at++];
}

/* Reads one head; its status, the body's length in *length. */
static int read_head(client *c, long *length)
{
    char head[512];
    size_t size = 0;
    while (size < 4 || memcmp(head + size - 4, "\r\n\r\n", 4) != 0) {
        int byte = next_byte(c);
        CHECK(byte >= 0 && size < sizeof(head) - 1);
        head[size++] = (char)byte;
    }
    head[size] = 0;
    const char *field = strstr(head, "Content-Length: ");
    CHECK(field && memcmp(head, "HTTP/1.1 ", 9) == 0);
    *length = strtol(field + strlen("Content-Length: "), NULL, 10);
    return atoi(head + 9);
}

static void read_response(client *c, long size)
{
    long length;
    CHECK(read_head(c, &length) == 200 && length == size);
    const uint8_t *body = rl_pattern();
    uint64_t at = rl_pattern_phase(c->seq);
    for (long i = 0; i < length; i++, at = (at + 1) % RL_PATTERN_PERIOD)
        CHECK(next_byte(c) == body[at]);
    c->seq++;
}

static long size_of(unsigned random) { return random % 4 ? random % 300 : random % 200000; }

static void ask(client *c, unsigned random)
{
    char request[128];
    int ms = random % 11 == 0 ? 3 : 0;
    snprintf(request, sizeof(request), "GET /%s?size=%ld&ms=%d HTTP/1.1\r\nHost: t\r\n\r\n",
             random % 3 ? "async" : "sync", size_of(random), ms);
    send_all(c, request);
}

/* Pipelines a few requests and reads what they ask for; with half, closes its own side first. */
static void run_whole(int port, unsigned *seed, int half)
{
    client c;
    unsigned asked[DEPTH];
    unsigned count = 1 + (unsigned)rand_r(seed) % DEPTH;
    connect_to(&c, port);
    for (unsigned i = 0; i < count; i++)
        ask(&c, asked[i] = (unsigned)rand_r(seed));
    if (half)
        CHECK(shutdown(c.fd, SHUT_WR) == 0);
    for (unsigned i = 0; i < count; i++)
        read_response(&c, size_of(asked[i]));
    if (half)
        CHECK(next_byte(&c) == -1);
    close(c.fd);
}

static void run_reset(int port, unsigned *seed)
{
    client c;
    connect_to(&c, port);
    send_all(&c, "GET /async?size=3000000 HTTP/1.1\r\n\r\nGET /async?size=9&ms=2 HTTP/1.1\r\n\r\n");
    sleep_ms(rand_r(seed) % 4);
    struct linger now = {.l_onoff = 1};
    CHECK(setsockopt(c.fd, SOL_SOCKET, SO_LINGER, &now, sizeof(now)) == 0);
    close(c.fd);
}

static void run_refused(int port)
{
    client c;
    long length;
    connect_to(&c, port);
    send_all(&c, "GET /nowhere HTTP/1.1\r\n\r\n");
    CHECK(read_head(&c, &length) == 404);
    while (next_byte(&c) >= 0)
        ;
    close(c.fd);
}

typedef struct {
    pthread_t thread;
    int port;
    unsigned seed;
} client_thread;

static void *run_client(void *arg)
{
    client_thread *self = arg;
    for (int left = rounds(); left > 0; left--) {
        int kind = rand_r(&self->seed) % 10;
        if (kind == 0)
            run_refused(self->port);
        else if (kind <= 2)
            run_reset(self->port, &self->seed);
        else
            run_whole(self->port, &self->seed, kind <= 4);
    }
    return NULL;
}

/* ---- the server ---------------------------------------------------------------------------- */

static rl_config server_config(void)
{
    rl_config config = {.host = "127.0.0.1", .workers = 2, .entries = 32, .sq_idle_ms = 100,
                        .handlers = 3, .max_connections = 64, .max_header = 8192,
                        .stop_grace_ms = 100, .sample_hz = 200, .sample_capacity = 64};
    config.settings[RL_SET_RESPONSE_SIZE] = 1000;
    config.settings[RL_SET_CAP_NS] = 5 * MS;
    config.settings[RL_SET_MAX_PIPELINE] = 4;
    config.settings[RL_SET_MAX_HANDLER_MS] = RL_MAX_HANDLER_MS;
    config.settings[RL_SET_SO_SNDBUF] = 16384;
    config.policy = fixed_policy();
    return config;
}

static rl_server *start(const rl_config *config)
{
    rl_server *server = NULL;
    char where[64] = "";
    int result = rl_server_start(config, &server, where, sizeof(where));
    if (result < 0)
        fprintf(stderr, "start: %s: %s\n", where, strerror(-result));
    CHECK(result == 0 && server);
    return server;
}

typedef struct {
    rl_server *server;
    atomic_bool done;
    atomic_long asked;
} shared;

static void *run_switcher(void *arg)
{
    shared *s = arg;
    for (unsigned n = 0; !atomic_load(&s->done); n++) {
        rl_policy policy = complete_policy(n);
        if (n % 3 == 2) {
            policy = fixed_policy();
            policy.asks = (1u << RL_DECISIONS) - 1;
            policy.asks &= ~(1u << RL_EXPIRED);
            policy.decide = own_decision;
            policy.self = &s->asked;
        }
        CHECK(rl_server_policy(s->server, &policy) == 0);
        CHECK(rl_server_set(s->server, RL_SET_MAX_PIPELINE, 1 + n % 8) == 0);
        CHECK(rl_server_set(s->server, RL_SET_CAP_NS, (1 + n % 5) * MS) == 0);
        CHECK(rl_server_set(s->server, RL_SET_SO_SNDBUF, n % 2 ? 0 : 8192) == 0);
        CHECK(rl_server_sample_rate(s->server, n % 4 ? 500 : 0) == 0);
        CHECK(rl_server_get(s->server, RL_SET_MAX_PIPELINE) == 1 + n % 8);
        sleep_ms(2);
    }
    return NULL;
}

static void *run_reader(void *arg)
{
    shared *s = arg;
    rl_sample samples[16];
    rl_conn_view views[128];
    rl_loop_view loop;
    rl_ring_info ring;
    uint64_t bytes;
    while (!atomic_load(&s->done)) {
        for (int worker = 0; worker < 2; worker++) {
            CHECK(rl_server_sample(s->server, worker, samples) == 0);
            CHECK(samples->worker == (uint64_t)worker);
            CHECK(rl_server_loop(s->server, worker, &loop) == 0);
            CHECK(rl_server_ring(s->server, worker, &ring) == 0);
        }
        int taken = rl_server_take(s->server, samples, 16);
        CHECK(taken >= 0 && taken <= 16);
        for (int i = 1; i < taken; i++)
            CHECK(samples[i].t_ns >= samples[i - 1].t_ns);
        int seen = rl_server_connections(s->server, views, 128);
        CHECK(seen >= 0 && seen <= 128);
        CHECK(rl_server_memory(s->server, &bytes) == 0);
        CHECK(rl_server_failed(s->server) == 0);
        (void)rl_server_dropped(s->server);
        sleep_ms(1);
    }
    return NULL;
}

/* Everybody at once; every response is read whole and compared. */
static void test_everybody(int setup, int recv)
{
    rl_config config = server_config();
    config.setup = setup;
    config.recv = recv;
    shared s = {.server = start(&config)};
    client_thread clients[CLIENTS];
    pthread_t switcher, reader;
    CHECK(pthread_create(&switcher, NULL, run_switcher, &s) == 0);
    CHECK(pthread_create(&reader, NULL, run_reader, &s) == 0);
    for (unsigned i = 0; i < CLIENTS; i++) {
        clients[i] = (client_thread){.port = rl_server_port(s.server), .seed = i + 1};
        CHECK(pthread_create(&clients[i].thread, NULL, run_client, &clients[i]) == 0);
    }
    for (unsigned i = 0; i < CLIENTS; i++)
        CHECK(pthread_join(clients[i].thread, NULL) == 0);
    atomic_store(&s.done, true);
    CHECK(pthread_join(switcher, NULL) == 0);
    CHECK(pthread_join(reader, NULL) == 0);
    CHECK(atomic_load(&s.asked) > 0);
    rl_server_close(s.server);
}

/* Two clients that do not read, and a handler that sleeps. */
static void stall(client *c, int port)
{
    for (int i = 0; i < 2; i++) {
        connect_to(&c[i], port);
        send_all(&c[i], "GET /async?size=9000000 HTTP/1.1\r\n\r\n");
        send_all(&c[i], "GET /async?size=90 HTTP/1.1\r\n\r\n");
    }
    connect_to(&c[2], port);
    send_all(&c[2], "GET /async?size=90&ms=60000 HTTP/1.1\r\n\r\n");
    sleep_ms(100);
}

static void test_stop(rl_policy policy)
{
    rl_config config = server_config();
    config.policy = policy;
    rl_server *server = start(&config);
    client c[3];
    stall(c, rl_server_port(server));
    CHECK(rl_server_stop(server) == 0);
    for (int left = 300; rl_server_running(server) > 0 && left > 0; left--)
        sleep_ms(10);
    CHECK(rl_server_running(server) == 0);
    rl_server_close(server);
    for (int i = 0; i < 3; i++)
        close(c[i].fd);
}

/* Close ends everything at once, also a handler in its long sleep and clients that stall. */
static void test_close_at_work(rl_policy policy)
{
    rl_config config = server_config();
    config.policy = policy;
    rl_server *server = start(&config);
    client c[3];
    stall(c, rl_server_port(server));
    rl_server_close(server);
    for (int i = 0; i < 3; i++)
        close(c[i].fd);
}

static int64_t failing_decision(void *self, int decision, const rl_conn_view *conn,
                                const rl_loop_view *loop)
{
    (void)self, (void)decision, (void)conn, (void)loop;
    return RL_POLICY_FAILED;
}

static void test_failed_policy(void)
{
    rl_config config = server_config();
    rl_server *server = start(&config);
    rl_policy policy = fixed_policy();
    policy.asks = 1u << RL_IDLE;
    policy.decide = failing_decision;
    CHECK(rl_server_policy(server, &policy) == 0);
    for (int left = 300; rl_server_running(server) > 0 && left > 0; left--)
        sleep_ms(10);
    CHECK(rl_server_running(server) == 0);
    CHECK(rl_server_failed(server) == 1);
    rl_server_close(server);
}

static void test_write_timeout(rl_policy policy)
{
    rl_config config = server_config();
    config.policy = policy;
    config.settings[RL_SET_WRITE_TIMEOUT_MS] = 150;
    rl_server *server = start(&config);
    client c[3];
    stall(c, rl_server_port(server));
    uint64_t timeouts = 0;
    for (int left = 300; timeouts < 2 && left > 0; left--) {
        rl_sample samples[2];
        CHECK(rl_server_sample(server, 0, &samples[0]) == 0);
        CHECK(rl_server_sample(server, 1, &samples[1]) == 0);
        timeouts = samples[0].c.write_timeouts + samples[1].c.write_timeouts;
        sleep_ms(10);
    }
    CHECK(timeouts == 2);
    rl_server_close(server);
    for (int i = 0; i < 3; i++)
        close(c[i].fd);
}

int main(void)
{
    alarm(LIMIT_SECONDS);
    test_script();
    rl_ring_info ring;
    int refused = rl_probe(&ring);
    if (refused < 0) {
        printf("test_native: server tests skipped: io_uring: %s\n", strerror(-refused));
        return SKIPPED;
    }
    rl_policy shipped = {0};
    test_everybody(RL_SETUP_AUTO, RL_RECV_AUTO);
    test_everybody(RL_SETUP_COOP, RL_RECV_PLAIN);
    test_stop(fixed_policy());
    test_stop(tickless_policy());
    test_close_at_work(tickless_policy());
    test_close_at_work(shipped);
    test_failed_policy();
    test_write_timeout(fixed_policy());
    test_write_timeout(tickless_policy());
    printf("test_native: ok\n");
    return 0;
}
