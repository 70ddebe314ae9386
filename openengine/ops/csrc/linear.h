// How the weights of a layer lie in memory: in panels of 32 outputs, each a plain sequence of groups of inputs,
//
//     panel (32 outputs) / group of inputs (4 bytes: 1 float32, 2 bfloat16 or 4 int8) / output / input of the group
//
// with zeros for outputs and inputs that are not there. A product reads a panel once, in order; one layout serves any
// number of rows and every level.
//
// Int8 weights are symmetric, with a scale per output; activations are asymmetric, with a scale and a zero for every
// run of 128 inputs of a row, for which the sum of the run's quantized weights is kept per output.

#ifndef OE_LINEAR_H
#define OE_LINEAR_H

#include "rows.h"

#include <stdlib.h>

namespace {

enum Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

// Mirrored by `_Layer` in linear_native.py. Arrays have an item for each output of whole panels.
struct Layer {
    char* weights;
    float* scales;  // int8 only
    int16_t* sums;  // int8 only: panel / run / output
    const float* bias;
    int64_t outputs, inputs;
    int32_t kind;
};

constexpr int64_t PANEL = 32, GROUP = 4, ROW = PANEL * GROUP;  // a row is one group of inputs for a panel's outputs
constexpr int64_t INT8_RUN = 128;                              // inputs

typedef uint8_t vb __attribute__((vector_size(OE_LANES)));

OE_INLINE int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
OE_INLINE int64_t item_bytes(int32_t kind) { return kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 1; }
OE_INLINE int64_t panels_of(const Layer& layer) { return padded(layer.outputs, PANEL) / PANEL; }
OE_INLINE int64_t groups_of(const Layer& layer) { return padded(layer.inputs * item_bytes(layer.kind), GROUP) / GROUP; }
OE_INLINE int64_t runs_of(const Layer& layer) { return padded(layer.inputs, INT8_RUN) / INT8_RUN; }

OE_INLINE char* place(const Layer& layer, int64_t output) {
    return layer.weights + (output / PANEL * groups_of(layer) * PANEL + output % PANEL) * GROUP;
}

}  // namespace

#endif
