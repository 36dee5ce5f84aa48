/* The bit streams of a RANKED payload (docs/delta_format.md): subsets as Rice-coded gaps, magnitudes as layers of subsets.
 * The same bytes and the same refusals as ranked.py, which is the reference. */

enum { LAYERS = 32, TAIL = 16, TAIL_MOST = 24, LOW_MOST = 48, HEAD = 6, SPARE = 16, ESCAPED = 255, FIT = -1, NO_MEMORY = -2, MALFORMED = -3 };

/* ---------------------------------------------------------------- writing */

typedef struct {
    uint8_t *data; /* room for `most` bytes and `SPARE` more, for whole-word stores */
    size_t bits, cleared;
    uint64_t word; /* of what `put` wrote last, the byte that is not full */
} Bits;

typedef struct {
    Bits low, unary, escapes;
    uint8_t head[BUCKETS * (16 + 4 * LAYERS)];
    size_t head_size, most; /* no stream may pass `most` bytes */
    uint32_t *others, *gaps;
} Writer;

/* Clear the way for more bits; FIT when they are too many. */
static int reserve(Bits *stream, size_t more, size_t most) {
    size_t need = (stream->bits + more + 7) / 8;
    if (need > most) return FIT;
    if (need + SPARE > stream->cleared) {
        size_t clear = need + SPARE + 4096 < most + SPARE ? need + SPARE + 4096 : most + SPARE;
        memset(stream->data + stream->cleared, 0, clear - stream->cleared);
        stream->cleared = clear;
    }
    return 0;
}

/* `width` bits of `value`, at most 49; room is reserved. Nothing is read back: a load across the last two stores would wait for both. */
static inline void put(Bits *stream, uint64_t value, int width) {
    size_t from = stream->bits / 8, next = stream->bits + (size_t)width;
    stream->word |= value << (stream->bits & 7);
    memcpy(stream->data + from, &stream->word, 8);
    stream->word >>= 8 * (next / 8 - from);
    stream->bits = next;
}

static void put_varint(Writer *w, uint64_t value) {
    for (; value >= 128; value >>= 7) w->head[w->head_size++] = (uint8_t)(value | 128);
    w->head[w->head_size++] = (uint8_t)value;
}

static int log2_floor(uint64_t value) { return value ? 63 - __builtin_clzll(value) : 0; }

/* The best Rice parameter for c of n at random: Kiely 2004, "Selecting the Golomb Parameter in Rice Coding", in integers. */
static int rice(uint64_t n, uint64_t c) { return log2_floor((2 * n - c) * 12 / (25 * c)); }

/* All of n but those chosen, in runs. */
static void others_of(const uint32_t *chosen, size_t m, size_t n, uint32_t *out) {
    uint32_t p = 0;
    for (size_t i = 0; i <= m; i++, p++)
        for (uint32_t stop = i < m ? chosen[i] : (uint32_t)n; p < stop; p++) *out++ = p;
}

/* Which m of n, by their ascending positions; the fewer of the chosen and the others are coded. */
static int put_subset(Writer *w, const uint32_t *chosen, size_t m, size_t n, int first) {
    int inverted = 2 * m > n;
    size_t c = inverted ? n - m : m;
    put_varint(w, 2 * (first ? m : c) + (size_t)inverted);
    if (first && inverted) put_varint(w, c);
    if (c == 0) return 0;
    if (inverted) others_of(chosen, m, n, w->others), chosen = w->others;
    uint32_t *gaps = w->gaps;
    gaps[0] = chosen[0];
    for (size_t i = 1; i < c; i++) gaps[i] = chosen[i] - chosen[i - 1] - 1;
    int best = rice(n, c);
    uint64_t least = UINT64_MAX, unary = 0;
    for (int k = first && best > 3 ? best - 3 : first ? 0 : best, last = best; k <= last; k++) {
        uint64_t sum = 0;
        for (size_t i = 0; i < c; i++) sum += gaps[i] >> k;
        if (sum + c * (uint64_t)(k + 1) < least) least = sum + c * (uint64_t)(k + 1), unary = sum + c, best = k;
    }
    if (first) w->head[w->head_size++] = (uint8_t)best;
    int failed = reserve(&w->unary, unary, w->most);
    if (!failed) failed = reserve(&w->low, c * (size_t)best, w->most);
    if (failed) return failed;
    uint32_t kept = ((uint32_t)1 << best) - 1;
    size_t at = w->unary.bits, open = at / 64;
    uint64_t word;
    memcpy(&word, w->unary.data + 8 * open, 8);
    Bits low = w->low; /* in registers */
    for (size_t i = 0; i < c; i++) {
        at += gaps[i] >> best;
        if (at / 64 != open) {
            memcpy(w->unary.data + 8 * open, &word, 8);
            open = at / 64, word = 0;
        }
        word |= (uint64_t)1 << (at & 63);
        at++;
        put(&low, gaps[i] & kept, best);
    }
    memcpy(w->unary.data + 8 * open, &word, 8);
    w->low = low, w->unary.bits = at;
    return 0;
}

