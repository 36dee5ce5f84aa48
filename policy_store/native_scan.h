/* Scanning kernels: what must look at every element of a shard, 64 at a time. Included once per instruction set by native.c,
 * which defines FN (storage and target of a function), NAME(x) (its name for this set) and the few operations that sets differ in:
 * PLANES, FLAGS, SPREAD, COUNT, BELOW, SELECT.
 *
 * A block of 64 elements becomes 64 keys (its buckets, 0..15), the keys four bit planes, and the planes one 64-bit mask per bucket:
 * an element's rank in its bucket is then a count of bits, and the r-th element of a bucket the r-th bit. Loops over a fixed 64 or
 * 16 are written for the compiler to vectorise. Nothing here reads or writes beyond `n` elements. */

#define TYPED(T)                                                                                                                 \
    FN inline void NAME(keys_##T)(const T *x, Window w, uint8_t *key) {                                                                 \
        T field = (T)w.field, top = (T)w.top;                                                                                    \
        for (int i = 0; i < 64; i++) {                                                                                           \
            T e = (T)(x[i] >> w.low) & field;                                                                                    \
            T below = top > e ? (T)(top - e) : (T)0;                                                                             \
            key[i] = below > 15 ? 15 : (uint8_t)below;                                                                           \
        }                                                                                                                        \
    }                                                                                                                            \
    FN inline void NAME(differ_##T)(const T *a, const T *b, uint8_t *flag) {                                                            \
        for (int i = 0; i < 64; i++) flag[i] = a[i] != b[i];                                                                     \
    }

TYPED(U8)
TYPED(U16)
TYPED(U32)
TYPED(U64)
#undef TYPED

FN inline __attribute__((always_inline)) void NAME(keys)(const uint8_t *x, int width, Window w, uint8_t *key) {
    switch (width) {
    case 1: NAME(keys_U8)(x, w, key); break;
    case 2: NAME(keys_U16)((const U16 *)x, w, key); break;
    case 4: NAME(keys_U32)((const U32 *)x, w, key); break;
    default: NAME(keys_U64)((const U64 *)x, w, key); break;
    }
}

/* The masks of the 16 buckets in a block of `count` elements (64 but for the last), and each element's bucket. */
FN inline __attribute__((always_inline)) void NAME(masks)(const uint8_t *x, size_t count, int width, Window w, uint8_t *key, uint64_t *mask) {
    uint64_t plane[4], valid = ~(uint64_t)0;
    if (count < 64) {
        uint64_t padded[64] = {0};
        memcpy(padded, x, count * (size_t)width);
        NAME(keys)((const U8 *)padded, width, w, key);
        valid = ((uint64_t)1 << count) - 1;
    } else {
        NAME(keys)(x, width, w, key);
    }
    PLANES(key, plane);
    SPREAD(plane, valid, mask);
}

/* The positions at which a and b differ, ascending, into `at`, and the XORs there; both have room for n + 2. Their number is returned. */
FN inline __attribute__((always_inline)) size_t NAME(changed_of)(const uint8_t *a, const uint8_t *b, size_t n, int width, int32_t *at, uint8_t *xor_out) {
    size_t found = 0;
    uint8_t flag[64];
    uint64_t pads[2][64] = {{0}};
    for (size_t start = 0; start < n; start += 64) {
        const uint8_t *p = a + start * (size_t)width, *q = b + start * (size_t)width;
        if (n - start < 64) {
            memcpy(pads[0], p, (n - start) * (size_t)width);
            memcpy(pads[1], q, (n - start) * (size_t)width);
            p = (const uint8_t *)pads[0], q = (const uint8_t *)pads[1];
        }
        switch (width) {
        case 1: NAME(differ_U8)(p, q, flag); break;
        case 2: NAME(differ_U16)((const U16 *)p, (const U16 *)q, flag); break;
        case 4: NAME(differ_U32)((const U32 *)p, (const U32 *)q, flag); break;
        default: NAME(differ_U64)((const U64 *)p, (const U64 *)q, flag); break;
        }
        uint64_t m = FLAGS(flag);
        size_t next = found;
        found += (size_t)__builtin_popcountll(m);
        /* Two without asking: at one per cent changed, whether there is one more is the branch predictor's guess. */
        for (int i = 0; i < 2 || m; i++, m &= m - 1, next++) {
            size_t bit = (size_t)lowest(m);
            at[next] = (int32_t)(start + bit);
            store(xor_out, next, width, load(p, bit, width) ^ load(q, bit, width));
        }
    }
    return found;
}

