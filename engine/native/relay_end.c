/*
 * Interest: what the loop does about each direction of a socket.
 *
 * Speculative engine: a wanted direction is ACTIVE, its handler runs every turn and the wait
 * cannot block. Only EAGAIN makes it POLLED; only an explicit stop turns it OFF; the event that
 * ends the polling makes it ACTIVE again. So a handler that neither consumes, nor meets EAGAIN,
 * nor stops, runs for ever. Level-triggered engine: a wanted direction is POLLED until it is
 * stopped, and epoll reports it each turn for as long as it is ready.
 */
#include "relay_model.h"

void end_init(struct end *e, struct session *s, int side)
{
    *e = (struct end){.fd = -1, .session = s, .side = (uint8_t)side};
    link_init(&e->active);
    link_init(&e->changed);
    link_init(&e->run);
    link_init(&e->timed);
}

/* ---- interest ------------------------------------------------------------------------------ */

static uint64_t *gauge(struct relay *r, const struct end *e, enum dir dir, uint8_t interest)
{
    if (interest == RL_INTEREST_OFF || !e->session)
        return NULL;
    bool active = interest == RL_INTEREST_ACTIVE;
    if (dir == READ)
        return active ? &r->count.read_active[e->side] : &r->count.read_polled[e->side];
    return active ? &r->count.write_active[e->side] : &r->count.write_polled[e->side];
}

static uint8_t polled(const struct end *e)
{
    return (e->interest[READ] == RL_INTEREST_POLLED ? BIT_READ : 0) |
           (e->interest[WRITE] == RL_INTEREST_POLLED ? BIT_WRITE : 0);
}

static bool any_active(const struct end *e)
{
    return e->interest[READ] == RL_INTEREST_ACTIVE || e->interest[WRITE] == RL_INTEREST_ACTIVE;
}

static void set_interest(struct relay *r, struct end *e, enum dir dir, uint8_t interest)
{
    if (e->interest[dir] == interest)
        return;
    uint64_t *was = gauge(r, e, dir, e->interest[dir]), *is = gauge(r, e, dir, interest);
    if (was)
        STORE(*was, *was - 1);
    if (is)
        STORE(*is, *is + 1);
    STORE(e->interest[dir], interest);
    if (any_active(e) && !linked(&e->active)) {
        link_to(&r->active, &e->active);
        STORE(r->active_ends, r->active_ends + 1);
    } else if (!any_active(e) && linked(&e->active)) {
        unlink_from(&e->active);
        STORE(r->active_ends, r->active_ends - 1);
    }
    if (dir == READ && interest != RL_INTEREST_POLLED)
        e->edge = 0;
    /* What is no longer POLLED is told to epoll only once it reports it: mostly it never does. */
    if (polled(e) & ~e->watched || (polled(e) & BIT_READ && e->edge != e->edge_told))
        link_to(&r->changed, &e->changed);
}

void end_want(struct relay *r, struct end *e, enum dir dir)
{
    if (e->fd >= 0 && e->interest[dir] == RL_INTEREST_OFF)
        set_interest(r, e, dir, r->level ? RL_INTEREST_POLLED : RL_INTEREST_ACTIVE);
}

void end_stop(struct relay *r, struct end *e, enum dir dir)
{
    set_interest(r, e, dir, RL_INTEREST_OFF);
}

void end_poll(struct relay *r, struct end *e, enum dir dir)
{
    if (e->fd < 0)
        return;
    if (dir == READ && e->edge) { /* polled in earnest from now on */
        e->edge = 0;
        link_to(&r->changed, &e->changed);
    }
    set_interest(r, e, dir, RL_INTEREST_POLLED);
}

/* The mirror fault: polled, but epoll will speak only of what arrives after this. */
void end_poll_edge(struct relay *r, struct end *e)
{
    e->edge = 1;
    set_interest(r, e, READ, RL_INTEREST_POLLED);
    link_to(&r->changed, &e->changed);
}

/* ACTIVE is not a state of the level-triggered engine. */
void end_level(struct relay *r)
{
    while (linked(&r->active)) {
        struct end *e = HOLDER(r->active.next, struct end, active);
        for (enum dir dir = READ; dir < DIRS; dir++)
            if (e->interest[dir] == RL_INTEREST_ACTIVE)
                set_interest(r, e, dir, RL_INTEREST_POLLED);
    }
}

void end_sync(struct relay *r)
{
    while (linked(&r->changed)) {
        struct end *e = HOLDER(r->changed.next, struct end, changed);
        unlink_from(&e->changed);
        uint8_t bits = polled(e);
        if (e->fd < 0 || (bits == e->watched && e->edge == e->edge_told))
            continue;
        ADD(r->count.watches, 1);
        int result = r->ops->watch(r, e, bits);
        if (result < 0)
            relay_fail(r, result);
        e->watched = bits;
        e->edge_told = e->edge;
    }
}

/* In the speculative engine a report makes the direction ACTIVE; in the other it only runs it. */
void end_report(struct relay *r, struct end *e, uint8_t bits)
{
    if (e->fd < 0)
        return;
    uint8_t wanted = bits & polled(e);
    if (wanted != bits)
        link_to(&r->changed, &e->changed); /* epoll speaks of what is not POLLED any more */
    for (enum dir dir = READ; dir < DIRS; dir++)
        if (wanted & (1 << dir) && !r->level)
            set_interest(r, e, dir, RL_INTEREST_ACTIVE);
    e->due |= wanted;
    e->told |= wanted & BIT_READ;
    if (e->due)
        link_to(&r->run, &e->run);
}

/* ---- timers and the end -------------------------------------------------------------------- */

/*
 * It is under that timer now. Only bytes of the awaited direction begin its time anew: who takes
 * nothing is not excused by what it sends. Lists are in the order of since, because that is always
 * now.
 */
void end_timer(struct relay *r, struct end *e, enum timer timer, uint8_t awaited)
{
    bool goes_on = e->timer == timer && e->awaited == awaited && !(e->moved & awaited);
    e->moved = 0;
    if (goes_on)
        return;
    STORE(e->timer, (uint8_t)timer);
    STORE(e->since, r->now);
    e->awaited = awaited;
    if (timer == TIMER_NONE)
        unlink_from(&e->timed);
    else
        link_to(&r->timed[timer], &e->timed);
}

void end_close(struct relay *r, struct end *e)
{
    if (e->fd < 0)
        return;
    end_stop(r, e, READ);
    end_stop(r, e, WRITE);
    unlink_from(&e->changed);
    unlink_from(&e->run);
    end_timer(r, e, TIMER_NONE, 0);
    r->ops->close(r, e);
    STORE(e->fd, -1);
    e->watched = e->due = e->edge = e->edge_told = 0;
}
