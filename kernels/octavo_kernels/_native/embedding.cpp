// Rows of a packed weight, as they were before it was packed.
//
// The caller has checked shapes and types; rows that do not exist are told of, not read.

#include <cstring>

#include "linear.h"

namespace {

constexpr int64_t kSerialRows = 4;  // fewer are not worth waking a team

// Copy output `row` of a weight that is not gated; its lanes lie a panel's width apart.
template <class T>
void unpack_row(const PackedLinear& linear, int64_t row, typename T::Element* to) {
    using E = typename T::Element;
    constexpr int64_t kStep = kPanelOutputs * T::kPerLane;
    const int64_t whole = linear.in_features / T::kPerLane, left = linear.in_features % T::kPerLane;
    const int64_t depth = whole + (left > 0);
    const E* from = static_cast<const E*>(linear.panels) + row / kPanelOutputs * depth * kStep +
                    row % kPanelOutputs * T::kPerLane;
    for (int64_t k = 0; k < whole; ++k)
        memcpy(to + k * T::kPerLane, from + k * kStep, sizeof(typename T::Lane));
    if (left) to[linear.in_features - 1] = from[whole * kStep];
}

template <class T>
void unpack_rows(const PackedLinear& linear, const int64_t* rows, int64_t count, void* out,
                 int threads) {
    auto* const to = static_cast<typename T::Element*>(out);
#pragma omp parallel for num_threads(threads) if (count >= kSerialRows)
    for (int64_t i = 0; i < count; ++i)
        unpack_row<T>(linear, rows[i], to + i * linear.in_features);
}

}  // namespace

extern "C" {

// out[i] = weight[rows[i]], out [count, in]; returns the first i whose row is outside, and then
// nothing is written, or -1.
int64_t octavo_embedding(int element, const PackedLinear* linear, const int64_t* rows,
                         int64_t count, void* out, int threads) {
    for (int64_t i = 0; i < count; ++i)
        if (rows[i] < 0 || rows[i] >= linear->out_features) return i;
    const auto run = for_element(element, unpack_rows<Float32>, unpack_rows<BFloat16>,
                                 unpack_rows<Float16>);
    run(*linear, rows, count, out, threads);
    return -1;
}

}  // extern "C"