FN size_t NAME(changed)(const uint8_t *a, const uint8_t *b, size_t n, int width, int32_t *at, uint8_t *xor_out) {
    switch (width) { /* a loop of its own for each */
    case 1: return NAME(changed_of)(a, b, n, 1, at, xor_out);
    case 2: return NAME(changed_of)(a, b, n, 2, at, xor_out);
    case 4: return NAME(changed_of)(a, b, n, 4, at, xor_out);
    default: return NAME(changed_of)(a, b, n, 8, at, xor_out);
    }
}

/* For each of the m ascending positions (`at` ends with a sentinel above n): its bucket, its rank among the bucket's elements, and
 * how far the XOR takes it. `total` gets the size of every bucket. */
FN void NAME(rank)(const uint8_t *x, size_t n, int width, Window w, const int32_t *at, const uint8_t *flips, uint8_t *bucket, uint32_t *rank,
                   uint64_t *diff, uint64_t *total) {
    uint64_t base[BUCKETS] = {0}, mask[BUCKETS];
    size_t i = 0;
    uint8_t key[64];
    for (size_t start = 0; start < n; start += 64) {
        NAME(masks)(x + start * (size_t)width, n - start < 64 ? n - start : 64, width, w, key, mask);
        for (; (size_t)at[i] < start + 64; i++) {
            size_t offset = (size_t)at[i] - start, b = key[offset];
            uint64_t old = load(x, (size_t)at[i], width);
            bucket[i] = (uint8_t)b;
            rank[i] = (uint32_t)(base[b] + (uint64_t)__builtin_popcountll(mask[b] & (((uint64_t)1 << offset) - 1)));
            diff[i] = (old ^ load(flips, i, width)) - old;
        }
        COUNT(base, mask, base);
    }
    memcpy(total, base, sizeof base);
}

/* Find the elements of given ranks and add their differences; `order[b]` points at bucket b's ascending ranks, each list ending with
 * NONE, and `value[b]` at its differences. With `at` the shard is only read: positions and XORs are written instead, ascending.
 * Four blocks at a time, so that a loop over the few ranks that fall in them ends at a surprise less often. */
FN size_t NAME(place)(uint8_t *x, size_t n, int width, Window w, const uint32_t **order, const uint64_t **value, int32_t *at, uint8_t *xor_out,
                      uint64_t *total) {
    uint64_t base[5][BUCKETS] = {{0}}, mask[4][BUCKETS], next[BUCKETS], touched[4] = {0}, flips[256];
    uint8_t key[64];
    size_t placed = 0;
    for (int b = 0; b < BUCKETS; b++) next[b] = *order[b];
    for (size_t start = 0; start < n; start += 256) {
        uint64_t hit;
#pragma GCC unroll 4
        for (size_t s = 0; s < 4; s++) {
            size_t from = start + 64 * s < n ? start + 64 * s : n;
            NAME(masks)(x + from * (size_t)width, n - from < 64 ? n - from : 64, width, w, key, mask[s]);
            COUNT(base[s], mask[s], base[s + 1]);
        }
        hit = BELOW(next, base[4]);
        for (; hit; hit &= hit - 1) {
            int b = __builtin_ctzll(hit);
            const uint32_t *rank = order[b];
            const uint64_t *add = value[b], one = base[1][b], two = base[2][b], three = base[3][b], end = base[4][b];
            do {
                size_t s = (size_t)(*rank >= one) + (*rank >= two) + (*rank >= three);
                size_t bit = (size_t)SELECT(mask[s][b], (unsigned)(*rank - base[s][b])), position = start + 64 * s + bit;
                uint64_t old = load(x, position, width), sum = old + *add;
                if (at == NULL) {
                    store(x, position, width, sum);
                } else {
                    touched[s] |= (uint64_t)1 << bit;
                    flips[64 * s + bit] = old ^ sum;
                }
                rank++, add++;
            } while (*rank < end);
            placed += at == NULL ? (size_t)(rank - order[b]) : 0;
            order[b] = rank, value[b] = add, next[b] = *rank;
        }
        for (size_t s = 0; at != NULL && s < 4; s++)
            for (; touched[s]; touched[s] &= touched[s] - 1, placed++) {
                size_t bit = 64 * s + (size_t)lowest(touched[s]);
                at[placed] = (int32_t)(start + bit);
                store(xor_out, placed, width, flips[bit]);
            }
        memcpy(base[0], base[4], sizeof base[0]);
    }
    memcpy(total, base[0], sizeof base[0]);
    return placed;
}