/* One bucket: its m changed elements of n, by rank, and their differences. `level` and `index` have room for m. */
static int put_bucket(Writer *w, const uint32_t *rank, const uint64_t *diff, size_t m, size_t n, int width, uint64_t *level, uint32_t *index) {
    int failed = put_subset(w, rank, m, n, 1);
    if (failed) return failed;
    uint64_t field = ~(uint64_t)0 >> (64 - 8 * width), lengths = 0;
    for (size_t i = 0; i < m; i++) {
        uint64_t size = diff[i] < (-diff[i] & field) ? diff[i] : -diff[i] & field;
        level[i] = size - 1;
        lengths += level[i] ? (uint64_t)log2_floor(level[i]) + 1 : 0;
    }
    int kv = (int)(lengths / m) - (m > TAIL ? 2 : 1);
    kv = kv < 0 ? 0 : kv > LOW_MOST ? LOW_MOST : kv;
    w->head[w->head_size++] = (uint8_t)kv;
    failed = reserve(&w->low, m * (size_t)(kv + 1), w->most);
    if (failed) return failed;
    Bits low = w->low;
    for (size_t i = 0; i < m; i++) {
        uint64_t negative = diff[i] != level[i] + 1;
        put(&low, negative | (level[i] & (((uint64_t)1 << kv) - 1)) << 1, kv + 1);
    }
    w->low = low;
    size_t alive = m;
    uint64_t layer = 0;
    for (; alive > TAIL && layer < LAYERS; layer++) {
        size_t count = 0;
        for (size_t i = 0; i < alive; i++) { /* branchless: places of the survivors among the living, who close ranks */
            uint64_t own = level[i];
            index[count] = (uint32_t)i;
            level[count] = own;
            count += own >> kv > layer;
        }
        failed = put_subset(w, index, count, alive, 0);
        if (failed) return failed;
        alive = count;
    }
    for (size_t i = 0; i < alive; i++) {
        uint64_t rest = (level[i] >> kv) - layer;
        if (rest >= TAIL_MOST) {
            rest = TAIL_MOST;
            failed = reserve(&w->escapes, 8 * (size_t)width, w->most);
            if (failed) return failed;
            store(w->escapes.data, w->escapes.bits / (8 * (size_t)width), width, level[i] + 1);
            w->escapes.bits += 8 * (size_t)width;
        }
        failed = reserve(&w->unary, rest + 1, w->most);
        if (failed) return failed;
        size_t at = w->unary.bits + rest;
        w->unary.data[at / 8] |= (uint8_t)(1 << (at & 7));
        w->unary.bits = at + 1;
    }
    return 0;
}

