// Write to the KV cache, and copy whole blocks of it.

#include "kv_cache.h"

#include "elements.h"

namespace {

constexpr int64_t kSerialBytes = 16 << 20;  // less than a millisecond is not worth waking a team
constexpr int64_t kLineBytes = 64;

template <class T>
void write_cache(const CacheShape& shape, const void* k, const void* v, void* keys, void* values,
                 const int64_t* slots, int64_t tokens, const int64_t* strides, int threads) {
    using E = typename T::Element;
    constexpr int kPerLane = T::kPerLane;
    const int64_t head_dim = shape.head_dim, size = head_dim * shape.block_size;
#pragma omp parallel for num_threads(threads) if (tokens > 16)
    for (int64_t token = 0; token < tokens; ++token) {
        if (slots[token] < 0) continue;
        const int64_t block = slots[token] / shape.block_size;
        const int64_t slot = slots[token] % shape.block_size;
        for (int64_t head = 0; head < shape.kv_heads; ++head) {
            const E* k_from = static_cast<const E*>(k) + token * strides[0] + head * head_dim;
            const E* v_from = static_cast<const E*>(v) + token * strides[1] + head * head_dim;
            const int64_t base = block * shape.block_stride + head * size;
            E* k_to = static_cast<E*>(keys) + base + slot * kPerLane;
            E* v_to = static_cast<E*>(values) + base + slot / kPerLane * kPerLane * head_dim +
                      slot % kPerLane;
            for (int64_t d = 0; d < head_dim; d += kPerLane)
                for (int i = 0; i < kPerLane; ++i) k_to[d * shape.block_size + i] = k_from[d + i];
            for (int64_t d = 0; d < head_dim; ++d) v_to[d * kPerLane] = v_from[d];
        }
    }
}

}  // namespace

extern "C" {

// strides: of the tokens of k and v. Returns the first token whose slot is past the cache, before
// anything is written, or -1.
int64_t octavo_write_kv_cache(const CacheShape* shape, const void* k, const void* v, void* keys,
                              void* values, const int64_t* slots, int64_t tokens,
                              const int64_t* strides, int threads) {
    for (int64_t token = 0; token < tokens; ++token)
        if (slots[token] >= shape->num_blocks * shape->block_size) return token;
    const auto run = for_element(shape->element, write_cache<Float32>, write_cache<BFloat16>,
                                 write_cache<Float16>);
    run(*shape, k, v, keys, values, slots, tokens, strides, threads);
    return -1;
}

// Copies `bytes` bytes from block pairs[2 i] of source to block pairs[2 i + 1] of target, in the
// order of i. A thread copies its own stretch of every block, so the order holds for each byte.
void octavo_copy_blocks(const void* source, void* target, const int64_t* pairs, int64_t count,
                        int64_t bytes, int threads) {
    if (count * bytes < kSerialBytes) threads = 1;
    const int64_t lines = (bytes + kLineBytes - 1) / kLineBytes;
    const int64_t stretch = (lines + threads - 1) / threads * kLineBytes;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t begin = 0; begin < bytes; begin += stretch) {
        const int64_t size = bytes - begin < stretch ? bytes - begin : stretch;
        for (int64_t i = 0; i < count; ++i) {
            const char* from = static_cast<const char*>(source) + pairs[2 * i] * bytes + begin;
            char* to = static_cast<char*>(target) + pairs[2 * i + 1] * bytes + begin;
            if (from != to) memcpy(to, from, size);
        }
    }
}

}  // extern "C"
