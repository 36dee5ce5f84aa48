/* Native kernels of the shard codec, called through ctypes by native.py without the interpreter lock.
 *
 * Every function keeps within the buffers it is given, whatever their contents: payloads come from the network. Each is compiled
 * for the instruction sets below and the best the machine has is taken when it is called; without x86 there is the portable one.
 * Little-endian machines only (native.py looks). The numpy code in codec.py and ranked.py does the same, byte for byte. */

#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define BUCKETS 16
#define NONE UINT32_MAX

typedef struct {
    unsigned low, bits, top; /* a key is how far the exponent, `bits` bits from bit `low`, lies below `top` */
    uint64_t field;
} Window;

static Window window_of(unsigned low, unsigned bits, unsigned top) {
    return (Window){low, bits, top, ((uint64_t)1 << bits) - 1};
}

/* Elements of a shard: wherever a view of bytes happens to start. */
typedef uint8_t U8;
typedef uint16_t U16 __attribute__((aligned(1), may_alias));
typedef uint32_t U32 __attribute__((aligned(1), may_alias));
typedef uint64_t U64 __attribute__((aligned(1), may_alias));

static inline uint64_t load(const uint8_t *x, size_t i, int width) {
    switch (width) {
    case 1: return x[i];
    case 2: return ((const U16 *)x)[i];
    case 4: return ((const U32 *)x)[i];
    default: return ((const U64 *)x)[i];
    }
}

static inline void store(uint8_t *x, size_t i, int width, uint64_t value) {
    switch (width) {
    case 1: x[i] = (uint8_t)value; break;
    case 2: ((U16 *)x)[i] = (uint16_t)value; break;
    case 4: ((U32 *)x)[i] = (uint32_t)value; break;
    default: ((U64 *)x)[i] = value; break;
    }
}

/* Memory lent for one call: the caller keeps it from call to call, so that its pages are there already. */
typedef struct {
    uint8_t *at, *end;
} Arena;

/* The next `size` bytes of it, on a cache line; NULL, from then on, when it is used up. */
static void *carve(Arena *arena, size_t size) {
    size_t whole = (size + 63) / 64 * 64;
    if (arena->at == NULL || whole > (size_t)(arena->end - arena->at)) {
        arena->at = NULL;
        return NULL;
    }
    arena->at += whole;
    return arena->at - whole;
}

static Arena arena_of(uint8_t *scratch, size_t size) {
    size_t skip = (64 - (uintptr_t)scratch % 64) % 64;
    return skip > size ? (Arena){NULL, NULL} : (Arena){scratch + skip, scratch + size};
}

/* The lowest bit set; 0 of none, which callers write where it is overwritten. */
static inline int lowest(uint64_t m) { return m ? __builtin_ctzll(m) : 0; }

#define A ~(uint64_t)0
static const uint64_t INVERT[4][BUCKETS] = {
    /* bit p of the bucket is clear: the plane counts inverted */
    {A, 0, A, 0, A, 0, A, 0, A, 0, A, 0, A, 0, A, 0},
    {A, A, 0, 0, A, A, 0, 0, A, A, 0, 0, A, A, 0, 0},
    {A, A, A, A, 0, 0, 0, 0, A, A, A, A, 0, 0, 0, 0},
    {A, A, A, A, A, A, A, A, 0, 0, 0, 0, 0, 0, 0, 0},
};
#undef A

/* Bit p of each of 64 bytes. */
static inline uint64_t gathered(const uint8_t *byte, int p) {
    uint64_t word, out = 0;
    for (int i = 0; i < 8; i++) {
        memcpy(&word, byte + 8 * i, 8);
        out |= ((word >> p & 0x0101010101010101u) * 0x0102040810204080u >> 56) << (8 * i);
    }
    return out;
}

static int limit = 2; /* on the instruction set, for tests */

static inline int nth_bit(uint64_t mask, unsigned r) {
    for (; r; r--) mask &= mask - 1;
    return __builtin_ctzll(mask);
}

/* Per bucket, the elements whose key it is. */
static inline void spread(const uint64_t *plane, uint64_t valid, uint64_t *mask) {
    for (int b = 0; b < BUCKETS; b++)
        mask[b] = (plane[0] ^ INVERT[0][b]) & (plane[1] ^ INVERT[1][b]) & (plane[2] ^ INVERT[2][b]) & (plane[3] ^ INVERT[3][b]) & valid;
}