/* The payload of m changed elements in bucket order (`first[b]`..`first[b + 1]` are bucket b's), into `out` of at most `most` bytes. */
static long write_ranked(const uint32_t *rank, const uint64_t *diff, const size_t *first, const uint64_t *total, int width, Window w,
                         Arena *arena, uint8_t *out, size_t most) {
    size_t m = first[BUCKETS], size = 0;
    Writer writer = {.most = most};
    uint64_t *level = carve(arena, 8 * m);
    uint32_t *index = carve(arena, 4 * m);
    writer.others = carve(arena, 4 * m), writer.gaps = carve(arena, 4 * m);
    writer.low.data = carve(arena, most + SPARE), writer.unary.data = carve(arena, most + SPARE);
    writer.escapes.data = carve(arena, most + SPARE);
    if (writer.escapes.data == NULL) return NO_MEMORY;
    int failed = 0;
    unsigned present = 0;
    for (int b = 0; b < BUCKETS && !failed; b++) {
        size_t from = first[b], count = first[b + 1] - from;
        if (count == 0) continue;
        present |= 1u << b;
        failed = put_bucket(&writer, rank + from, diff + from, count, total[b], width, level, index);
    }
    if (!failed) {
        uint8_t sizes[16];
        size_t low = (writer.low.bits + 7) / 8, unary = (writer.unary.bits + 7) / 8, escapes = writer.escapes.bits / 8, lengths = 0;
        for (size_t part = 0, value = writer.head_size; part < 2; part++, value = escapes / (size_t)width) {
            for (; value >= 128; value >>= 7) sizes[lengths++] = (uint8_t)(value | 128);
            sizes[lengths++] = (uint8_t)value;
        }
        size = HEAD + lengths + writer.head_size + low + unary + escapes;
        if (size > most) {
            failed = FIT;
        } else {
            out[0] = (uint8_t)w.low, out[1] = (uint8_t)w.bits, out[2] = (uint8_t)w.top, out[3] = (uint8_t)(w.top >> 8);
            out[4] = (uint8_t)present, out[5] = (uint8_t)(present >> 8);
            out += HEAD;
            memcpy(out, sizes, lengths), out += lengths;
            memcpy(out, writer.head, writer.head_size), out += writer.head_size;
            if (low) memcpy(out, writer.low.data, low), out += low;
            if (unary) memcpy(out, writer.unary.data, unary), out += unary;
            if (escapes) memcpy(out, writer.escapes.data, escapes);
        }
    }
    return failed ? failed : (long)size;
}

/* ---------------------------------------------------------------- reading */

typedef struct {
    const uint8_t *low, *unary; /* eight bytes past the end of either can be read */
    size_t low_at, word_at, last;
    uint64_t word;
} Reader;

typedef struct {
    size_t codes, chosen; /* how many are coded, how many chosen: among `of` when `codes` are the others */
    size_t of;
    int inverted, k;
} Subset;

typedef struct {
    Subset ranks;
    Subset layer[LAYERS];
    int layers, kv;
    size_t tail;
} Bucket;

static inline uint64_t take(Reader *r, int width) {
    uint64_t word;
    memcpy(&word, r->low + r->low_at / 8, 8);
    word = word >> (r->low_at & 7) & (((uint64_t)1 << width) - 1);
    r->low_at += (size_t)width;
    return word;
}

/* Zeros before the next one. There are as many ones as codes (counted before), so this cannot run past the end. */
static inline uint64_t zeros(Reader *r) {
    while (r->word == 0) {
        r->word_at += 64;
        memcpy(&r->word, r->unary + r->word_at / 8, 8);
    }
    size_t at = r->word_at + (size_t)__builtin_ctzll(r->word) + 1;
    uint64_t count = at - r->last - 1;
    r->word &= r->word - 1;
    r->last = at;
    return count;
}

static int get_varint(const uint8_t **at, const uint8_t *end, size_t most, size_t *out) {
    uint64_t value = 0;
    for (int shift = 0; shift < 35; shift += 7) {
        if (*at == end) return MALFORMED;
        uint8_t byte = *(*at)++;
        value |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) {
            *out = (size_t)value;
            return value > most ? MALFORMED : 0;
        }
    }
    return MALFORMED;
}

