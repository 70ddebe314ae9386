// What every kernel file shares: the level it is compiled for, vectors of that level, bfloat16, exp.
//
// Each kernel file is compiled once per level (see setup.py): `OE_LEVEL` names it and `OE_EXPORT(name)` declares the C
// function `oe_<name>_<level>`. Everything else has internal linkage and no kernel uses templates of the C++ library:
// the linker would keep one copy of such a function for all levels, perhaps one that this CPU cannot run.

#ifndef OE_COMMON_H
#define OE_COMMON_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Declared here, for compilers that know OpenMP and come without its header.
#ifdef _OPENMP
extern "C" int omp_get_thread_num() noexcept;
extern "C" int omp_get_num_threads() noexcept;
extern "C" int omp_get_max_threads() noexcept;
extern "C" int omp_get_num_procs() noexcept;
#else
static inline int omp_get_thread_num() { return 0; }
static inline int omp_get_num_threads() { return 1; }
static inline int omp_get_max_threads() { return 1; }
static inline int omp_get_num_procs() { return 1; }
#endif

// Raise together with INTERFACE in native.py whenever the exported functions or their arguments change.
#define OE_INTERFACE 11

#ifdef OE_LEVEL
#define OE_JOIN_(name, level) oe_##name##_##level
#define OE_JOIN(name, level) OE_JOIN_(name, level)
#define OE_EXPORT(name) extern "C" __attribute__((visibility("default"))) void OE_JOIN(name, OE_LEVEL)
// One that allocates: it returns whether there was memory, and has done nothing where there was none.
#define OE_CHECKED(name) extern "C" __attribute__((visibility("default"))) int32_t OE_JOIN(name, OE_LEVEL)
#endif

#if defined(__AVX512F__)
#define OE_LANES 16
#elif defined(__AVX2__)
#define OE_LANES 8
#else
#define OE_LANES 4
#endif

#define OE_INLINE static inline __attribute__((always_inline))
#define OE_INLINE_MEMBER __attribute__((always_inline))  // of a struct that every level has, so with no linkage of its own

namespace {

constexpr int LANES = OE_LANES;

typedef float vf __attribute__((vector_size(4 * OE_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * OE_LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * OE_LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * OE_LANES)));

struct bf16 {
    uint16_t bits;
};

enum Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };  // what a matrix holds

template <class To, class From>
OE_INLINE To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "sizes must agree");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}

template <class V>
OE_INLINE V load_as(const void* from) {
    V v;
    memcpy(&v, from, sizeof(v));
    return v;
}

template <class V>
OE_INLINE void store_as(void* to, V v) {
    memcpy(to, &v, sizeof(v));
}

OE_INLINE int min_of(int a, int b) { return a < b ? a : b; }
OE_INLINE int max_of(int a, int b) { return a > b ? a : b; }
OE_INLINE int up_to(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
OE_INLINE vf splat(float x) { return vf{} + x; }
OE_INLINE vu splat_bits(uint32_t x) { return vu{} + x; }
OE_INLINE vi iota() {
    vi v;
    for (int i = 0; i < LANES; i++) v[i] = i;
    return v;
}

// ---- bfloat16: rounded to nearest even, NaN stays NaN; the instruction of AVX-512 takes subnormals for 0 ----

OE_INLINE float widen(bf16 x) { return bits_as<float>(uint32_t(x.bits) << 16); }
OE_INLINE float widen(float x) { return x; }

OE_INLINE bf16 narrow(float x) {
    uint32_t u = bits_as<uint32_t>(x);
    if (x != x) return {uint16_t((u >> 16) | 0x40)};
    return {uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}

OE_INLINE vh narrow_bits(vf x) {
#if defined(__AVX512BF16__) && OE_LANES == 16
    return bits_as<vh>(_mm512_cvtneps_pbh(bits_as<__m512>(x)));
#else
    vu u = bits_as<vu>(x);
    vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    vu result = x == x ? rounded : (u >> 16) | 0x40;
    return __builtin_convertvector(result, vh);
#endif
}

OE_INLINE vf load(const float* from) { return load_as<vf>(from); }
OE_INLINE vf load(const bf16* from) {
#if OE_LANES == 16  // what GCC makes of the plain form takes five instructions
    return bits_as<vf>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_as<__m256i>(from)), 16));
#else
    return bits_as<vf>(__builtin_convertvector(load_as<vh>(from), vu) << 16);
#endif
}
OE_INLINE void store(float* to, vf v) { store_as(to, v); }
OE_INLINE void store(bf16* to, vf v) { store_as(to, narrow_bits(v)); }
OE_INLINE void put(float* to, float x) { *to = x; }
OE_INLINE void put(bf16* to, float x) { *to = narrow(x); }

// Ask for the line at `at`, which will be read soon though not at once: into the second-level cache, which can wait for
// more lines than the first.
OE_INLINE void fetch(const void* at) { __builtin_prefetch(at, 0, 2); }

