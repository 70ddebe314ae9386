// Rotation, cache write and causal attention of one layer for a ragged batch over the paged cache.
//
// Cache: tiles of 16 tokens of one KV head, addressed in units of 32 bits, which hold one float or two bfloat16.
//
//     key tile    [head_dim / P][16 tokens] units    P = 1 or 2 dimensions per unit
//     value tile  [16 / P tokens][head_dim] units    P = 1 or 2 tokens per unit
//
// So both products of attention are the same loop, and bfloat16 comes in the pairs that the dot-product instruction
// takes. A block is [num_kv_heads][block_size / 16] tiles.
//
// Work is cut into items: the queries of up to ROWS rows (a row is one query token and one head of the group) of one
// KV head. Keys are taken in chunks; each chunk has its own softmax, and chunks are merged in order. Which keys make
// up a chunk depends on the sequence alone, so results do not depend on the batch, the threads or how work is cut.

#include "attention.h"

#include <stdlib.h>

namespace {

constexpr int TILE = 16;           // tokens
constexpr int ROWS = 96;           // of an item
constexpr int CHUNK_MAX = 512;     // keys
constexpr int PREFILL_CHUNK = 64;  // keys, so that a chunk's keys and values stay in the first-level cache
constexpr int R_MAX = LANES == 16 ? 8 : 4;  // rows of a register block: as many as there are registers for
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

template <class T, int R, int C>
OE_INLINE void multiply(vf (&sum)[R][C], const typename T::Factor* a, int a_stride, const uint32_t* const* b, int b_stride,
                        int steps) {
    for (int s = 0; s < steps; s++) {
        vu column[C];
        for (int c = 0; c < C; c++) column[c] = load_as<vu>(b[c] + (long)s * b_stride);
        for (int r = 0; r < R; r++) T::template step<C>(sum[r], a + r * a_stride + s * T::PACKED, column);
    }
}

// Scores of R rows with `num_tiles` key tiles -> scores[r][16 * num_tiles].
template <class T, int R, int C>
OE_INLINE void score_columns(const typename T::Factor* q, int head_dim, const uint32_t* const* tiles, int first, float* scores,
                             int stride) {
    constexpr int PER_TILE = TILE / LANES;
    const uint32_t* columns[C];
    for (int c = 0; c < C; c++) columns[c] = tiles[(first + c) / PER_TILE] + (first + c) % PER_TILE * LANES;
    vf sum[R][C] = {};
    multiply<T, R, C>(sum, q, head_dim, columns, TILE, head_dim / T::PACKED);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(scores + r * stride + (first + c) * LANES, sum[r][c]);
}

template <class T, int R>
static void score(const typename T::Factor* q, int head_dim, const uint32_t* const* tiles, int num_tiles, float* scores,
                  int stride) {
    constexpr int C = R <= 2 ? 4 : 2;
    int columns = num_tiles * (TILE / LANES), first = 0;
    for (; first + C <= columns; first += C) score_columns<T, R, C>(q, head_dim, tiles, first, scores, stride);
    for (; first < columns; first++) score_columns<T, R, 1>(q, head_dim, tiles, first, scores, stride);
}

// Weighted values of R rows: out[r] = out[r] * keep[r] + (p[r] * values) * add[r], for the first `count` tokens.
template <class T, int R, int C>
OE_INLINE void weigh_columns(const typename T::Factor* p, int p_stride, const uint32_t* const* tiles, int count, int head_dim,
                             int first, float* out, const float* keep, const float* add) {
    vf sum[R][C] = {};
    int token = 0;
    for (; token < count; token += TILE) {
        const uint32_t* columns[C];
        for (int c = 0; c < C; c++) columns[c] = tiles[token / TILE] + (first + c) * LANES;
        int steps = min_of(TILE, count - token) / T::PACKED;
        multiply<T, R, C>(sum, p + token, p_stride, columns, head_dim, steps);
    }
    if (count % T::PACKED) {
        // Half a unit: nobody may have written the other token's value, so it must not be multiplied.
        token = count - 1;
        vu column[C];
        for (int c = 0; c < C; c++) {
            const uint32_t* tile = tiles[token / TILE] + token % TILE / T::PACKED * head_dim;
            column[c] = load_as<vu>(tile + (first + c) * LANES) & 0xffffu;
        }
        for (int r = 0; r < R; r++) T::template step<C>(sum[r], p + r * p_stride + token, column);
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            float* to = out + (long)r * head_dim + (first + c) * LANES;
            store(to, load(to) * keep[r] + sum[r][c] * add[r]);
        }
}

template <class T, int R>
static void weigh(const typename T::Factor* p, int p_stride, const uint32_t* const* tiles, int count, int head_dim, float* out,
                  const float* keep, const float* add) {
    constexpr int C = R <= 4 && LANES == 16 ? 4 : 2;
    int columns = head_dim / LANES, first = 0;
    for (; first + C <= columns; first += C)
        weigh_columns<T, R, C>(p, p_stride, tiles, count, head_dim, first, out, keep, add);
    if constexpr (C == 4)
        for (; first + 2 <= columns; first += 2)
            weigh_columns<T, R, 2>(p, p_stride, tiles, count, head_dim, first, out, keep, add);
    for (; first < columns; first++)
        weigh_columns<T, R, 1>(p, p_stride, tiles, count, head_dim, first, out, keep, add);
}