/* A subset's line of the head; `n` is the most it can choose from. */
static int get_subset(const uint8_t **at, const uint8_t *end, size_t n, int first, Subset *s) {
    size_t count = 0;
    if (get_varint(at, end, 2 * n + 1, &count)) return MALFORMED;
    s->inverted = (int)(count & 1), s->codes = s->chosen = count / 2, s->of = n, s->k = 0;
    if (first && s->inverted) {
        if (get_varint(at, end, n, &s->codes) || s->codes + s->chosen > n) return MALFORMED;
        s->of = s->codes + s->chosen;
    } else if (s->inverted) {
        if (s->codes > n) return MALFORMED;
        s->chosen = n - s->codes;
    }
    if (s->chosen > n || (first && s->chosen == 0)) return MALFORMED;
    if (s->codes == 0) return 0;
    if (!first) {
        s->k = rice(n, s->codes);
    } else {
        if (*at == end || **at > 31) return MALFORMED;
        s->k = *(*at)++;
    }
    return 0;
}

/* The ascending positions of a subset into `out`, which has room for those chosen. */
static int read_subset(Reader *r, const Subset *s, uint32_t *out, uint32_t *scratch) {
    uint32_t *codes = s->inverted ? scratch : out;
    Reader local = *r; /* in registers */
    uint64_t next = 0;
    const size_t count = s->codes, of = s->of;
    const int k = s->k;
    for (size_t i = 0; i < count; i++) {
        next += zeros(&local) << k;
        next += take(&local, k);
        if (next >= of) return MALFORMED;
        codes[i] = (uint32_t)next++;
    }
    *r = local;
    if (s->inverted) others_of(codes, s->codes, s->of, out);
    return 0;
}

/* A bucket's ranks (and NONE after them) and differences. `escape` moves past the escapes it uses. */
static int read_bucket(Reader *r, const Bucket *bucket, int width, const uint8_t **escape, const uint8_t *end, uint32_t *rank, uint64_t *diff,
                       uint32_t *index, uint32_t *scratch, uint8_t *level) {
    size_t m = bucket->ranks.chosen;
    if (read_subset(r, &bucket->ranks, rank, scratch)) return MALFORMED;
    rank[m] = NONE;
    Reader local = *r;
    for (size_t i = 0; i < m; i++) diff[i] = take(&local, bucket->kv + 1);
    *r = local;
    memset(level, 0, m);
    for (int j = 0; j < bucket->layers; j++) {
        const Subset *s = &bucket->layer[j];
        uint32_t *chosen = scratch + (s->inverted ? s->codes : 0);
        if (read_subset(r, s, chosen, scratch)) return MALFORMED;
        for (size_t i = 0; i < s->chosen; i++) {
            index[i] = j ? index[chosen[i]] : chosen[i];
            level[index[i]]++;
        }
    }
    for (size_t i = 0; i < bucket->tail; i++) {
        uint64_t rest = zeros(r);
        if (rest > TAIL_MOST) return MALFORMED;
        uint8_t *own = &level[bucket->layers ? index[i] : i];
        *own = rest == TAIL_MOST ? ESCAPED : (uint8_t)(*own + rest);
    }
    uint64_t field = ~(uint64_t)0 >> (64 - 8 * width);
    for (size_t i = 0; i < m; i++) {
        uint64_t size = (diff[i] >> 1) + ((uint64_t)level[i] << bucket->kv) + 1;
        if (level[i] == ESCAPED) {
            if (end - *escape < width) return MALFORMED;
            size = load(*escape, 0, width);
            *escape += width;
        }
        diff[i] = (diff[i] & 1 ? -size : size) & field;
        if (diff[i] == 0) return MALFORMED;
    }
    return 0;
}

typedef struct {
    Window window;
    Bucket bucket[BUCKETS];
    size_t changed, largest; /* over all buckets; of the lists of one */
    size_t low_bits, codes;
    const uint8_t *low, *unary, *escapes, *end;
} Plan;

