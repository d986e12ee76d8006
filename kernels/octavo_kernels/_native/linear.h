// Products with a fixed weight, as the code that packs one and the code that uses it agree on it.
//
// A weight [out, in] is kept in panels of neighbouring outputs, one after the other in memory:
//     [panels, in / per_lane, kPanelVectors * kLanes]    a lane pairs inputs, as in kv_cache.h
// so that a panel is read in one stream, and no product needs a sum across lanes. What is past the
// last input or output is zero.
#pragma once

#include <cstdint>

#include "elements.h"

constexpr int kPanelVectors = 2;
constexpr int kPanelOutputs = kPanelVectors * kLanes;

struct PackedLinear {
    const void *panels, *bias;  // bias [out] or null
    int64_t in_features, out_features;
};

extern "C" {

// Bytes that a packed weight takes.
int64_t octavo_packed_size(int element, int64_t in_features, int64_t out_features);

// weight: [out, in], contiguous
void octavo_pack_weight(int element, const void* weight, void* panels, int64_t in_features,
                        int64_t out_features, int threads);

// out = x @ weight^T + bias for x [rows, in]; strides: of the rows of x and out
void octavo_linear(int element, const void* x, const PackedLinear* linear, void* out, int64_t rows,
                   const int64_t* strides, int threads);

}  // extern "C"
