// Weights into their places, and out again.

#include "linear.h"

namespace {

// One row to `q * scale`, with q from -127 to 127. `q` has room for a whole number of vectors.
template <class T>
void quantize_weights(const T* x, int64_t n, int8_t* q, float* scale) {
    vf low = {}, high = {};
    NanCheck check;
    for (int64_t i = 0; i < n; i += LANES) {
        const vf v = load_some(x + i, n - i);
        low = smaller(v, low);
        high = larger(v, high);
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

void write_quantized(const Layer& layer, const int8_t* q, int64_t output) {
    char* to = place(layer, output);
    for (int64_t group = 0; group < groups_of(layer); group++) memcpy(to + group * ROW, q + group * GROUP, GROUP);
    const int64_t slot = slot_of(layer, output);
    int16_t* sums = layer.sums + slot / PANEL * runs_of(layer) * PANEL + slot % PANEL;
    for (int64_t run = 0; run < runs_of(layer); run++) {
        const int64_t start = run * INT8_RUN, end = start + INT8_RUN < layer.inputs ? start + INT8_RUN : layer.inputs;
        int32_t sum = 0;
        for (int64_t i = start; i < end; i++) sum += q[i];
        sums[run * PANEL] = int16_t(sum);
    }
}

template <class T>
void read_row(const Layer& layer, int64_t output, T* to) {
    const char* from = place(layer, output);
    const int64_t bytes = item_bytes(layer.kind);
    for (int64_t i = 0; i < layer.inputs; i++) {
        const char* at = from + i * bytes / GROUP * ROW + i * bytes % GROUP;
        if (layer.kind == INT8) put(to + i, float(load_as<int8_t>(at)) * layer.scales[output]);
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
OE_CHECKED(linear_quantize)(
    const Layer* layer, const char* from, int64_t from_bytes, int32_t kind, int64_t first, int64_t count) {
    const int64_t size = padded(layer->inputs, 64);
    int8_t* rows = static_cast<int8_t*>(calloc(omp_get_max_threads(), size));
    if (!rows) return false;
#pragma omp parallel
    {
        int8_t* q = rows + omp_get_thread_num() * size;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < count; row++) {
            const char* source = from + row * from_bytes;
            float* scale = layer->scales + first + row;
            if (kind == BFLOAT16) quantize_weights(reinterpret_cast<const bf16*>(source), layer->inputs, q, scale);
            else quantize_weights(reinterpret_cast<const float*>(source), layer->inputs, q, scale);
            write_quantized(*layer, q, first + row);
        }
    }
    free(rows);
    return true;
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