// ---- across lanes ----

// a > b ? a : b, so b if one is NaN; what the instruction does, though compilers do not see it.
OE_INLINE vf larger(vf a, vf b) {
#if OE_LANES == 16
    return bits_as<vf>(_mm512_max_ps(bits_as<__m512>(a), bits_as<__m512>(b)));
#elif OE_LANES == 8
    return bits_as<vf>(_mm256_max_ps(bits_as<__m256>(a), bits_as<__m256>(b)));
#else
    return a > b ? a : b;
#endif
}

// Halves are combined until one lane is left, in the same order at every level.
#if OE_LANES == 16
#define OE_FOLD(op, v)                                                                                  \
    __m512 v16 = bits_as<__m512>(v);                                                                    \
    __m256 v8 = _mm256_##op##_ps(_mm512_castps512_ps256(v16), _mm512_extractf32x8_ps(v16, 1));          \
    __m128 v4 = _mm_##op##_ps(_mm256_castps256_ps128(v8), _mm256_extractf128_ps(v8, 1));
#elif OE_LANES == 8
#define OE_FOLD(op, v)                                                                                  \
    __m256 v8 = bits_as<__m256>(v);                                                                     \
    __m128 v4 = _mm_##op##_ps(_mm256_castps256_ps128(v8), _mm256_extractf128_ps(v8, 1));
#else
#define OE_FOLD(op, v) vf v4 = v;
#endif

OE_INLINE float sum_of(vf v) {
    OE_FOLD(add, v)
    return (v4[0] + v4[2]) + (v4[1] + v4[3]);
}

OE_INLINE float max_of(vf v) {
    OE_FOLD(max, v)
    float a = v4[0] > v4[2] ? v4[0] : v4[2], b = v4[1] > v4[3] ? v4[1] : v4[3];
    return a > b ? a : b;
}

// ---- 2^x and e^x ----

constexpr float LOG2_E = 1.44269504f;

// 2^f for f in [-0.5, 0.5]: minimax fits with the constant term 1, with relative errors of 1e-7 and 1e-4.
OE_INLINE vf exp2_fraction(vf f) {
    vf p = splat(1.32647272e-3f);
    p = p * f + 9.67151281e-3f;
    p = p * f + 5.55073374e-2f;
    p = p * f + 2.40222421e-1f;
    p = p * f + 6.93146978e-1f;
    return p * f + 1.0f;
}

OE_INLINE vf exp2_fraction_rough(vf f) {
    vf p = splat(5.50089309e-2f);
    p = p * f + 2.42210969e-1f;
    p = p * f + 6.93282928e-1f;
    return p * f + 1.0f;
}

// 2^(n + f) for f in [-0.5, 0.5], n in the low bits of `shifted`. Exponents outside -126..127 are garbage.
OE_INLINE vf scaled_exp2(vf shifted, vf f) {
    vf p = exp2_fraction(f);
    return bits_as<vf>(bits_as<vu>(p) + (bits_as<vu>(shifted) << 23));
}

constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it leaves a float's nearest integer in its low bits

// `result` for x in [low, high); 0 below and for -inf, inf above, NaN for NaN.
OE_INLINE vf within(vf result, vf x, float low, float high) {
    result = x < low ? vf{} : result;
    return x < high ? result : (x == x ? splat(__builtin_inff()) : x);
}

// 2^x; what would be subnormal is 0.
OE_INLINE vf exp2_of(vf x) {
    vf shifted = x + ROUND;
    return within(scaled_exp2(shifted, x - (shifted - ROUND)), x, -126.0f, 127.5f);
}

// e^x; what would be subnormal is 0.
OE_INLINE vf exp_of(vf x) {
    vf shifted = x * LOG2_E + ROUND;
    vf n = shifted - ROUND;
    vf rest = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts; the first product is exact
    return within(scaled_exp2(shifted, rest * LOG2_E), x, -87.33f, 88.37f);
}

// 2^x for x <= 0; NaN for NaN. Rough where the result is rounded to bfloat16 anyway.
template <bool ROUGH>
OE_INLINE vf exp2_below_one(vf x) {
#if OE_LANES == 16
    vf bounded = larger(splat(-1000.0f), x);
    vf n = bits_as<vf>(_mm512_roundscale_ps(bits_as<__m512>(bounded), 0));
    vf p = ROUGH ? exp2_fraction_rough(bounded - n) : exp2_fraction(bounded - n);
    return bits_as<vf>(_mm512_scalef_ps(bits_as<__m512>(p), bits_as<__m512>(n)));
#else
    vf shifted = x + ROUND;
    vf e = scaled_exp2(shifted, x - (shifted - ROUND));
    return x >= splat(-126.0f) ? e : larger(vf{}, x);  // 0, or the NaN: scaled, one may come out finite
#endif
}

}  // namespace

#endif
