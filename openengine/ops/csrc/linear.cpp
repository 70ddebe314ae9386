// Matrix products y = x w^T + bias over packed weights: float32, bfloat16, and int8 with activations quantized per row.
//
// A layer's weights lie in panels of 32 outputs, each a plain sequence of groups that a product reads once, in order:
//
//     panel (32 outputs) / group of inputs (4 bytes: 1 float32, 2 bfloat16 or 4 int8) / output / input of the group
//
// with zeros for outputs and inputs that are not there. One layout serves any number of rows and every level.
//
// Each output is one accumulator that takes its groups in order, however many rows are computed beside it: a row's
// result does not depend on the rest of the batch, nor on the number of threads. Only levels differ in rounding.

#include "rows.h"

#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

enum Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

// Mirrored by `_Layer` in linear_native.py. The arrays have an item for each output of whole panels.
struct Layer {
    char* weights;
    float* scales;  // int8 only
    int32_t* sums;  // of the quantized weights, int8 only
    const float* bias;
    int64_t outputs, inputs;
    int32_t kind;
};

constexpr int64_t PANEL = 32, GROUP = 4, ROW = PANEL * GROUP;  // a row is one group of inputs for a panel's outputs
constexpr int VECS = 2;                                       // vectors of outputs in a tile
#if defined(__AVX512BF16__)
constexpr int MAX_ROWS = 14;  // 28 of 32 registers accumulate
#elif OE_LANES == 16
constexpr int MAX_ROWS = 10;
#else
constexpr int MAX_ROWS = 4;
#endif
constexpr int64_t RUN = 64;                 // groups summed before they join the total, which bounds rounding errors
constexpr int64_t NEAR = 2048;              // bytes to fetch ahead of a tile that reads weights from memory
constexpr int64_t BLOCK_BYTES = 256 << 10;  // of activations that stay in the second-level cache beside a panel

typedef uint8_t vb __attribute__((vector_size(OE_LANES)));

int64_t item_bytes(int32_t kind) { return kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 1; }
int64_t panels_of(const Layer& layer) { return (layer.outputs + PANEL - 1) / PANEL; }
int64_t groups_of(const Layer& layer) {
    const int64_t items = GROUP / item_bytes(layer.kind);
    return (layer.inputs + items - 1) / items;
}
char* place(const Layer& layer, int64_t output) {
    return layer.weights + (output / PANEL * groups_of(layer) * PANEL + output % PANEL) * GROUP;
}

OE_INLINE vi splat_group(const char* at) { return vi{} + load_as<int32_t>(at); }

// ---- what a group of each kind adds to its accumulator ----

struct F32 {
    typedef vf Acc;
    OE_INLINE vf dot(vf acc, vi x, vi w) { return acc + bits_as<vf>(x) * bits_as<vf>(w); }
};

struct Bf16 {
    typedef vf Acc;
    OE_INLINE vf dot(vf acc, vi x, vi w) {
#if defined(__AVX512BF16__)
        return bits_as<vf>(_mm512_dpbf16_ps(bits_as<__m512>(acc), bits_as<__m512bh>(x), bits_as<__m512bh>(w)));
#else
        const vi high = vi{} + int32_t(0xffff0000);
        acc += bits_as<vf>(x << 16) * bits_as<vf>(w << 16);
        return acc + bits_as<vf>(x & high) * bits_as<vf>(w & high);
#endif
    }
};

struct Int8 {  // x unsigned, w signed
    typedef vi Acc;
    OE_INLINE vi dot(vi acc, vi x, vi w) {
#if defined(__AVX512VNNI__)
        return bits_as<vi>(_mm512_dpbusd_epi32(bits_as<__m512i>(acc), bits_as<__m512i>(x), bits_as<__m512i>(w)));
#elif OE_LANES == 16
        const __m512i a = bits_as<__m512i>(x), b = bits_as<__m512i>(w), low = _mm512_set1_epi16(255);
        const __m512i even = _mm512_madd_epi16(_mm512_and_si512(a, low), _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8));
        const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(b, 8));
        return acc + bits_as<vi>(even) + bits_as<vi>(odd);