/* Per bucket, how many there were and how many more there are. */
static inline void count(const uint64_t *base, const uint64_t *mask, uint64_t *out) {
    for (int b = 0; b < BUCKETS; b++) out[b] = base[b] + (uint64_t)__builtin_popcountll(mask[b]);
}

/* The buckets for which a < b. */
static inline uint64_t below(const uint64_t *a, const uint64_t *b) {
    uint64_t out = 0;
    for (int i = 0; i < BUCKETS; i++) out |= (uint64_t)(a[i] < b[i]) << i;
    return out;
}

#define FN static
#define SPREAD(plane, valid, mask) spread(plane, valid, mask)
#define COUNT(base, mask, out) count(base, mask, out)
#define BELOW(a, b) below(a, b)
#define NAME(x) x##_portable
#define PLANES(key, plane) for (int p = 0; p < 4; p++) plane[p] = gathered(key, p)
#define FLAGS(flag) gathered(flag, 0)
#define SELECT(mask, r) nth_bit(mask, r)
#include "native_scan.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define FN __attribute__((target("avx2,bmi,bmi2,popcnt,lzcnt"))) static
#define NAME(x) x##_avx2
FN inline uint64_t gathered_avx2(const uint8_t *byte, int p) {
    __m256i a = _mm256_loadu_si256((const __m256i *)byte), b = _mm256_loadu_si256((const __m256i *)(byte + 32));
    __m128i up = _mm_cvtsi32_si128(7 - p);
    uint32_t low = (uint32_t)_mm256_movemask_epi8(_mm256_sll_epi16(a, up));
    return low | (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_sll_epi16(b, up)) << 32;
}
FN inline void spread_avx2(const uint64_t *plane, uint64_t valid, uint64_t *mask) {
    for (int b = 0; b < BUCKETS; b += 4) {
        __m256i m = _mm256_set1_epi64x((long long)valid);
        for (int p = 0; p < 4; p++)
            m = _mm256_and_si256(m, _mm256_xor_si256(_mm256_set1_epi64x((long long)plane[p]), _mm256_loadu_si256((const __m256i *)&INVERT[p][b])));
        _mm256_storeu_si256((__m256i *)(mask + b), m);
    }
}
FN inline void count_avx2(const uint64_t *base, const uint64_t *mask, uint64_t *out) {
    const __m256i ones = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, 0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4);
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int b = 0; b < BUCKETS; b += 4) { /* by a table of the sixteen nibbles, summed over each 64 bits */
        __m256i m = _mm256_loadu_si256((const __m256i *)(mask + b));
        __m256i low = _mm256_shuffle_epi8(ones, _mm256_and_si256(m, nibble));
        __m256i high = _mm256_shuffle_epi8(ones, _mm256_and_si256(_mm256_srli_epi16(m, 4), nibble));
        __m256i sum = _mm256_sad_epu8(_mm256_add_epi8(low, high), _mm256_setzero_si256());
        _mm256_storeu_si256((__m256i *)(out + b), _mm256_add_epi64(_mm256_loadu_si256((const __m256i *)(base + b)), sum));
    }
}
#define PLANES(key, plane) for (int p = 0; p < 4; p++) plane[p] = gathered_avx2(key, p)
#define FLAGS(flag) gathered_avx2(flag, 0)
#define SPREAD(plane, valid, mask) spread_avx2(plane, valid, mask)
#define COUNT(base, mask, out) count_avx2(base, mask, out)
#define BELOW(a, b) below(a, b)
#define SELECT(mask, r) nth_bit(mask, r) /* pdep is microcode on the AMD parts that stop at AVX2 */
#include "native_scan.h"

