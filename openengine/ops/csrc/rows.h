// Vectors at the ragged end of a row, and what rows are reduced and rounded with.

#ifndef OE_ROWS_H
#define OE_ROWS_H

#include "common.h"

namespace {

// The first `count` items, and zeros after them. `count` may exceed a vector.
template <class T>
OE_INLINE vf load_some(const T* from, int64_t count) {
    if (count >= LANES) return load(from);
    T whole[LANES] = {};
    memcpy(whole, from, count * sizeof(T));
    return load(whole);
}

template <class T>
OE_INLINE void store_some(T* to, vf value, int64_t count) {
    if (count >= LANES) return store(to, value);
    T whole[LANES];
    store(whole, value);
    memcpy(to, whole, count * sizeof(T));
}

// a < b ? a : b, so b if one is NaN, as `larger`.
OE_INLINE vf smaller(vf a, vf b) {
#if OE_LANES == 16
    return bits_as<vf>(_mm512_min_ps(bits_as<__m512>(a), bits_as<__m512>(b)));
#elif OE_LANES == 8
    return bits_as<vf>(_mm256_min_ps(bits_as<__m256>(a), bits_as<__m256>(b)));
#else
    return a < b ? a : b;
#endif
}

// To nearest even. Not by adding a large number, which a compiler may contract with the product before it.
OE_INLINE vi rounded(vf x) {
#if OE_LANES == 16
    return bits_as<vi>(_mm512_cvtps_epi32(bits_as<__m512>(x)));
#elif OE_LANES == 8
    return bits_as<vi>(_mm256_cvtps_epi32(bits_as<__m256>(x)));
#elif defined(__SSE2__)
    return bits_as<vi>(_mm_cvtps_epi32(bits_as<__m128>(x)));
#else
    vi q;
    for (int i = 0; i < LANES; i++) q[i] = int32_t(__builtin_lrintf(x[i]));
    return q;
#endif
}

// Whether any of the vectors it was given holds a NaN; below AVX-512 infinity counts as one.
struct NanCheck {
#if OE_LANES == 16
    __mmask16 found = 0;
    OE_INLINE void add(NanCheck& c, vf a, vf b) {
        c.found |= _mm512_cmp_ps_mask(bits_as<__m512>(a), bits_as<__m512>(b), _CMP_UNORD_Q);
    }
    OE_INLINE bool any(const NanCheck& c) { return c.found != 0; }
#else
    vf sum = {};
    OE_INLINE void add(NanCheck& c, vf a, vf b) { c.sum += a * 0.0f + b * 0.0f; }
    OE_INLINE bool any(const NanCheck& c) {
        const float sum = sum_of(c.sum);
        return sum != sum;
    }
#endif
};

}  // namespace

#endif