#elif OE_LANES == 8
        const __m256i a = bits_as<__m256i>(x), b = bits_as<__m256i>(w), low = _mm256_set1_epi16(255);
        const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, low), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
        const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
        return acc + bits_as<vi>(even) + bits_as<vi>(odd);
#else
        const vu byte = splat_bits(255), a = bits_as<vu>(x);
        acc += bits_as<vi>(a & byte) * ((w << 24) >> 24);
        acc += bits_as<vi>((a >> 8) & byte) * ((w << 16) >> 24);
        acc += bits_as<vi>((a >> 16) & byte) * ((w << 8) >> 24);
        return acc + bits_as<vi>(a >> 24) * (w >> 24);
#endif
    }
};

// ---- the product ----

struct Product {
    const Layer* layer;
    const char* x;  // groups of each row
    int64_t x_bytes;
    const float* x_scales;   // [rows], int8 only
    const int32_t* x_zeros;  // [rows], int8 only
    char* y;
    int64_t y_bytes;
    int32_t y_kind;
    int64_t groups;
};

OE_INLINE vf output_of(const Product&, vf total, int64_t, int64_t) { return total; }

OE_INLINE vf output_of(const Product& p, vi total, int64_t row, int64_t column) {
    total -= load_as<vi>(p.layer->sums + column) * p.x_zeros[row];
    return __builtin_convertvector(total, vf) * (load(p.layer->scales + column) * p.x_scales[row]);
}

// Write the outputs of a tile, [rows][VECS] accumulators, as T.
template <class T, class Acc>
void finish(const Product& p, const Acc* totals, int64_t row, int64_t rows, int64_t column) {
    for (int64_t end = row + rows; row < end; row++, totals += VECS) {
        T* y = reinterpret_cast<T*>(p.y + row * p.y_bytes);
        for (int j = 0; j < VECS; j++) {
            const int64_t at = column + j * LANES, left = p.layer->outputs - at;
            const vf value = output_of(p, totals[j], row, at) + load(p.layer->bias + at);
            if (left > 0) store_some(y + at, value, left);
        }
    }
}

// ROWS x (VECS * LANES) outputs at (row, column). Fetches two lines from `ahead` on with every group.
template <class D, int ROWS>
void tile(const Product& p, const char* w, int64_t row, int64_t column, const char* ahead, int64_t ahead_step) {
    typename D::Acc total[ROWS][VECS] = {};
    const char* x = p.x + row * p.x_bytes;
    const int64_t x_bytes = p.x_bytes;
    for (int64_t left = p.groups; left > 0; left -= RUN) {
        typename D::Acc acc[ROWS][VECS] = {};
        for (const char* end = w + (left < RUN ? left : RUN) * ROW; w != end; w += ROW, x += GROUP, ahead += ahead_step) {
            __builtin_prefetch(ahead);
            __builtin_prefetch(ahead + 64);
            vi weights[VECS];
            for (int j = 0; j < VECS; j++) weights[j] = load_as<vi>(w + j * LANES * GROUP);
            for (int i = 0; i < ROWS; i++) {
                const vi group = splat_group(x + i * x_bytes);
                for (int j = 0; j < VECS; j++) acc[i][j] = D::dot(acc[i][j], group, weights[j]);
            }
        }
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < VECS; j++) total[i][j] += acc[i][j];
    }
    if (p.y_kind == BFLOAT16) finish<bf16>(p, &total[0][0], row, ROWS, column);
    else finish<float>(p, &total[0][0], row, ROWS, column);
}

