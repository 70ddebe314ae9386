// Attention in which every token of an item sees every other, or those in a window around it: rotation, scores,
// softmax and weighted values of one layer for a ragged batch, read straight from the rows of the projection.
//
// Work is cut into units: a block of queries of one item and one head. A unit takes the item's keys in chunks, and its
// queries in tiles whose lanes are queries, so that maxima and sums need no step across lanes:
//
//     scores [keys][TILE]       += keys [keys][head_dim / P]    x  queries [head_dim / P][TILE]
//     output [TILE][head_dim]   += weights [keys / P][TILE]     x  values [keys / P][head_dim]
//
// in units of 32 bits, which hold P elements: one float, or the two bfloat16 that the dot-product instruction takes.
// Chunks and tiles begin at multiples of their sizes in the item, so that a result depends neither on the batch, nor on
// the threads, nor on how work is cut.

#include "rows.h"

#define OE_UNROLL _Pragma("GCC unroll 16")  // keeps arrays of vectors in registers

namespace {

constexpr int TILE = 2 * LANES;  // queries
constexpr int CHUNK = 256;       // keys, so that a tile's scores stay close to the core
constexpr int BLOCK = 256;       // queries of a unit, at most
constexpr int HEAD_DIM_MAX = 256;
constexpr int KEYS = LANES == 16 ? 8 : 4, ROWS = KEYS;  // of a register block two vectors wide: half of the registers
constexpr int64_t SMALL = 16384;                        // products below which waking the threads costs more

// Queries [first, first + count) of the item whose first row is `start`. `first` is a multiple of TILE.
struct EncoderBlock {
    int32_t start, length, first, count;
};

// Mirrored by `_Call` in encoder_attention_native.py.
struct EncoderCall {
    const EncoderBlock* blocks;
    const void *q, *k, *v;
    void* out;               // [T, num_heads * head_dim]
    const float *cos, *sin;  // [T, rotary_dim], or null
    const float* bias;       // [num_heads, bias_stride], or null: entry `bias_middle + i - j` for query i and key j
    char* workspace;
    int64_t q_stride, k_stride, v_stride, bias_stride;  // elements
    int64_t scratch_bytes;                              // of the workspace, per thread
    int32_t num_blocks, num_heads, head_dim, rotary_dim, bias_middle;
    int32_t window;  // -1: none
    int32_t is_bfloat16, num_threads;
    float scale;  // positive
};

OE_INLINE vi splat_unit(const uint32_t* at) { return vi{} + load_as<int32_t>(at); }

// ---- what a unit of 32 bits holds ----

struct Singles {
    typedef float Item;
    static constexpr int PACKED = 1;
    static constexpr bool ROUGH = false;
    OE_INLINE vf dot(vf acc, vi a, vi b) { return acc + bits_as<vf>(a) * bits_as<vf>(b); }
    OE_INLINE void pack(uint32_t* to, const vf* parts) { store_as(to, parts[0]); }
};

#if defined(__AVX512BF16__)
struct Pairs {
    typedef bf16 Item;
    static constexpr int PACKED = 2;
    static constexpr bool ROUGH = true;
    OE_INLINE vf dot(vf acc, vi a, vi b) {
        return bits_as<vf>(_mm512_dpbf16_ps(bits_as<__m512>(acc), bits_as<__m512bh>(a), bits_as<__m512bh>(b)));
    }
    OE_INLINE void pack(uint32_t* to, const vf* parts) {
        const __m512i order = _mm512_or_si512(
            bits_as<__m512i>(iota()), bits_as<__m512i>((iota() + 16) << 16));  // words 0, 16, 1, 17, …
        const auto both = _mm512_cvtne2ps_pbh(bits_as<__m512>(parts[1]), bits_as<__m512>(parts[0]));
        store_as(to, _mm512_permutexvar_epi16(order, bits_as<__m512i>(both)));
    }
};
#else
typedef Singles Pairs;
#endif

// ---- memory of a thread ----

struct Scratch {
    uint32_t *keys, *values, *queries, *rows;
    float *scores, *state, *max, *sum;
    int steps, width;  // units of a head; its elements, in whole vectors
};

template <class T>
Scratch scratch_in(char* at, int head_dim, int64_t* bytes = nullptr) {
    Scratch s;
    s.width = up_to(head_dim, LANES);
    s.steps = (head_dim + T::PACKED - 1) / T::PACKED;
    char* const begin = at;
    auto take = [&at](int64_t units) {
        char* taken = at;
        at += (units * 4 + 127) / 64 * 64;  // no line is shared
        return taken;
    };
    s.keys = (uint32_t*)take(CHUNK * s.width / T::PACKED);
    s.values = (uint32_t*)take(CHUNK / T::PACKED * s.width);
    s.queries = (uint32_t*)take(BLOCK * s.steps + LANES * TILE);
    s.rows = (uint32_t*)take(LANES * up_to(s.steps, LANES));
    s.scores = (float*)take(CHUNK * TILE);
    s.state = (float*)take(BLOCK * s.width);
    s.max = (float*)take(BLOCK);
    s.sum = (float*)take(BLOCK);
    if (bytes) *bytes = at - begin;
    return s;
}

// ---- packing ----

OE_INLINE void rotate(const EncoderCall& call, int64_t token, float* x) {
    const int half = call.rotary_dim / 2;
    const float *cos = call.cos + token * call.rotary_dim, *sin = call.sin + token * call.rotary_dim;
    int d = 0;
    for (; d + LANES <= half; d += LANES) {
        const vf a = load(x + d), b = load(x + d + half);
        store(x + d, a * load(cos + d) + b * load(sin + d));
        store(x + d + half, b * load(cos + d + half) + a * load(sin + d + half));
    }
    for (; d < half; d++) {
        const float a = x[d], b = x[d + half];
        x[d] = a * cos[d] + b * sin[d];
        x[d + half] = b * cos[d + half] + a * sin[d + half];
    }
}

// Ask for what the next head reads of a row: the rows of one head lie too far apart for the hardware to foresee.
template <class Stored>
OE_INLINE void fetch_next(const Stored* x, int head_dim) {
    for (int d = 0; d < head_dim; d += 64 / sizeof(Stored)) fetch(x + head_dim + d);
}

// A head of one token, rotated if there are angles, with zeros up to whole vectors.
template <class T, class Stored>
OE_INLINE void pack_row(const EncoderCall& call, const Stored* x, int64_t token, uint32_t* to) {
    typedef typename T::Item Item;
    const int head_dim = call.head_dim;
    Item* y = (Item*)to;
    fetch_next(x, head_dim);
    if (call.cos) {
        float wide[HEAD_DIM_MAX + LANES];
        for (int d = 0; d < head_dim; d += LANES) store(wide + d, load_some(x + d, head_dim - d));
        rotate(call, token, wide);
        for (int d = 0; d < head_dim; d += LANES) store(y + d, load(wide + d));
        return;
    }
    int d = 0;
    if (sizeof(Item) == sizeof(Stored))
        for (constexpr int WHOLE = LANES * T::PACKED; d + WHOLE <= head_dim; d += WHOLE)
            store_as(y + d, load_as<vi>(x + d));
    for (; d < head_dim; d += LANES) store(y + d, load_some(x + d, head_dim - d));
}

// Turn a square of units: row r, column c -> row c, column r.
OE_INLINE void transpose(vi (&rows)[LANES]) {
#if OE_LANES == 4
    vi turned[LANES] = {};
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) turned[j][i] = rows[i][j];
    for (int i = 0; i < LANES; i++) rows[i] = turned[i];
#else
    OE_UNROLL for (int size = 1; size < LANES; size *= 2)  // swap the off-diagonal squares of this size
        OE_UNROLL for (int i = 0; i < LANES; i++) {
            if (i & size) continue;
            const vi a = rows[i], b = rows[i + size], lane = iota();
#if OE_LANES == 16
            const vi low = (lane & size) ? lane - size + 16 : lane, high = (lane & size) ? lane + 16 : lane + size;
            const __m512i x = bits_as<__m512i>(a), y = bits_as<__m512i>(b);
            rows[i] = bits_as<vi>(_mm512_permutex2var_epi32(x, bits_as<__m512i>(low), y));
            rows[i + size] = bits_as<vi>(_mm512_permutex2var_epi32(x, bits_as<__m512i>(high), y));
#else
            const __m256i swapped = bits_as<__m256i>(lane ^ size);
            const vi x = bits_as<vi>(_mm256_permutevar8x32_epi32(bits_as<__m256i>(a), swapped));
            const vi y = bits_as<vi>(_mm256_permutevar8x32_epi32(bits_as<__m256i>(b), swapped));
            rows[i] = (lane & size) ? y : a;
            rows[i + size] = (lane & size) ? b : x;
#endif
        }
#endif
}

