// Residual addition with normalization. Computed in float32, rounded once when stored. Each row on its own: a result
// does not depend on the rows beside it.

#include "norm.h"
#include "rows.h"

namespace {

constexpr int64_t SMALL = 16384;  // items: below, starting threads costs more than they save

OE_INLINE vf only(vf value, int64_t count) {  // zeros in the lanes from `count` on
    if (count >= LANES) return value;
    return iota() < int32_t(count) ? value : vf{};
}

// x += delta where there is one; then y = norm(x) * weight + bias, root-mean-square unless `centered`.
template <class T>
void norm_row(
    T* x, const T* delta, const float* weight, const float* bias, T* y, int64_t n, float eps, bool centered) {
    vf sum = {}, square = {};
    for (int64_t i = 0; i < n; i += LANES) {
        vf v = load_some(x + i, n - i);
        if (delta) {
            store_some(x + i, v + load_some(delta + i, n - i), n - i);
            v = load_some(x + i, n - i);  // as rounded
        }
        sum += v;
        square += v * v;
    }
    float mean = 0, variance = sum_of(square) / float(n);
    if (centered) {
        mean = sum_of(sum) / float(n);
        square = vf{};
        for (int64_t i = 0; i < n; i += LANES) {
            const vf v = only(load_some(x + i, n - i) - mean, n - i);
            square += v * v;
        }
        variance = sum_of(square) / float(n);
    }
    const float scale = 1.0f / __builtin_sqrtf(variance + eps);
    for (int64_t i = 0; i < n; i += LANES) {
        vf v = (load_some(x + i, n - i) - mean) * scale * load_some(weight + i, n - i);
        if (bias) v += load_some(bias + i, n - i);
        store_some(y + i, v, n - i);
    }
}

template <class T>
void norm(const Team& team, const NormCall& c) {
    for (int64_t row = team.first(c.rows); row < team.last(c.rows); row++)
        for (int64_t head = 0; head < c.heads; head++)
            norm_row(
                reinterpret_cast<T*>(c.x + row * c.x_bytes) + head * c.n,
                c.delta ? reinterpret_cast<const T*>(c.delta + row * c.delta_bytes) : nullptr, c.weight + head * c.n,
                c.bias, reinterpret_cast<T*>(c.y) + (row * c.heads + head) * c.n, c.n, c.eps, c.centered);
}

}  // namespace

OE_SHARED(share_norm)(Team& team, const NormCall& call) {
    if (call.kind == BFLOAT16) norm<bf16>(team, call);
    else norm<float>(team, call);
}

OE_EXPORT(norm)(
    char* x, int64_t x_bytes, const char* delta, int64_t delta_bytes, const float* weight, const float* bias, char* y,
    int64_t rows, int64_t heads, int64_t n, float eps, int32_t centered, int32_t kind) {
    const NormCall call = {x, x_bytes, delta, delta_bytes, weight, bias, y, rows, heads, n, eps, centered, kind};
    const int threads = rows * heads * n < SMALL ? 1 : omp_get_max_threads();
    together(threads, [&call](Team& team) { OE_SHARE(share_norm)(team, call); });
}
