/* Standard normal numbers, and sums with noise, for `shuffled_dpsgd.training.native_noise`.

   The same random bits, used in the same way, as `box_muller.standard_normal`; logarithm, sine and
   cosine are polynomials here, so that a compiler can turn whole loops into vector instructions.
   Results differ from numpy's by rounding. */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* One clone of a function for each kind of processor; the loader takes the best that serves. */
#if defined(__x86_64__) && defined(__linux__) && !defined(ONE_TARGET)
#define VECTORS __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define VECTORS
#endif

/* Pairs of numbers that are made at a time: all of them stay in the first-level cache. */
enum { BLOCK = 512 };
/* Below this, 31 bits are too coarse for a radius, and 64 more are drawn. */
static const uint32_t TINY = 1u << 16;

/* SFC64, as numpy has it. */
static inline uint64_t next(uint64_t s[4]) {
    uint64_t drawn = s[0] + s[1] + s[3]++;
    s[0] = s[1] ^ (s[1] >> 11);
    s[1] = s[2] + (s[2] << 3);
    s[2] = ((s[2] << 24) | (s[2] >> 40)) + drawn;
    return drawn;
}

static inline float as_float(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline uint32_t as_bits(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

/* sqrt(-2 log u) for 0 < u <= 1. u is m 2^k with m between sqrt(1/2) and sqrt(2), and -2 log m is a
   polynomial in f = m - 1, off by at most 3e-8 of itself. */
static inline float radius_of(float u) {
    const uint32_t root_half = 0x3f3504f3u;
    uint32_t above = as_bits(u) - root_half;
    float k = (float)((int32_t)above >> 23);
    float f = as_float((above & 0x007fffffu) + root_half) - 1.0f;
    float p = -0.17066626f;
    p = p * f + 0.28538516f;
    p = p * f - 0.29954803f;
    p = p * f + 0.33155987f;
    p = p * f - 0.39911866f;
    p = p * f + 0.50002706f;
    p = p * f - 0.66668385f;
    p = p * f + 0.99999994f;
    p = p * f - 2.0f;
    return sqrtf(p * f - k * 1.38629436f);
}

/* Cosine and sine of x between -pi/2 and pi/2, off by at most 1e-8 before rounding. */
static inline float cosine(float z) {
    float p = -2.6050657e-07f;
    p = p * z + 2.476011e-05f;
    p = p * z - 0.0013888361f;
    p = p * z + 0.041666634f;
    p = p * z - 0.5f;
    return p * z + 1.0f;
}

static inline float sine(float x, float z) {
    float p = 2.6051077e-06f;
    p = p * z - 0.00019809017f;
    p = p * z + 0.00833305f;
    p = p * z - 0.16666658f;
    return (p * z + 1.0f) * x;
}

/* `size` numbers into `out`, which has room for an even number of them. The state moves on. */
VECTORS void standard_normal(uint64_t state[4], float *out, int64_t size) {
    const int64_t pairs = (size + 1) / 2;
    uint64_t s[4] = {state[0], state[1], state[2], state[3]};
    for (int64_t i = 0; i < pairs; i++) {
        uint64_t drawn = next(s);
        memcpy(out + 2 * i, &drawn, sizeof drawn);
    }
    for (int64_t start = 0; start < pairs; start += BLOCK) {
        const int count = (int)(pairs - start < BLOCK ? pairs - start : BLOCK);
        float u[BLOCK];
        uint32_t words[BLOCK], angles[BLOCK];
        float *first = out + start, *second = out + pairs + start;
        memcpy(words, first, count * sizeof *words);
        memcpy(angles, second, count * sizeof *angles);
        int rare = 0;
        for (int i = 0; i < count; i++) {
            words[i] >>= 1;
            rare |= words[i] < TINY;
            u[i] = (float)(int32_t)words[i] + 0.5f;
        }
        for (int i = 0; rare && i < count; i++)
            if (words[i] < TINY) {
                uint64_t more;
                do more = next(s); while (!more);
                u[i] = (float)(words[i] + ((double)(more - 1) + 0.5) * 0x1p-64);
            }
        for (int i = 0; i < count; i++) {
            /* An angle on the left is turned by half a circle, and the radius with it. */
            uint32_t left = (angles[i] + 0x40000000u) & 0x80000000u;
            float x = (float)(int32_t)(angles[i] ^ left) * 1.46291807926716e-09f;
            float z = x * x;
            float radius = as_float(as_bits(radius_of(u[i] * 0x1p-31f)) ^ left);
            first[i] = radius * cosine(z);
            second[i] = radius * sine(x, z);
        }
    }
    memcpy(state, s, sizeof s);
}

/* sums = (sums + std * numbers) / divide_by */
VECTORS void add_noise(float *restrict sums, const float *restrict numbers, int64_t size, float std,
                       float divide_by) {
    for (int64_t i = 0; i < size; i++) sums[i] = (sums[i] + std * numbers[i]) / divide_by;
}
