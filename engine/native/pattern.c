/*
 * The bodies of responses: slices of one periodic pattern, so that ten thousand stalled responses
 * of 3 MiB share 2 MiB of memory, and a client can tell from any 16 bytes where a stream is wrong.
 *
 * Record k spells 16 * k, its own offset in the period, as 15 hexadecimal digits and a newline.
 */
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "ringlab.h"

enum { RECORD = 16, DIGITS = 15 };
/* Odd, so that a connection's first 2^16 responses all begin at different places. */
#define PHASE_STEP 69061u
#define PHASES 65536u /* bodies begin within 64 KiB: what is sent often stays cached */

_Static_assert((PHASES & (PHASES - 1)) == 0, "phases are taken by a mask");
_Static_assert(PHASES <= RL_PATTERN_PERIOD, "a phase lies in the first period");
_Static_assert(RL_PATTERN_PERIOD % RECORD == 0, "a record does not straddle the period");

/* Two periods: a slice of up to one period is contiguous wherever in the first it begins. */
static uint8_t pattern[2 * RL_PATTERN_PERIOD];
static pthread_once_t filled = PTHREAD_ONCE_INIT;

static void fill(void)
{
    static const char HEX[16] = "0123456789abcdef";
    for (uint64_t offset = 0; offset < RL_PATTERN_PERIOD; offset += RECORD) {
        uint8_t *record = pattern + offset;
        for (int digit = 0; digit < DIGITS; digit++)
            record[digit] = (uint8_t)HEX[(offset >> (4 * (DIGITS - 1 - digit))) & 15];
        record[DIGITS] = '\n';
    }
    memcpy(pattern + RL_PATTERN_PERIOD, pattern, RL_PATTERN_PERIOD);
}

const uint8_t *rl_pattern(void)
{
    pthread_once(&filled, fill);
    return pattern;
}

uint64_t rl_pattern_phase(uint64_t seq)
{
    return (seq * PHASE_STEP) & (PHASES - 1);
}
