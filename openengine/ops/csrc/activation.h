// Activation functions on vectors. Results that are rounded to bfloat16 need less exact ones.

#ifndef OE_ACTIVATION_H
#define OE_ACTIVATION_H

#include "common.h"

namespace {

enum Activation : int32_t { NO_ACTIVATION = -1, SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3 };

// The error function's complement on [0, inf) is t P(t) exp(-x^2) with t = 1 / (1 + x / 2); P is a minimax fit
// with a relative error below 6e-8.
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

// 1/2 + x P(x^2) from -4.3 to 4.3, 0 below and what comes nearest to 1 above; P is a minimax fit, for which x times the
// result errs by less than 7e-5, or 5e-6 of x where that is more.
OE_INLINE vf normal_cdf_rough(vf far) {
    const vf x = far > 4.3f ? splat(4.3f) : far;
    const vf s = x * x;
    vf p = splat(5.39077972e-11f);
    p = p * s + -5.25826870e-9f;
    p = p * s + 2.25875572e-7f;
    p = p * s + -5.68720001e-6f;
    p = p * s + 9.47237007e-5f;
    p = p * s + -1.12144050e-3f;
    p = p * s + 9.88039963e-3f;
    p = p * s + -6.64959390e-2f;
    p = p * s + 3.99025949e-1f;
    return x < -4.3f ? vf{} : x * p + 0.5f;
}

// x / (1 + 2^u), with a relative error below 2e-4 where that is faster.
OE_INLINE vf over_one_and_exp2_rough(vf x, vf u) {
#if OE_LANES == 16
    const vf e = exp2_below_one<true>(u > 1000.0f ? splat(1000.0f) : u);  // at this level right above 1 too
    return x * bits_as<vf>(_mm512_rcp14_ps(bits_as<__m512>(1.0f + e)));
#else
    return x / (1.0f + exp2_of(u));
#endif
}

// The activation of x, exact enough for a result of type T.
template <class T>
OE_INLINE vf activated(int32_t activation, vf x) {
    switch (activation) {
        case SILU: return sizeof(T) == 2 ? over_one_and_exp2_rough(x, x * -LOG2_E) : x / (1.0f + exp_of(-x));
        case GELU_TANH: {
            // x (1 + tanh u) / 2 = x / (1 + exp(-2 u))
            const vf u = 0.79788456f * (x + 0.044715f * x * x * x);
            if (sizeof(T) == 2) return over_one_and_exp2_rough(x, u * (-2.0f * LOG2_E));
            return x / (1.0f + exp_of(-2.0f * u));
        }
        case GELU: return x * (sizeof(T) == 2 ? normal_cdf_rough(x) : normal_cdf(x));
        case RELU: return x < 0.0f ? vf{} : x;
        default: return x;
    }
}

}  // namespace

#endif
