// Whole rows of logits: the best few tokens, how much all of them weigh, and the race that draws one. Each row on its
// own, by one thread: a result does not depend on the rows beside it.
//
// What the functions compute is written in ops/sampling.py. A row that holds a NaN gives garbage within its bounds; its
// first value from `top` or `score` is NaN and says so.

#include "rows.h"

namespace {

constexpr int64_t SMALL = 1 << 16;   // logits: below, starting threads costs more than they save
constexpr int64_t AT_ONCE = 4;       // vectors that are looked through before a branch
constexpr int64_t RUN = 16 * LANES;  // logits whose weights are added in float32; runs are added in float64
constexpr int64_t MAX_TOP = 1024;    // tokens that can be asked for, as sampling_native.py has it
constexpr int64_t MAX_ARRIVALS = 8;  // of a race
constexpr float FAR = 80.0f;         // as in ops/sampling.py
const float INF = __builtin_inff();

// ---- the best few ----

// Sorts as candidates do, by value and then by lower id: value in the high half, complemented id in the low one.
OE_INLINE uint64_t key_of(float value, int64_t id) {
    const uint32_t bits = bits_as<uint32_t>(value + 0.0f);  // -0 equals 0 and must not sort below it
    const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return uint64_t(ordered) << 32 | (0xffffffffu - uint32_t(id));
}

OE_INLINE int64_t id_of(uint64_t key) { return 0xffffffffu - uint32_t(key); }

OE_INLINE float value_of(uint64_t key) {
    const uint32_t ordered = uint32_t(key >> 32);
    return bits_as<float>(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

// A heap of the best keys, the worst of them at the root.
struct Heap {
    uint64_t keys[MAX_TOP];
    int64_t size = 0;
};

OE_INLINE void sink(Heap& heap, uint64_t key) {  // in the root's place
    int64_t place = 0;
    for (int64_t child = 1; child < heap.size; child = 2 * place + 1) {
        child += child + 1 < heap.size && heap.keys[child + 1] < heap.keys[child];
        if (key <= heap.keys[child]) break;
        heap.keys[place] = heap.keys[child];
        place = child;
    }
    heap.keys[place] = key;
}

OE_INLINE void push(Heap& heap, uint64_t key) {
    int64_t place = heap.size++;
    for (; place; place = (place - 1) / 2) {
        const uint64_t parent = heap.keys[(place - 1) / 2];
        if (parent <= key) break;
        heap.keys[place] = parent;
    }
    heap.keys[place] = key;
}

OE_INLINE uint64_t pop(Heap& heap) {  // the worst
    const uint64_t worst = heap.keys[0];
    heap.size--;
    sink(heap, heap.keys[heap.size]);
    return worst;
}

// One bit for each lane that is above `floor` or NaN.
OE_INLINE uint32_t lanes_above(vf v, float floor) {
#if OE_LANES == 16
    return _mm512_cmp_ps_mask(bits_as<__m512>(v), _mm512_set1_ps(floor), _CMP_NLE_UQ);
#elif OE_LANES == 8
    return _mm256_movemask_ps(_mm256_cmp_ps(bits_as<__m256>(v), _mm256_set1_ps(floor), _CMP_NLE_UQ));
#else
    uint32_t lanes = 0;
    for (int i = 0; i < LANES; i++) lanes |= uint32_t(!(v[i] <= floor)) << i;
    return lanes;
#endif
}

// The `count` best of a row of n >= count, in canonical order.
void top_row(const float* row, int64_t n, int64_t count, float* values, int64_t* ids) {
    Heap heap;
    bool is_void = false;
    for (int64_t id = 0; id < count; id++) {
        is_void |= row[id] != row[id];
        push(heap, key_of(row[id] == row[id] ? row[id] : -INF, id));
    }
    // Ids ascend, so an equal of the worst one comes after it.
    float floor = value_of(heap.keys[0]);
    int64_t id = count;
    const auto offer = [&](int64_t at) __attribute__((always_inline)) {
        if (row[at] > floor) {
            sink(heap, key_of(row[at], at));
            floor = value_of(heap.keys[0]);
        } else {
            is_void |= row[at] != row[at];
        }
    };
    for (; id + AT_ONCE * LANES <= n; id += AT_ONCE * LANES) {
        uint64_t above = 0;
        for (int64_t i = 0; i < AT_ONCE; i++)
            above |= uint64_t(lanes_above(load(row + id + i * LANES), floor)) << (i * LANES);
        for (; above; above &= above - 1) offer(id + __builtin_ctzll(above));
    }
    for (; id < n; id++) offer(id);
    for (int64_t place = count - 1; place >= 0; place--) {
        const uint64_t worst = pop(heap);
        values[place] = value_of(worst);
        ids[place] = id_of(worst);
    }
    if (is_void) values[0] = __builtin_nanf("");
}

// ---- sums over a row ----

// e^(sign * gap) for gap in [0, FAR], more exact than `exp_of`: thousands of them are added up. With x = n ln 2 + r it
// is 2^n (1 + r + r^2 q(r)), where q is a minimax fit for a relative error of the whole below 4e-9.
OE_INLINE vf exp_of_gap(vf gap, float sign) {
    const vf x = gap * sign;
    const vf shifted = x * 1.44269504f + ROUND;
    const vf n = shifted - ROUND;
    const vf r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts; the first product is exact
    vf q = splat(1.38131448e-3f);
    q = q * r + 8.36941879e-3f;
    q = q * r + 4.16684560e-2f;
    q = q * r + 1.66665152e-1f;
    q = q * r + 4.99999940e-1f;
    const vf p = (q * r * r + r) + 1.0f;
    return bits_as<vf>(bits_as<vi>(p) + (bits_as<vi>(shifted) << 23));
}

OE_INLINE vf gap_of(vf logits, float best, float temperature) {
    return smaller((best - logits) / temperature, splat(FAR));
}

// Zeros in the lanes from `count` on.
OE_INLINE vf only(vf value, int64_t count) { return iota() < int32_t(count) ? value : vf{}; }

// The first `count` logits, and -inf after them.
OE_INLINE vf load_row(const float* from, int64_t count) {
    if (count >= LANES) return load(from);
    return iota() < int32_t(count) ? load_some(from, count) : splat(-INF);
}

// The mass of a row: the sum of e^-gap over its logits.
double mass_row(const float* row, int64_t n, float best, float temperature) {
    double mass = 0;
    for (int64_t start = 0; start < n; start += RUN) {
        const int64_t end = start + RUN < n ? start + RUN : n;
        vf sum = {};
        int64_t id = start;
        for (; id + LANES <= end; id += LANES) sum += exp_of_gap(gap_of(load(row + id), best, temperature), -1.0f);
        if (id < end) sum += only(exp_of_gap(gap_of(load_row(row + id, end - id), best, temperature), -1.0f), end - id);
        mass += sum_of(sum);
    }
    return mass;
}

// The mass before each of `ids` in canonical order.
void mass_before_row(
    const float* row, int64_t n, float best, float temperature, const int64_t* ids, int64_t count, double* mass) {
    for (int64_t i = 0; i < count; i++) mass[i] = 0;
    for (int64_t start = 0; start < n; start += RUN) {
        const int64_t end = start + RUN < n ? start + RUN : n;
        vf sums[MAX_ARRIVALS] = {};
        for (int64_t id = start; id < end; id += LANES) {
            const vf logits = load_row(row + id, end - id);
            vf weight = exp_of_gap(gap_of(logits, best, temperature), -1.0f);
            if (id + LANES > end) weight = only(weight, end - id);
            for (int64_t i = 0; i < count; i++) {
                const float value = row[ids[i]];
                const vi is_before = (logits > value) | ((logits == value) & (iota() < int32_t(ids[i] - id)));
                sums[i] += is_before ? weight : vf{};
            }
        }
        for (int64_t i = 0; i < count; i++) mass[i] += sum_of(sums[i]);
    }
}

int64_t count_above(const float* row, int64_t n, float value) {
    vi count = {};
    int64_t id = 0;
    for (; id + LANES <= n; id += LANES) count -= load(row + id) > value;
    int64_t total = 0;
    for (int i = 0; i < LANES; i++) total += count[i];
    for (; id < n; id++) total += row[id] > value;
    return total;
}

// ---- the race ----

struct Arrival {
    float time;
    int64_t id;
};
// |63 bits of noise| / 2^63 of LANES tokens, made from their `bits` and the row's key.
OE_INLINE vf noise_of(const int64_t* bits, int64_t key) {
    const uint64_t mix_1 = 0xbf58476d1ce4e5b9u, mix_2 = 0x94d049bb133111ebu;
    float v[LANES];
    for (int i = 0; i < LANES; i++) {
        int64_t x = int64_t(uint64_t(bits[i] ^ key) * mix_1);
        x = int64_t(uint64_t(x ^ (x >> 32)) * mix_2);
        v[i] = float(x);
    }
    const vf noise = load_as<vf>(v);
    return (noise < 0.0f ? -noise : noise) * (0x1p-63f * (1 - 0x1p-24f)) + 0x1p-65f;
}

// The tokens that arrive first, in no particular order. An arrival is at -log(1 - v) e^gap, v being the noise.
void race_row(
    const float* row, int64_t n, float best, float temperature, float max_gap, int64_t key, const int64_t* bits,
    int64_t count, int64_t* ids) {
    Arrival first[MAX_ARRIVALS];
    for (int64_t i = 0; i < count; i++) first[i] = {INF, i};
    int64_t last = 0;  // of the first ones
    for (int64_t id = 0; id < n; id += LANES) {
        int64_t padded[LANES] = {};
        const int64_t* from = bits + id;
        if (id + LANES > n) {
            memcpy(padded, from, (n - id) * sizeof(*from));
            from = padded;
        }
        vf gap = gap_of(load_row(row + id, n - id), best, temperature);
        gap = gap > max_gap ? splat(FAR) : gap;
        const vf noise = noise_of(from, key);
        const vf weight = exp_of_gap(gap, 1.0f);
        // -log(1 - v) >= v: few tokens are near enough for a logarithm.
        const vf times = noise * weight;
        uint32_t near = ~lanes_above(times, first[last].time);
        if (id + LANES > n) near &= (1u << (n - id)) - 1;
        near &= (1ull << LANES) - 1;
        for (; near; near &= near - 1) {
            const int lane = __builtin_ctz(near);
            const float time = -__builtin_log1pf(-noise[lane]) * weight[lane];
            if (!(time < first[last].time)) continue;
            first[last] = {time, id + lane};
            for (int64_t i = 0; i < count; i++)
                if (first[i].time > first[last].time) last = i;
        }
    }
    for (int64_t i = 0; i < count; i++) ids[i] = first[i].id;
}

// ---- penalties ----

OE_INLINE float penalized(float logit, int32_t count, float repetition, float frequency, float presence) {
    if (!(logit - logit == 0)) return logit;  // masked, or invalid
    const float most = __FLT_MAX__;
    // In float64 the products are exact, so that no compiler can round them otherwise.
    const float subtract = double(count) * double(frequency) + (count > 0 ? double(presence) : 0.0);
    const float scaled = logit > 0 ? logit / repetition : float(double(logit) * double(repetition));
    const float result = scaled - subtract;
    return result > most ? most : result < -most ? -most : result;
}

}  // namespace

// All functions take rows of n logits, `stride` logits apart.

// The `count` best of each row, at most n and 1024, in canonical order: values, ids [rows, count].
OE_EXPORT(top)(
    const float* logits, int64_t stride, int64_t rows, int64_t n, int64_t count, float* values, int64_t* ids) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * n >= SMALL)
    for (int64_t i = 0; i < rows; i++) top_row(logits + i * stride, n, count, values + i * count, ids + i * count);
}

