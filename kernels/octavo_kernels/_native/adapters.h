// What adapters add to products, as the code that packs an adapter and the code that adds it agree
// on it.
//     product[row] += x[row] @ down^T @ up^T        of the row's own adapter
// In float32, in the order of the inputs and then of the ranks, by one instruction, and added to
// the rounded product before it is rounded again: no other row or adapter changes a bit.
//     down   panels of up to kDownVectors vectors of ranks, each [in, vectors * kLanes]
//     up     for each vector of the product's panels (linear.h) [count, kLanes]: of `count` ranks
// Ranks that add nothing to any output of a vector, at its beginning and at its end, are left out:
// where layers are joined, those of the others.
#pragma once

#include <cstdint>
#include <vector>

#include "linear.h"

constexpr int kDownVectors = 3;

// Ranks [first, first + count) of one vector of outputs, which begin at vector `begin` of `up`.
struct UpSpan {
    int32_t first, count;
    int64_t begin;
};

// One adapter's; all zero for nothing.
struct LowRank {
    const float *down, *up;
    const UpSpan* spans;
    int64_t vectors;  // of ranks
};

// What is added to one row of a product: `low_rank` is null for nothing.
struct RowTerm {
    const LowRank* low_rank;
    const float* shrunk;  // the row @ down^T
    bool fetches;         // whether this row, of all of its adapter, fetches the next panel's `up`
};

// Rows of a step sorted by adapter: those of adapter g are rows[starts[g] : starts[g + 1]].
struct AdaptedRows {
    const int64_t *rows, *starts;
    int64_t count, num_adapters;  // of rows; 0 for none
};

// The rows of one step, and memory for the terms of one product after the other.
class AdaptedStep {
  public:
    AdaptedStep(const AdaptedRows& adapted, int64_t tokens);

    // Returns a term for each token, good until the next call, for the product of x
    // [tokens, in_features]; by_adapter: what each adds to it, or null for nothing.
    const RowTerm* shrink(int64_t element, const void* x, int64_t x_stride, int64_t in_features,
                          const LowRank* by_adapter, int threads);

  private:
    // Neighbours in `rows` that are of one adapter, few enough for one tile; its first, or not.
    struct Piece {
        int64_t adapter, first, end;
        bool is_first;
        float* shrunk;
    };
    // Give each row its place in memory; returns the most vectors of ranks of any.
    int64_t place(const LowRank* by_adapter);

    const int64_t* rows_;
    std::vector<Piece> pieces_;
    std::vector<RowTerm> terms_;
    std::vector<float> shrunk_;
};

extern "C" {

// Write into sizes[4] what a packed adapter of a weight of this shape takes: floats of `down`, the
// most floats of `up`, spans, and vectors of ranks.
void octavo_low_rank_sizes(const PackedLinear* linear, int64_t rank, int64_t* sizes);

// Pack down [rank, in] and up [out, rank], contiguous; returns how many floats of `up` there are.
int64_t octavo_pack_low_rank(const PackedLinear* linear, int64_t rank, const float* down,
                             const float* up, float* to_down, float* to_up, UpSpan* spans);

// The first of the adapters whose rows are not some of those behind the ones before it, or else
// -2 - i for the first rows[i] outside [0, tokens), or else -1.
int64_t octavo_invalid_adapted(const AdaptedRows* adapted, int64_t tokens);

// Add to product [tokens, out] of x [tokens, in] what adapters add; strides: of the rows of x and
// of product. Returns what octavo_invalid_adapted does, and unless it is -1 nothing is added.
int64_t octavo_add_low_rank(int element, const void* x, const PackedLinear* linear, void* product,
                            int64_t tokens, const int64_t* strides, const AdaptedRows* adapted,
                            const LowRank* by_adapter, int threads);

}  // extern "C"
