// What the operations on rows of logits share: how a row is read, searched and summed.
//
// Every sum has one fixed order, so that a row's bits depend on that row alone.
#pragma once

#include <algorithm>
#include <memory>

#include "elements.h"

constexpr float kInfinity = __builtin_inff();
constexpr int64_t kBlock = 64;    // logits that share a maximum
constexpr int64_t kChunk = 1024;  // numbers added in float32; sums of chunks are added in double
constexpr int64_t kSerialLogits = 1 << 14;  // fewer are not worth waking a team

// Read `count` logits; lanes past them hold -inf, which weighs nothing.
INLINE Floats read_logits(const float* from, int count) {
    if (count == kLanes) return load<Floats>(from);
    float padded[kLanes];
    for (int i = 0; i < kLanes; ++i) padded[i] = i < count ? from[i] : -kInfinity;
    return load<Floats>(padded);
}

// Put -inf behind `count` values, for as long as a vector.
INLINE void pad(float* values, int64_t count) {
    std::fill(values + count, values + count + kLanes, -kInfinity);
}

inline std::unique_ptr<float[]> memory_for_maxima(int64_t size) {
    return std::unique_ptr<float[]>(new float[size / kBlock + 1 + kLanes]);
}

// Write the maximum of each block, padded; return that of the row, or NaN if the row holds NaN.
inline float find_maxima(const float* row, int64_t size, float* maxima) {
    float best = -kInfinity;
    Ints unordered = {};
    int64_t blocks = 0;
    for (int64_t start = 0; start < size; start += kBlock) {
        Floats block = splat(-kInfinity);
        for_pieces(std::min(kBlock, size - start), [&](int64_t i, int count) {
            const Floats x = read_logits(row + start + i, count);
            unordered |= x != x;
            block = larger(x, block);
        });
        maxima[blocks] = across_max(block);
        best = std::max(best, maxima[blocks++]);
    }
    pad(maxima, blocks);
    for (int i = 0; i < kLanes; ++i)
        if (unordered[i]) return __builtin_nanf("");
    return best;
}

inline int64_t first_best(const float* row, const float* maxima, float best) {
    int64_t block = 0;
    while (maxima[block] != best) ++block;
    int64_t id = block * kBlock;
    while (row[id] != best) ++id;
    return id;
}

// Sum what `value(start, count)` gives for the pieces of each chunk; `each` sees the sums.
template <class Value, class Each>
INLINE double sum_chunks(int64_t size, Value value, Each each) {
    double total = 0;
    for (int64_t start = 0; start < size; start += kChunk) {
        Floats sum = {};
        for_pieces(std::min(kChunk, size - start),
                   [&](int64_t i, int count) { sum += value(start + i, count); });
        const double chunk = across_sum(sum);
        each(start / kChunk, chunk);
        total += chunk;
    }
    return total;
}

INLINE void ignore(int64_t, double) {}