// `top`, with each row's mass f64[rows] at temperature 1, the target's logit f32[rows] and how many are above it.
OE_EXPORT(score)(
    const float* logits, int64_t stride, int64_t rows, int64_t n, int64_t count, const int64_t* targets, float* values,
    int64_t* ids, double* mass, float* chosen, int64_t* above) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * n >= SMALL)
    for (int64_t i = 0; i < rows; i++) {
        const float* row = logits + i * stride;
        top_row(row, n, count, values + i * count, ids + i * count);
        mass[i] = mass_row(row, n, values[i * count], 1.0f);
        chosen[i] = row[targets[i]];
        above[i] = count_above(row, n, chosen[i]);
    }
}

// The mass of each row f64[rows].
OE_EXPORT(mass)(
    const float* logits, int64_t stride, int64_t rows, int64_t n, const float* best, const float* temperature,
    double* mass) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * n >= SMALL)
    for (int64_t i = 0; i < rows; i++) mass[i] = mass_row(logits + i * stride, n, best[i], temperature[i]);
}

// The mass of the tokens before each of `ids` [rows, count] in canonical order: f64[rows, count].
OE_EXPORT(mass_before)(
    const float* logits, int64_t stride, int64_t rows, int64_t n, int64_t count, const float* best,
    const float* temperature, const int64_t* ids, double* mass) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * n >= SMALL)
    for (int64_t i = 0; i < rows; i++)
        mass_before_row(logits + i * stride, n, best[i], temperature[i], ids + i * count, count, mass + i * count);
}