#define FN __attribute__((target("avx2,bmi,bmi2,popcnt,lzcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vpopcntdq,prefer-vector-width=512"))) static
#define NAME(x) x##_avx512
FN inline void spread_avx512(const uint64_t *plane, uint64_t valid, uint64_t *mask) {
    for (int b = 0; b < BUCKETS; b += 8) {
        __m512i m = _mm512_set1_epi64((long long)valid);
        for (int p = 0; p < 4; p++)
            m = _mm512_and_si512(m, _mm512_xor_si512(_mm512_set1_epi64((long long)plane[p]), _mm512_loadu_si512(&INVERT[p][b])));
        _mm512_storeu_si512(mask + b, m);
    }
}
FN inline void count_avx512(const uint64_t *base, const uint64_t *mask, uint64_t *out) {
    for (int b = 0; b < BUCKETS; b += 8)
        _mm512_storeu_si512(out + b, _mm512_add_epi64(_mm512_loadu_si512(base + b), _mm512_popcnt_epi64(_mm512_loadu_si512(mask + b))));
}
FN inline uint64_t below_avx512(const uint64_t *a, const uint64_t *b) {
    return _mm512_cmplt_epu64_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b)) |
           (uint64_t)_mm512_cmplt_epu64_mask(_mm512_loadu_si512(a + 8), _mm512_loadu_si512(b + 8)) << 8;
}
FN inline uint64_t gathered_avx512(const uint8_t *byte, int p) {
    return _mm512_test_epi8_mask(_mm512_loadu_si512(byte), _mm512_set1_epi8((char)(1 << p)));
}
#define PLANES(key, plane) for (int p = 0; p < 4; p++) plane[p] = gathered_avx512(key, p)
#define FLAGS(flag) gathered_avx512(flag, 0)
#define SPREAD(plane, valid, mask) spread_avx512(plane, valid, mask)
#define COUNT(base, mask, out) count_avx512(base, mask, out)
#define BELOW(a, b) below_avx512(a, b)
#define SELECT(mask, r) (int)_tzcnt_u64(_pdep_u64((uint64_t)1 << (r), mask))
#include "native_scan.h"

static int level(void) {
    static int known = -1; /* every thread finds the same */
    if (known < 0) {
        __builtin_cpu_init();
        int v4 = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                 __builtin_cpu_supports("avx512vpopcntdq");
        int v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
        known = v3 && v4 ? 2 : v3;
    }
    return known < limit ? known : limit;
}
#define BEST(f, ...) (level() == 2 ? f##_avx512(__VA_ARGS__) : level() == 1 ? f##_avx2(__VA_ARGS__) : f##_portable(__VA_ARGS__))
#else
static int level(void) { return 0; }
#define BEST(f, ...) f##_portable(__VA_ARGS__)
#endif

#include "native_ranked.h"

/* Changed with any signature below: a library of another number is not used. */
API int dl_interface(void) { return 1; }

/* Which instructions are used: 0 portable, 1 AVX2, 2 AVX-512; never more than `at_most` from now on. */
API int dl_level(int at_most) {
    limit = at_most;
    return level();
}

API size_t dl_changed(const uint8_t *a, const uint8_t *b, size_t n, int width, int32_t *at, uint8_t *xor_out) {
    return BEST(changed, a, b, n, width, at, xor_out);
}

API void dl_split(const uint8_t *a, const uint8_t *b, size_t n, int width, uint8_t *planes) { BEST(split, a, b, n, width, planes); }

API void dl_merge(const uint8_t *const *planes, size_t n, int width, int flip, uint8_t *out) { BEST(merge, planes, n, width, flip, out); }

/* SPARSE: gap bytes of m ascending positions (room for m + n / 255), and the planes of their XORs; returns the gap bytes. */
API size_t dl_sparse_pack(const int32_t *at, const uint8_t *flips, size_t m, int width, uint8_t *gaps, uint8_t *planes) {
    size_t written = 0;
    int32_t next = 0;
    for (size_t i = 0; i < m; i++) {
        int32_t gap = at[i] - next;
        for (; gap >= 255; gap -= 255) gaps[written++] = 255;
        gaps[written++] = (uint8_t)gap;
        next = at[i] + 1;
    }
    BEST(split, flips, NULL, m, width, planes);
    return written;
}

