// Matrix products y = x w^T + bias over packed weights: float32, bfloat16, and int8 with activations quantized as they
// come.
//
// Each output is one accumulator that takes its groups in order, however many rows are computed beside it: a row's
// result does not depend on the rest of the batch, nor on the number of threads. Only levels differ in rounding.

#include "activation.h"
#include "linear.h"

namespace {

constexpr int VECS = 2;               // vectors of outputs in a tile: one of each half panel
constexpr int PARTS = HALF / LANES;   // of a panel, each as wide as a tile
// Rows of a tile, at most: what its accumulators leave of the registers.
#if defined(__AVX512BF16__)
constexpr int F32_ROWS = 14, BF16_ROWS = 14, INT8_ROWS = 10;
#elif OE_LANES == 16
constexpr int F32_ROWS = 10, BF16_ROWS = 10, INT8_ROWS = 8;
#else
constexpr int F32_ROWS = 6, BF16_ROWS = 4, INT8_ROWS = 4;
#endif
constexpr int MANY_ROWS = 8;  // of each tile where one does not take all: lower ones are faster with weights at hand
constexpr int WIDE_FROM = 16;  // rows from which on a run's weights are widened once: for fewer, each tile does it
constexpr int LEAST_ROWS = 2 * F32_ROWS > WIDE_FROM ? 2 * F32_ROWS : WIDE_FROM;  // of one of several blocks
constexpr int64_t ROWS_AT_ONCE = PARTS == 1 ? 64 : 32;  // whose totals, one for each part, stay close to the core
constexpr int64_t NEAR = 4096;              // bytes to fetch ahead of a tile that reads weights from memory
constexpr int64_t BLOCK_BYTES = 1 << 20;    // of activations that stay in the second-level cache beside a panel
constexpr int64_t SMALL = 65536;            // bytes of weights times rows: below, waking the threads costs more

OE_INLINE vi splat_group(const char* at) { return vi{} + load_as<int32_t>(at); }

// Products of 16-bit integers, those of each pair added.
OE_INLINE vi multiply_pairs(vi a, vi b) {
#if OE_LANES == 16
    return bits_as<vi>(_mm512_madd_epi16(bits_as<__m512i>(a), bits_as<__m512i>(b)));
#elif OE_LANES == 8
    return bits_as<vi>(_mm256_madd_epi16(bits_as<__m256i>(a), bits_as<__m256i>(b)));
#elif defined(__SSE2__)
    return bits_as<vi>(_mm_madd_epi16(bits_as<__m128i>(a), bits_as<__m128i>(b)));
#else
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

#if OE_LANES > 4
// Products of unsigned and signed bytes, those of each pair added to 16 bits, which they must fit.
OE_INLINE vi multiply_bytes(vi a, vi b) {
#if OE_LANES == 16
    return bits_as<vi>(_mm512_maddubs_epi16(bits_as<__m512i>(a), bits_as<__m512i>(b)));
#else
    return bits_as<vi>(_mm256_maddubs_epi16(bits_as<__m256i>(a), bits_as<__m256i>(b)));
#endif
}
#endif

// ---- what a group of each kind adds to its accumulator, and the accumulator of RUN groups to the total ----

constexpr int64_t FLOAT_RUN = 64;  // bounds the rounding errors

// A step of a tile reads WORDS words of x. Over a packed panel that is a group; NEXT and APART are the bytes from one
// step's weights to the next and from vector to vector.
struct Packed {
    static constexpr int STEPS = 1;
    static constexpr int64_t NEXT = ROW, APART = HALF * GROUP;
};

struct F32 : Packed {
    typedef vf Acc;
    static constexpr int64_t RUN = FLOAT_RUN;
    static constexpr int MAX_ROWS = F32_ROWS, WORDS = 1;
    OE_INLINE vf dot(vf acc, const vi (&x)[WORDS], vi w) { return acc + bits_as<vf>(x[0]) * bits_as<vf>(w); }
};

struct Bf16 : Packed {
    typedef vf Acc;
    static constexpr int64_t RUN = FLOAT_RUN;
    static constexpr int MAX_ROWS = BF16_ROWS, WORDS = BF16_WORDS;
    OE_INLINE vi word(vi w, int k) { return k == 0 ? w << 16 : w & int32_t(0xffff0000); }
    OE_INLINE vf add(vf acc, vi x, vi w) { return acc + bits_as<vf>(x) * bits_as<vf>(w); }
    OE_INLINE vf dot(vf acc, const vi (&x)[WORDS], vi w) {
#if defined(__AVX512BF16__)
        return bits_as<vf>(_mm512_dpbf16_ps(bits_as<__m512>(acc), bits_as<__m512bh>(x[0]), bits_as<__m512bh>(w)));
#else
        return add(add(acc, x[0], word(w, 0)), x[1], word(w, 1));
#endif
    }
};

struct Int8 : Packed {  // x unsigned, w signed
    typedef vi Acc;
    static constexpr int64_t RUN = INT8_RUN / GROUP;
    static constexpr int MAX_ROWS = INT8_ROWS, WORDS = INT8_WORDS;
    OE_INLINE vi word(vi w, int k) {
        typedef int16_t pairs __attribute__((vector_size(4 * OE_LANES)));
        return bits_as<vi>(k == 0 ? bits_as<pairs>(w) << 8 >> 8 : bits_as<pairs>(w) >> 8);
    }
    OE_INLINE vi add(vi acc, vi x, vi w) { return acc + multiply_pairs(x, w); }
    OE_INLINE vi dot(vi acc, const vi (&x)[WORDS], vi w) {
#if defined(__AVX512VNNI__)
        return bits_as<vi>(_mm512_dpbusd_epi32(bits_as<__m512i>(acc), bits_as<__m512i>(x[0]), bits_as<__m512i>(w)));
#elif OE_LANES > 4
        return add(acc, multiply_bytes(x[0], w), vi{} + 0x00010001);
#else
        return add(add(acc, x[0], word(w, 0)), x[1], word(w, 1));
#endif
    }
};

// As D, over weights that `widen_run` put side by side: a step for each word of a group.
template <class D>
struct Wide {
    typedef typename D::Acc Acc;
    static constexpr int64_t RUN = D::RUN, NEXT = VECS * sizeof(vi), APART = sizeof(vi);
    static constexpr int MAX_ROWS = F32_ROWS, WORDS = 1, STEPS = D::WORDS;
    OE_INLINE vi word(vi w, int k) { return D::word(w, k); }
    OE_INLINE Acc dot(Acc acc, const vi (&x)[WORDS], vi w) { return D::add(acc, x[0], w); }
};

// Whether many rows widen a run's weights once. Where a vector is a half panel this has not been measured.
template <class D>
constexpr bool IS_WIDENED = D::WORDS > 1 && PARTS > 1;

// ---- the product ----

struct Product {
    const Layer* layer;
    const char* x;  // words of each row
    int64_t x_bytes;
    const float* x_scales;  // int8 only: row / run
    const float* x_shifts;  // int8 only: row / run, -zero * scale
    char* y;
    int64_t y_bytes;
    int32_t y_kind, activation;
    int64_t groups, runs;
};

OE_INLINE const char* weights_of(const Product& p, int64_t panel) { return p.layer->weights + panel * p.groups * ROW; }

// The totals of a tile, [rows][VECS], as outputs of type T.
template <class T, int32_t ACTIVATION>
void finish(const Product& p, const vf* totals, int64_t row, int64_t rows, int64_t slot) {
    const Layer& layer = *p.layer;
    const int64_t gates = layer.outputs / 2;
    const int64_t first = layer.is_gated ? slot / PANEL * HALF + slot % PANEL : slot;  // output of the first vector
    const int64_t apart = layer.is_gated ? gates : HALF;                               // and from it to the second
    const int64_t left[VECS] = {(layer.is_gated ? gates : layer.outputs) - first, layer.outputs - first - apart};
    vf bias[VECS];
    for (int j = 0; j < VECS; j++) bias[j] = load(layer.bias + first + j * apart);
    for (int64_t end = row + rows; row < end; row++) {
        T* y = reinterpret_cast<T*>(p.y + row * p.y_bytes) + first;
        vf value[VECS];
        for (int j = 0; j < VECS; j++) value[j] = *totals++ + bias[j];
        if (ACTIVATION != NO_ACTIVATION && layer.is_gated) {
            if (left[0] > 0) store_some(y, activated<T>(ACTIVATION, value[0]) * value[1], left[0]);
            continue;
        }
        for (int j = 0; j < VECS; j++)
            if (left[j] > 0) store_some(y + j * apart, activated<T>(ACTIVATION, value[j]), left[j]);
    }
}

template <class T>
void finish(const Product& p, const vf* totals, int64_t row, int64_t rows, int64_t slot) {
    switch (p.activation) {
        case SILU: return finish<T, SILU>(p, totals, row, rows, slot);
        case GELU_TANH: return finish<T, GELU_TANH>(p, totals, row, rows, slot);
        case GELU: return finish<T, GELU>(p, totals, row, rows, slot);
        case RELU: return finish<T, RELU>(p, totals, row, rows, slot);
        default: return finish<T, NO_ACTIVATION>(p, totals, row, rows, slot);
    }
}

template <int ROWS>
OE_INLINE void join(const Product&, vf (&total)[ROWS][VECS], const vf (&acc)[ROWS][VECS], int64_t, int64_t, int64_t) {
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < VECS; j++) total[i][j] += acc[i][j];
}

template <int ROWS>
OE_INLINE void join(
    const Product& p, vf (&total)[ROWS][VECS], const vi (&acc)[ROWS][VECS], int64_t run, int64_t row, int64_t slot) {
    typedef int16_t vs __attribute__((vector_size(2 * OE_LANES)));
    const int64_t at = (slot / PANEL * p.runs + run) * PANEL + slot % PANEL;
    vf sum[VECS], factor[VECS];
    for (int j = 0; j < VECS; j++) {
        const vs sums = load_as<vs>(p.layer->sums + at + j * HALF);
        sum[j] = __builtin_convertvector(__builtin_convertvector(sums, vi), vf);
        factor[j] = load(p.layer->scales + at + j * HALF);
    }
    for (int i = 0; i < ROWS; i++) {
        const vf scale = splat(p.x_scales[(row + i) * p.runs + run]);
        const vf shift = splat(p.x_shifts[(row + i) * p.runs + run]);
        for (int j = 0; j < VECS; j++)
            total[i][j] += (__builtin_convertvector(acc[i][j], vf) * scale + sum[j] * shift) * factor[j];
    }
}

// A run of groups of the outputs from `slot` on.
struct Run {
    const char* weights;
    int64_t index, groups, slot;
};

OE_INLINE Run part_of(const Run& run, int part) {
    return {run.weights + part * LANES * GROUP, run.index, run.groups, run.slot + part * LANES};
}

// What a run adds to `totals`, [ROWS][VECS], of the rows from `row` on. With every step what lies at `ahead` is
// fetched: into the second-level cache, and all of it, where one tile takes all rows and outputs and memory is the
// limit; else into the first.
template <class D, int ROWS, bool STREAMED>
void tile(const Product& p, const Run& run, int64_t row, vf* totals, const char* ahead, int64_t ahead_step) {
    typename D::Acc acc[ROWS][VECS] = {};
    constexpr int64_t X_STEP = D::WORDS * GROUP;
    const char *w = run.weights, *x = p.x + row * p.x_bytes + run.index * D::RUN * D::STEPS * X_STEP;
    const int64_t x_bytes = p.x_bytes;
    const char* end = w + run.groups * D::STEPS * D::NEXT;
    for (; w != end; w += D::NEXT, x += X_STEP, ahead += ahead_step) {
        if (STREAMED) fetch(ahead), fetch(ahead + 64);
        else __builtin_prefetch(ahead);
        vi weights[VECS];
        for (int j = 0; j < VECS; j++) weights[j] = load_as<vi>(w + j * D::APART);
        for (int i = 0; i < ROWS; i++) {
            vi group[D::WORDS];
            for (int k = 0; k < D::WORDS; k++) group[k] = splat_group(x + i * x_bytes + k * GROUP);
            for (int j = 0; j < VECS; j++) acc[i][j] = D::dot(acc[i][j], group, weights[j]);
        }
    }
    join<ROWS>(p, *reinterpret_cast<vf(*)[ROWS][VECS]>(totals), acc, run.index, row, run.slot);
}

template <class D, bool STREAMED>
void tile_of(
    const Product& p, const Run& run, int64_t row, int64_t rows, vf* totals, const char* ahead, int64_t ahead_step) {
    switch (rows) {
#define OE_CASE(n) \
    case n: return tile<D, n <= D::MAX_ROWS ? n : D::MAX_ROWS, STREAMED>(p, run, row, totals, ahead, ahead_step);
        OE_CASE(1) OE_CASE(2) OE_CASE(3) OE_CASE(4) OE_CASE(5) OE_CASE(6) OE_CASE(7)
        OE_CASE(8) OE_CASE(9) OE_CASE(10) OE_CASE(11) OE_CASE(12) OE_CASE(13) OE_CASE(14)
#undef OE_CASE
    }
}

// A run of packed weights as words, [groups][word][VECS], at `to`.
template <class D>
Run widen_run(const Run& run, char* to) {
    const Run wide = {to, run.index, run.groups, run.slot};
    const char* w = run.weights;
    for (const char* end = w + run.groups * ROW; w != end; w += ROW)
        for (int k = 0; k < D::STEPS; k++)
            for (int j = 0; j < VECS; j++, to += sizeof(vi))
                store_as(to, D::word(load_as<vi>(w + j * Packed::APART), k));
    return wide;
}

// `rows` rows of one panel from `row` on, in tiles of nearly equal height. The tiles take one run after the other
// together, so that its weights come from memory once, and evenly: most of the next are fetched meanwhile, and with the
// last run of the panel those at `after`.
template <class D>
void multiply_panel(const Product& p, int64_t panel, int64_t row, int64_t rows, const char* after) {
    constexpr bool IS_WIDE = D::STEPS > 1;
    const int64_t most = rows <= D::MAX_ROWS ? D::MAX_ROWS : min_of(MANY_ROWS, D::MAX_ROWS);
    const int64_t tiles = (rows + most - 1) / most, ahead_step = ROW / (tiles * PARTS * D::STEPS);
    char words[IS_WIDE ? D::RUN * D::STEPS * D::NEXT : 1] __attribute__((aligned(64)));
    vf totals[PARTS][ROWS_AT_ONCE * VECS];
    for (int part = 0; part < PARTS; part++) memset(totals[part], 0, rows * VECS * sizeof(vf));
    Run run = {weights_of(p, panel), 0, 0, panel * PANEL};
    for (int64_t left = p.groups; left > 0; left -= D::RUN, run.weights += run.groups * ROW, run.index++) {
        run.groups = left < D::RUN ? left : D::RUN;
        if constexpr (PARTS == 1 && !IS_WIDE)
            if (tiles == 1) {
                tile_of<D, true>(p, run, row, rows, totals[0], run.weights + NEAR, ROW);
                continue;
            }
        const char* ahead = left > D::RUN ? run.weights + run.groups * ROW : after;
        for (int part = 0; part < PARTS; part++) {
            Run own = part_of(run, part);
            if constexpr (IS_WIDE) own = widen_run<D>(own, words);
            for (int64_t first = 0, next, n = tiles; n > 0; n--, first = next) {
                next = first + (rows - first + n - 1) / n;
                tile_of<D, false>(p, own, row + first, next - first, totals[part] + first * VECS, ahead, ahead_step);
                ahead += run.groups * D::STEPS * ahead_step;
            }
        }
    }
    for (int part = 0; part < PARTS; part++) {
        const int64_t slot = part_of(run, part).slot;
        if (p.y_kind == BFLOAT16) finish<bf16>(p, totals[part], row, rows, slot);
        else finish<float>(p, totals[part], row, rows, slot);
    }
}

// The calling thread's share of all panels and blocks of rows; neighbours in memory go to one thread. Of a block some
// rows are computed at once.
template <class D>
void multiply_share(const Team& team, const Product& p, int64_t rows, int64_t blocks) {
    const int64_t panels = panels_of(*p.layer), units = panels * blocks;
    for (int64_t unit = team.first(units); unit < team.last(units); unit++) {
        const int64_t block = unit / panels, panel = unit % panels, first = rows * block / blocks;
        const int64_t in_block = rows * (block + 1) / blocks - first;
        const int64_t pieces = (in_block + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
        for (int64_t piece = 0; piece < pieces; piece++) {
            const int64_t row = in_block * piece / pieces, count = in_block * (piece + 1) / pieces - row;
            const char* after = weights_of(p, panel + (piece + 1 == pieces));
            if constexpr (IS_WIDENED<D>)
                if (count >= WIDE_FROM) {
                    multiply_panel<Wide<D>>(p, panel, first + row, count, after);
                    continue;
                }
            multiply_panel<D>(p, panel, first + row, count, after);
        }
    }
}

void multiply_share(const Team& team, const Product& p, int64_t rows, int64_t blocks) {
    switch (p.layer->kind) {
        case FLOAT32: return multiply_share<F32>(team, p, rows, blocks);
        case BFLOAT16: return multiply_share<Bf16>(team, p, rows, blocks);
        default: return multiply_share<Int8>(team, p, rows, blocks);
    }
}

// Blocks of rows that fit the cache, and more where the panels alone do not share out evenly.
int64_t blocks_for(int64_t panels, int64_t rows, int64_t bytes, int64_t threads) {
    int64_t blocks = (bytes + BLOCK_BYTES - 1) / BLOCK_BYTES;
    if (blocks > rows) blocks = rows;
    while (rows / (blocks + 1) >= LEAST_ROWS) {
        const int64_t units = panels * blocks, most = (units + threads - 1) / threads;
        if (most * threads * 16 <= units * 17) break;  // threads wait for at most a sixteenth of the work
        blocks++;
    }
    return blocks;
}

// ---- activations ----

OE_INLINE vb bytes_of(vi q) {  // from 0 on; above 255 cut
#if OE_LANES == 16
    return bits_as<vb>(_mm512_cvtusepi32_epi8(bits_as<__m512i>(q)));
#else
    return __builtin_convertvector(q > 255 ? vi{} + 255 : q, vb);
#endif
}

// n items to `q * scale + shift`, q unsigned, over a range that includes 0, which is met exactly. With a NaN the scale
// is NaN, with infinity that or infinite; ranges below 1e-30 become zeros. `q` has room for a run.
template <class T>
OE_INLINE void quantize(const T* x, int64_t n, uint8_t* q, float* scale, float* shift) {
    constexpr int VECTORS = INT8_RUN / LANES;
    static_assert(INT8_RUN % (2 * LANES) == 0, "vectors are taken in pairs");
    vf v[VECTORS], low[VECTORS / 2], high[VECTORS / 2];
    NanCheck check;
    for (int i = 0; i < VECTORS; i++) v[i] = n > i * LANES ? load_some(x + i * LANES, n - i * LANES) : vf{};
    for (int i = 0; i < VECTORS / 2; i++) {
        low[i] = smaller(v[2 * i], v[2 * i + 1]);
        high[i] = larger(v[2 * i], v[2 * i + 1]);
        NanCheck::add(check, v[2 * i], v[2 * i + 1]);
    }
    for (int count = VECTORS / 2; count > 1; count -= count / 2)
        for (int i = 0; i < count / 2; i++) {
            low[i] = smaller(low[i], low[count - 1 - i]);
            high[i] = larger(high[i], high[count - 1 - i]);
        }
    const float depth = max_of(larger(-low[0], vf{})), range = max_of(larger(high[0], vf{})) + depth;
    const float inverse = range > 1e-30f ? 255.0f / range : 0.0f;
    const vi zero = rounded(splat(depth * inverse));
    *scale = NanCheck::any(check) ? __builtin_nanf("") : range / 255.0f;
    *shift = -float(zero[0]) * *scale;
    for (int i = 0; i < VECTORS; i++) store_as(q + i * LANES, bytes_of(rounded(v[i] * inverse) + zero));
}

template <class T>
void quantize_row(const T* x, int64_t n, uint8_t* q, float* scales, float* shifts) {
    for (; n >= INT8_RUN; n -= INT8_RUN, x += INT8_RUN, q += INT8_RUN) quantize(x, INT8_RUN, q, scales++, shifts++);
    if (n > 0) quantize(x, n, q, scales, shifts);
}

// Activations in words, and for int8 with the scale and shift of each run.
struct Scratch {
    char* x;
    int64_t x_bytes;
    float *scales, *shifts;
};

Scratch scratch_in(char* memory, const Layer& layer, int64_t rows) {
    Scratch s = {memory, copied_bytes(layer)};
    s.scales = reinterpret_cast<float*>(memory + rows * s.x_bytes);
    s.shifts = s.scales + rows * runs_of(layer);
    return s;
}

// Groups of quantized items to words, in their place: items 0 and 2, and 1 and 3, in 16 bits each.
void widen(uint8_t* q, int64_t groups) {
    for (int64_t i = groups - 1; i >= 0; i--) {
        const uint32_t group = load_as<uint32_t>(q + i * GROUP), even = 0x00ff00ff;
        store_as(q + 2 * i * GROUP, group & even);
        store_as(q + (2 * i + 1) * GROUP, group >> 8 & even);
    }
}

void prepare(const Layer& layer, const char* x, int32_t kind, const Scratch& s, int64_t row) {
    char* to = s.x + row * s.x_bytes;
    const int64_t n = layer.inputs, bytes = n * item_bytes(kind), runs = runs_of(layer);
    if (layer.kind == INT8) {
        uint8_t* q = reinterpret_cast<uint8_t*>(to);
        float *scales = s.scales + row * runs, *shifts = s.shifts + row * runs;
        if (kind == BFLOAT16) quantize_row(reinterpret_cast<const bf16*>(x), n, q, scales, shifts);
        else quantize_row(reinterpret_cast<const float*>(x), n, q, scales, shifts);
        if (INT8_WORDS == 2) widen(q, runs * INT8_RUN / GROUP);
    } else if (words_of(layer) == 2) {
        const bf16* items = reinterpret_cast<const bf16*>(x);
        float* floats = reinterpret_cast<float*>(to);
        for (int64_t i = 0; i < n; i += LANES) store(floats + i, load_some(items + i, n - i));
    } else {
        memcpy(to, x, bytes);
        memset(to + bytes, 0, groups_of(layer) * GROUP - bytes);
    }
}

}  // namespace

OE_SHARED(share_linear)(Team& team, const LinearCall& call, char* scratch) {
    if (call.rows == 0) return;
    const Layer& layer = *call.layer;
    const int64_t rows = call.rows, groups = groups_of(layer);
    Product p = {&layer, call.x, call.x_bytes, nullptr, nullptr, call.y, call.y_bytes, call.y_kind, call.activation, groups,
                 runs_of(layer)};
    if (is_copied(layer)) {
        const bool alone = is_private(call);
        if (alone) scratch += scratch_bytes(call, 1) * team.thread;
        const Scratch s = scratch_in(scratch, layer, rows);
        const int64_t first = alone ? 0 : team.first(rows), last = alone ? rows : team.last(rows);
        for (int64_t row = first; row < last; row++) prepare(layer, call.x + row * call.x_bytes, call.x_kind, s, row);
        if (!alone) team.wait();
        p.x = s.x, p.x_bytes = s.x_bytes, p.x_scales = s.scales, p.x_shifts = s.shifts;
    }
    const int64_t bytes = rows * groups * GROUP * words_of(layer);
    multiply_share(team, p, rows, blocks_for(panels_of(layer), rows, bytes, team.threads));
}

OE_CHECKED(linear)(
    const Layer* layer, const char* x, int64_t x_bytes, int32_t x_kind, char* y, int64_t y_bytes, int32_t y_kind,
    int64_t rows, int32_t activation) {
    const LinearCall call = {layer, x, x_bytes, y, y_bytes, rows, x_kind, y_kind, activation};
    const int threads = panels_of(*layer) * groups_of(*layer) * ROW * rows < SMALL ? 1 : omp_get_max_threads();
    const int64_t size = scratch_bytes(call, threads);
    char* scratch = static_cast<char*>(malloc(size));
    const bool fits = scratch || !size;
    if (fits) together(threads, [&call, scratch](Team& team) { OE_SHARE(share_linear)(team, call, scratch); });
    free(scratch);
    return fits;
}
