// Products with a fixed weight, as the code that packs one and the code that uses it agree on it.
//
// A weight [out, in] is kept in panels of neighbouring outputs, one after the other in memory:
//     [panels, in / per_lane, kPanelVectors * kLanes]    a lane pairs inputs, as in kv_cache.h
// so that a panel is read in one stream, and no product needs a sum across lanes. What is past the
// last input or output is zero. Of a gated weight, whose first half of outputs is a gate for the
// other half, a panel holds kLanes gates and then what they are for:
//     plain    outputs [32 p, 32 p + 16), [32 p + 16, 32 p + 32)      of panel p with 16 lanes
//     gated    outputs [16 p, 16 p + 16), out / 2 + [16 p, 16 p + 16)
#pragma once

#include <cstdint>

#include "elements.h"

constexpr int kPanelVectors = 2;
constexpr int kPanelOutputs = kPanelVectors * kLanes;

struct RowTerm;  // of adapters.h

struct PackedLinear {
    const void *panels, *bias;  // bias [out] or null
    int64_t in_features, out_features, is_gated;
    int64_t is_int8;  // whether the panels are as linear_int8.h says
};

extern "C" {

// Bytes that a packed weight takes.
int64_t octavo_packed_size(int element, int64_t in_features, int64_t out_features);

// weight: [out, in], contiguous; written to linear->panels
void octavo_pack_weight(int element, const void* weight, const PackedLinear* linear, int threads);

// The same of a weight that is quantised as it is packed.
int64_t octavo_packed_int8_size(int64_t in_features, int64_t out_features);
void octavo_pack_int8_weight(int element, const void* weight, const PackedLinear* linear,
                             int threads);

// out = x @ weight^T + bias for x [rows, in]; strides: of the rows of x and out; next: the weight
// that is multiplied by next, whose beginning is fetched meanwhile, or null; terms: what an adapter
// adds to each row of the rounded product, or null for nothing
void octavo_linear(int element, const void* x, const PackedLinear* linear, void* out, int64_t rows,
                   const int64_t* strides, const PackedLinear* next, const RowTerm* terms,
                   int threads);

// The same, rounded to the element and written as float32.
void octavo_linear_to_float32(int element, const void* x, const PackedLinear* linear, void* out,
                              int64_t rows, const int64_t* strides, const PackedLinear* next,
                              const RowTerm* terms, int threads);

// octavo_silu_and_mul of what octavo_linear makes with a gated weight; out is [rows, out / 2].
void octavo_silu_linear(int element, const void* x, const PackedLinear* linear, void* out,
                        int64_t rows, const int64_t* strides, const PackedLinear* next,
                        const RowTerm* terms, int threads);

// octavo_gelu_and_mul of the same.
void octavo_gelu_linear(int element, const void* x, const PackedLinear* linear, void* out,
                        int64_t rows, const int64_t* strides, const PackedLinear* next,
                        const RowTerm* terms, int threads);

// octavo_linear of groups of rows, each with a weight of its own: rows [starts[g], starts[g + 1])
// of x with the g-th of `count` weights, which lie behind each other in memory, all of the shape of
// `first`, without bias. Returns the first group that is not within the rows or begins before the
// end of the one before it, and then nothing is computed, or -1.
int64_t octavo_grouped_linear(int element, const void* x, const PackedLinear* first,
                              const int64_t* starts, int64_t count, void* out, int64_t rows,
                              const int64_t* strides, int threads);

// octavo_silu_linear of the same.
int64_t octavo_grouped_silu_linear(int element, const void* x, const PackedLinear* first,
                                   const int64_t* starts, int64_t count, void* out, int64_t rows,
                                   const int64_t* strides, int threads);

}  // extern "C"
