// The operations that run_layers calls, which Python calls one by one too.
#pragma once

#include <cstdint>

#include "kv_cache.h"

// As AttentionMetadata in attention.py.
struct Batch {
    const int32_t *query_start_loc, *seq_lens, *block_tables;
    int64_t num_seqs, max_blocks, num_tokens;
};

extern "C" {

void octavo_rms_norm(int element, const void* x, const float* weight, void* out, int64_t outer,
                     int64_t inner, int64_t size, const int64_t* strides, float eps, int threads);
void octavo_add_rms_norm(int element, const void* x, const void* residual, const float* weight,
                         void* out, void* residual_out, int64_t rows, int64_t size,
                         const int64_t* strides, float eps, int threads);
void octavo_add(int element, const void* x, void* residual, int64_t count, int threads);
void octavo_scale(int element, void* x, float factor, int64_t count, int threads);
int64_t octavo_write_kv_cache(const CacheShape* shape, const void* k, const void* v, void* keys,
                              void* values, const int64_t* slots, int64_t tokens,
                              const int64_t* strides, int threads);
int64_t octavo_rope_and_write_kv_cache(const CacheShape* shape, const void* q, const void* k,
                                       const void* v, void* q_out, void* keys, void* values,
                                       const int64_t* positions, const float* cos_sin,
                                       const int64_t* slots, int64_t tokens, int64_t q_heads,
                                       int64_t rotary_dim, int64_t max_len, int interleaved,
                                       const int64_t* strides, int threads);
int64_t octavo_paged_attention(const CacheShape* shape, const Batch* batch, const void* q,
                               void* out, const void* keys, const void* values,
                               const float* sinks, int64_t group, const int64_t* strides,
                               float scale, float soft_cap, int64_t window, int threads);

}  // extern "C"
