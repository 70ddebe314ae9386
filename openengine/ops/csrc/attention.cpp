// Rotation, cache write and causal attention of one layer for a ragged batch over the paged cache.
//
// Cache: tiles of 16 tokens of one KV head, addressed in units of 32 bits, which hold one float or two bfloat16.
//
//     key tile    [head_dim / P][16 tokens] units    P = 1 or 2 dimensions per unit
//     value tile  [16 / P tokens][head_dim] units    P = 1 or 2 tokens per unit
//
// So both products of attention are the same loop, and bfloat16 comes in the pairs that the dot-product instruction
// takes. A block is [block_size / 16][num_kv_heads] tiles.
//
// Work is cut into items: the queries of up to ROWS rows (a row is one query token and one head of the group) of one
// KV head. Keys are taken in chunks; each chunk has its own softmax, and chunks are merged in order. Which keys make
// up a chunk depends on the sequence alone, so results do not depend on the batch, the threads or how work is cut.

#include "attention.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int TILE = 16;           // tokens
constexpr int ROWS = 96;           // of an item
constexpr int CHUNK_MAX = 512;     // keys
constexpr int PREFILL_CHUNK = 128;  // keys, so that a chunk's keys and values stay close to the core
// Rows of a register block and vectors of sums: as many as there are registers for.
constexpr int R_MAX = LANES == 16 ? 8 : 4, MAX_SUMS = LANES == 16 ? 16 : 8;
constexpr int HEAD_DIM_MAX = 256;
// Elements between rows of the workspace: constants, so that all rows have one base, and no power of two, so that they
// do not compete for the same lines of the cache.
constexpr int Q_STRIDE = HEAD_DIM_MAX + 16, P_STRIDE = CHUNK_MAX + 16;
constexpr float LOG2_E = 1.44269504f;

