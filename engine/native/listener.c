/* Listening sockets: one a worker, the kernel spreads connections over them. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server.h"

#ifndef SO_BUF_LOCK
#define SO_BUF_LOCK 72
#endif
#define BACKLOG 4096

/* A numeric address of either family. */
int address_read(const char *host, int port, union address *out, socklen_t *size)
{
    *out = (union address){0};
    if (inet_pton(AF_INET, host, &out->v4.sin_addr) == 1) {
        out->v4.sin_family = AF_INET;
        out->v4.sin_port = htons((uint16_t)port);
        *size = sizeof out->v4;
        return 0;
    }
    if (inet_pton(AF_INET6, host, &out->v6.sin6_addr) == 1) {
        out->v6.sin6_family = AF_INET6;
        out->v6.sin6_port = htons((uint16_t)port);
        *size = sizeof out->v6;
        return 0;
    }
    return -EINVAL;
}

int listener_port(int fd)
{
    union address bound;
    socklen_t size = sizeof bound;
    if (getsockname(fd, &bound.any, &size))
        return -errno;
    bool v6 = bound.any.sa_family == AF_INET6;
    return ntohs(v6 ? bound.v6.sin6_port : bound.v4.sin_port);
}

static long default_sndbuf(void)
{
    long least = 4096, initial = 16384;
    FILE *file = fopen("/proc/sys/net/ipv4/tcp_wmem", "re");
    if (!file)
        return initial;
    if (fscanf(file, "%ld %ld", &least, &initial) != 2)
        initial = 16384;
    fclose(file);
    return initial;
}

/* SO_SNDBUF of connections accepted from now on; 0 gives the size back to the kernel's tuning. */
int listener_sndbuf(int fd, int64_t bytes)
{
    int value = bytes ? (int)bytes : (int)(default_sndbuf() / 2);
    if (setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &value, sizeof value))
        return -errno;
    int unlocked = 0;
    if (!bytes && setsockopt(fd, SOL_SOCKET, SO_BUF_LOCK, &unlocked, sizeof unlocked))
        return -errno;
    return 0;
}

/* A listening socket; where names the call that failed. shared: others may take the port too. */
int listener_open(const union address *address, socklen_t size, bool shared, int64_t sndbuf,
                  const char **where)
{
    int on = 1;
    *where = "socket";
    int fd = socket(address->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* accepted sockets inherit it */
    if (shared)
        setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on);
    *where = "bind";
    int result = bind(fd, &address->any, size) ? -errno : 0;
    if (result == 0) {
        *where = "listen";
        result = listen(fd, BACKLOG) ? -errno : 0;
    }
    if (result == 0 && sndbuf)
        result = listener_sndbuf(fd, sndbuf);
    if (result == 0)
        return fd;
    close(fd);
    return result;
}

/* A port that another process shares with SO_REUSEPORT would be taken silently: try it alone. */
static int probe_port(const union address *address, socklen_t size, const char **where)
{
    int fd = listener_open(address, size, false, 0, where);
    if (fd < 0)
        return fd;
    int port = listener_port(fd);
    close(fd);
    return port;
}

int listeners_open(rl_server *server, const char **where)
{
    union address address;
    socklen_t size;
    const rl_config *config = &server->config;
    bool shared = config->workers > 1;
    *where = "host";
    int result = address_read(config->host, config->port, &address, &size);
    if (result == 0 && shared)
        result = probe_port(&address, size, where);
    if (result < 0)
        return result;
    int port = shared ? result : config->port;
    for (int i = 0; i < config->workers; i++) {
        address_read(config->host, port, &address, &size);
        result = listener_open(&address, size, shared, server->settings[RL_SET_SO_SNDBUF], where);
        if (result < 0)
            return result;
        server->workers[i].listener = result;
        server->workers[i].w.has_listener = true;
        port = listener_port(result);
    }
    server->port = port;
    return 0;
}