/* The head of a payload, held against its length and the n elements of the shard; nothing is allocated. */
static int read_plan(const uint8_t *at, size_t length, size_t n, int width, Plan *plan) {
    const uint8_t *end = at + length;
    size_t head = 0, escapes = 0;
    memset(plan, 0, sizeof *plan);
    if (length < HEAD) return MALFORMED;
    unsigned low = at[0], bits = at[1], top = (unsigned)at[2] | (unsigned)at[3] << 8, present = (unsigned)at[4] | (unsigned)at[5] << 8;
    unsigned most = 8 * (unsigned)width;
    if (low >= most || bits > 16 || low + bits > most || top >> bits || present == 0) return MALFORMED;
    plan->window = window_of(low, bits, top);
    at += HEAD;
    if (get_varint(&at, end, length, &head) || get_varint(&at, end, length, &escapes) || head > (size_t)(end - at)) return MALFORMED;
    const uint8_t *stop = at + head;
    for (int b = 0; b < BUCKETS; b++) {
        Bucket *bucket = &plan->bucket[b];
        if (!(present >> b & 1)) continue;
        if (get_subset(&at, stop, n, 1, &bucket->ranks) || at == stop || *at > LOW_MOST) return MALFORMED;
        bucket->kv = *at++;
        size_t m = bucket->ranks.chosen, alive = m, lists = m > bucket->ranks.codes ? m : bucket->ranks.codes;
        plan->low_bits += bucket->ranks.codes * (size_t)bucket->ranks.k + m * (size_t)(bucket->kv + 1);
        plan->codes += bucket->ranks.codes;
        for (; alive > TAIL && bucket->layers < LAYERS; bucket->layers++) {
            Subset *s = &bucket->layer[bucket->layers];
            if (get_subset(&at, stop, alive, 0, s)) return MALFORMED;
            plan->low_bits += s->codes * (size_t)s->k;
            plan->codes += s->codes;
            alive = s->chosen;
        }
        bucket->tail = alive;
        plan->codes += alive;
        plan->changed += m;
        if (lists > plan->largest) plan->largest = lists;
    }
    size_t low_size = (plan->low_bits + 7) / 8, ones = 0, left = (size_t)(end - at);
    if (at != stop || plan->changed > n || escapes > left / (size_t)width || low_size > left - escapes * (size_t)width) return MALFORMED;
    plan->low = at, plan->unary = at + low_size, plan->escapes = end - escapes * (size_t)width, plan->end = end;
    for (at = plan->unary; at < plan->escapes; at++) ones += (size_t)__builtin_popcount(*at);
    return ones == plan->codes ? 0 : MALFORMED;
}

/* Every bucket's ranks and differences, ready for `place`. */
static int read_ranked(const Plan *plan, int width, Arena *arena, const uint32_t **order, const uint64_t **value) {
    static const uint32_t none = NONE;
    size_t low = (size_t)(plan->unary - plan->low), unary = (size_t)(plan->escapes - plan->unary), largest = plan->largest;
    uint32_t *rank = carve(arena, 4 * (plan->changed + BUCKETS)), *index = carve(arena, 4 * largest), *scratch = carve(arena, 4 * largest);
    uint64_t *diff = carve(arena, 8 * plan->changed);
    uint8_t *level = carve(arena, largest), *lows = carve(arena, low + 8), *runs = carve(arena, unary + 8);
    if (runs == NULL) return NO_MEMORY;
    memcpy(lows, plan->low, low), memset(lows + low, 0, 8);
    memcpy(runs, plan->unary, unary), memset(runs + unary, 0, 8);
    Reader reader = {.low = lows, .unary = runs};
    memcpy(&reader.word, runs, 8);
    const uint8_t *escape = plan->escapes;
    for (int b = 0; b < BUCKETS; b++) {
        size_t m = plan->bucket[b].ranks.chosen;
        order[b] = m ? rank : &none, value[b] = diff;
        if (m == 0) continue;
        int failed = read_bucket(&reader, &plan->bucket[b], width, &escape, plan->end, rank, diff, index, scratch, level);
        if (failed) return failed;
        rank += m + 1, diff += m;
    }
    return escape == plan->end ? 0 : MALFORMED;
}
