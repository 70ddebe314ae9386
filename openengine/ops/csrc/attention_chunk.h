// A block of rows attends a chunk of keys: scores, softmax, weighted values, merged with what earlier chunks gave.
//
// The cache's layout (attention.cpp) makes both products the same loop: a unit of 32 bits per lane, which is one float
// or the pair of bfloat16 that the dot-product instruction takes.

#ifndef OE_ATTENTION_CHUNK_H
#define OE_ATTENTION_CHUNK_H

#include "attention.h"

namespace {

constexpr int TILE = 16;        // tokens
constexpr int CHUNK = 256;      // keys, so that those of a chunk and their values stay close to the core
constexpr int HEAD_DIM_MAX = 256;
// Rows of a register block and vectors of sums: as many as there are registers for.
constexpr int R_MAX = LANES == 16 ? 8 : 4, MAX_SUMS = LANES == 16 ? 16 : 8;
// Elements between rows of the workspace: constants, so that all rows have one base, and no power of two, so that they
// do not compete for the same lines of the cache.
constexpr int Q_STRIDE = HEAD_DIM_MAX + 16, P_STRIDE = CHUNK + 16;

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

constexpr int LINE = 16;  // units of a line of the cache

// `ahead`, unless null, are SEGMENTS tiles that will be read next. To ask for all of them at once would hold up what
// follows, so they are fetched as fast as `b` is used, from `offset` on; line by line, for the hardware foresees where
// such a sequence leads and then keeps more lines on their way than it can be asked for.
template <class T, int A_STRIDE, int SEGMENTS, int R, int C>
OE_INLINE void multiply(vf (&sum)[R][C], const typename T::Factor* a, const uint32_t* const* b,
                        const uint32_t* const* ahead, int offset, int b_stride, int steps) {
    constexpr int LINES = C * LANES < LINE ? 1 : C * LANES / LINE;
    const int part = steps / SEGMENTS;  // whole, for steps are multiples of 8
    for (int segment = 0; segment < SEGMENTS; segment++) {
        const uint32_t* at = ahead ? ahead[segment] + offset : nullptr;
        for (int s = segment * part; s < (segment + 1) * part; s++) {
            vu column[C];
            for (int c = 0; c < C; c++) column[c] = load_as<vu>(b[c] + int64_t(s) * b_stride);
            if (at)
                for (int l = 0; l < LINES; l++, at += LINE) fetch(at);
            for (int r = 0; r < R; r++) T::template step<C>(sum[r], a + r * A_STRIDE + s * T::PACKED, column);
        }
    }
}

// Scores of R rows with `num_tiles` key tiles -> scores[r][16 * num_tiles].
template <class T, int R, int C>
OE_INLINE void score_columns(const typename T::Factor* q, int head_dim, const uint32_t* const* tiles,
                             const uint32_t* const* next, int first, float* scores) {
    constexpr int PER_TILE = TILE / LANES, SEGMENTS = C < PER_TILE ? 1 : C / PER_TILE;
    const uint32_t* columns[C];
    for (int c = 0; c < C; c++) columns[c] = tiles[(first + c) / PER_TILE] + (first + c) % PER_TILE * LANES;
    vf sum[R][C] = {};
    if (next) next += first / PER_TILE;
    multiply<T, Q_STRIDE, SEGMENTS>(sum, q, columns, next, 0, TILE, head_dim / T::PACKED);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(scores + r * P_STRIDE + (first + c) * LANES, sum[r][c]);
}

template <class T, int R>
static void score(const typename T::Factor* q, int head_dim, const uint32_t* const* tiles,
                  const uint32_t* const* next, int num_tiles, float* scores) {
    constexpr int C = R * 4 <= MAX_SUMS ? 4 : 2;
    int columns = num_tiles * (TILE / LANES), first = 0;
    for (; first + C <= columns; first += C) score_columns<T, R, C>(q, head_dim, tiles, next, first, scores);
    if constexpr (C == 4)
        for (; first + 2 <= columns; first += 2) score_columns<T, R, 2>(q, head_dim, tiles, next, first, scores);
    for (; first < columns; first++) score_columns<T, R, 1>(q, head_dim, tiles, next, first, scores);
}

// Weighted values of R rows: out[r] = out[r] * keep[r] + (p[r] * values) * add[r], for the first `count` tokens.
template <class T, int R, int C>
OE_INLINE void weigh_columns(const typename T::Factor* p, const uint32_t* const* tiles, const uint32_t* const* next,
                             int count, int head_dim, int first, float* out, const float* keep, const float* add) {
    // As many units of the next tiles are fetched as are used: by now `first` columns of all tiles.
    constexpr int TILE_ROWS = TILE / T::PACKED;
    const int used = first * LANES * TILE_ROWS * ((count + TILE - 1) / TILE), tile_units = TILE_ROWS * head_dim;
    int offset = used % tile_units;
    if (next) next += used / tile_units;
    vf sum[R][C] = {};
    int token = 0;
    for (; token < count; token += TILE, offset += C * LANES * TILE_ROWS) {
        if (next && offset >= tile_units) next++, offset -= tile_units;
        const uint32_t* columns[C];
        for (int c = 0; c < C; c++) columns[c] = tiles[token / TILE] + (first + c) * LANES;
        int steps = min_of(TILE, count - token) / T::PACKED;
        multiply<T, P_STRIDE, 1>(sum, p + token, columns, next, offset, head_dim, steps);
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
            float* to = out + int64_t(r) * head_dim + (first + c) * LANES;
            store(to, load(to) * keep[r] + sum[r][c] * add[r]);
        }
}

template <class T, int R>
static void weigh(const typename T::Factor* p, const uint32_t* const* tiles, const uint32_t* const* next, int count,
                  int head_dim, float* out, const float* keep, const float* add) {
    constexpr int C = R * 4 <= MAX_SUMS ? 4 : 2;
    int columns = head_dim / LANES, first = 0;
    for (; first + C <= columns; first += C)
        weigh_columns<T, R, C>(p, tiles, next, count, head_dim, first, out, keep, add);
    if constexpr (C == 4)
        for (; first + 2 <= columns; first += 2)
            weigh_columns<T, R, 2>(p, tiles, next, count, head_dim, first, out, keep, add);
    for (; first < columns; first++)
        weigh_columns<T, R, 1>(p, tiles, next, count, head_dim, first, out, keep, add);
}

// ---- softmax ----

// What the rows of an item have come to so far: 2^(score - max) summed, and the values weighted by it.
struct State {
    float *max, *sum, *values;  // [rows], [rows], [rows, head_dim]
};

// Merge what other keys gave `rows` rows from `row` on into their maxima and sums; what the weighted values of both
// sides are to be multiplied by.
OE_INLINE void merge(const State& state, int row, int rows, vf new_max, vf new_sum, vf& keep, vf& add) {
    const vf old_max = load(state.max + row), old_sum = load(state.sum + row);
    const vf both = larger(old_max, new_max);
    const vf base = both == splat(-__builtin_inff()) ? vf{} : both;
    keep = exp2_of(old_max - base);
    add = exp2_of(new_max - base);
    const vi valid = iota() < rows;
    store(state.max + row, valid ? both : old_max);
    store(state.sum + row, valid ? old_sum * keep + new_sum * add : old_sum);
}

// Hide the scores of one row outside [first, last) of [0, width).
OE_INLINE void hide(float* scores, int width, int first, int last) {
    const vf none = splat(-__builtin_inff());
    for (int i = 0; i < first; i += LANES) store(scores + i, iota() + i < first ? none : load(scores + i));
    for (int i = last / LANES * LANES; i < width; i += LANES)
        store(scores + i, iota() + i < last ? load(scores + i) : none);
}

// softcap * tanh(score * scale / softcap), by tanh x = 1 - 2 / (e^2x + 1).
OE_INLINE void cap(float* scores, int width, float scale, float softcap) {
    for (int i = 0; i < width; i += LANES) {
        vf e = exp_of(load(scores + i) * (2 * scale / softcap));
        store(scores + i, softcap - 2.0f * softcap / (e + 1.0f));
    }
}

// Softmax numerators of one row, 2^(score * scale - max), with their greatest exponent and their sum.
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
    const uint32_t* keys[CHUNK / TILE];
    const uint32_t* values[CHUNK / TILE];
    int base;   // position of the first key
    int count;  // keys
};

