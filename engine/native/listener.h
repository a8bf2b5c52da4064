#pragma once
/* Numeric addresses, and sockets that listen on them. */
#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

int address_read(const char *host, int port, union address *out, socklen_t *size);
int listener_open(const union address *address, socklen_t size, bool shared, int64_t sndbuf,
                  const char **where);
int listener_port(int fd);
int listener_sndbuf(int fd, int64_t bytes);
