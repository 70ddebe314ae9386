// What stands between matrix products: residual addition with normalization, and gated activation. Computed in
// float32, rounded once when stored. Each row on its own: a result does not depend on the rows beside it.

#include "rows.h"

namespace {

enum Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1 };
enum Activation : int32_t { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3 };

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
void norm(
    char* x, int64_t x_bytes, const char* delta, int64_t delta_bytes, const float* weight, const float* bias, char* y,
    int64_t rows, int64_t heads, int64_t n, float eps, bool centered) {
#pragma omp parallel for schedule(static) if (rows * heads * n >= SMALL)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++)
            norm_row(
                reinterpret_cast<T*>(x + row * x_bytes) + head * n,
                delta ? reinterpret_cast<const T*>(delta + row * delta_bytes) : nullptr, weight + head * n, bias,
                reinterpret_cast<T*>(y) + (row * heads + head) * n, n, eps, centered);
}

// The error function's complement on [0, inf) is t P(t) exp(-x^2) with t = 1 / (1 + x / 2); P is a minimax fit
// with a relative error below 3e-8.
OE_INLINE vf normal_cdf(vf x) {
    const vf z = (x < 0.0f ? -x : x) * 0.70710678f;
    const vf t = 1.0f / (1.0f + 0.5f * z);
    vf p = splat(0.0069349241f);
    p = p * t + -0.095093846f;
    p = p * t + 0.36505491f;
    p = p * t + -0.58834904f;
    p = p * t + 0.35660401f;
    p = p * t + -0.0655469f;
    p = p * t + 0.21495184f;
    p = p * t + 0.24074218f;
    p = p * t + 0.28262672f;
    p = p * t + 0.28207517f;
    const vf tail = 0.5f * t * p * exp_of(-z * z);
    return x < 0.0f ? tail : 1.0f - tail;
}

OE_INLINE vf activated(int32_t activation, vf x) {
    switch (activation) {
        case SILU: return x / (1.0f + exp_of(-x));
        case GELU_TANH: {
            // x (1 + tanh u) / 2 = x / (1 + exp(-2 u))
            const vf u = 0.79788456f * (x + 0.044715f * x * x * x);
            return x / (1.0f + exp_of(-2.0f * u));
        }
        case GELU: return x * normal_cdf(x);
        default: return x < 0.0f ? vf{} : x;
    }
}

template <class T, int32_t ACTIVATION>
void gated(const char* from, int64_t from_bytes, T* to, int64_t rows, int64_t n) {
#pragma omp parallel for schedule(static) if (rows * n >= SMALL / 4)
    for (int64_t row = 0; row < rows; row++) {
        const T* gate = reinterpret_cast<const T*>(from + row * from_bytes);
        const T* up = gate + n;
        T* y = to + row * n;
        for (int64_t i = 0; i < n; i += LANES) {
            const vf value = activated(ACTIVATION, load_some(gate + i, n - i)) * load_some(up + i, n - i);
            store_some(y + i, value, n - i);
        }
    }
}

template <class T>
void gated(int32_t activation, const char* from, int64_t from_bytes, char* to, int64_t rows, int64_t n) {
    T* y = reinterpret_cast<T*>(to);
    switch (activation) {
        case SILU: return gated<T, SILU>(from, from_bytes, y, rows, n);
        case GELU_TANH: return gated<T, GELU_TANH>(from, from_bytes, y, rows, n);
        case GELU: return gated<T, GELU>(from, from_bytes, y, rows, n);
        default: return gated<T, RELU>(from, from_bytes, y, rows, n);
    }
}

}  // namespace

// For each row of x [rows, heads, n]: x += delta if there is one, y = norm(x) * weight [heads, n] + bias [n] if there is
// one. Strides between rows in bytes; y is contiguous. A delta needs heads = 1.
OE_EXPORT(norm)(
    char* x, int64_t x_bytes, const char* delta, int64_t delta_bytes, const float* weight, const float* bias, char* y,
    int64_t rows, int64_t heads, int64_t n, float eps, int32_t centered, int32_t kind) {
    if (kind == BFLOAT16) norm<bf16>(x, x_bytes, delta, delta_bytes, weight, bias, y, rows, heads, n, eps, centered);
    else norm<float>(x, x_bytes, delta, delta_bytes, weight, bias, y, rows, heads, n, eps, centered);
}

// activation(gate) * up for [gate | up] of n items each: y [rows, n].
OE_EXPORT(gated)(
    int32_t activation, const char* from, int64_t from_bytes, char* y, int64_t rows, int64_t n, int32_t kind) {
    if (kind == BFLOAT16) gated<bf16>(activation, from, from_bytes, y, rows, n);
    else gated<float>(activation, from, from_bytes, y, rows, n);
}