// Queries [first, first + count) as [tile][step][TILE]; lanes without a query get zeros.
template <class T, class Stored>
void pack_queries(const EncoderCall& call, const EncoderBlock& block, int head, const Scratch& s) {
    const int stride = up_to(s.steps, LANES);
    for (int first = 0; first < block.count; first += LANES) {
        uint32_t* to = s.queries + first / TILE * TILE * s.steps + first % TILE;
        const int count = min_of(LANES, block.count - first);
        for (int r = 0; r < count; r++) {
            const int64_t token = block.start + block.first + first + r;
            pack_row<T>(call, (const Stored*)call.q + token * call.q_stride + head * call.head_dim, token,
                        s.rows + r * stride);
        }
        memset(s.rows + count * stride, 0, (LANES - count) * stride * 4);
        for (int step = 0; step < s.steps; step += LANES) {
            vi square[LANES];
            OE_UNROLL for (int r = 0; r < LANES; r++) square[r] = load_as<vi>(s.rows + r * stride + step);
            transpose(square);
            // The last square may write past its tile, where the next is yet to come.
            OE_UNROLL for (int i = 0; i < LANES; i++) store_as(to + (step + i) * TILE, square[i]);
        }
    }
}

// Keys and values [begin, end) of the item, at their places in the chunk, with zeros up to whole register blocks.
template <class T, class Stored>
void pack_chunk(const EncoderCall& call, int64_t start, int begin, int end, int head, const Scratch& s) {
    constexpr int P = T::PACKED;
    const int key_stride = s.width / P, padded = up_to(end, KEYS), at = head * call.head_dim;
    for (int j = begin; j < end; j++)
        pack_row<T>(call, (const Stored*)call.k + (start + j) * call.k_stride + at, start + j,
                    s.keys + j % CHUNK * key_stride);
    for (int j = end; j < padded; j++) memset(s.keys + j % CHUNK * key_stride, 0, key_stride * 4);
    for (int j = begin; j < padded; j += P) {
        const Stored* v = (const Stored*)call.v + (start + j) * call.v_stride + at;
        uint32_t* to = s.values + j % CHUNK / P * s.width;
        for (int p = 0; p < P && j < end; p++) fetch_next(v + p * call.v_stride, call.head_dim);
        for (int d = 0; d < s.width; d += LANES) {
            const int left = call.head_dim - d;
            const vf a = j < end ? load_some(v + d, left) : vf{};
            if (P == 1) {
                store_as(to + d, a);
            } else {
                const vf b = j + 1 < end ? load_some(v + call.v_stride + d, left) : vf{};
                store_as(to + d, bits_as<vu>(a) >> 16 | bits_as<vu>(b));
            }
        }
    }
}

