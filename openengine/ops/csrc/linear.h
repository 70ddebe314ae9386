// How the weights of a layer lie in memory: in panels of 32 outputs, each a plain sequence of groups of inputs,
//
//     panel (32 outputs) / group of inputs (4 bytes: 1 float32, 2 bfloat16 or 4 int8) / output / input of the group
//
// with zeros for outputs and inputs that are not there. A product reads a panel in order; one layout serves any number
// of rows and every level. The outputs of a gated layer are [gate | up]: half a panel of gates lies beside the
// half panel they are multiplied with.
//
// Int8 weights and activations have a scale for every run of 192 inputs of an output or of a row. Weights are symmetric,
// and any two neighbours add up to at most 128, so that their products with two activations fit 16 bits; activations are
// asymmetric, with a zero, for which the sum of each run's quantized weights is kept.

#ifndef OE_LINEAR_H
#define OE_LINEAR_H

#include "rows.h"
#include "team.h"

#include <stdlib.h>

namespace {

// Mirrored by `_Layer` in linear_native.py. Arrays have as many items as whole panels have outputs, or those times runs.
struct Layer {
    char* weights;
    float* scales;      // int8 only: panel / run / output
    int16_t* sums;      // int8 only: likewise
    const float* bias;  // output
    int64_t outputs, inputs;
    int32_t kind, is_gated;
};

constexpr int64_t PANEL = 32, HALF = PANEL / 2;
constexpr int64_t GROUP = 4, ROW = PANEL * GROUP;  // a row is one group of inputs for a panel's outputs
constexpr int64_t INT8_RUN = 192;                              // inputs with one scale; up to 258 sum to an int16

typedef uint8_t vb __attribute__((vector_size(OE_LANES)));

OE_INLINE int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
OE_INLINE int64_t item_bytes(int32_t kind) { return kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 1; }
OE_INLINE int64_t panels_of(const Layer& layer) { return padded(layer.outputs, PANEL) / PANEL; }
OE_INLINE int64_t groups_of(const Layer& layer) { return padded(layer.inputs * item_bytes(layer.kind), GROUP) / GROUP; }
OE_INLINE int64_t runs_of(const Layer& layer) { return padded(layer.inputs, INT8_RUN) / INT8_RUN; }

// Which of all panels' outputs a layer's output is.
OE_INLINE int64_t slot_of(const Layer& layer, int64_t output) {
    if (!layer.is_gated) return output;
    const int64_t gates = layer.outputs / 2, gate = output % gates;
    return gate / HALF * PANEL + output / gates * HALF + gate % HALF;
}

// Where the scale and the sum of an output's first run are; those of the next run are a panel further.
OE_INLINE int64_t first_run_of(const Layer& layer, int64_t output) {
    const int64_t slot = slot_of(layer, output);
    return slot / PANEL * runs_of(layer) * PANEL + slot % PANEL;
}

OE_INLINE char* place(const Layer& layer, int64_t output) {
    const int64_t slot = slot_of(layer, output);
    return layer.weights + (slot / PANEL * groups_of(layer) * PANEL + slot % PANEL) * GROUP;
}

}  // namespace

// y [rows, outputs] = activation(x [rows, inputs] w^T + bias); for a gated layer with an activation it is
// y [rows, outputs / 2] = activation(gate) * up. Strides in bytes. x is of the layer's kind, for int8 either float
// kind; y is of either float kind. `scratch` has the bytes that `scratch_bytes` says.
struct LinearCall {
    const Layer* layer;
    const char* x;
    int64_t x_bytes;
    char* y;
    int64_t y_bytes;
    int64_t rows;
    int32_t x_kind, y_kind, activation;
};

OE_SHARED(share_linear)(Team& team, const LinearCall& call, char* scratch);

namespace {

// Rows so few that every thread prepares them for itself, which takes less time than to wait for each other.
OE_INLINE bool is_private(const LinearCall& call) { return call.rows * call.layer->inputs < 4096; }

// Words of 32 bits that a product reads of x for a group: the group as it is where instructions multiply it, else
// two, so that nothing of x is left to widen while products are summed.
#if defined(__AVX512BF16__)
constexpr int BF16_WORDS = 1;
#else
constexpr int BF16_WORDS = 2;  // a float each
#endif
#if OE_LANES > 4
constexpr int INT8_WORDS = 1;
#else
constexpr int INT8_WORDS = 2;  // two 16-bit integers each
#endif

OE_INLINE int words_of(const Layer& layer) {
    return layer.kind == FLOAT32 ? 1 : layer.kind == BFLOAT16 ? BF16_WORDS : INT8_WORDS;
}

// Whether the product reads a copy of x: in whole groups of words, and for int8 quantized.
OE_INLINE bool is_copied(const Layer& layer) {
    return layer.kind == INT8 || words_of(layer) == 2 || layer.inputs * item_bytes(layer.kind) % GROUP;
}

// Of a row of that copy. Whole runs are written; an odd number of lines keeps rows off each other's cache sets.
OE_INLINE int64_t copied_bytes(const Layer& layer) {
    return padded(groups_of(layer) * GROUP, INT8_RUN) * words_of(layer) | 64;
}

OE_INLINE int64_t scratch_bytes(const LinearCall& call, int threads) {
    if (!is_copied(*call.layer)) return 0;
    const int64_t factors = call.layer->kind == INT8 ? 2 * runs_of(*call.layer) * int64_t(sizeof(float)) : 0;
    const int64_t bytes = padded(call.rows * (copied_bytes(*call.layer) + factors), 64);
    return is_private(call) ? bytes * threads : bytes;
}

}  // namespace

#endif
