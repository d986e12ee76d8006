// One tile of paged attention: up to kMaxRows rows against up to kTile neighbouring positions.
//
// Knows nothing of block tables or sequences; the caller has found the memory of every position.
#pragma once

#include "elements.h"
#include "kv_cache.h"

constexpr int kTile = 64;
constexpr int kGroups = kTile / kLanes;  // vectors of positions in a tile
constexpr int kMaxRows = kLanes == 16 ? 6 : 4;
static_assert(kMaxRows <= kLanes, "`weigh` keeps a number of each row in one vector");

struct Range {
    int begin, end;  // positions within a tile
    bool operator==(const Range& other) const { return begin == other.begin && end == other.end; }
};

// How scores become weights.
struct Softmax {
    float scale, soft_cap;  // soft_cap 0 for none
};

template <class T>
struct Row {
    const typename T::Scalar* q;  // kMaxRows apart: neighbouring rows share a line
    int64_t first, last;  // positions it attends to, both included
    float max;
    Floats sum;
    float* acc;  // [head_dim], padded to whole vectors
};

template <class T>
struct Tile {
    typedef typename T::Lane Lane;
    const Lane* keys[kGroups] = {};  // lane rows of a group of positions, `stride` apart
    int64_t stride;
    const Lane* values[kTile] = {};  // one lane row for each position, or pair of positions
    Range range;                 // the positions that are there
    alignas(64) Lane packed[kMaxHeadDim * kTile];  // keys of blocks smaller than a vector
};

// How many vectors the inner loops keep for each of R rows, beside the operands, in registers.
template <class T, int R>
constexpr int kPass = R * 4 + T::kWide * 5 <= kRegisters ? 4 : 2;