// ---- a tile of queries and a chunk of keys ----

// Which keys of the chunk a tile sees, from the item's begin: [begin, end), begin a multiple of KEYS.
struct Span {
    int query, begin, end;  // query: the tile's first
    bool is_first, is_last;
};

// Add the bias to KEYS x VECS scores, hide what the window or the span leaves out, and have the maxima join `highest`.
template <int VECS>
static void adjust(const EncoderCall& call, const float* bias, const Span& span, int key, float* scores,
                   vf (&highest)[VECS]) {
    const vf hidden = splat(-__builtin_inff());
    for (int j = key; j < key + KEYS; j++, scores += TILE)
        for (int v = 0; v < VECS; v++) {
            const int query = span.query + v * LANES;
            vf score = load(scores + v * LANES);
            if (bias) score = score * call.scale + load(bias + query - j);
            const vi distance = iota() + (query - j);
            if (call.window >= 0) score = (distance <= call.window) & (distance >= -call.window) ? score : hidden;
            if (j >= span.end) score = hidden;
            store(scores + v * LANES, score);
            highest[v] = larger(score, highest[v]);
        }
}

// Scores of KEYS keys from `key` on, of which some may be hidden; their maxima join `highest`.
template <class T, int VECS>
OE_INLINE void score_keys(const EncoderCall& call, const Scratch& s, const uint32_t* queries, const float* bias,
                          const Span& span, int key, vf (&highest)[VECS]) {
    const int stride = s.width / T::PACKED, steps = s.steps;
    const uint32_t* keys = s.keys + key % CHUNK * stride;
    vf sum[KEYS][VECS] = {};
    for (int step = 0; step < steps; step++) {
        vi q[VECS];
        OE_UNROLL for (int v = 0; v < VECS; v++) q[v] = load_as<vi>(queries + step * TILE + v * LANES);
        OE_UNROLL for (int k = 0; k < KEYS; k++) {
            const vi unit = splat_unit(keys + k * stride + step);
            OE_UNROLL for (int v = 0; v < VECS; v++) sum[k][v] = T::dot(sum[k][v], q[v], unit);
        }
    }
    float* scores = s.scores + (key - span.begin) * TILE;
    OE_UNROLL for (int k = 0; k < KEYS; k++)
        OE_UNROLL for (int v = 0; v < VECS; v++) store(scores + k * TILE + v * LANES, sum[k][v]);
    const int window = call.window, last = span.query + VECS * LANES - 1;
    const bool hides = window >= 0 && (key < last - window || key + KEYS - 1 > span.query + window);
    if (bias || hides || key + KEYS > span.end) return adjust<VECS>(call, bias, span, key, scores, highest);
    OE_UNROLL for (int k = 0; k < KEYS; k += 2)
        OE_UNROLL for (int v = 0; v < VECS; v++)
            highest[v] = larger(larger(sum[k][v], sum[k + 1][v]), highest[v]);
}

