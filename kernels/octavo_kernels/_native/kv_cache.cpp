// Write to the KV cache, with or without rotating what is written, and copy whole blocks of it.

#include "kv_cache.h"

#include "elements.h"
#include "rope.h"

namespace {

constexpr int64_t kSerialBytes = 16 << 20;  // less than a millisecond is not worth waking a team
constexpr int64_t kLineBytes = 64;

constexpr int64_t kSerialElements = 1 << 14;  // as in rowwise.cpp

// One layer's keys and values.
struct Layer {
    CacheShape shape;
    void *keys, *values;
};

template <class T>
INLINE void write_head(const Layer& layer, const typename T::Element* k,
                       const typename T::Element* v, int64_t slot, int64_t head) {
    using E = typename T::Element;
    constexpr int kPerLane = T::kPerLane;
    const int64_t head_dim = layer.shape.head_dim, size = layer.shape.block_size;
    const int64_t base = slot / size * layer.shape.block_stride + head * head_dim * size;
    const int64_t at = slot % size;
    E* k_to = static_cast<E*>(layer.keys) + base + at * kPerLane;
    E* v_to = static_cast<E*>(layer.values) + base + at / kPerLane * kPerLane * head_dim +
              at % kPerLane;
    for (int64_t d = 0; d < head_dim; d += kPerLane)
        for (int i = 0; i < kPerLane; ++i) k_to[d * size + i] = k[d + i];
    for (int64_t d = 0; d < head_dim; ++d) v_to[d * kPerLane] = v[d];
}

// Fetch the lines that a token's keys will be written to: each dimension of them lies in another.
template <class T>
INLINE void fetch_keys(const Layer& layer, int64_t slot) {
    using E = typename T::Element;
    const int64_t size = layer.shape.block_size;
    const E* keys = static_cast<const E*>(layer.keys) + slot / size * layer.shape.block_stride +
                    slot % size * T::kPerLane;
    for (int64_t d = 0; d < layer.shape.kv_heads * layer.shape.head_dim; d += T::kPerLane)
        __builtin_prefetch(keys + d * size, 1);
}

template <class T>
void write_cache(const Layer& layer, const void* k, const void* v, const int64_t* slots,
                 int64_t tokens, const int64_t* strides, int threads) {
    using E = typename T::Element;
    const int64_t head_dim = layer.shape.head_dim;
#pragma omp parallel for num_threads(threads) if (tokens > 16)
    for (int64_t token = 0; token < tokens; ++token) {
        if (slots[token] < 0) continue;
        for (int64_t head = 0; head < layer.shape.kv_heads; ++head)
            write_head<T>(layer,
                          static_cast<const E*>(k) + token * strides[0] + head * head_dim,
                          static_cast<const E*>(v) + token * strides[1] + head * head_dim,
                          slots[token], head);
    }
}

// strides: of the tokens of q, q_out, k and v
template <class T>
void rope_and_write(const Layer& layer, const Rope& rope, const void* q, const void* k,
                    const void* v, void* q_out, const int64_t* slots, int64_t tokens,
                    int64_t q_heads, const int64_t* strides, int threads) {
    using E = typename T::Element;
    const int64_t head_dim = layer.shape.head_dim, kv_heads = layer.shape.kv_heads;
#pragma omp parallel for num_threads(threads) \
    if (tokens * (q_heads + kv_heads) * head_dim > kSerialElements)
    for (int64_t token = 0; token < tokens; ++token) {
        const int64_t block = slots[token] / layer.shape.block_size;
        if (slots[token] >= 0 && (token == 0 || slots[token - 1] / layer.shape.block_size != block))
            fetch_keys<T>(layer, slots[token]);
        for (int64_t head = 0; head < q_heads; ++head)
            rotate_head<T>(rope, token,
                           static_cast<const E*>(q) + token * strides[0] + head * head_dim,
                           static_cast<E*>(q_out) + token * strides[1] + head * head_dim, head_dim);
        if (slots[token] < 0) continue;
        for (int64_t head = 0; head < kv_heads; ++head) {
            E turned[kMaxHeadDim];
            rotate_head<T>(rope, token,
                           static_cast<const E*>(k) + token * strides[2] + head * head_dim, turned,
                           head_dim);
            write_head<T>(layer, turned,
                          static_cast<const E*>(v) + token * strides[3] + head * head_dim,
                          slots[token], head);
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
    run({*shape, keys, values}, k, v, slots, tokens, strides, threads);
    return -1;
}

// Rotates q into q_out and k into the cache, beside v. strides: of the tokens of q, q_out, k and v.
// Returns the first token whose position is outside [0, max_len) or whose slot is past the cache,
// before anything is written, or -1.
int64_t octavo_rope_and_write_kv_cache(const CacheShape* shape, const void* q, const void* k,
                                       const void* v, void* q_out, void* keys, void* values,
                                       const int64_t* positions, const float* cos_sin,
                                       const int64_t* slots, int64_t tokens, int64_t q_heads,
                                       int64_t rotary_dim, int64_t max_len, int interleaved,
                                       const int64_t* strides, int threads) {
    for (int64_t token = 0; token < tokens; ++token)
        if (positions[token] < 0 || positions[token] >= max_len ||
            slots[token] >= shape->num_blocks * shape->block_size)
            return token;
    const auto run = for_element(shape->element, rope_and_write<Float32>, rope_and_write<BFloat16>,
                                 rope_and_write<Float16>);
    run({*shape, keys, values}, {positions, cos_sin, rotary_dim, interleaved}, q, k, v, q_out,
        slots, tokens, q_heads, strides, threads);
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