// scores[r][g] = q[r] . keys of the positions of group g, for G groups from `group` on.
// `next`, where given, is fetched into the cache meanwhile: blocks are scattered over memory, and
// the processor cannot guess where the next one lies.
template <class T, int R, int G>
INLINE void score(const Tile<T>& tile, const Tile<T>* next, const Row<T>* rows, int64_t depth,
                  int group, Floats (*scores)[kGroups]) {
    Floats sums[R][G] = {};
    for (int64_t d = 0; d < depth; ++d) {
        typename T::Wide keys[G];
        for (int g = 0; g < G; ++g)
            keys[g] = T::lanes(tile.keys[group + g] + d * tile.stride, 0xffffffffu);
        if (next)
            for (int g = 0; g < G; ++g)
                __builtin_prefetch(next->keys[group + g] + d * next->stride);
        for (int r = 0; r < R; ++r) {
            const typename T::Scalar q = rows[0].q[d * kMaxRows + r];
            for (int g = 0; g < G; ++g) sums[r][g] = T::dot(sums[r][g], keys[g], q);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int g = 0; g < G; ++g) scores[r][group + g] = sums[r][g];
}

// Bound the scaled scores of R rows softly. Apart from the loops that most models need, in which
// even a branch not taken costs a twentieth.
template <int R>
__attribute__((noinline)) void cap_scores(Floats (*scores)[kGroups], Range range, Softmax softmax) {
    for (int r = 0; r < R; ++r)
        for (int g = range.begin / kLanes; g * kLanes < range.end; ++g)
            scores[r][g] = hyperbolic_tangent(scores[r][g] * softmax.scale / softmax.soft_cap) *
                           softmax.soft_cap;
}

// Scale a row's scores, hide those of positions outside `range`, and return the largest.
INLINE float mask_scores(Floats* scores, Range range, float scale) {
    const Floats hidden = splat(-__builtin_inff());
    Floats highest = hidden;
    for (int g = range.begin / kLanes; g * kLanes < range.end; ++g) {
        scores[g] *= scale;
        if (g * kLanes < range.begin || (g + 1) * kLanes > range.end) {
            Ints lane = {};
            for (int i = 0; i < kLanes; ++i) lane[i] = i;
            const Ints position = lane + g * kLanes;
            const Ints seen = (position >= range.begin) & (position < range.end);
            scores[g] = seen ? scores[g] : hidden;
        }
        highest = larger(scores[g], highest);
    }
    return across_max(highest);
}

// Raise the running maxima to this tile's scores, turn the scores into weights relative to them,
// and return the factor that brings each row's past to the new maximum.
template <class T, int R>
INLINE Floats weigh(Row<T>* rows, Floats (*scores)[kGroups], Range range, float scale,
                    typename T::Scalar (*weights)[kTile / T::kPerLane]) {
    Floats before = {}, after = {};
    for (int r = 0; r < R; ++r) {
        const float tile_max = mask_scores(scores[r], range, scale);
        before[r] = rows[r].max;
        after[r] = rows[r].max = tile_max > rows[r].max ? tile_max : rows[r].max;
    }
    const Floats factors = exponential(before - after);
    for (int r = 0; r < R; ++r) {
        Floats sum = rows[r].sum * factors[r];
        for (int g = range.begin / kLanes; g * kLanes < range.end; ++g) {
            const Floats weight = exponential(scores[r][g] - rows[r].max);
            sum += weight;
            T::scalars(weights[r] + g * kLanes / T::kPerLane, weight);
        }
        rows[r].sum = sum;
    }
    return factors;
}

// Which halves of a lane row of values hold positions inside `range`.
template <class T>
INLINE uint32_t value_mask(int lane_row, Range range) {
    if constexpr (T::kPerLane == 1) return 0xffffffffu;
    const int low = lane_row * 2, high = low + 1;
    return (low >= range.begin ? 0x0000ffffu : 0u) | (high < range.end ? 0xffff0000u : 0u);
}

// The lanes of values that end a row: a whole vector of them could reach out of the cache.
template <class T>
INLINE typename T::Wide last_lanes(const typename T::Lane* from, int64_t count, uint32_t mask) {
    alignas(64) typename T::Lane held[kLanes] = {};
#if defined(OCTAVO_AVX512)
    const uint32_t read = (1u << count) - 1;
    if constexpr (sizeof *from == 4)
        store(held, _mm512_maskz_loadu_epi32(static_cast<__mmask16>(read), from));
    else
        store(held, _mm256_maskz_loadu_epi16(static_cast<__mmask16>(read), from));
#else
    for (int64_t i = 0; i < count; ++i) held[i] = from[i];
#endif
    return T::lanes(held, mask);
}

// acc[r] = acc[r] * factor[r] + weights[r] . values, for D vectors of dimensions from `dim` on, or,
// if Last, for the `rest` dimensions from there on
template <class T, int R, int D, bool Last = false>
INLINE void accumulate(const Tile<T>& tile, const Tile<T>* next, Row<T>* rows, Range range,
                       Floats factors, const typename T::Scalar (*weights)[kTile / T::kPerLane],
                       int64_t dim, int64_t rest = 0) {
    Floats sums[R][D];
    for (int r = 0; r < R; ++r)
        for (int d = 0; d < D; ++d)
            sums[r][d] = load<Floats>(rows[r].acc + dim + d * kLanes) * factors[r];
    const int begin = range.begin / T::kPerLane;
    const int end = (range.end + T::kPerLane - 1) / T::kPerLane;
    const auto add = [&](int i, uint32_t mask) __attribute__((always_inline)) {
        typename T::Wide values[D];
        for (int d = 0; d < D; ++d) {
            const auto* from = tile.values[i] + dim + d * kLanes;
            values[d] = Last ? last_lanes<T>(from, rest, mask) : T::lanes(from, mask);
        }
        if (next)
            for (int d = 0; d < D; ++d) __builtin_prefetch(next->values[i] + dim + d * kLanes);
        for (int r = 0; r < R; ++r)
            for (int d = 0; d < D; ++d) sums[r][d] = T::dot(sums[r][d], values[d], weights[r][i]);
    };
    add(begin, value_mask<T>(begin, range));
    for (int i = begin + 1; i < end - 1; ++i) add(i, 0xffffffffu);
    if (end - 1 > begin) add(end - 1, value_mask<T>(end - 1, range));
    for (int r = 0; r < R; ++r)
        for (int d = 0; d < D; ++d) store(rows[r].acc + dim + d * kLanes, sums[r][d]);
}

template <class T, int R>
void attend_tile(int64_t head_dim, Softmax softmax, const Tile<T>& tile, const Tile<T>* next,
                 Row<T>* rows, Range range) {
    constexpr int kStep = kPass<T, R>;
    const int64_t depth = head_dim / T::kPerLane;
    Floats scores[R][kGroups];
    const int end = (range.end + kLanes - 1) / kLanes;
    int group = range.begin / kLanes;
    for (; group + kStep <= end; group += kStep)
        score<T, R, kStep>(tile, next, rows, depth, group, scores);
    if constexpr (kStep > 2)
        for (; group + 2 <= end; group += 2)
            score<T, R, 2>(tile, next, rows, depth, group, scores);
    for (; group < end; ++group) score<T, R, 1>(tile, next, rows, depth, group, scores);

    typename T::Scalar weights[R][kTile / T::kPerLane];
    const bool capped = softmax.soft_cap > 0.0f;
    if (capped) cap_scores<R>(scores, range, softmax);
    const float scale = capped ? 1.0f : softmax.scale;
    const Floats factors = weigh<T, R>(rows, scores, range, scale, weights);

    int64_t dim = 0;
    for (; dim + kStep * kLanes <= head_dim; dim += kStep * kLanes)
        accumulate<T, R, kStep>(tile, next, rows, range, factors, weights, dim);
    for (; dim + kLanes <= head_dim; dim += kLanes)
        accumulate<T, R, 1>(tile, next, rows, range, factors, weights, dim);
    if (dim < head_dim)
        accumulate<T, R, 1, true>(tile, next, rows, range, factors, weights, dim, head_dim - dim);
}

// Fetch what a tile holds past the positions that were fetched beside another tile's loops.
template <class T>
void fetch_rest(int64_t head_dim, const Tile<T>& tile, Range fetched) {
    constexpr int kLine = 64 / sizeof(typename T::Lane);
    for (int g = (fetched.end + kLanes - 1) / kLanes; g * kLanes < tile.range.end; ++g)
        for (int64_t d = 0; d < head_dim / T::kPerLane; ++d)
            __builtin_prefetch(tile.keys[g] + d * tile.stride);
    const int seen = (fetched.end + T::kPerLane - 1) / T::kPerLane;
    for (int i = seen; i * T::kPerLane < tile.range.end; ++i)
        for (int64_t d = 0; d < head_dim; d += kLine) __builtin_prefetch(tile.values[i] + d);
}
