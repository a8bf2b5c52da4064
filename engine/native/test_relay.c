/*
 * The relay on real sockets, as the sanitizers see it: clients on threads of their own stall, read,
 * reset and pipeline through it, before an origin that answers, falls silent or closes, while
 * another thread switches policies and settings and looks at everything. Python comes nowhere near.
 *
 *   RINGLAB_ROUNDS  connections that each client makes (30)
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* memmem */
#endif
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "ringlab.h"

#include "relay.h"

#define MUST(holds)                                                                                \
    do {                                                                                           \
        if (!(holds)) {                                                                            \
            fprintf(stderr, "%s:%d: does not hold: %s (%s)\n", __FILE__, __LINE__, #holds,         \
                    strerror(errno));                                                              \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

enum { CLIENTS = 6, BODY = 60000, HEAD = 42, PATIENCE_MS = 10000 };

static int listener, origin_port, relay_port, rounds = 30;
static bool ending;
static int answering;
static uint8_t body[BODY];

static bool is_ending(void) { return __atomic_load_n(&ending, __ATOMIC_ACQUIRE); }

/* ---- the origin: a thread a connection, what it does is in the request's path ---------------- */

static void send_all(int fd, const void *data, size_t size)
{
    const uint8_t *at = data;
    while (size) {
        ssize_t n = send(fd, at, size, MSG_NOSIGNAL);
        if (n <= 0)
            return;
        at += n;
        size -= (size_t)n;
    }
}

static void answer(int fd)
{
    char head[2048];
    size_t size = 0;
    while (size < sizeof head - 1 && !memmem(head, size, "\r\n\r\n", 4)) {
        ssize_t n = recv(fd, head + size, sizeof head - 1 - size, 0);
        if (n <= 0)
            return;
        size += (size_t)n;
    }
    head[size] = 0;
    static const char LENGTH[] = "HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n";
    static const char CHUNKED[] = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nea60\r\n";
    if (strstr(head, "/gone"))
        return;
    bool chunked = strstr(head, "/chunked");
    send_all(fd, chunked ? CHUNKED : LENGTH, chunked ? sizeof CHUNKED - 1 : sizeof LENGTH - 1);
    send_all(fd, body, strstr(head, "/short") ? BODY / 2 : BODY);
    if (chunked)
        send_all(fd, "\r\n0\r\n\r\n", 7);
}

static void *connection_main(void *arg)
{
    int fd = (int)(intptr_t)arg;
    answer(fd);
    close(fd);
    __atomic_fetch_sub(&answering, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void *origin_main(void *unused)
{
    (void)unused;
    for (;;) {
        pthread_t thread;
        int fd = accept(listener, NULL, NULL);
        if (fd < 0)
            return NULL;
        __atomic_fetch_add(&answering, 1, __ATOMIC_RELAXED);
        MUST(pthread_create(&thread, NULL, connection_main, (void *)(intptr_t)fd) == 0);
        MUST(pthread_detach(thread) == 0);
    }
}

static void start_origin(pthread_t *thread)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    listener = socket(AF_INET, SOCK_STREAM, 0);
    MUST(listener >= 0 && bind(listener, (struct sockaddr *)&address, size) == 0);
    MUST(listen(listener, 128) == 0);
    MUST(getsockname(listener, (struct sockaddr *)&address, &size) == 0);
    origin_port = ntohs(address.sin_port);
    MUST(pthread_create(thread, NULL, origin_main, NULL) == 0);
}

/* ---- clients ------------------------------------------------------------------------------- */

static int connect_client(void)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
        .sin_port = htons((uint16_t)relay_port),
    };
    int fd = socket(AF_INET, SOCK_STREAM, 0), small = 4096;
    MUST(fd >= 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    MUST(connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
    return fd;
}

/* Reads until so many bytes, the end, or a silence; what came. */
static size_t read_some(int fd, size_t most)
{
    static _Thread_local uint8_t data[65536];
    size_t got = 0;
    while (got < most) {
        struct pollfd ready = {.fd = fd, .events = POLLIN};
        if (poll(&ready, 1, PATIENCE_MS) <= 0)
            break;
        size_t want = most - got < sizeof data ? most - got : sizeof data;
        ssize_t n = recv(fd, data, want, 0);
        if (n <= 0)
            break;
        got += (size_t)n;
    }
    return got;
}

static void one_round(int number)
{
    static const char *const ASK[] = {
        "GET /a HTTP/1.1\r\n\r\nGET /b HTTP/1.1\r\n\r\n",
        "GET /chunked HTTP/1.1\r\nConnection: close\r\n\r\n",
        "GET /short HTTP/1.1\r\n\r\n",
        "GET /gone HTTP/1.1\r\n\r\n",
        "no HTTP\r\n\r\n",
    };
    int fd = connect_client();
    const char *ask = ASK[number % 5];
    send_all(fd, ask, strlen(ask));
    if (number % 7 == 3) { /* a reset while it stalls */
        usleep(3000);
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &(struct linger){1, 0}, sizeof(struct linger));
    } else {
        size_t most = number % 5 == 0 ? 2 * (BODY + HEAD) : SIZE_MAX;
        size_t got = read_some(fd, most);
        if (number % 5 == 0)
            MUST(got == most);
        MUST(got > 0);
    }
    close(fd);
}

static void *client_main(void *arg)
{
    for (int i = 0; i < rounds; i++)
        one_round(i + (int)(intptr_t)arg);
    return NULL;
}

/* ---- whoever looks and switches ------------------------------------------------------------ */

static int64_t decide(void *self, int which, const rl_relay_view *session,
                      const rl_relay_loop_view *loop)
{
    (void)self;
    return which == RL_RELAY_RULE_ENGINE ? (int64_t)(loop->iterations / 64 % 2)
                                         : session->response.piped > 20000;
}

static void *watcher_main(void *arg)
{
    rl_relay *relay = arg;
    static rl_relay_view views[64];
    static rl_relay_sample samples[64];
    rl_relay_loop_view loop;
    for (unsigned turn = 0; !is_ending(); turn++) {
        rl_relay_policy policy = {.decide = decide};
        for (int i = 0; i < RL_RELAY_RULE_READINESS; i++)
            policy.choice[i] = turn >> i & 1;
        if (turn % 3 == 0)
            policy.asks = 1u << RL_RELAY_RULE_ENGINE | 1u << RL_RELAY_RULE_LAST_BLOCK;
        MUST(rl_relay_set_policy(relay, &policy) == 0);
        MUST(rl_relay_set(relay, RL_RELAY_SETTING_SO_SNDBUF, turn % 2 ? 8192 : 0) == 0);
        MUST(rl_relay_sessions(relay, views, 64) >= 0);
        MUST(rl_relay_loop(relay, 0, &loop) == 0);
        MUST(rl_relay_sample_now(relay, 0, samples) == 0);
        MUST(rl_relay_take(relay, samples, 64) >= 0);
        usleep(1000);
    }
    return NULL;
}

static rl_relay *start_relay(void)
{
    rl_relay_config config = {
        .host = "127.0.0.1", .origin_host = "127.0.0.1", .origin_port = origin_port,
        .max_sessions = 4, .max_head = 4096, .stop_grace_ms = 200, .sample_hz = 500,
        .sample_capacity = 256,
        .settings = {[RL_RELAY_SETTING_CLIENT_TIMEOUT_MS] = 5000,
                     [RL_RELAY_SETTING_SERVER_TIMEOUT_MS] = 5000},
    };
    char where[64] = "";
    rl_relay *relay = NULL;
    MUST(rl_relay_start(&config, &relay, where, sizeof where) == 0);
    relay_port = rl_relay_port(relay);
    return relay;
}

int main(void)
{
    const char *asked = getenv("RINGLAB_ROUNDS");
    if (asked)
        rounds = atoi(asked);
    pthread_t origin, watcher, clients[CLIENTS];
    start_origin(&origin);
    rl_relay *relay = start_relay();
    MUST(pthread_create(&watcher, NULL, watcher_main, relay) == 0);
    for (int i = 0; i < CLIENTS; i++)
        MUST(pthread_create(&clients[i], NULL, client_main, (void *)(intptr_t)i) == 0);
    for (int i = 0; i < CLIENTS; i++)
        MUST(pthread_join(clients[i], NULL) == 0);
    __atomic_store_n(&ending, true, __ATOMIC_RELEASE);
    MUST(pthread_join(watcher, NULL) == 0);
    MUST(rl_relay_failed(relay) == 0);
    MUST(rl_relay_stop(relay) == 0);
    for (int i = 0; i < 200 && rl_relay_running(relay); i++)
        usleep(10000);
    MUST(!rl_relay_running(relay));
    rl_relay_close(relay);
    shutdown(listener, SHUT_RDWR);
    MUST(pthread_join(origin, NULL) == 0);
    while (__atomic_load_n(&answering, __ATOMIC_ACQUIRE))
        usleep(1000);
    close(listener);
    printf("test_relay: %d rounds of %d clients\n", rounds, CLIENTS);
    return 0;
}