// The `count` tokens of each row that arrive first, at most n and 8: ids [rows, count], in no particular order.
OE_EXPORT(race)(
    const float* logits, int64_t stride, int64_t rows, int64_t n, int64_t count, const float* best,
    const float* temperature, const float* max_gap, const int64_t* keys, const int64_t* bits, int64_t* ids) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * n >= SMALL)
    for (int64_t i = 0; i < rows; i++)
        race_row(
            logits + i * stride, n, best[i], temperature[i], max_gap ? max_gap[i] : INF, keys[i], bits, count,
            ids + i * count);
}

// Penalizes, in place, the tokens that each row has seen: entries [start, start + size), where a key is base + token.
OE_EXPORT(penalize)(
    float* logits, int64_t stride, int64_t rows, int64_t, const int64_t* keys, const int32_t* counts,
    const int64_t* bases, const int64_t* starts, const int64_t* sizes, const float* repetition,
    const float* frequency, const float* presence) {
#pragma omp parallel for schedule(dynamic, 4) if (rows > 4)
    for (int64_t i = 0; i < rows; i++)
        for (int64_t entry = starts[i]; entry < starts[i] + sizes[i]; entry++) {
            float& logit = logits[i * stride + keys[entry] - bases[i]];
            logit = penalized(logit, counts[entry], repetition[i], frequency[i], presence[i]);
        }
}

// Takes, in place, infinity off every token whose bit in `mask` [rows, words] is 0; what is invalid becomes NaN.
OE_EXPORT(apply_bitmask)(float* logits, int64_t stride, int64_t rows, int64_t n, int64_t words, const int32_t* mask) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * n >= SMALL)
    for (int64_t i = 0; i < rows; i++)
        for (int64_t word = 0; word < words; word++) {
            const uint32_t bits = uint32_t(mask[i * words + word]);
            if (bits == 0xffffffffu) continue;
            for (int64_t at = 0; at < 32 && word * 32 + at < n; at += LANES) {
                float* from = logits + i * stride + word * 32 + at;
                const int64_t left = n - word * 32 - at;
                const vf v = load_some(from, left);
                const vu is_allowed = (splat_bits(bits >> at) >> bits_as<vu>(iota())) & 1;
                store_some(from, is_allowed ? v : v - INF, left);
            }
        }
}
