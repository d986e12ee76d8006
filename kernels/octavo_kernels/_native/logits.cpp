// Change logits before tokens are chosen, by penalties and masks; choose the best token of a row,
// say how likely one was, and which were most likely.
//
// The caller has checked shapes, types and strides, which are in elements. Rows and tokens that do
// not exist are passed over.

#include "logits.h"

#include <cmath>

namespace {

constexpr int64_t kSerialTokens = 1 << 12;  // fewer are not worth waking a team

struct Penalties {
    const int64_t *row_starts, *token_ids;
    const int32_t* output_counts;
    const float *repetition, *presence, *frequency;
    int64_t num_tokens;
};

void penalize_row(float* row, int64_t size, const Penalties& penalties, int64_t index) {
    const float repetition = penalties.repetition[index], presence = penalties.presence[index];
    const float frequency = penalties.frequency[index];
    const int64_t end = std::min(penalties.row_starts[index + 1], penalties.num_tokens);
    for (int64_t i = std::max<int64_t>(penalties.row_starts[index], 0); i < end; ++i) {
        const int64_t id = penalties.token_ids[i];
        if (id < 0 || id >= size) continue;
        const int32_t count = penalties.output_counts[i];
        float logit = row[id] < 0 ? row[id] * repetition : row[id] / repetition;
        logit -= frequency * static_cast<float>(count);
        row[id] = count > 0 ? logit - presence : logit;
    }
}

void mask_row(float* row, int64_t size, const int32_t* words, int64_t num_words) {
    const int64_t known = std::min(size, 32 * num_words);
    for (int64_t start = 0; start < known; start += 32) {
        const uint32_t word = static_cast<uint32_t>(words[start / 32]);
        if (word == 0xffffffffu) continue;
        const int64_t count = std::min<int64_t>(32, known - start);
        float* logits = row + start;
        if (word == 0)
            std::fill(logits, logits + count, -kInfinity);
        else
            for (int64_t i = 0; i < count; ++i)
                logits[i] = (word >> i) & 1 ? logits[i] : -kInfinity;
    }
    std::fill(row + known, row + size, -kInfinity);
}

double log_of_sum(const float* row, int64_t size, float best) {
    const auto weights = [&](int64_t i, int count) {
        return exponential(read_logits(row + i, count) - best);
    };
    return std::log(sum_chunks(size, weights, ignore));
}

float token_logprob(const float* row, int64_t size, int64_t id, float* maxima) {
    const float best = find_maxima(row, size, maxima);
    if (!(std::fabs(best) < kInfinity)) return __builtin_nanf("");
    return static_cast<float>(row[id] - best - log_of_sum(row, size, best));
}

int64_t count_above(const float* row, int64_t size, const float* maxima, float logit) {
    int64_t count = 0;
    for (int64_t start = 0; start < size; start += kBlock) {
        if (!(maxima[start / kBlock] > logit)) continue;
        Ints above = {};
        for_pieces(std::min(kBlock, size - start), [&](int64_t i, int lanes) {
            above -= read_logits(row + start + i, lanes) > splat(logit);
        });
        for (int i = 0; i < kLanes; ++i) count += above[i];
    }
    return count;
}

// Write the `wanted` largest logits and their ids, of equal ones those of the lowest ids.
void list_largest(const float* row, int64_t size, const float* maxima, int64_t wanted, float* logits,
                  int64_t* ids) {
    int64_t count = 0;
    const auto is_too_small = [&](float x) { return count == wanted && x <= logits[count - 1]; };
    for (int64_t start = 0; start < size; start += kBlock) {
        if (is_too_small(maxima[start / kBlock])) continue;
        const int64_t end = std::min(start + kBlock, size);
        for (int64_t id = start; id < end; ++id) {
            if (is_too_small(row[id])) continue;
            const float* behind = std::upper_bound(
                logits, logits + count, row[id], [](float a, float b) { return a > b; });
            const int64_t place = behind - logits;
            count += count < wanted;
            std::copy_backward(logits + place, logits + count - 1, logits + count);
            std::copy_backward(ids + place, ids + count - 1, ids + count);
            logits[place] = row[id];
            ids[place] = id;
        }
    }
}

// Of the token ids[0], then of the `wanted` most likely ones.
void top_logprobs(const float* row, int64_t size, int64_t wanted, float* maxima, int64_t* ids,
                  float* logprobs, int64_t* ranks) {
    const float best = find_maxima(row, size, maxima);
    if (!(std::fabs(best) < kInfinity)) return;
    const double log_sum = log_of_sum(row, size, best);
    logprobs[0] = row[ids[0]];
    ranks[0] = 1 + count_above(row, size, maxima, logprobs[0]);
    if (wanted) list_largest(row, size, maxima, wanted, logprobs + 1, ids + 1);
    for (int64_t i = 1; i <= wanted; ++i)
        ranks[i] = i > 1 && logprobs[i] == logprobs[i - 1] ? ranks[i - 1] : i;
    for (int64_t i = 0; i <= wanted; ++i)
        logprobs[i] = static_cast<float>(logprobs[i] - best - log_sum);
}

}  // namespace