// Scores become softmax numerators, packed in their place; `keep` is what to multiply earlier sums by.
template <class T, int VECS>
OE_INLINE void exponentiate(float* scores, int count, float scale, const vf (&highest)[VECS], float* max, float* sum,
                            float* keep, bool is_first) {
    constexpr int P = T::PACKED;
    vf base[VECS], total[VECS][P] = {};
    for (int v = 0; v < VECS; v++) {
        const vf before = is_first ? splat(-__builtin_inff()) : load(max + v * LANES);
        const vf now = larger(highest[v] * scale, before);
        base[v] = now == splat(-__builtin_inff()) ? vf{} : now;
        store(max + v * LANES, now);
        store(keep + v * LANES, is_first ? vf{} : exp2_below_one<false>(before - base[v]));
    }
    for (int k = 0; k < count; k += P)
        for (int v = 0; v < VECS; v++) {
            vf e[P];
            for (int p = 0; p < P; p++) {
                e[p] = exp2_below_one<T::ROUGH>(load(scores + (k + p) * TILE + v * LANES) * scale - base[v]);
                total[v][p] += e[p];
            }
            T::pack((uint32_t*)scores + k / P * TILE + v * LANES, e);
        }
    for (int v = 0; v < VECS; v++) {
        vf all = total[v][0];
        if (P == 2) all += total[v][P - 1];
        store(sum + v * LANES, is_first ? all : load(sum + v * LANES) * load(keep + v * LANES) + all);
    }
}