/* SPARSE applied to x, or, with `at`, its positions and XORs written and x left alone. 0, or MALFORMED. */
API int dl_sparse_apply(const uint8_t *gaps, size_t gap_bytes, const uint8_t *const *planes, size_t m, uint8_t *x, size_t n, int width,
                        int32_t *at, uint8_t *xor_out) {
    size_t position = 0, found = 0;
    if (gap_bytes == 0 || gaps[gap_bytes - 1] == 255) return MALFORMED;
    for (size_t i = 0; i < gap_bytes; i++) {
        position += gaps[i];
        if (gaps[i] == 255) continue;
        if (position >= n || found >= m) return MALFORMED;
        uint64_t value = 0;
        for (int k = 0; k < width; k++) value |= (uint64_t)planes[k][found] << (8 * k);
        if (at == NULL) {
            store(x, position, width, load(x, position, width) ^ value);
        } else {
            at[found] = (int32_t)position;
            store(xor_out, found, width, value);
        }
        found++, position++;
    }
    return found == m ? 0 : MALFORMED;
}

/* The smallest exponent that at most 1/256 of a sample exceed, so that a few outliers do not spoil the buckets. */
static unsigned top_of(const uint8_t *x, size_t n, int width, unsigned low, unsigned bits) {
    static const size_t RUN = 64;
    size_t step = n / RUN > RUN ? n / RUN : RUN, sampled = 0, above = 0;
    uint32_t count[1 << 11] = {0};
    if (bits == 0 || bits > 11) return 0;
    for (size_t start = 0; start < n; start += step)
        for (size_t i = start; i < n && i < start + RUN; i++, sampled++) count[load(x, i, width) >> low & (((uint64_t)1 << bits) - 1)]++;
    unsigned top = (1u << bits) - 1;
    for (; top > 0 && above + count[top] <= sampled / 256; top--) above += count[top];
    return top;
}

/* RANKED: the payload into `out` (at most `most` bytes); its size, or FIT when it is larger, or NO_MEMORY for want of scratch: it takes
 * 45 m + 3 most bytes and 2 KiB. `at` ends with a sentinel; `flips` are the XORs there. */
API long dl_ranked_encode(const uint8_t *old, const int32_t *at, const uint8_t *flips, size_t m, size_t n, int width, unsigned low, unsigned bits,
                          uint8_t *scratch, size_t scratch_size, uint8_t *out, size_t most) {
    Window w = window_of(low, bits, top_of(old, n, width, low, bits));
    Arena arena = arena_of(scratch, scratch_size);
    uint64_t total[BUCKETS], field = ~(uint64_t)0 >> (64 - 8 * width), *diff = carve(&arena, 8 * m), *sorted_diff = carve(&arena, 8 * m);
    uint32_t *rank = carve(&arena, 4 * m), *sorted = carve(&arena, 4 * m);
    uint8_t *bucket = carve(&arena, m);
    size_t first[BUCKETS + 1] = {0}, to[BUCKETS];
    if (bucket == NULL) return NO_MEMORY;
    BEST(rank, old, n, width, w, at, flips, bucket, rank, diff, total);
    for (size_t i = 0; i < m; i++) first[bucket[i] + 1]++;
    for (int b = 0; b < BUCKETS; b++) first[b + 1] += first[b], to[b] = first[b];
    for (size_t i = 0; i < m; i++) {
        size_t place = to[bucket[i]]++;
        sorted[place] = rank[i];
        sorted_diff[place] = diff[i] & field;
    }
    return write_ranked(sorted, sorted_diff, first, total, width, w, &arena, out, most);
}

/* RANKED applied to x, or, with `at` (room for n), its positions and XORs written and x left alone: their number, or MALFORMED, or
 * NO_MEMORY for want of scratch: it takes 21 bytes for each element or bit of payload, whichever are fewer, and the payload's and 2 KiB. */
API long dl_ranked_apply(const uint8_t *payload, size_t length, uint8_t *x, size_t n, int width, uint8_t *scratch, size_t scratch_size,
                         int32_t *at, uint8_t *xor_out) {
    Plan plan;
    const uint32_t *order[BUCKETS];
    const uint64_t *value[BUCKETS];
    uint64_t total[BUCKETS];
    Arena arena = arena_of(scratch, scratch_size);
    if (read_plan(payload, length, n, width, &plan)) return MALFORMED;
    int failed = read_ranked(&plan, width, &arena, order, value);
    if (failed) return failed;
    size_t placed = BEST(place, x, n, width, plan.window, order, value, at, xor_out, total);
    for (int b = 0; b < BUCKETS; b++)
        if (plan.bucket[b].ranks.inverted && total[b] != plan.bucket[b].ranks.of) return MALFORMED;
    return placed == plan.changed ? (long)placed : MALFORMED;
}