template <class D>
void tile_of(
    const Product& p, const char* w, int64_t row, int64_t rows, int64_t column, const char* ahead, int64_t ahead_step) {
    switch (rows) {
#define OE_CASE(n) \
    case n: return tile<D, n <= MAX_ROWS ? n : MAX_ROWS>(p, w, row, column, ahead, ahead_step);
        OE_CASE(1) OE_CASE(2) OE_CASE(3) OE_CASE(4) OE_CASE(5) OE_CASE(6) OE_CASE(7)
        OE_CASE(8) OE_CASE(9) OE_CASE(10) OE_CASE(11) OE_CASE(12) OE_CASE(13) OE_CASE(14)
#undef OE_CASE
    }
}

// Rows [row, end) of one panel, in tiles of nearly equal height.
template <class D>
void multiply_panel(const Product& p, int64_t panel, int64_t row, int64_t end) {
    const char* w = p.layer->weights + panel * p.groups * ROW;
    const int64_t panel_bytes = p.groups * ROW;
    int64_t tiles = (end - row + MAX_ROWS - 1) / MAX_ROWS;
    // One tile reads the weights from memory as it goes; several have the time to fetch the next panel.
    const int64_t step = ROW / tiles;
    const char* ahead = tiles == 1 ? w + NEAR : w + panel_bytes;
    for (; tiles > 0; tiles--, ahead += p.groups * step) {
        const int64_t rows = (end - row + tiles - 1) / tiles;
        for (int column = 0; column < PANEL; column += VECS * LANES)
            tile_of<D>(p, w + column * GROUP, row, rows, panel * PANEL + column, ahead, step);
        row += rows;
    }
}

// The calling thread's share of all panels and blocks of rows; neighbours in memory go to one thread.
template <class D>
void multiply_share(const Product& p, int64_t rows, int64_t blocks) {
#ifdef _OPENMP
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
#else
    const int64_t thread = 0, threads = 1;
#endif
    const int64_t panels = panels_of(*p.layer), units = panels * blocks;
    for (int64_t unit = units * thread / threads; unit < units * (thread + 1) / threads; unit++) {
        const int64_t block = unit / panels;
        multiply_panel<D>(p, unit % panels, rows * block / blocks, rows * (block + 1) / blocks);
    }
}

void multiply_share(const Product& p, int64_t rows, int64_t blocks) {
    switch (p.layer->kind) {
        case FLOAT32: return multiply_share<F32>(p, rows, blocks);
        case BFLOAT16: return multiply_share<Bf16>(p, rows, blocks);
        default: return multiply_share<Int8>(p, rows, blocks);
    }
}

// Blocks of rows that fit the cache, and more where the panels alone do not share out evenly.
int64_t blocks_for(int64_t panels, int64_t rows, int64_t bytes, int64_t threads) {
    int64_t blocks = (bytes + BLOCK_BYTES - 1) / BLOCK_BYTES;
    while (rows / (blocks + 1) >= 2 * MAX_ROWS) {
        const int64_t units = panels * blocks, most = (units + threads - 1) / threads;
        if (most * threads * 16 <= units * 17) break;
        blocks++;
    }
    return blocks;
}

// ---- quantization ----

// The least and greatest of x and 0, and NaN or 0: NaN if any value is infinite or NaN.
struct Range {
    vf low = {}, high = {}, check = {};

    OE_INLINE void join(Range& r, vf v) {
        r.low = least(v, r.low);
        r.high = most(v, r.high);
        r.check += v * 0.0f;
    }
};

template <class T>
OE_INLINE Range range_of(const T* x, int64_t n) {
    Range a, b;  // two, for the latency
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        Range::join(a, load(x + i));
        Range::join(b, load(x + i + LANES));
    }
    for (; i < n; i += LANES) Range::join(a, load_some(x + i, n - i));
    a.low = least(a.low, b.low);
    a.high = most(a.high, b.high);
    a.check += b.check;
    return a;
}

OE_INLINE vb bytes_of(vi q) {  // from 0 to 255, larger ones cut
#if OE_LANES == 16
    return bits_as<vb>(_mm512_cvtusepi32_epi8(bits_as<__m512i>(q)));
#else
    return __builtin_convertvector(q > 255 ? vi{} + 255 : q, vb);
#endif
}