// What becomes of weighted values: they join those of earlier chunks, and the last leave for the output.
template <class Stored>
struct Sink {
    float* state;  // [queries, width]
    int width;
    const float *keep, *inverse;
    bool is_first, is_last;
    Stored* out;
    int64_t out_stride;
    int count, head_dim;
};

// Values weighted for ROWS queries from `row` on and VECS vectors of the head from d on.
template <class T, int VECS, class Stored>
OE_INLINE void weigh(const uint32_t* weights, const uint32_t* values, int steps, int row, int d,
                     const Sink<Stored>& sink) {
    vf sum[ROWS][VECS] = {};
    const uint32_t* w = weights + row;
    const uint32_t* at = values + d;
    for (int step = 0; step < steps; step++, w += TILE, at += sink.width) {
        vi value[VECS];
        OE_UNROLL for (int v = 0; v < VECS; v++) value[v] = load_as<vi>(at + v * LANES);
        OE_UNROLL for (int r = 0; r < ROWS; r++) {
            const vi weight = splat_unit(w + r);
            OE_UNROLL for (int v = 0; v < VECS; v++) sum[r][v] = T::dot(sum[r][v], weight, value[v]);
        }
    }
    float* state = sink.state + row * sink.width + d;
    if (!sink.is_first)
        OE_UNROLL for (int r = 0; r < ROWS; r++)
            OE_UNROLL for (int v = 0; v < VECS; v++)
                sum[r][v] += load(state + r * sink.width + v * LANES) * sink.keep[row + r];
    if (!sink.is_last) {
        OE_UNROLL for (int r = 0; r < ROWS; r++)
            OE_UNROLL for (int v = 0; v < VECS; v++) store(state + r * sink.width + v * LANES, sum[r][v]);
        return;
    }
    Stored* out = sink.out + row * sink.out_stride + d;
    if (row + ROWS <= sink.count && d + VECS * LANES <= sink.head_dim) {
        OE_UNROLL for (int r = 0; r < ROWS; r++)
            OE_UNROLL for (int v = 0; v < VECS; v++)
                store(out + r * sink.out_stride + v * LANES, sum[r][v] * sink.inverse[row + r]);
        return;
    }
    float rest[ROWS][VECS * LANES];
    OE_UNROLL for (int r = 0; r < ROWS; r++)
        OE_UNROLL for (int v = 0; v < VECS; v++) store(rest[r] + v * LANES, sum[r][v] * sink.inverse[row + r]);
    for (int r = 0; r < min_of(ROWS, sink.count - row); r++)
        for (int v = 0; v * LANES < min_of(VECS * LANES, sink.head_dim - d); v++)
            store_some(out + r * sink.out_stride + v * LANES, load(rest[r] + v * LANES), sink.head_dim - d - v * LANES);
}

