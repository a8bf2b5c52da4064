/* Bytes on their way out: a queue of copied text and of slices of the shared pattern. */
#include <stdlib.h>
#include <string.h>

#include "model.h"

static bool grow(void **block, uint32_t *cap, uint32_t need, size_t unit, uint32_t least)
{
    uint32_t size = *cap ? *cap : least;
    while (size < need)
        size *= 2;
    if (size == *cap)
        return true;
    void *bigger = realloc(*block, size * unit);
    if (!bigger)
        return false;
    *block = bigger;
    STORE(*cap, size); /* conn_memory reads it from any thread */
    return true;
}

static struct piece *add_piece(struct out *out)
{
    if (out->head && out->count + 1 > out->cap) { /* room at the front: close the gap first */
        memmove(out->pieces, out->pieces + out->head,
                (out->count - out->head) * sizeof *out->pieces);
        out->count -= out->head;
        out->head = 0;
    }
    if (!grow((void **)&out->pieces, &out->cap, out->count + 1, sizeof *out->pieces, 4))
        return NULL;
    return &out->pieces[out->count++];
}

/* Append len copied bytes. False: out of memory, nothing was added. */
bool out_text(struct out *out, const uint8_t *data, uint32_t len)
{
    if (!grow((void **)&out->text, &out->text_cap, out->text_len + len, 1, 256))
        return false;
    bool joins = out->count > out->head && !out->pieces[out->count - 1].at;
    struct piece *piece = joins ? &out->pieces[out->count - 1] : add_piece(out);
    if (!piece)
        return false;
    if (!joins)
        *piece = (struct piece){NULL, 0};
    piece->len += len;
    memcpy(out->text + out->text_len, data, len);
    out->text_len += len;
    STORE(out->bytes, out->bytes + len);
    return true;
}

/* Append a slice that outlives the queue (the pattern's). False: out of memory. */
bool out_slice(struct out *out, const uint8_t *at, uint32_t len)
{
    struct piece *piece = add_piece(out);
    if (!piece)
        return false;
    *piece = (struct piece){at, len};
    STORE(out->bytes, out->bytes + len);
    return true;
}

/* The first pieces as an iovec; the number of entries filled. */
int out_iov(const struct out *out, struct iovec *iov, int most)
{
    uint32_t text = out->text_off;
    int n = 0;
    for (uint32_t i = out->head; i < out->count && n < most; i++, n++) {
        const struct piece *piece = &out->pieces[i];
        iov[n].iov_len = piece->len;
        iov[n].iov_base = piece->at ? (void *)(uintptr_t)piece->at : out->text + text;
        if (!piece->at)
            text += piece->len;
    }
    return n;
}

uint64_t out_front(const struct out *out)
{
    uint64_t bytes = 0;
    for (uint32_t i = out->head; i < out->count && i < out->head + RL_IOV_MAX; i++)
        bytes += out->pieces[i].len;
    return bytes;
}

void out_consume(struct out *out, uint64_t bytes)
{
    STORE(out->bytes, out->bytes - bytes);
    while (bytes) {
        struct piece *piece = &out->pieces[out->head];
        uint32_t take = bytes < piece->len ? (uint32_t)bytes : piece->len;
        if (piece->at)
            piece->at += take;
        else
            out->text_off += take;
        piece->len -= take;
        bytes -= take;
        if (!piece->len)
            out->head++;
    }
    if (!out->bytes)
        out_clear(out);
}

/* Forget what is queued; the memory is kept for the next response. */
void out_clear(struct out *out)
{
    out->text_len = out->text_off = out->head = out->count = 0;
    STORE(out->bytes, 0);
}

void out_free(struct out *out)
{
    free(out->text);
    free(out->pieces);
    *out = (struct out){0};
}

size_t out_memory(const struct out *out)
{
    return LOAD(out->text_cap) + LOAD(out->cap) * sizeof *out->pieces;
}