/* Byte k of every element (of a XOR b where b is given) to planes + k * n. */
#define TYPED(T)                                                                                                                 \
    FN void NAME(split_##T)(const T *a, const T *b, size_t n, uint8_t *planes) {                                                 \
        for (size_t k = 0; k < sizeof(T); k++) {                                                                                 \
            uint8_t *out = planes + k * n;                                                                                       \
            if (b != NULL)                                                                                                       \
                for (size_t i = 0; i < n; i++) out[i] = (uint8_t)((a[i] ^ b[i]) >> (8 * k));                                     \
            else                                                                                                                 \
                for (size_t i = 0; i < n; i++) out[i] = (uint8_t)(a[i] >> (8 * k));                                              \
        }                                                                                                                        \
    }                                                                                                                            \
    FN void NAME(merge_##T)(const uint8_t *const *planes, size_t n, int flip, T *out) {                                          \
        for (size_t from = 0; from < n; from += 1024) {                                                                          \
            size_t count = n - from < 1024 ? n - from : 1024;                                                                    \
            T sum[1024] = {0};                                                                                                   \
            for (size_t k = 0; k < sizeof(T); k++)                                                                               \
                for (size_t i = 0; i < count; i++) sum[i] |= (T)((T)planes[k][from + i] << (8 * k));                             \
            if (flip)                                                                                                            \
                for (size_t i = 0; i < count; i++) out[from + i] ^= sum[i];                                                      \
            else                                                                                                                 \
                memcpy(out + from, sum, count * sizeof(T));                                                                      \
        }                                                                                                                        \
    }

TYPED(U8)
TYPED(U16)
TYPED(U32)
TYPED(U64)
#undef TYPED

FN void NAME(split)(const uint8_t *a, const uint8_t *b, size_t n, int width, uint8_t *planes) {
    switch (width) {
    case 1: NAME(split_U8)(a, b, n, planes); break;
    case 2: NAME(split_U16)((const U16 *)a, (const U16 *)b, n, planes); break;
    case 4: NAME(split_U32)((const U32 *)a, (const U32 *)b, n, planes); break;
    default: NAME(split_U64)((const U64 *)a, (const U64 *)b, n, planes); break;
    }
}

FN void NAME(merge)(const uint8_t *const *planes, size_t n, int width, int flip, uint8_t *out) {
    switch (width) {
    case 1: NAME(merge_U8)(planes, n, flip, out); break;
    case 2: NAME(merge_U16)(planes, n, flip, (U16 *)out); break;
    case 4: NAME(merge_U32)(planes, n, flip, (U32 *)out); break;
    default: NAME(merge_U64)(planes, n, flip, (U64 *)out); break;
    }
}

/* For the next instructions. */
#undef FN
#undef NAME
#undef PLANES
#undef FLAGS
#undef SELECT
#undef SPREAD
#undef COUNT
#undef BELOW