// The tile of queries from `first` of the block on: VECS vectors of them.
template <class T, int VECS, class Stored>
void attend_tile(const EncoderCall& call, const EncoderBlock& block, int head, const Scratch& s, const Span& span) {
    const int first = span.query - block.first, count = min_of(TILE, block.count - first);
    const float* bias = call.bias ? call.bias + head * call.bias_stride + call.bias_middle : nullptr;
    const uint32_t* queries = s.queries + first * s.steps;
    vf highest[VECS];
    for (int v = 0; v < VECS; v++) highest[v] = splat(-__builtin_inff());
    for (int key = span.begin; key < span.end; key += KEYS)
        score_keys<T, VECS>(call, s, queries, bias, span, key, highest);

    float keep[TILE], inverse[TILE];
    const int keys = up_to(span.end - span.begin, KEYS);
    const float scale = bias ? LOG2_E : call.scale * LOG2_E;
    exponentiate<T, VECS>(s.scores, keys, scale, highest, s.max + first, s.sum + first, keep, span.is_first);
    for (int v = 0; v < VECS; v++) store(inverse + v * LANES, 1.0f / load(s.sum + first + v * LANES));

    const int64_t out_stride = int64_t(call.num_heads) * call.head_dim;
    Stored* out = (Stored*)call.out + (block.start + span.query) * out_stride + head * call.head_dim;
    const Sink<Stored> sink = {s.state + first * s.width, s.width, keep, inverse, span.is_first, span.is_last,
                               out, out_stride, count, call.head_dim};
    const uint32_t* values = s.values + span.begin % CHUNK / T::PACKED * s.width;
    for (int row = 0; row < count; row += ROWS) {
        int d = 0;
        for (; d + 2 * LANES <= s.width; d += 2 * LANES)
            weigh<T, 2>((uint32_t*)s.scores, values, keys / T::PACKED, row, d, sink);
        if (d < s.width) weigh<T, 1>((uint32_t*)s.scores, values, keys / T::PACKED, row, d, sink);
    }
}

template <class T, class Stored>
void attend_unit(const EncoderCall& call, const EncoderBlock& block, int head, const Scratch& s) {
    const int reach = call.window < 0 ? block.length : call.window, past = block.first + block.count;
    const int begin = max_of(0, block.first - reach), end = min_of(block.length, past + reach);
    pack_queries<T, Stored>(call, block, head, s);
    for (int chunk = begin / CHUNK * CHUNK; chunk < end; chunk += CHUNK) {
        const int chunk_end = min_of(end, chunk + CHUNK);
        pack_chunk<T, Stored>(call, block.start, max_of(chunk, begin / KEYS * KEYS), chunk_end, head, s);
        for (int query = block.first; query < past; query += TILE) {
            const int from = max_of(0, query - reach), to = min_of(block.length, min_of(query + TILE, past) + reach);
            const Span span = {query, max_of(chunk, from / KEYS * KEYS), min_of(chunk_end, to), chunk <= from,
                               to <= chunk + CHUNK};
            if (span.begin >= span.end) continue;
            if (past - query > LANES) attend_tile<T, 2, Stored>(call, block, head, s, span);
            else attend_tile<T, 1, Stored>(call, block, head, s, span);
        }
    }
}

template <class T, class Stored>
void attend(const EncoderCall& call) {
    const int64_t units = int64_t(call.num_blocks) * call.num_heads;
    int64_t cost = 0;
    for (int i = 0; i < call.num_blocks; i++) cost += int64_t(call.blocks[i].count) * call.blocks[i].length;
    const bool is_small = call.num_threads == 1 || cost * call.num_heads * call.head_dim < SMALL;
    // The heads of a block lie side by side, and a thread fetches what it takes next.
    const int num_together = max_of(1, min_of(call.num_heads, int(units / (4 * call.num_threads))));
#pragma omp parallel num_threads(call.num_threads) if (!is_small)
    {
        const Scratch s = scratch_in<T>(call.workspace + call.scratch_bytes * omp_get_thread_num(), call.head_dim);
#pragma omp for schedule(dynamic, num_together)
        for (int64_t unit = 0; unit < units; unit++)
            attend_unit<T, Stored>(call, call.blocks[unit / call.num_heads], int(unit % call.num_heads), s);
    }
}

}  // namespace

// The memory that a thread needs.
OE_EXPORT(encoder_attention_plan)(EncoderCall* call) {
    if (call->is_bfloat16) scratch_in<Pairs>(nullptr, call->head_dim, &call->scratch_bytes);
    else scratch_in<Singles>(nullptr, call->head_dim, &call->scratch_bytes);
}

// Blocks are taken in order: the largest should come first.
OE_EXPORT(encoder_attention)(const EncoderCall* call) {
    call->is_bfloat16 ? attend<Pairs, bf16>(*call) : attend<Singles, float>(*call);
}