// One row to `(q - zero) * scale`, q unsigned, over a range that includes 0. A row that is not finite gets a scale of
// NaN, one whose range is below 1e-30 becomes zeros. `q` has room for a whole number of vectors.
template <class T>
void quantize_row(const T* x, int64_t n, uint8_t* q, float* scale, int32_t* zero) {
    const Range r = range_of(x, n);
    const float low = -max_of(-r.low), range = max_of(r.high) - low;
    const float inverse = range > 1e-30f ? 255.0f / range : 0.0f;
    *scale = range / 255.0f + sum_of(r.check);
    const vi offset = rounded(splat(-low * inverse));
    *zero = offset[0];
    const auto quantize = [=](vf v) {
        const vi shifted = rounded(v * inverse) + offset;
        return bytes_of(shifted < 0 ? vi{} : shifted);
    };
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store_as(q + i, quantize(load(x + i)));
    if (i < n) store_as(q + i, quantize(load_some(x + i, n - i)));
}

// One row of weights to `q * scale`, q signed and symmetric; returns the sum of q.
template <class T>
int32_t quantize_weights(const T* x, int64_t n, int8_t* q, float* scale) {
    const Range r = range_of(x, n);
    const float range = max_of(most(r.high, -r.low));
    const float inverse = range > 1e-30f ? 127.0f / range : 0.0f;
    *scale = range / 127.0f + sum_of(r.check);
    vi sum = {};
    for (int64_t i = 0; i < n; i += LANES) {
        vi v = rounded(load_some(x + i, n - i) * inverse);
        v = v > 127 ? vi{} + 127 : v < -127 ? vi{} - 127 : v;
        sum += v;
        store_as(q + i, __builtin_convertvector(v, vb));
    }
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += sum[i];
    return total;
}

int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// A buffer for activations in groups, with what a row's quantization adds. Freed with `free`.
struct Scratch {
    char* x;
    int64_t x_bytes;
    float* scales;
    int32_t* zeros;
};

Scratch allocate(const Layer& layer, int64_t rows) {
    Scratch s;
    // Whole vectors may be written; the odd line keeps rows off each other's cache sets.
    s.x_bytes = padded(groups_of(layer) * GROUP, 64) + 64;
    s.x = static_cast<char*>(malloc(rows * (s.x_bytes + 8)));
    s.scales = reinterpret_cast<float*>(s.x + rows * s.x_bytes);
    s.zeros = reinterpret_cast<int32_t*>(s.scales + rows);
    return s;
}

void prepare(const Layer& layer, const char* x, int32_t kind, const Scratch& s, int64_t row) {
    char* to = s.x + row * s.x_bytes;
    const int64_t n = layer.inputs;
    if (layer.kind != INT8) {
        memcpy(to, x, n * item_bytes(kind));
        memset(to + n * item_bytes(kind), 0, groups_of(layer) * GROUP - n * item_bytes(kind));
    } else if (kind == BFLOAT16) {
        quantize_row(reinterpret_cast<const bf16*>(x), n, reinterpret_cast<uint8_t*>(to), s.scales + row, s.zeros + row);
    } else {
        quantize_row(reinterpret_cast<const float*>(x), n, reinterpret_cast<uint8_t*>(to), s.scales + row, s.zeros + row);
    }
}

template <class T>
void unpack_row(const Layer& layer, int64_t output, T* to) {
    const char* from = place(layer, output);
    for (int64_t i = 0; i < layer.inputs; i++) {
        const int64_t bytes = i * item_bytes(layer.kind);
        const char* at = from + bytes / GROUP * ROW + bytes % GROUP;
        if (layer.kind == INT8) put(to + i, float(*reinterpret_cast<const int8_t*>(at)) * layer.scales[output]);
        else if (layer.kind == BFLOAT16) put(to + i, widen(load_as<bf16>(at)));
        else put(to + i, load_as<float>(at));
    }
}

}  // namespace