OE_INLINE int min_of(int a, int b) { return a < b ? a : b; }
OE_INLINE int max_of(int a, int b) { return a > b ? a : b; }
OE_INLINE int up_to(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// ---- the two cache types: how a unit is multiplied ----

struct Float32 {
    typedef float Stored;
    typedef float Factor;             // what a query or a probability is kept as
    static constexpr int PACKED = 1;  // elements per unit
    template <int C>
    OE_INLINE void step(vf* sum, const Factor* a, const vu* b) {
        for (int c = 0; c < C; c++) sum[c] += *a * bits_as<vf>(b[c]);
    }
};

struct Bfloat16 {
    typedef bf16 Stored;
    static constexpr int PACKED = 2;
#if defined(__AVX512BF16__)
    typedef bf16 Factor;
    template <int C>
    OE_INLINE void step(vf* sum, const Factor* a, const vu* b) {
        __m512i pair = _mm512_set1_epi32(load_as<int32_t>(a));
        for (int c = 0; c < C; c++)
            sum[c] = bits_as<vf>(_mm512_dpbf16_ps(bits_as<__m512>(sum[c]), (__m512bh)pair, bits_as<__m512bh>(b[c])));
    }
#else
    typedef float Factor;
    template <int C>
    OE_INLINE void step(vf* sum, const Factor* a, const vu* b) {
        for (int c = 0; c < C; c++) {
            sum[c] += a[0] * bits_as<vf>(b[c] << 16);
            sum[c] += a[1] * bits_as<vf>(b[c] & 0xffff0000u);
        }
    }
#endif
};

// ---- matrix products: sum[r][c] += a[r][:] * b[:][c], C vectors of columns ----

template <class T, int A_STRIDE, int R, int C>
OE_INLINE void multiply(vf (&sum)[R][C], const typename T::Factor* a, const uint32_t* const* b, int b_stride,
                        int steps) {
    for (int s = 0; s < steps; s++) {
        vu column[C];
        for (int c = 0; c < C; c++) column[c] = load_as<vu>(b[c] + (long)s * b_stride);
        for (int r = 0; r < R; r++) T::template step<C>(sum[r], a + r * A_STRIDE + s * T::PACKED, column);
    }
}

// Scores of R rows with `num_tiles` key tiles -> scores[r][16 * num_tiles].
template <class T, int R, int C>
OE_INLINE void score_columns(const typename T::Factor* q, int head_dim, const uint32_t* const* tiles, int first, float* scores) {
    constexpr int PER_TILE = TILE / LANES;
    const uint32_t* columns[C];
    for (int c = 0; c < C; c++) columns[c] = tiles[(first + c) / PER_TILE] + (first + c) % PER_TILE * LANES;
    vf sum[R][C] = {};
    multiply<T, Q_STRIDE>(sum, q, columns, TILE, head_dim / T::PACKED);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(scores + r * P_STRIDE + (first + c) * LANES, sum[r][c]);
}

template <class T, int R>
static void score(const typename T::Factor* q, int head_dim, const uint32_t* const* tiles, int num_tiles, float* scores) {
    constexpr int C = R * 4 <= MAX_SUMS ? 4 : 2;
    int columns = num_tiles * (TILE / LANES), first = 0;
    for (; first + C <= columns; first += C) score_columns<T, R, C>(q, head_dim, tiles, first, scores);
    if constexpr (C == 4)
        for (; first + 2 <= columns; first += 2) score_columns<T, R, 2>(q, head_dim, tiles, first, scores);
    for (; first < columns; first++) score_columns<T, R, 1>(q, head_dim, tiles, first, scores);
}

// Weighted values of R rows: out[r] = out[r] * keep[r] + (p[r] * values) * add[r], for the first `count` tokens.
template <class T, int R, int C>
OE_INLINE void weigh_columns(const typename T::Factor* p, const uint32_t* const* tiles, int count, int head_dim,
                             int first, float* out, const float* keep, const float* add) {
    vf sum[R][C] = {};
    int token = 0;
    for (; token < count; token += TILE) {
        const uint32_t* columns[C];
        for (int c = 0; c < C; c++) columns[c] = tiles[token / TILE] + (first + c) * LANES;
        int steps = min_of(TILE, count - token) / T::PACKED;
        multiply<T, P_STRIDE>(sum, p + token, columns, head_dim, steps);
    }
    if (count % T::PACKED) {
        // Half a unit: nobody may have written the other token's value, so it must not be multiplied.
        token = count - 1;
        vu column[C];
        for (int c = 0; c < C; c++) {
            const uint32_t* tile = tiles[token / TILE] + token % TILE / T::PACKED * head_dim;
            column[c] = load_as<vu>(tile + (first + c) * LANES) & 0xffffu;
        }
        for (int r = 0; r < R; r++) T::template step<C>(sum[r], p + r * P_STRIDE + token, column);
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            float* to = out + (long)r * head_dim + (first + c) * LANES;
            store(to, load(to) * keep[r] + sum[r][c] * add[r]);
        }
}

template <class T, int R>
static void weigh(const typename T::Factor* p, const uint32_t* const* tiles, int count, int head_dim, float* out,
                  const float* keep, const float* add) {
    constexpr int C = R * 4 <= MAX_SUMS ? 4 : 2;
    int columns = head_dim / LANES, first = 0;
    for (; first + C <= columns; first += C)
        weigh_columns<T, R, C>(p, tiles, count, head_dim, first, out, keep, add);
    if constexpr (C == 4)
        for (; first + 2 <= columns; first += 2)
            weigh_columns<T, R, 2>(p, tiles, count, head_dim, first, out, keep, add);
    for (; first < columns; first++)
        weigh_columns<T, R, 1>(p, tiles, count, head_dim, first, out, keep, add);
}

// ---- softmax ----

// What the rows of an item have come to so far: 2^(score - max) summed, and the values weighted by it.
struct State {
    float *max, *sum, *values;  // [rows], [rows], [rows, head_dim]
};

// Merge R rows' next keys into their maxima and sums; what the weighted values of both sides are to be multiplied by.
OE_INLINE void merge(float* max, float* sum, vf new_max, vf new_sum, int rows, vf& keep, vf& add) {
    const vf none = splat(-__builtin_inff());
    vf old_max = load(max), old_sum = load(sum);
    vf both = larger(old_max, new_max);
    vf base = both == none ? vf{} : both;
    keep = exp2_of(old_max - base);
    add = exp2_of(new_max - base);
    vf total = old_sum * keep + new_sum * add;
    const vi valid = iota() < rows;
    store(max, valid ? both : old_max);
    store(sum, valid ? total : old_sum);
}

struct Scaling {
    float scale;  // to powers of two; of what the softcap takes, if there is one
    float softcap;
};

// 2^x for x <= 0. Rough where the result is rounded to bfloat16 anyway.
template <bool ROUGH>
OE_INLINE vf exp2_below_one(vf x) {
#if OE_LANES == 16
    vf bounded = larger(splat(-1000.0f), x);
    vf n = bits_as<vf>(_mm512_roundscale_ps(bits_as<__m512>(bounded), 0));
    vf p = ROUGH ? exp2_fraction_rough(bounded - n) : exp2_fraction(bounded - n);
    return bits_as<vf>(_mm512_scalef_ps(bits_as<__m512>(p), bits_as<__m512>(n)));
#else
    vf shifted = x + ROUND;
    vf e = scaled_exp2(shifted, x - (shifted - ROUND));
    return x < splat(-126.0f) ? vf{} : e;
#endif
}

// Hide the scores of one row outside [first, last) of [0, width).
OE_INLINE void hide(float* scores, int width, int first, int last) {
    const vf none = splat(-__builtin_inff());
    for (int i = 0; i < first; i += LANES) store(scores + i, iota() + i < first ? none : load(scores + i));
    for (int i = last / LANES * LANES; i < width; i += LANES) store(scores + i, iota() + i < last ? load(scores + i) : none);
}

OE_INLINE void cap(float* scores, int width, const Scaling& scaling) {
    for (int i = 0; i < width; i += LANES) {
        vf e = exp2_of(load(scores + i) * scaling.scale);
        store(scores + i, scaling.softcap - 2.0f * scaling.softcap / (e + 1.0f));
    }
}

// Softmax numerators of one row of scores, their greatest exponent and their sum.
template <class Factor>
OE_INLINE void exponentiate(const float* scores, Factor* p, int width, float scale, float& max, float& sum) {
    constexpr bool ROUGH = sizeof(Factor) == 2;
    vf highest = load(scores);
    for (int i = LANES; i < width; i += LANES) highest = larger(load(scores + i), highest);
    max = max_of(highest) * scale;
    const float base = max == -__builtin_inff() ? 0.0f : max;
    vf total = {};
    for (int i = 0; i < width; i += LANES) {
        vf e = exp2_below_one<ROUGH>(load(scores + i) * scale - base);
        total += e;
        store(p + i, e);
    }
    sum = sum_of(total);
}

// ---- a block of rows and a chunk of keys ----

struct Chunk {
    const uint32_t* keys[CHUNK_MAX / TILE];
    const uint32_t* values[CHUNK_MAX / TILE];
    int base;   // position of the first key
    int count;  // keys
};

// Ask for tiles that will be read soon: the hardware does not foresee where the next one lies.
OE_INLINE void fetch(const uint32_t* const* tiles, int count, int units) {
    for (int i = 0; i < (count + TILE - 1) / TILE; i++)
        for (int u = 0; u < units; u += 16) __builtin_prefetch(tiles[i] + u);
}

template <class T>
struct Workspace {
    int* positions;         // [rows], of the queries
    typename T::Factor* q;  // [rows, Q_STRIDE]
    State state;
    float* scores;          // [R_MAX, P_STRIDE]
    typename T::Factor* p;  // [R_MAX, P_STRIDE]
};

// Attend R rows from `row` on, and fetch the next chunk meanwhile.
template <class T, int R>
static void attend_rows(const Workspace<T>& ws, const Chunk& chunk, const Chunk* next, int row, int window, int head_dim,
                        const Scaling& scaling) {
    const int* positions = ws.positions + row;
    const int count = min_of(chunk.count, positions[R - 1] + 1 - chunk.base);
    if (count <= 0 || (window && positions[0] - window + 1 >= chunk.base + chunk.count)) return;
    const int num_tiles = (count + TILE - 1) / TILE, width = num_tiles * TILE;
    if (next) fetch(next->keys, next->count, TILE * head_dim / T::PACKED);
    score<T, R>(ws.q + (long)row * Q_STRIDE, head_dim, chunk.keys, num_tiles, ws.scores);
    float maxima[LANES], sums[LANES];
    for (int r = 0; r < R; r++) {
        float* scores = ws.scores + r * P_STRIDE;
        if (scaling.softcap != 0.0f) cap(scores, width, scaling);
        const int last = positions[r] + 1 - chunk.base, first = window ? last - window : 0;
        if (first > 0 || last < width) hide(scores, width, first, max_of(0, min_of(last, width)));
        const float scale = scaling.softcap != 0.0f ? 1.0f : scaling.scale;
        exponentiate(scores, ws.p + r * P_STRIDE, width, scale, maxima[r], sums[r]);
    }
    if (next) fetch(next->values, next->count, TILE * head_dim / T::PACKED);
    vf keep, add;
    merge(ws.state.max + row, ws.state.sum + row, load(maxima), load(sums), R, keep, add);
    float keeps[LANES], adds[LANES];
    store(keeps, keep);
    store(adds, add);
    weigh<T, R>(ws.p, chunk.values, count, head_dim, ws.state.values + (long)row * head_dim, keeps, adds);
}

template <class T>
static void attend_chunk(const Workspace<T>& ws, const Chunk& chunk, const Chunk* next, int rows, int window, int head_dim,
                         const Scaling& scaling) {
    for (int row = 0; row < rows; row += R_MAX) {
        switch (min_of(R_MAX, rows - row)) {
#define OE_CASE(R) \
    case R: attend_rows<T, (R <= R_MAX ? R : 1)>(ws, chunk, row ? nullptr : next, row, window, head_dim, scaling); break;
            OE_CASE(1) OE_CASE(2) OE_CASE(3) OE_CASE(4) OE_CASE(5) OE_CASE(6) OE_CASE(7) OE_CASE(8)
#undef OE_CASE
        }
    }
}

// ---- rotation and the cache ----

// x [head_dim] as floats, its first rotary_dim elements rotated if there are angles.
template <class Stored>
OE_INLINE void rotate(const Stored* x, const float* cos, const float* sin, int rotary_dim, int head_dim, float* out) {
    for (int d = 0; d < head_dim; d++) out[d] = widen(x[d]);
    if (!cos) return;
    const int half = rotary_dim / 2;
    for (int d = 0; d < half; d++) {
        float a = out[d], b = out[d + half];
        out[d] = a * cos[d] + b * sin[d];
        out[d + half] = b * cos[d + half] + a * sin[d + half];
    }
}

// Where the cache keeps a tile of a head: the index of its first unit.
OE_INLINE long tile_at(const AttentionStep& step, long block, int offset, int head, int unit) {
    const unsigned tiles = unsigned(step.block_size) / TILE, tile = unsigned(offset) / TILE;
    return ((block * tiles + tile) * step.num_kv_heads + head) * (TILE * step.head_dim / unit);
}

template <class T>
static void write_token(const AttentionStep& step, const AttentionLayer& layer, int token, int head) {
    typedef typename T::Stored Stored;
    constexpr int P = T::PACKED;
    const int head_dim = step.head_dim;
    const long slot = step.slots[token], block = slot / step.block_size;
    const int offset = int(slot - block * step.block_size), index = offset % TILE;
    const long at = tile_at(step, block, offset, head, 1);  // in elements
    const long angle = (long)token * layer.rotary_dim;
    float key[HEAD_DIM_MAX];
    rotate((const Stored*)layer.k + (long)token * layer.k_stride + head * head_dim, layer.cos ? layer.cos + angle : nullptr,
           layer.sin + angle, layer.rotary_dim, head_dim, key);
    Stored* keys = (Stored*)layer.keys + at + index * P;
    for (int d = 0; d < head_dim; d += P)
        for (int e = 0; e < P; e++) put(keys + d * TILE + e, key[d + e]);
    const Stored* value = (const Stored*)layer.v + (long)token * layer.v_stride + head * head_dim;
    Stored* values = (Stored*)layer.values + at + (index / P) * head_dim * P + index % P;
    for (int d = 0; d < head_dim; d++) values[d * P] = value[d];
}

// ---- items ----

// Keys of a chunk for one query that sees `keys` of them: enough chunks to share out, few enough to merge.
OE_INLINE int chunk_of(int keys) {
    int chunk = up_to((keys + 7) / 8, 64);
    return chunk < CHUNK_MAX ? chunk : CHUNK_MAX;
}

// First key that a query at `position` sees, rounded down.
OE_INLINE int first_key(int position, int window, int multiple) {
    return window ? max_of(0, position - window + 1) / multiple * multiple : 0;
}

template <class T>
static Workspace<T> workspace_in(char* scratch, int rows, int head_dim) {
    Workspace<T> ws;
    ws.positions = (int*)scratch;
    ws.state.max = (float*)(ws.positions + rows);
    ws.state.sum = ws.state.max + rows + LANES;
    ws.state.values = ws.state.sum + rows + LANES;
    ws.scores = ws.state.values + (long)rows * head_dim;
    ws.p = (typename T::Factor*)(ws.scores + R_MAX * P_STRIDE);
    ws.q = (typename T::Factor*)((float*)ws.p + R_MAX * P_STRIDE);
    return ws;
}

OE_INLINE int rows_of_items(const AttentionStep& step) {
    const int group = step.num_heads / step.num_kv_heads;
    return max_of(1, ROWS / group) * group;
}

static int64_t scratch_floats(const AttentionStep& step) {
    const int64_t rows = rows_of_items(step);
    return up_to(int(rows + 2 * (rows + LANES) + rows * (step.head_dim + Q_STRIDE) + 2 * R_MAX * P_STRIDE), 1024);
}

OE_INLINE int64_t partial_floats(const AttentionStep& step) {
    const int group = step.num_heads / step.num_kv_heads;
    return up_to(2 * (group + LANES) + group * step.head_dim, 16);
}

OE_INLINE State partial_at(const AttentionStep& step, float* partials, int index) {
    const int group = step.num_heads / step.num_kv_heads;
    float* at = partials + index * partial_floats(step);
    return {at, at + group + LANES, at + 2 * (group + LANES)};
}

static void clear(const State& state, int rows, int head_dim) {
    for (int r = 0; r < rows + LANES; r++) state.max[r] = -__builtin_inff(), state.sum[r] = 0.0f;
    memset(state.values, 0, sizeof(float) * rows * head_dim);
}

template <class Stored>
static void finish(const State& state, Stored* out, int rows, int head_dim) {
    for (int r = 0; r < rows; r++) {
        const float factor = 1.0f / state.sum[r];
        for (int d = 0; d < head_dim; d += LANES)
            store(out + (long)r * head_dim + d, load(state.values + (long)r * head_dim + d) * factor);
    }
}

// What an item reads: keys [begin, end) in chunks of `size`, for queries from `position` on.
struct Span {
    int position, begin, end, size;
};

static Span span_of(const AttentionStep& step, const AttentionPlan& plan, const AttentionItem& item) {
    const int query_len = step.query_starts[item.seq + 1] - step.query_starts[item.seq];
    const int position = step.context_lens[item.seq] - query_len + item.token;
    Span span = {position, first_key(position, plan.window, query_len == 1 ? TILE : PREFILL_CHUNK), position + item.num_tokens,
                 PREFILL_CHUNK};
    if (query_len == 1) span.size = chunk_of(span.end - span.begin);
    if (item.chunk >= 0) {
        span.begin += item.chunk * span.size;
        span.end = min_of(span.end, span.begin + span.size);
    }
    return span;
}

// The chunk of `span` that begins at `base`.
template <class T>
static void list(const AttentionStep& step, const AttentionLayer& layer, const AttentionItem& item, const Span& span, int base,
                 Chunk& chunk) {
    chunk.base = base;
    chunk.count = min_of(span.size, span.end - base);
    const int32_t* block = step.block_tables + (long)item.seq * step.table_stride + base / step.block_size;
    int offset = base % step.block_size;
    for (int i = 0; i * TILE < chunk.count; i++) {
        const long tile = tile_at(step, *block, offset, item.head, T::PACKED);
        chunk.keys[i] = (const uint32_t*)layer.keys + tile;
        chunk.values[i] = (const uint32_t*)layer.values + tile;
        offset += TILE;
        if (offset == step.block_size) offset = 0, block++;
    }
}

template <class T>
static void load_queries(const AttentionStep& step, const AttentionLayer& layer, const AttentionItem& item, const Span& span,
                         int token, const Workspace<T>& ws) {
    const int head_dim = step.head_dim, group = step.num_heads / step.num_kv_heads;
    for (int i = 0, row = 0; i < item.num_tokens; i++)
        for (int g = 0; g < group; g++, row++) {
            float query[HEAD_DIM_MAX];
            const long angle = (long)(token + i) * layer.rotary_dim;
            rotate((const typename T::Stored*)layer.q + (long)(token + i) * layer.q_stride + (item.head * group + g) * head_dim,
                   layer.cos ? layer.cos + angle : nullptr, layer.sin + angle, layer.rotary_dim, head_dim, query);
            for (int d = 0; d < head_dim; d += LANES) store(ws.q + (long)row * Q_STRIDE + d, load(query + d));
            ws.positions[row] = span.position + i;
        }
}

// Attend item `index`; the first chunk of the one after it is fetched meanwhile.
template <class T>
static void attend_item(const AttentionStep& step, const AttentionPlan& plan, const AttentionLayer& layer, int index,
                        char* scratch, float* partials) {
    typedef typename T::Stored Stored;
    const AttentionItem& item = plan.items[index];
    const int head_dim = step.head_dim, group = step.num_heads / step.num_kv_heads, rows = item.num_tokens * group;
    const int token = step.query_starts[item.seq] + item.token;
    const Span span = span_of(step, plan, item);
    Workspace<T> ws = workspace_in<T>(scratch, rows_of_items(step), head_dim);
    if (item.chunk >= 0) ws.state = partial_at(step, partials, item.partial);
    clear(ws.state, rows, head_dim);
    load_queries(step, layer, item, span, token, ws);
    const Scaling scaling = layer.softcap != 0.0f ? Scaling{2 * LOG2_E * layer.scale / layer.softcap, LOG2_E * layer.softcap}
                                                  : Scaling{LOG2_E * layer.scale, 0.0f};
    Chunk chunks[2];
    int now = 0;
    list<T>(step, layer, item, span, span.begin, chunks[0]);
    for (int base = span.begin; base < span.end; base += span.size, now ^= 1) {
        const bool is_last = base + span.size >= span.end, has_next = !is_last || index + 1 < plan.num_items;
        if (!is_last) {
            list<T>(step, layer, item, span, base + span.size, chunks[now ^ 1]);
        } else if (has_next) {
            const AttentionItem& after = plan.items[index + 1];
            const Span next = span_of(step, plan, after);
            list<T>(step, layer, after, next, next.begin, chunks[now ^ 1]);
        }
        attend_chunk(ws, chunks[now], has_next ? &chunks[now ^ 1] : nullptr, rows, plan.window, head_dim, scaling);
    }
    if (item.chunk >= 0) return;
    for (int i = 0; i < item.num_tokens; i++) {
        const State state = {ws.state.max, ws.state.sum + i * group, ws.state.values + (long)i * group * head_dim};
        Stored* out = (Stored*)layer.out + ((long)(token + i) * step.num_heads + item.head * group) * head_dim;
        finish(state, out, group, head_dim);
    }
}

template <class T>
static void merge_chunks(const AttentionStep& step, const AttentionLayer& layer, const AttentionMerge& merged, float* partials) {
    const int head_dim = step.head_dim, group = step.num_heads / step.num_kv_heads;
    const State total = partial_at(step, partials, merged.partial);
    for (int i = 1; i < merged.num_partials; i++) {
        const State next = partial_at(step, partials, merged.partial + i);
        for (int row = 0; row < group; row += LANES) {
            const int rows = min_of(LANES, group - row);
            vf keep, add;
            merge(total.max + row, total.sum + row, load(next.max + row), load(next.sum + row), rows, keep, add);
            for (int r = 0; r < rows; r++)
                for (int d = 0; d < head_dim; d += LANES) {
                    const long at = (long)(row + r) * head_dim + d;
                    store(total.values + at, load(total.values + at) * keep[r] + load(next.values + at) * add[r]);
                }
        }
    }
    typedef typename T::Stored Stored;
    const long token = step.query_starts[merged.seq];
    finish(total, (Stored*)layer.out + (token * step.num_heads + merged.head * group) * head_dim, group, head_dim);
}

template <class T>
static void run(const AttentionStep& step, const AttentionPlan& plan, const AttentionLayer& layer, char* workspace) {
    float* partials = (float*)(workspace + plan.scratch_bytes * step.num_threads);
#pragma omp parallel num_threads(step.num_threads) if (!plan.is_small)
    {
#ifdef _OPENMP
        char* scratch = workspace + plan.scratch_bytes * omp_get_thread_num();
#else
        char* scratch = workspace;
#endif
#pragma omp for schedule(static)
        for (int token = 0; token < step.num_tokens; token++)
            for (int head = 0; head < step.num_kv_heads; head++) write_token<T>(step, layer, token, head);
#pragma omp for schedule(dynamic, plan.num_together)
        for (int i = 0; i < plan.num_items; i++) attend_item<T>(step, plan, layer, i, scratch, partials);
        if (plan.num_merges) {
#pragma omp for schedule(static)
            for (int i = 0; i < plan.num_merges; i++) merge_chunks<T>(step, layer, plan.merges[i], partials);
        }
    }
}

}  // namespace