extern "C" {

// Row chosen[i], i < count, is changed by the i-th of each of the others.
void octavo_apply_penalties(float* logits, const int64_t* chosen, const int64_t* row_starts,
                            const int64_t* token_ids, const int32_t* output_counts,
                            const float* repetition, const float* presence, const float* frequency,
                            int64_t count, int64_t num_tokens, int64_t rows, int64_t size,
                            int64_t stride, int threads) {
    const Penalties penalties = {row_starts, token_ids, output_counts, repetition,
                                 presence,   frequency, num_tokens};
#pragma omp parallel for num_threads(threads) if (num_tokens > kSerialTokens)
    for (int64_t i = 0; i < count; ++i)
        if (chosen[i] >= 0 && chosen[i] < rows)
            penalize_row(logits + chosen[i] * stride, size, penalties, i);
}

// Row chosen[i], i < count, is masked by the i-th row of the bitmask.
void octavo_apply_token_bitmask(float* logits, const int32_t* bitmask, const int64_t* chosen,
                                int64_t count, int64_t num_words, int64_t rows, int64_t size,
                                int64_t stride, int threads) {
#pragma omp parallel for num_threads(threads) if (count * size > kSerialLogits)
    for (int64_t i = 0; i < count; ++i)
        if (chosen[i] >= 0 && chosen[i] < rows)
            mask_row(logits + chosen[i] * stride, size, bitmask + i * num_words, num_words);
}

void octavo_greedy(const float* logits, int64_t* out, int64_t rows, int64_t size, int64_t stride,
                   int threads) {
#pragma omp parallel num_threads(threads) if (rows * size > kSerialLogits)
    {
        const auto maxima = memory_for_maxima(size);
#pragma omp for
        for (int64_t row = 0; row < rows; ++row) {
            const float* from = logits + row * stride;
            const float best = find_maxima(from, size, maxima.get());
            out[row] = std::fabs(best) < kInfinity ? first_best(from, maxima.get(), best) : -1;
        }
    }
}

// Of token chosen_ids[i] in row chosen_rows[i], i < count; NaN where there is none.
void octavo_token_logprobs(const float* logits, const int64_t* chosen_rows,
                           const int64_t* chosen_ids, float* out, int64_t count, int64_t rows,
                           int64_t size, int64_t stride, int threads) {
#pragma omp parallel num_threads(threads) if (count * size > kSerialLogits)
    {
        const auto maxima = memory_for_maxima(size);
#pragma omp for
        for (int64_t i = 0; i < count; ++i) {
            const int64_t row = chosen_rows[i], id = chosen_ids[i];
            const bool exists = row >= 0 && row < rows && id >= 0 && id < size;
            out[i] = exists ? token_logprob(logits + row * stride, size, id, maxima.get())
                            : __builtin_nanf("");
        }
    }
}

// Of token chosen_ids[i] in row chosen_rows[i], i < count, and of the `wanted` most likely ones of
// that row; each row of the results has 1 + wanted. Where there is none: -1, NaN and 0.
void octavo_top_logprobs(const float* logits, const int64_t* chosen_rows, const int64_t* chosen_ids,
                         int64_t* ids, float* logprobs, int64_t* ranks, int64_t wanted,
                         int64_t count, int64_t rows, int64_t size, int64_t stride, int threads) {
#pragma omp parallel num_threads(threads) if (count * size > kSerialLogits)
    {
        const auto maxima = memory_for_maxima(size);
#pragma omp for
        for (int64_t i = 0; i < count; ++i) {
            const int64_t row = chosen_rows[i], id = chosen_ids[i], first = i * (1 + wanted);
            std::fill_n(ids + first, 1 + wanted, -1);
            std::fill_n(logprobs + first, 1 + wanted, __builtin_nanf(""));
            std::fill_n(ranks + first, 1 + wanted, 0);
            if (row < 0 || row >= rows || id < 0 || id >= size) continue;
            ids[first] = id;
            top_logprobs(logits + row * stride, size, wanted, maxima.get(), ids + first,
                         logprobs + first, ranks + first);
            if (!ranks[first]) ids[first] = -1;
        }
    }
}

}  // extern "C"