// y [rows, outputs] = x [rows, inputs] w^T + bias. Strides in bytes. x is of the layer's kind, for int8 either float
// kind; y is of either float kind.
OE_EXPORT(linear)(
    const Layer* layer, const char* x, int64_t x_bytes, int32_t x_kind, char* y, int64_t y_bytes, int32_t y_kind,
    int64_t rows) {
    if (rows == 0) return;
    const int64_t groups = groups_of(*layer), panels = panels_of(*layer);
    const bool copied = layer->kind == INT8 || layer->inputs * item_bytes(layer->kind) % GROUP;
    Scratch scratch = {};
    if (copied) scratch = allocate(*layer, rows);
    Product p = {layer, x, x_bytes, scratch.scales, scratch.zeros, y, y_bytes, y_kind, groups};
    if (copied) p.x = scratch.x, p.x_bytes = scratch.x_bytes;

    const bool small = rows * layer->inputs < 16384;  // not worth a barrier
    if (copied && small)
        for (int64_t row = 0; row < rows; row++) prepare(*layer, x + row * x_bytes, x_kind, scratch, row);
#ifdef _OPENMP
    const int threads = panels * groups * ROW * rows < 65536 ? 1 : omp_get_max_threads();
#else
    const int threads = 1;
#endif
    const int64_t blocks = blocks_for(panels, rows, rows * groups * GROUP, threads);
#pragma omp parallel num_threads(threads)
    {
        if (copied && !small) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++) prepare(*layer, x + row * x_bytes, x_kind, scratch, row);
        }
        multiply_share(p, rows, blocks);
    }
    free(scratch.x);
}

// Put rows [first, first + count) of a weight of the layer's kind into their places.
OE_EXPORT(linear_pack)(const Layer* layer, const char* from, int64_t from_bytes, int64_t first, int64_t count) {
    const int64_t bytes = layer->inputs * item_bytes(layer->kind);
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < count; row++) {
        const char* source = from + row * from_bytes;
        char* to = place(*layer, first + row);
        for (int64_t done = 0; done < bytes; done += GROUP, to += ROW)
            memcpy(to, source + done, bytes - done < GROUP ? bytes - done : GROUP);
    }
}

// Quantize rows [first, first + count) of a float32 or bfloat16 weight into their places, with scales and sums.
OE_EXPORT(linear_quantize)(
    const Layer* layer, const char* from, int64_t from_bytes, int32_t kind, int64_t first, int64_t count) {
    const int64_t groups = groups_of(*layer);
#pragma omp parallel
    {
        int8_t* q = static_cast<int8_t*>(calloc(padded(groups * GROUP, 64), 1));
#pragma omp for schedule(static)
        for (int64_t row = 0; row < count; row++) {
            const char* source = from + row * from_bytes;
            float* scale = layer->scales + first + row;
            layer->sums[first + row] =
                kind == BFLOAT16 ? quantize_weights(reinterpret_cast<const bf16*>(source), layer->inputs, q, scale)
                                 : quantize_weights(reinterpret_cast<const float*>(source), layer->inputs, q, scale);
            char* to = place(*layer, first + row);
            for (int64_t g = 0; g < groups; g++) memcpy(to + g * ROW, q + g * GROUP, GROUP);
        }
        free(q);
    }
}

// Rows `ids` of the weight, as either float kind: a table that is also a layer is read through this.
OE_EXPORT(linear_rows)(const Layer* layer, const int64_t* ids, int64_t count, char* to, int64_t to_bytes, int32_t kind) {
#pragma omp parallel for schedule(static) if (count * layer->inputs >= 16384)
    for (int64_t i = 0; i < count; i++) {
        char* row = to + i * to_bytes;
        if (kind == BFLOAT16) unpack_row(*layer, ids[i], reinterpret_cast<bf16*>(row));
        else unpack_row(*layer, ids[i], reinterpret_cast<float*>(row));
    }
}
