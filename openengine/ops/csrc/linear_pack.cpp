// Weights into their places, and out again.

#include "linear.h"

namespace {

OE_INLINE vf swapped(vf v) {  // with its neighbour
    typedef uint64_t pairs __attribute__((vector_size(sizeof(vf))));
    const pairs both = bits_as<pairs>(v);
    return bits_as<vf>(both << 32 | both >> 32);
}

// One run of a row to `q * scale`, with q from -127 to 127 and the sum of no two neighbours beyond 128: the range is that
// of all items and of all sums of two. `q` has room for a whole number of vectors, and zeros follow the items.
template <class T>
void quantize_run(const T* x, int64_t n, int8_t* q, float* scale) {
    vf low = {}, high = {};
    NanCheck check;
    for (int64_t i = 0; i < n; i += LANES) {
        const vf v = load_some(x + i, n - i), both = v + swapped(v);
        low = smaller(smaller(both, v), low);
        high = larger(larger(both, v), high);
        NanCheck::add(check, v, v);
    }
    const float range = NanCheck::any(check) ? __builtin_nanf("") : max_of(larger(high, -low));
    const float inverse = range > 1e-30f ? 127.0f / range : 0.0f;
    *scale = range / 127.0f;
    for (int64_t i = 0; i < n; i += LANES) {
        vi v = rounded(load_some(x + i, n - i) * inverse);
        v = v > 127 ? vi{} + 127 : v < -127 ? vi{} - 127 : v;
        store_as(q + i, __builtin_convertvector(v, vb));
    }
}

template <class T>
void write_quantized(const Layer& layer, const T* x, int64_t output) {
    int8_t q[INT8_RUN];
    char* to = place(layer, output);
    const int64_t first = first_run_of(layer, output);
    for (int64_t run = 0; run < runs_of(layer); run++, x += INT8_RUN) {
        const int64_t left = layer.inputs - run * INT8_RUN, n = left < INT8_RUN ? left : INT8_RUN;
        quantize_run(x, n, q, layer.scales + first + run * PANEL);
        int32_t sum = 0;
        for (int64_t i = 0; i < n; i++) sum += q[i];
        layer.sums[first + run * PANEL] = int16_t(sum);
        for (int64_t i = 0; i < n; i += GROUP, to += ROW) memcpy(to, q + i, GROUP);
    }
}

template <class T>
void read_row(const Layer& layer, int64_t output, T* to) {
    const char* from = place(layer, output);
    const float* scales = layer.scales + first_run_of(layer, output);
    const int64_t bytes = item_bytes(layer.kind);
    for (int64_t i = 0; i < layer.inputs; i++) {
        const char* at = from + i * bytes / GROUP * ROW + i * bytes % GROUP;
        if (layer.kind == INT8) put(to + i, float(load_as<int8_t>(at)) * scales[i / INT8_RUN * PANEL]);
        else if (layer.kind == BFLOAT16) put(to + i, widen(load_as<bf16>(at)));
        else put(to + i, load_as<float>(at));
    }
}

}  // namespace

// Put rows [first, first + count) of a weight of the layer's kind into their places. Strides in bytes, here and below.
OE_EXPORT(linear_pack)(const Layer* layer, const char* from, int64_t from_bytes, int64_t first, int64_t count) {
    const int64_t bytes = layer->inputs * item_bytes(layer->kind);
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < count; row++) {
        const char* source = from + row * from_bytes;
        char* to = place(*layer, first + row);
        int64_t done = 0;
        for (; done + GROUP <= bytes; done += GROUP, to += ROW) memcpy(to, source + done, GROUP);
        memcpy(to, source + done, bytes - done);
    }
}

// Quantize rows [first, first + count) of a float32 or bfloat16 weight into their places.
OE_EXPORT(linear_quantize)(
    const Layer* layer, const char* from, int64_t from_bytes, int32_t kind, int64_t first, int64_t count) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < count; row++) {
        const char* source = from + row * from_bytes;
        if (kind == BFLOAT16) write_quantized(*layer, reinterpret_cast<const bf16*>(source), first + row);
        else write_quantized(*layer, reinterpret_cast<const float*>(source), first + row);
    }
}

// Rows `ids` of the weight, as either float kind: a table that is also a layer is read through this.
OE_EXPORT(linear_rows)(const Layer* layer, const int64_t* ids, int64_t count, char* to, int64_t to_bytes, int32_t kind) {
#pragma omp parallel for schedule(static) if (count * layer->inputs >= 16384)
    for (int64_t i = 0; i < count; i++) {
        char* row = to + i * to_bytes;
        if (kind == BFLOAT16) read_row(*layer, ids[i], reinterpret_cast<bf16*>(row));
        else read_row(*layer, ids[i], reinterpret_cast<float*>(row));
    }
}
