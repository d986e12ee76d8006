// The KV cache in memory, as the code that writes, reads and copies it agrees on it.
//
// A block holds all layers, keys and values, in one contiguous piece; of one layer it holds, in
// lanes (one float32, one float16, or two neighbours in bfloat16):
//     keys   [kv_heads, head_dim / per_lane, block_size]    a lane pairs dimensions
//     values [kv_heads, block_size / per_lane, head_dim]    a lane pairs positions
// so that scores of neighbouring positions, and outputs of neighbouring dimensions, fill a vector
// and no product needs a sum across lanes.
#pragma once

#include <cstdint>

constexpr int kMaxHeadDim = 256;

struct CacheShape {
    int64_t element;  // an ElementCode
    int64_t kv_heads, head_dim, block_size, num_blocks;
    int64_t block_stride;  // elements from one block to the next
};

constexpr int32_t kNoBlock = -1;  // in a block table: no row of the step sees this block
