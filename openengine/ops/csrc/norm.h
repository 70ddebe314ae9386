// The arguments of norm.cpp. Strides between rows in bytes.

#ifndef OE_NORM_H
#define OE_NORM_H

#include "team.h"

// For each row of x [rows, heads, n]: x += delta if there is one, y = norm(x) * weight [heads, n] + bias [n] if there
// is one. y is contiguous. A delta needs heads = 1.
struct NormCall {
    char* x;
    int64_t x_bytes;
    const char* delta;
    int64_t delta_bytes;
    const float *weight, *bias;
    char* y;
    int64_t rows, heads, n;
    float eps;
    int32_t centered, kind;
};

OE_SHARED(share_norm)(Team& team, const NormCall& call);

#endif
