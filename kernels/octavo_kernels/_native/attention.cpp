// Paged attention.
//
// A row is one query token of one head. Its keys are reduced in tiles of kTile absolute positions,
// counted from 0, one after the other: which rows share a tile's loads changes no bit of any row.
// Slots outside a row's positions may hold anything: they never enter its arithmetic.

#include <utility>
#include <vector>

#include "attention_tile.h"
#include "operations.h"

namespace {

constexpr int kSmallestBlock = 8;
constexpr int64_t kSerialPositions = 1024;  // shorter work is not worth waking a team
constexpr int kRun = 6, kManyItems = 12;

struct Call {
    CacheShape shape;
    Batch batch;
    const void* q;
    void* out;
    const void *keys, *values;
    const float* sinks;  // a logit for each query head, or null
    int64_t q_stride, out_stride, group, window;  // group: query heads of one kv head
    Softmax softmax;
};

// Up to kMaxRows rows of one sequence and one kv head.
struct Item {
    int64_t seq, kv_head, first_row;
    int rows;
    bool alone;  // no other item reads these keys, so they are not in cache yet
};

// The first position that the row at `position` sees; window 0 for all.
INLINE int64_t first_seen(int64_t position, int64_t window) {
    return window > 0 && position >= window ? position - window + 1 : 0;
}

INLINE Range range_in_tile(int64_t first, int64_t last, int64_t tile) {
    const int64_t begin = first - tile * kTile, end = last + 1 - tile * kTile;
    return {static_cast<int>(begin < 0 ? 0 : begin > kTile ? kTile : begin),
            static_cast<int>(end < 0 ? 0 : end > kTile ? kTile : end)};
}

// Find the memory of the blocks that hold `range` of a tile.
template <class T>
void locate(const Call& call, const Item& item, int64_t index, Range range, Tile<T>& tile) {
    typedef typename T::Lane Lane;
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
        const Lane* values =
            static_cast<const Lane*>(call.values) + base + slot / T::kPerLane * shape.head_dim;
        for (int i = 0; i < kSmallestBlock / T::kPerLane; ++i)
            tile.values[at / T::kPerLane + i] = values + i * shape.head_dim;
        const Lane* keys = static_cast<const Lane*>(call.keys) + base + slot;
        if (pack) {
            for (int64_t d = 0; d < depth; ++d)
                memcpy(tile.packed + d * kTile + at, keys + d * shape.block_size,
                       kSmallestBlock * sizeof *keys);
            tile.keys[at / kLanes] = tile.packed + at / kLanes * kLanes;
        } else {
            for (int i = at; i < at + kSmallestBlock; i += kLanes)
                tile.keys[i / kLanes] = keys + (i - at) - i % kLanes;
        }
    }
}

template <class T>
void attend_run(const Call& call, const Tile<T>& tile, const Tile<T>* next, Row<T>* rows,
                int count, Range range) {
    const int64_t head_dim = call.shape.head_dim;
    switch (count) {
        case 1: return attend_tile<T, 1>(head_dim, call.softmax, tile, next, rows, range);
        case 2: return attend_tile<T, 2>(head_dim, call.softmax, tile, next, rows, range);
        case 3: return attend_tile<T, 3>(head_dim, call.softmax, tile, next, rows, range);
        case 4: return attend_tile<T, 4>(head_dim, call.softmax, tile, next, rows, range);
#if defined(OCTAVO_AVX512)  // kMaxRows is 6
        case 5: return attend_tile<T, 5>(head_dim, call.softmax, tile, next, rows, range);
        case 6: return attend_tile<T, 6>(head_dim, call.softmax, tile, next, rows, range);
#endif
    }
}

// The rows of an item and their memory.
template <class T>
struct Workspace {
    Tile<T> tiles[2];
    Row<T> rows[kMaxRows];
    typename T::Scalar queries[kMaxHeadDim / T::kPerLane][kMaxRows];
    alignas(64) float acc[kMaxRows][kMaxHeadDim];
};

INLINE int64_t head_of(const Call& call, const Item& item, int r) {
    return item.kv_head * call.group + (item.first_row + r) % call.group;
}

// Where row r of an item lies in an array of rows `stride` apart.
INLINE int64_t row_offset(const Call& call, const Item& item, int r, int64_t stride) {
    const int64_t token =
        call.batch.query_start_loc[item.seq] + (item.first_row + r) / call.group;
    return token * stride + head_of(call, item, r) * call.shape.head_dim;
}

// A sink is where the running softmax begins: a maximum, and e^0 in the sum.
template <class T>
INLINE void start_at_sink(float sink, Row<T>& row) {
    row.max = sink;
    if (sink > -__builtin_inff()) row.sum[0] = 1.0f;
}

