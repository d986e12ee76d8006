// Paged attention.
//
// A row is one query token of one head. Its keys are reduced in tiles of kTile absolute positions,
// counted from 0, one after the other: which rows share a tile's loads changes no bit of any row.
// Slots outside a row's positions may hold anything: they never enter its arithmetic.
// The cache must be followed by kLanes readable lanes (loads may run past the last head_dim).

#include <utility>
#include <vector>

#include "kv_cache.h"
#include "vector.h"

namespace {

constexpr int kTile = 64;
constexpr int kGroups = kTile / kLanes;  // vectors of positions in a tile
constexpr int kSmallestBlock = 8;
constexpr int kMaxHeadDim = 256;
constexpr int64_t kSerialPositions = 1024;  // shorter work is not worth waking a team
#if defined(OCTAVO_AVX512)
constexpr int kMaxRows = 6, kPass = 4;  // rows x vectors held in registers by the inner loops
#else
constexpr int kMaxRows = 4, kPass = 2;
#endif

struct Batch {
    const int32_t *query_start_loc, *seq_lens, *block_tables;
    int64_t num_seqs, max_blocks, num_tokens;
};

struct Call {
    CacheShape shape;
    Batch batch;
    const void* q;
    void* out;
    const uint32_t *keys, *values;
    int64_t q_stride, out_stride, group, window;  // group: query heads of one kv head
    float scale;
};

// Up to kMaxRows rows of one sequence and one kv head.
struct Item {
    int64_t seq, kv_head, first_row;
    int rows;
    bool alone;  // no other item reads these keys, so they are not in cache yet
};

struct Row {
    const uint32_t* q;  // kMaxRows lanes apart: neighbouring rows share a line
    int64_t first, last;  // positions it attends to, both included
    float max;
    Floats sum;
    float* acc;  // [head_dim], padded to whole vectors
};

struct Tile {
    const uint32_t* keys[kGroups] = {};  // lane rows of a group of positions, `stride` apart
    int64_t stride;
    const uint32_t* values[kTile] = {};  // one lane row for each position, or pair of positions
    alignas(64) uint32_t packed[kMaxHeadDim * kTile];  // keys of blocks smaller than a vector
};

// The first position that the row at `position` sees; window 0 for all.
INLINE int64_t first_seen(int64_t position, int64_t window) {
    return window > 0 && position >= window ? position - window + 1 : 0;
}

struct Range {
    int begin, end;  // positions within a tile
    bool operator==(const Range& other) const { return begin == other.begin && end == other.end; }
};

INLINE Range range_in_tile(int64_t first, int64_t last, int64_t tile) {
    const int64_t begin = first - tile * kTile, end = last + 1 - tile * kTile;
    return {static_cast<int>(begin < 0 ? 0 : begin > kTile ? kTile : begin),
            static_cast<int>(end < 0 ? 0 : end > kTile ? kTile : end)};
}

// Find the memory of the blocks that hold `range` of a tile.
template <class T>
void locate(const Call& call, const Item& item, int64_t index, Range range, Tile& tile) {
    const CacheShape& shape = call.shape;
    const int64_t block_lanes = shape.block_stride / T::kPerLane;
    const int64_t head = item.kv_head * shape.head_dim * shape.block_size / T::kPerLane;
    const int64_t depth = shape.head_dim / T::kPerLane;
    const int32_t* table = call.batch.block_tables + item.seq * call.batch.max_blocks;
    const int shift = __builtin_ctzll(shape.block_size);  // block sizes are powers of two
    const bool pack = shape.block_size < kLanes;
    tile.stride = pack ? kTile : shape.block_size;
    for (int at = range.begin / kSmallestBlock * kSmallestBlock; at < range.end;
         at += kSmallestBlock) {
        const int64_t position = index * kTile + at;
        const int64_t block = table[position >> shift];
        const int64_t slot = position & (shape.block_size - 1);
        const int64_t base = block * block_lanes + head;
        const uint32_t* values = call.values + base + slot / T::kPerLane * shape.head_dim;
        for (int i = 0; i < kSmallestBlock / T::kPerLane; ++i)
            tile.values[at / T::kPerLane + i] = values + i * shape.head_dim;
        const uint32_t* keys = call.keys + base + slot;
        if (pack) {
            for (int64_t d = 0; d < depth; ++d)
                memcpy(tile.packed + d * kTile + at, keys + d * shape.block_size,
                       kSmallestBlock * sizeof *keys);
            tile.keys[at / kLanes] = tile.packed + at / kLanes * kLanes;
        } else {
            tile.keys[at / kLanes] = keys - at % kLanes;
        }
    }
}

// scores[r][g] = q[r] . keys of the positions of group g, for G groups from `group` on.
// `next`, where given, is fetched into the cache meanwhile: blocks are scattered over memory, and
// the processor cannot guess where the next one lies.
template <class T, int R, int G>
INLINE void score(const Tile& tile, const Tile* next, const Row* rows, int64_t depth, int group,
                  Floats (*scores)[kGroups]) {
    Floats sums[R][G] = {};
    for (int64_t d = 0; d < depth; ++d) {
        Lanes keys[G];
        for (int g = 0; g < G; ++g) keys[g] = load<Lanes>(tile.keys[group + g] + d * tile.stride);
        if (next)
            for (int g = 0; g < G; ++g)
                __builtin_prefetch(next->keys[group + g] + d * next->stride);
        for (int r = 0; r < R; ++r) {
            const Lanes q = splat_lane(rows[0].q[d * kMaxRows + r]);
            for (int g = 0; g < G; ++g) sums[r][g] = T::dot(sums[r][g], keys[g], q);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int g = 0; g < G; ++g) scores[r][group + g] = sums[r][g];
}

// Scale a row's scores, hide those of positions outside `range`, and return the largest.
INLINE float mask_scores(Floats* scores, Range range, float scale) {
    const Floats hidden = splat(-__builtin_inff());
    Floats highest = hidden;
    for (int g = range.begin / kLanes; g * kLanes < range.end; ++g) {
        scores[g] *= scale;
        if (g * kLanes < range.begin || (g + 1) * kLanes > range.end) {
            Ints position;
            for (int i = 0; i < kLanes; ++i) position[i] = g * kLanes + i;
            scores[g] = (position >= range.begin) & (position < range.end) ? scores[g] : hidden;
        }
        highest = larger(scores[g], highest);
    }
    return across_max(highest);
}

// Raise the running maxima to this tile's scores, turn the scores into weights relative to them,
// and return the factor that brings each row's past to the new maximum.
template <class T, int R>
INLINE Floats weigh(Row* rows, Floats (*scores)[kGroups], Range range, float scale,
                    uint32_t (*weights)[kTile]) {
    static_assert(kMaxRows <= kLanes);
    Floats before = {}, after = {};
    for (int r = 0; r < R; ++r) {
        const float tile_max = mask_scores(scores[r], range, scale);
        before[r] = rows[r].max;
        after[r] = rows[r].max = tile_max > rows[r].max ? tile_max : rows[r].max;
    }
    const Floats factors = exponential(before - after);
    for (int r = 0; r < R; ++r) {
        auto* to = reinterpret_cast<typename T::Element*>(weights[r]);
        Floats sum = rows[r].sum * factors[r];
        for (int g = range.begin / kLanes; g * kLanes < range.end; ++g) {
            const Floats weight = exponential(scores[r][g] - rows[r].max);
            sum += weight;
            T::narrow(to + g * kLanes, weight);
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

// acc[r] = acc[r] * factor[r] + weights[r] . values, for D vectors of dimensions from `dim` on
template <class T, int R, int D>
INLINE void accumulate(const Tile& tile, const Tile* next, Row* rows, Range range, Floats factors,
                       const uint32_t (*weights)[kTile], int64_t dim) {
    Floats sums[R][D];
    for (int r = 0; r < R; ++r)
        for (int d = 0; d < D; ++d)
            sums[r][d] = load<Floats>(rows[r].acc + dim + d * kLanes) * factors[r];
    const int begin = range.begin / T::kPerLane;
    const int end = (range.end + T::kPerLane - 1) / T::kPerLane;
    const auto add = [&](int i, uint32_t mask) __attribute__((always_inline)) {
        Lanes values[D];
        for (int d = 0; d < D; ++d)
            values[d] = load<Lanes>(tile.values[i] + dim + d * kLanes) & mask;
        if (next)
            for (int d = 0; d < D; ++d) __builtin_prefetch(next->values[i] + dim + d * kLanes);
        for (int r = 0; r < R; ++r) {
            const Lanes weight = splat_lane(weights[r][i]);
            for (int d = 0; d < D; ++d) sums[r][d] = T::dot(sums[r][d], values[d], weight);
        }
    };
    add(begin, value_mask<T>(begin, range));
    for (int i = begin + 1; i < end - 1; ++i) add(i, 0xffffffffu);
    if (end - 1 > begin) add(end - 1, value_mask<T>(end - 1, range));
    for (int r = 0; r < R; ++r)
        for (int d = 0; d < D; ++d) store(rows[r].acc + dim + d * kLanes, sums[r][d]);
}

template <class T, int R>
void attend_tile(const Call& call, const Tile& tile, const Tile* next, Row* rows, Range range) {
    const int64_t head_dim = call.shape.head_dim, depth = head_dim / T::kPerLane;
    Floats scores[R][kGroups];
    const int end = (range.end + kLanes - 1) / kLanes;
    int group = range.begin / kLanes;
    for (; group + kPass <= end; group += kPass)
        score<T, R, kPass>(tile, next, rows, depth, group, scores);
    for (; group < end; ++group) score<T, R, 1>(tile, next, rows, depth, group, scores);

    uint32_t weights[R][kTile];
    const Floats factors = weigh<T, R>(rows, scores, range, call.scale, weights);

    int64_t dim = 0;
    for (; dim + (kPass - 1) * kLanes < head_dim; dim += kPass * kLanes)
        accumulate<T, R, kPass>(tile, next, rows, range, factors, weights, dim);
    for (; dim < head_dim; dim += kLanes)
        accumulate<T, R, 1>(tile, next, rows, range, factors, weights, dim);
}

template <class T>
void attend_run(const Call& call, const Tile& tile, const Tile* next, Row* rows, int count,
                Range range) {
    switch (count) {
        case 1: return attend_tile<T, 1>(call, tile, next, rows, range);
        case 2: return attend_tile<T, 2>(call, tile, next, rows, range);
        case 3: return attend_tile<T, 3>(call, tile, next, rows, range);
        case 4: return attend_tile<T, 4>(call, tile, next, rows, range);
#if defined(OCTAVO_AVX512)
        case 5: return attend_tile<T, 5>(call, tile, next, rows, range);
        case 6: return attend_tile<T, 6>(call, tile, next, rows, range);
#endif
    }
}

// The rows of an item and their memory.
struct Workspace {
    Tile tiles[2];
    Row rows[kMaxRows];
    uint32_t queries[kMaxHeadDim][kMaxRows];
    alignas(64) float acc[kMaxRows][kMaxHeadDim];
};

// Where row r of an item lies in an array of rows `stride` apart.
INLINE int64_t row_offset(const Call& call, const Item& item, int r, int64_t stride) {
    const int64_t row = item.first_row + r;
    const int64_t token = call.batch.query_start_loc[item.seq] + row / call.group;
    const int64_t head = item.kv_head * call.group + row % call.group;
    return token * stride + head * call.shape.head_dim;
}

template <class T>
void start_rows(const Call& call, const Item& item, Workspace& work) {
    const int32_t* start = call.batch.query_start_loc + item.seq;
    const int64_t computed = call.batch.seq_lens[item.seq] - (start[1] - start[0]);
    memset(work.acc, 0, sizeof work.acc);
    for (int r = 0; r < item.rows; ++r) {
        const int64_t last = computed + (item.first_row + r) / call.group;
        const auto* q = static_cast<const typename T::Element*>(call.q) +
                        row_offset(call, item, r, call.q_stride);
        for (int64_t d = 0; d < call.shape.head_dim / T::kPerLane; ++d)
            memcpy(&work.queries[d][r], q + d * T::kPerLane, sizeof work.queries[d][r]);
        work.rows[r] = Row{&work.queries[0][r], first_seen(last, call.window), last,
                           -__builtin_inff(), Floats{}, work.acc[r]};
    }
}

template <class T>
void finish_rows(const Call& call, const Item& item, const Workspace& work) {
    for (int r = 0; r < item.rows; ++r) {
        auto* out = static_cast<typename T::Element*>(call.out) +
                    row_offset(call, item, r, call.out_stride);
        const Floats total = splat(across_sum(work.rows[r].sum));
        for_pieces(call.shape.head_dim, [&](int64_t d, int count) {
            write<T>(out + d, load<Floats>(work.acc[r] + d) / total, count);
        });
    }
}

template <class T>
void attend_item(const Call& call, const Item& item, Workspace& work) {
    start_rows<T>(call, item, work);
    Row* rows = work.rows;
    // Rows are in order of position: the first begins first, the last ends last.
    const int64_t first = rows[0].first, last = rows[item.rows - 1].last;
    const int64_t end = last / kTile + 1;
    Tile *tile = work.tiles, *following = work.tiles + 1;
    locate<T>(call, item, first / kTile, range_in_tile(first, last, first / kTile), *tile);
    for (int64_t index = first / kTile; index < end; ++index) {
        if (index + 1 < end)
            locate<T>(call, item, index + 1, range_in_tile(first, last, index + 1), *following);
        const Tile* next = item.alone && index + 1 < end ? following : nullptr;
        for (int r = 0, stop; r < item.rows; r = stop) {
            const Range range = range_in_tile(rows[r].first, rows[r].last, index);
            for (stop = r + 1; stop < item.rows; ++stop)
                if (!(range_in_tile(rows[stop].first, rows[stop].last, index) == range)) break;
            if (range.begin < range.end)
                attend_run<T>(call, *tile, next, rows + r, stop - r, range);
        }
        std::swap(tile, following);
    }
    finish_rows<T>(call, item, work);
}

std::vector<Item> split_rows(const Call& call) {
    std::vector<Item> items;
    for (int64_t seq = 0; seq < call.batch.num_seqs; ++seq) {
        const int32_t* start = call.batch.query_start_loc + seq;
        const int64_t rows = (start[1] - start[0]) * call.group;
        const int64_t parts = (rows + kMaxRows - 1) / kMaxRows;
        for (int64_t head = 0; head < call.shape.kv_heads; ++head)
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t begin = rows * part / parts, end = rows * (part + 1) / parts;
                items.push_back({seq, head, begin, static_cast<int>(end - begin), parts == 1});
            }
    }
    return items;
}

template <class T>
void attend(const Call& call, int threads) {
    const std::vector<Item> items = split_rows(call);
    const int64_t count = static_cast<int64_t>(items.size());
    int64_t positions = 0;
    for (const Item& item : items) positions += call.batch.seq_lens[item.seq];
#pragma omp parallel num_threads(threads) if (count > 1 && positions > kSerialPositions)
    {
        Workspace work;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; ++i) attend_item<T>(call, items[i], work);
    }
}

// The first sequence whose numbers point outside the arrays, or -1.
int64_t find_invalid(const Batch& batch, const CacheShape& shape, int64_t window) {
    for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
        const int64_t begin = batch.query_start_loc[seq], end = batch.query_start_loc[seq + 1];
        const int64_t length = batch.seq_lens[seq];
        if (begin < 0 || end < begin || end > batch.num_tokens || length < end - begin) return seq;
        if (end == begin) continue;
        const int64_t blocks = (length + shape.block_size - 1) / shape.block_size;
        if (blocks > batch.max_blocks) return seq;
        const int64_t unseen = first_seen(length - (end - begin), window) / shape.block_size;
        const int32_t* table = batch.block_tables + seq * batch.max_blocks;
        for (int64_t i = 0; i < blocks; ++i) {
            const int64_t lowest = i < unseen ? kNoBlock : 0;
            if (table[i] < lowest || table[i] >= shape.num_blocks) return seq;
        }
    }
    return -1;
}

}  // namespace

extern "C" {

// strides: of the tokens of q and out; window: 0 for none. Returns the first sequence whose numbers
// point outside the arrays, before anything is written, or -1.
int64_t octavo_paged_attention(const CacheShape* shape, const Batch* batch, const void* q,
                               void* out, const void* keys, const void* values, int64_t group,
                               const int64_t* strides, float scale, int64_t window, int threads) {
    const int64_t invalid = find_invalid(*batch, *shape, window);
    if (invalid >= 0) return invalid;
    const Call call = {*shape,
                       *batch,
                       q,
                       out,
                       static_cast<const uint32_t*>(keys),
                       static_cast<const uint32_t*>(values),
                       strides[0],
                       strides[1],
                       group,
                       window,
                       scale};
    if (shape->bfloat16)
        attend<BFloat16>(call, threads);
    else
        attend<Float32>(call, threads);
    return -1;
}

}  // extern "C"