// Count the work of one step's layers of a window and, where there is room for them, list its items.
OE_EXPORT(attention_plan)(const AttentionStep* batch, AttentionPlan* plan) {
    const AttentionStep& step = *batch;
    const int group = step.num_heads / step.num_kv_heads, tokens = max_of(1, ROWS / group);
    int num_items = 0, num_merges = 0, num_partials = 0;
    int64_t cost = 0;  // keys read for all heads
    for (int seq = 0; seq < step.num_seqs; seq++) {
        const int query_len = step.query_starts[seq + 1] - step.query_starts[seq], end = step.context_lens[seq];
        const int begin = first_key(end - query_len, plan->window, TILE);
        cost += (int64_t)(end - begin) * (query_len + tokens - 1) / tokens * step.num_kv_heads;
    }
    // Long prompts first, and of each the last queries first, so that no thread starts on a large item at the end.
    for (int seq = step.num_seqs - 1; seq >= 0; seq--) {
        const int query_len = step.query_starts[seq + 1] - step.query_starts[seq], end = step.context_lens[seq];
        const int begin = first_key(end - 1, plan->window, TILE), size = chunk_of(end - begin);
        // One query is split if its keys are more than half of what a thread is to read.
        const bool is_split = query_len == 1 && end - begin > size && (int64_t)(end - begin) * step.num_threads * 2 > cost;
        const int chunks = is_split ? (end - begin + size - 1) / size : 0;
        for (int token = (query_len - 1) / tokens * tokens; token >= 0; token -= tokens)
            for (int head = 0; head < step.num_kv_heads; head++) {
                if (is_split && plan->items) plan->merges[num_merges] = {seq, head, num_partials, chunks};
                for (int chunk = is_split ? 0 : -1; chunk < chunks; chunk++, num_items++)
                    if (plan->items)
                        plan->items[num_items] = {seq, token, min_of(tokens, query_len - token), head, chunk, num_partials + chunk};
                num_merges += is_split;
                num_partials += chunks;
            }
    }
    plan->num_items = num_items;
    // The heads of a sequence lie side by side in the cache.
    plan->num_together = num_items >= 16 * step.num_threads * step.num_kv_heads ? step.num_kv_heads : 1;
    plan->num_merges = num_merges;
    plan->num_partials = num_partials;
    plan->is_small = step.num_threads == 1 || cost * group * step.head_dim < 16384;
    plan->scratch_bytes = scratch_floats(step) * sizeof(float);
    plan->partial_bytes = partial_floats(step) * sizeof(float);
}

// Rotate, write a layer's keys and values to the cache, and attend.
OE_EXPORT(attention)(const AttentionLayer* layer) {
    if (layer->step->is_bfloat16)
        run<Bfloat16>(*layer->step, *layer->plan, *layer, (char*)layer->workspace);
    else
        run<Float32>(*layer->step, *layer->plan, *layer, (char*)layer->workspace);
}