template <class T>
void start_rows(const Call& call, const Item& item, Workspace<T>& work) {
    const int32_t* start = call.batch.query_start_loc + item.seq;
    const int64_t computed = call.batch.seq_lens[item.seq] - (start[1] - start[0]);
    memset(work.acc, 0, sizeof work.acc);
    for (int r = 0; r < item.rows; ++r) {
        const int64_t last = computed + (item.first_row + r) / call.group;
        const auto* q = static_cast<const typename T::Element*>(call.q) +
                        row_offset(call, item, r, call.q_stride);
        for (int64_t d = 0; d < call.shape.head_dim / T::kPerLane; ++d)
            work.queries[d][r] = T::scalar(q + d * T::kPerLane);
        work.rows[r] = Row<T>{&work.queries[0][r], first_seen(last, call.window), last,
                              -__builtin_inff(), Floats{}, work.acc[r]};
        if (call.sinks) start_at_sink(call.sinks[head_of(call, item, r)], work.rows[r]);
    }
}

template <class T>
void finish_rows(const Call& call, const Item& item, const Workspace<T>& work) {
    for (int r = 0; r < item.rows; ++r) {
        auto* out = static_cast<typename T::Element*>(call.out) +
                    row_offset(call, item, r, call.out_stride);
        const Floats total = splat(across_sum(work.rows[r].sum));
        for_pieces(call.shape.head_dim, [&](int64_t d, int count) {
            write<T>(out + d, load<Floats>(work.acc[r] + d) / total, count);
        });
    }
}

// Fetch the first tile of an item, of which nothing is in the cache yet.
template <class T>
void fetch_first(const Call& call, const Item& item, Tile<T>& tile) {
    constexpr int kLine = 64 / sizeof(typename T::Lane);
    const int32_t* start = call.batch.query_start_loc + item.seq;
    const int64_t computed = call.batch.seq_lens[item.seq] - (start[1] - start[0]);
    const int64_t first = first_seen(computed + item.first_row / call.group, call.window);
    const int64_t index = first / kTile;
    const Range range = range_in_tile(first, call.batch.seq_lens[item.seq] - 1, index);
    locate<T>(call, item, index, range, tile);
    for (int at = range.begin / kSmallestBlock * kSmallestBlock; at < range.end;
         at += kSmallestBlock) {
        const auto* keys = tile.keys[at / kLanes] + at % kLanes;
        for (int64_t d = 0; d < call.shape.head_dim / T::kPerLane; ++d)
            __builtin_prefetch(keys + d * tile.stride);
        for (int i = at / T::kPerLane; i < (at + kSmallestBlock) / T::kPerLane; ++i)
            for (int64_t d = 0; d < call.shape.head_dim; d += kLine)
                __builtin_prefetch(tile.values[i] + d);
    }
}

template <class T>
void attend_item(const Call& call, const Item& item, const Item* after, Workspace<T>& work) {
    start_rows<T>(call, item, work);
    Row<T>* rows = work.rows;
    // Rows are in order of position: the first begins first, the last ends last.
    const int64_t first = rows[0].first, last = rows[item.rows - 1].last;
    const int64_t end = last / kTile + 1;
    Tile<T> *tile = work.tiles, *following = work.tiles + 1;
    locate<T>(call, item, first / kTile, range_in_tile(first, last, first / kTile), *tile);
    for (int64_t index = first / kTile; index < end; ++index) {
        if (index + 1 < end)
            locate<T>(call, item, index + 1, range_in_tile(first, last, index + 1), *following);
        else if (after && after->alone && call.shape.block_size >= kLanes)
            fetch_first<T>(call, *after, *following);
        const Tile<T>* next = item.alone && index + 1 < end ? following : nullptr;
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
    // A thread that takes several items knows which is its next, and fetches that meanwhile.
    const int run = count >= kManyItems * threads ? kRun : 1;
#pragma omp parallel num_threads(threads) if (count > 1 && positions > kSerialPositions)
    {
        Workspace<T> work;
#pragma omp for schedule(dynamic, run)
        for (int64_t i = 0; i < count; ++i) {
            const bool goes_on = (i + 1) % run != 0 && i + 1 < count;
            attend_item<T>(call, items[i], goes_on ? &items[i + 1] : nullptr, work);
        }
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

// sinks: null for none; strides: of the tokens of q and out; soft_cap and window: 0 for none.
// Returns the first sequence whose numbers point outside the arrays, before anything is written,
// or -1.
int64_t octavo_paged_attention(const CacheShape* shape, const Batch* batch, const void* q,
                               void* out, const void* keys, const void* values,
                               const float* sinks, int64_t group, const int64_t* strides,
                               float scale, float soft_cap, int64_t window, int threads) {
    const int64_t invalid = find_invalid(*batch, *shape, window);
    if (invalid >= 0) return invalid;
    const Call call = {*shape,
                       *batch,
                       q,
                       out,
                       keys,
                       values,
                       sinks,
                       strides[0],
                       strides[1],
                       group,
                       window,
                       {scale, soft_cap}};
    const auto run = for_element(shape->element, attend<Float32>, attend<BFloat16>,
                                 attend<Float16>);
    run(call, threads);
    return -1;
}

}  // extern "C"
