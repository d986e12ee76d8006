// Draw a token from each row of logits, among those that filters keep.
//
// A row is computed by one thread in one fixed order. Nothing is sorted: what a filter keeps is all
// that reaches some logit, which is found by bisection, for that many times one counts, or adds, a
// vector at a time. To look at few logits only, blocks of the row whose maximum is too small are
// skipped. The caller has checked shapes, types and strides, which are in elements.

#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>

#include "logits.h"

namespace {

constexpr float kColdest = 1e-30f;  // so that 0 / temperature stays 0
// Where a row is cut to find what top-p keeps, in exponents below the best.
constexpr float kDepths[] = {1, 2, 4, 6, 9, 13};
constexpr int kNumDepths = sizeof kDepths / sizeof *kDepths;

struct Params {
    const float *temperature, *top_p, *min_p;
    const int32_t* top_k;
    const int64_t *seeds, *positions;
};

// Memory of one thread, for rows of `size` logits.
struct Scratch {
    explicit Scratch(int64_t size)
        : maxima(memory_for_maxima(size)),
          logits(new float[size + kLanes]),
          weights(new float[size + kLanes]),
          ids(new int32_t[size + kLanes]),
          sums(new double[size / kChunk + 1]) {}
    std::unique_ptr<float[]> maxima, logits, weights;
    std::unique_ptr<int32_t[]> ids;
    std::unique_ptr<double[]> sums;
};

// Some tokens of a row in the order of their ids; without `ids`, all of them.
struct Tokens {
    const float* logits;
    const int32_t* ids;
    int64_t count;
};

// A token weighs e^exponent, exponent = (logit - best) * scale, if neither is below its bound.
struct Filter {
    float best, scale, least_logit, least_exponent;
};

INLINE Floats exponents(Floats logits, const Filter& filter) {
    return (logits - filter.best) * filter.scale;
}

INLINE Floats weights_of(Floats logits, const Filter& filter) {
    const Floats exponent = exponents(logits, filter);
    const Ints kept = (logits >= filter.least_logit) & (exponent >= filter.least_exponent);
    return kept ? exponential(exponent) : Floats{};
}

// Numbers in the order of floats: of a < b, order(a) < order(b).
INLINE uint32_t order(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

INLINE float at_order(uint32_t number) {
    const uint32_t bits = number ^ (number >> 31 ? 0x80000000u : 0xffffffffu);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Append to a list the lanes that `kept` marks; may write as many lanes as there are.
INLINE int64_t append(float* logits, int32_t* ids, Floats x, int64_t first, Ints kept) {
    Ints lanes;
    for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<int32_t>(first) + i;
#if defined(OCTAVO_AVX512)
    const __mmask16 mask = _mm512_cmplt_epi32_mask((__m512i)kept, _mm512_setzero_si512());
    store(logits, _mm512_maskz_compress_ps(mask, (__m512)x));
    store(ids, _mm512_maskz_compress_epi32(mask, (__m512i)lanes));
    return __builtin_popcount(mask);
#else
    int64_t count = 0;
    for (int i = 0; i < kLanes; ++i) {
        logits[count] = x[i];
        ids[count] = lanes[i];
        count -= kept[i];
    }
    return count;
#endif
}

// List the tokens that `keeps` wants, which may want blocks of which it wants no token; the list
// is padded. It is asked for a float, and for lanes of them.
template <class Keeps>
Tokens list_tokens(const float* row, int64_t size, const Scratch& scratch, Keeps keeps) {
    float* logits = scratch.logits.get();
    int32_t* ids = scratch.ids.get();
    int64_t count = 0;
    for (int64_t start = 0; start < size; start += kBlock) {
        if (!keeps(scratch.maxima[start / kBlock])) continue;
        for_pieces(std::min(kBlock, size - start), [&](int64_t i, int lanes) {
            Floats x = read_logits(row + start + i, lanes);
            // Not a number is never wanted.
            for (int lane = lanes; lane < kLanes; ++lane) x[lane] = __builtin_nanf("");
            count += append(logits + count, ids + count, x, start + i, keeps(x));
        });
    }
    pad(logits, count);
    return {logits, ids, count};
}

// Return a bound that just the k largest of padded values reach, and what is equal to the kth.
float bound_of_largest(const float* values, int64_t count, int64_t k, float largest) {
    uint32_t low = order(-kInfinity), high = order(largest);
    while (low < high) {
        const uint32_t middle = low + (high - low + 1) / 2;
        const float bound = at_order(middle);
        Ints negated = {};
        for (int64_t i = 0; i < count; i += kLanes) negated += load<Floats>(values + i) >= bound;
        int64_t reach = 0;
        for (int i = 0; i < kLanes; ++i) reach -= negated[i];
        if (reach == k) return bound;
        if (reach > k)
            low = middle;
        else
            high = middle - 1;
    }
    return at_order(low);
}

Tokens keep_top_k(const float* row, int64_t size, int64_t k, Filter& filter,
                  const Scratch& scratch) {
    // At least k logits reach the kth largest of the maxima.
    const int64_t blocks = (size + kBlock - 1) / kBlock;
    const float* maxima = scratch.maxima.get();
    const float bound = k > blocks ? -kInfinity : bound_of_largest(maxima, blocks, k, filter.best);
    const Tokens tokens =
        list_tokens(row, size, scratch, [bound](auto logit) { return logit >= bound; });
    filter.least_logit = bound_of_largest(tokens.logits, tokens.count, k, filter.best);
    return tokens;
}

// Return the least bound such that what lies above it weighs less than `goal`: what weighs `beyond`,
// and logits of a list, which must hold one that is to be kept.
float bound_of_mass(const Tokens& tokens, const Filter& filter, double beyond, double goal,
                    const Scratch& scratch) {
    float* weights = scratch.weights.get();
    Floats most = splat(-kInfinity), negated_least = splat(-kInfinity);
    for (int64_t i = 0; i < tokens.count; i += kLanes) {
        const Floats logits = load<Floats>(tokens.logits + i);
        store(weights + i, weights_of(logits, filter));
        most = larger(logits, most);
        negated_least = larger(logits > -kInfinity ? -logits : splat(-kInfinity), negated_least);
    }
    // Padding weighs nothing, so that whole vectors may be read.
    const int64_t padded = (tokens.count + kLanes - 1) / kLanes * kLanes;
    uint32_t low = order(std::max(-across_max(negated_least), filter.least_logit));
    uint32_t high = order(across_max(most));
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        const float bound = at_order(middle);
        const auto above = [&](int64_t i, int) {
            return load<Floats>(tokens.logits + i) > bound ? load<Floats>(weights + i) : Floats{};
        };
        if (beyond + sum_chunks(padded, above, ignore) < goal)
            high = middle;
        else
            low = middle + 1;
    }
    return at_order(low);
}

// What the filters before top-p keep.
INLINE Filter without_min_p(Filter filter) {
    filter.least_exponent = -kInfinity;
    return filter;
}

// Keep of a list what has less than the share `top_p` of its weight above it.
void keep_top_p_of_list(const Tokens& tokens, float top_p, Filter& filter,
                        const Scratch& scratch) {
    const Filter before = without_min_p(filter);
    const auto weights = [&](int64_t i, int count) {
        return weights_of(read_logits(tokens.logits + i, count), before);
    };
    const double goal = top_p * sum_chunks(tokens.count, weights, ignore);
    filter.least_logit = bound_of_mass(tokens, before, 0, goal, scratch);
}

// The same of a row, which is cut at some depths first, to list the tokens between two of them.
void keep_top_p_of_row(const float* row, int64_t size, float top_p, Filter& filter,
                       const Scratch& scratch) {
    const Filter before = without_min_p(filter);
    double total = 0, masses[kNumDepths] = {};
    for (int64_t start = 0; start < size; start += kChunk) {
        Floats sum = {}, sums[kNumDepths] = {};
        for_pieces(std::min(kChunk, size - start), [&](int64_t i, int count) {
            const Floats exponent = exponents(read_logits(row + start + i, count), before);
            const Floats weight = exponential(exponent);
            sum += weight;
            for (int d = 0; d < kNumDepths; ++d)
                sums[d] += exponent > -kDepths[d] ? weight : Floats{};
        });
        total += across_sum(sum);
        for (int d = 0; d < kNumDepths; ++d) masses[d] += across_sum(sums[d]);
    }
    const double goal = top_p * total;
    int depth = 0;
    while (depth < kNumDepths && masses[depth] < goal) ++depth;
    const float top = depth == 0 ? 1.0f : -kDepths[depth - 1];  // no exponent is above 0
    const float bottom = depth == kNumDepths ? -kInfinity : -kDepths[depth];
    const Tokens tokens = list_tokens(row, size, scratch, [before, top, bottom](auto logit) {
        const auto exponent = (logit - before.best) * before.scale;
        if constexpr (std::is_same_v<decltype(exponent), const float>)
            return exponent > bottom;
        else
            return (exponent > bottom) & (exponent <= top);
    });
    const double beyond = depth == 0 ? 0 : masses[depth - 1];
    filter.least_logit = bound_of_mass(tokens, before, beyond, goal, scratch);
}

// Return the token in which `uniform` of all weight is reached, in the order of ids.
int64_t draw(const Tokens& tokens, const Filter& filter, double uniform, const Scratch& scratch) {
    double* sums = scratch.sums.get();
    const auto weights = [&](int64_t i, int count) {
        return weights_of(read_logits(tokens.logits + i, count), filter);
    };
    const auto remember = [sums](int64_t chunk, double sum) { sums[chunk] = sum; };
    const double target = uniform * sum_chunks(tokens.count, weights, remember);
    // Should rounding leave the target beyond everything, the last that weighs something is drawn.
    double before = 0, reached = 0;
    int64_t first = 0;
    for (int64_t chunk = 0; chunk * kChunk < tokens.count && reached <= target; ++chunk) {
        if (sums[chunk] == 0) continue;
        first = chunk * kChunk;
        before = reached;
        reached += sums[chunk];
    }
    float weight[kChunk];
    const int64_t count = std::min(kChunk, tokens.count - first);
    for_pieces(count, [&](int64_t i, int lanes) {
        write<Float32>(weight + i, weights(first + i, lanes), lanes);
    });
    int64_t chosen = first;
    for (int64_t i = 0; i < count && before <= target; ++i) {
        if (weight[i] == 0) continue;
        chosen = first + i;
        before += weight[i];
    }
    return tokens.ids ? tokens.ids[chosen] : chosen;
}

// One step of SplitMix64 (Steele, Lea and Flood, 2014).
INLINE uint64_t mix(uint64_t state) {
    state += 0x9e3779b97f4a7c15u;
    state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
    state = (state ^ (state >> 27)) * 0x94d049bb133111ebu;
    return state ^ (state >> 31);
}

INLINE double uniform_number(int64_t seed, int64_t position) {
    const uint64_t state = mix(seed) + static_cast<uint64_t>(position) * 0x9e3779b97f4a7c15u;
    return static_cast<double>(mix(state) >> 12) * 0x1p-52;
}

int64_t sample_row(const float* row, int64_t size, const Params& params, int64_t index,
                   const Scratch& scratch) {
    const float best = find_maxima(row, size, scratch.maxima.get());
    if (!(std::fabs(best) < kInfinity)) return -1;
    const float temperature = params.temperature[index], min_p = params.min_p[index];
    if (!(temperature > 0)) return first_best(row, scratch.maxima.get(), best);
    const float least = min_p > 0 ? std::min(std::log(min_p), 0.0f) : -kInfinity;
    Filter filter = {best, 1.0f / std::max(temperature, kColdest), -kInfinity, least};
    Tokens tokens = {row, nullptr, size};
    const int64_t top_k = params.top_k[index];
    if (top_k > 0 && top_k < size) tokens = keep_top_k(row, size, top_k, filter, scratch);
    const float top_p = params.top_p[index];
    if (top_p < 1) {
        if (tokens.ids)
            keep_top_p_of_list(tokens, top_p, filter, scratch);
        else
            keep_top_p_of_row(row, size, top_p, filter, scratch);
    }
    const double uniform = uniform_number(params.seeds[index], params.positions[index]);
    return draw(tokens, filter, uniform, scratch);
}

}  // namespace

extern "C" {

void octavo_sample(const float* logits, const float* temperature, const int32_t* top_k,
                   const float* top_p, const float* min_p, const int64_t* seeds,
                   const int64_t* positions, int64_t* out, int64_t rows, int64_t size,
                   int64_t stride, int threads) {
    const Params params = {temperature, top_p, min_p, top_k, seeds, positions};
#pragma omp parallel num_threads(threads) if (rows * size > kSerialLogits)
    {
        const Scratch scratch(size);
#pragma omp for schedule(dynamic)
        for (int64_t row = 0; row < rows; ++row)
            out[row] = sample_row(logits + row * stride, size, params, row, scratch);
    }
}

}  // extern "C"