template <class T>
struct Workspace {
    int* positions;         // [rows], of the queries
    typename T::Factor* q;  // [rows, Q_STRIDE]
    State state;
    float* scores;          // [R_MAX, P_STRIDE]
    typename T::Factor* p;  // [R_MAX, P_STRIDE]
};

// Which scores are seen, and what becomes of them.
struct Masking {
    int window;            // 0: all before
    float scale, softcap;  // softcap 0: none
};

// Attend R rows from `row` on, and fetch the next chunk meanwhile, unless it is null.
template <class T, int R>
static void attend_rows(const Workspace<T>& ws, const Chunk& chunk, const Chunk* next, int row, int head_dim,
                        const Masking& masking) {
    const int *positions = ws.positions + row, window = masking.window;
    const int count = min_of(chunk.count, positions[R - 1] + 1 - chunk.base);
    if (count <= 0 || (window && positions[0] - window + 1 >= chunk.base + chunk.count)) return;
    const int num_tiles = (count + TILE - 1) / TILE, width = num_tiles * TILE;
    const bool is_capped = masking.softcap != 0.0f;
    score<T, R>(ws.q + int64_t(row) * Q_STRIDE, head_dim, chunk.keys, next ? next->keys : nullptr, num_tiles, ws.scores);
    float maxima[LANES], sums[LANES];
    for (int r = 0; r < R; r++) {
        float* scores = ws.scores + r * P_STRIDE;
        const int last = positions[r] + 1 - chunk.base, first = window ? last - window : 0;
        if (is_capped) cap(scores, width, masking.scale, masking.softcap);
        if (first > 0 || last < width) hide(scores, width, min_of(first, width), max_of(0, min_of(last, width)));
        const float scale = is_capped ? LOG2_E : LOG2_E * masking.scale;
        exponentiate(scores, ws.p + r * P_STRIDE, width, scale, maxima[r], sums[r]);
    }
    vf keep, add;
    merge(ws.state, row, R, load(maxima), load(sums), keep, add);
    float keeps[LANES], adds[LANES];
    store(keeps, keep);
    store(adds, add);
    weigh<T, R>(ws.p, chunk.values, next ? next->values : nullptr, count, head_dim,
                ws.state.values + int64_t(row) * head_dim, keeps, adds);
}

template <class T>
static void attend_chunk(const Workspace<T>& ws, const Chunk& chunk, const Chunk* next, int rows, int head_dim,
                         const Masking& masking) {
    for (int row = 0; row < rows; row += R_MAX, next = nullptr) {
        switch (min_of(R_MAX, rows - row)) {
#define OE_CASE(R) \
    case R: attend_rows<T, (R <= R_MAX ? R : 1)>(ws, chunk, next, row, head_dim, masking); break;
            OE_CASE(1) OE_CASE(2) OE_CASE(3) OE_CASE(4) OE_CASE(5) OE_CASE(6) OE_CASE(7) OE_CASE(8)
#undef OE_CASE
        }
    }
}

}  // namespace

#endif
