// Paged attention.
//
// A row is one query token of one head. Its keys are reduced in tiles of kTile absolute positions,
// counted from 0, one after the other: which rows share a tile's loads changes no bit of any row.
// Slots outside a row's positions may hold anything: they never enter its arithmetic.

#include <atomic>
#include <utility>

#include "attention_items.h"

namespace {

constexpr int kSmallestBlock = 8;
constexpr int64_t kSerialPositions = 1024;  // shorter work is not worth waking a team

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

INLINE Range range_in_tile(int64_t first, int64_t last, int64_t tile) {
    const int64_t begin = first - tile * kTile, end = last + 1 - tile * kTile;
    return {static_cast<int>(begin < 0 ? 0 : begin > kTile ? kTile : begin),
            static_cast<int>(end < 0 ? 0 : end > kTile ? kTile : end)};
}

// Find the memory of the blocks that hold a tile of a span.
template <class T>
void locate(const Call& call, const Span& span, int64_t index, Tile<T>& tile) {
    typedef typename T::Lane Lane;
    const CacheShape& shape = call.shape;
    const Range range = tile.range = range_in_tile(span.first, span.last, index);
    const int64_t block_lanes = shape.block_stride / T::kPerLane;
    const int64_t head = span.kv_head * shape.head_dim * shape.block_size / T::kPerLane;
    const int64_t depth = shape.head_dim / T::kPerLane;
    const int32_t* table = call.batch.block_tables + span.seq * call.batch.max_blocks;
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

// Call body(r, seq, token, head) for each row r of an item: a query head at a token of a sequence.
template <class Body>
INLINE void for_rows(const Call& call, const Bundle& bundle, int64_t kv_head, Body body) {
    int r = 0;
    for (int p = 0; p < bundle.count; ++p)
        for (int i = 0; i < bundle.pieces[p].rows; ++i) {
            const int64_t row = bundle.pieces[p].first_row + i;
            body(r++, bundle.pieces[p].seq, row / call.group,
                 kv_head * call.group + row % call.group);
        }
}

// Where a head at a token of a sequence lies in an array of tokens `stride` apart.
INLINE int64_t offset(const Call& call, int64_t seq, int64_t token, int64_t head, int64_t stride) {
    return (call.batch.query_start_loc[seq] + token) * stride + head * call.shape.head_dim;
}

// A sink is where the running softmax begins: a maximum, and e^0 in the sum.
template <class T>
INLINE void start_at_sink(float sink, Row<T>& row) {
    row.max = sink;
    if (sink > -__builtin_inff()) row.sum[0] = 1.0f;
}

template <class T>
void start_rows(const Call& call, const Bundle& bundle, int64_t kv_head, Workspace<T>& work) {
    for_rows(call, bundle, kv_head, [&](int r, int64_t seq, int64_t token, int64_t head) {
        const int64_t last = first_query(call.batch, seq) + token;
        const auto* q = static_cast<const typename T::Element*>(call.q) +
                        offset(call, seq, token, head, call.q_stride);
        for (int64_t d = 0; d < call.shape.head_dim / T::kPerLane; ++d)
            work.queries[d][r] = T::scalar(q + d * T::kPerLane);
        work.rows[r] = Row<T>{&work.queries[0][r], first_seen(last, call.window), last,
                              -__builtin_inff(), Floats{}, work.acc[r]};
        if (call.sinks) start_at_sink(call.sinks[head], work.rows[r]);
        for (int64_t d = 0; d < call.shape.head_dim; d += kLanes)
            store(work.acc[r] + d, Floats{});
    });
}

template <class T>
void finish_rows(const Call& call, const Bundle& bundle, int64_t kv_head,
                 const Workspace<T>& work) {
    for_rows(call, bundle, kv_head, [&](int r, int64_t seq, int64_t token, int64_t head) {
        auto* out = static_cast<typename T::Element*>(call.out) +
                    offset(call, seq, token, head, call.out_stride);
        const Floats total = splat(across_sum(work.rows[r].sum));
        for_pieces(call.shape.head_dim, [&](int64_t d, int count) {
            write<T>(out + d, load<Floats>(work.acc[r] + d) / total, count);
        });
    });
}

template <class T>
void attend_rows(const Call& call, const Span& span, int64_t index, const Tile<T>& tile,
                 const Tile<T>* next, Row<T>* rows) {
    for (int r = span.row, stop; r < span.stop; r = stop) {
        const Range range = range_in_tile(rows[r].first, rows[r].last, index);
        for (stop = r + 1; stop < span.stop; ++stop)
            if (!(range_in_tile(rows[stop].first, rows[stop].last, index) == range)) break;
        if (range.begin == range.end) continue;
        attend_run<T>(call, tile, next, rows + r, stop - r, range);
        if (next) fetch_rest<T>(call.shape.head_dim, *next, range);
        next = nullptr;
    }
}

// `after` is the item that this thread does next, whose first tile is fetched meanwhile.
template <class T>
void attend_item(const Call& call, const Work& all, const Item& item, const Item* after,
                 Workspace<T>& work) {
    const Bundle& bundle = all.bundles[item.bundle];
    Span spans[2 * kMaxSpans];
    const int count =
        find_spans(call.batch, call.group, call.window, bundle, item.kv_head, spans);
    int known = count;
    if (after)
        known += find_spans(call.batch, call.group, call.window, all.bundles[after->bundle],
                            after->kv_head, spans + count);
    start_rows<T>(call, bundle, item.kv_head, work);
    Tile<T> *tile = work.tiles, *following = work.tiles + 1;
    locate<T>(call, spans[0], spans[0].begin, *tile);
    for (int s = 0; s < count; ++s)
        for (int64_t index = spans[s].begin; index < spans[s].end; ++index) {
            const bool goes_on = index + 1 < spans[s].end;
            const int of = goes_on ? s : s + 1;
            if (of < known)
                locate<T>(call, spans[of], goes_on ? index + 1 : spans[of].begin, *following);
            attend_rows<T>(call, spans[s], index, *tile, of < known ? following : nullptr,
                           work.rows);
            std::swap(tile, following);
        }
    finish_rows<T>(call, bundle, item.kv_head, work);
}

// Hands out items to threads, all heads of a bundle to one, for they lie side by side in memory.
class Queue {
public:
    Queue(const Work& all, int64_t heads, int threads)
        : all_(all), run_(std::clamp(size() / (kRunsPerThread * threads), int64_t(1), heads)) {}

    // The item after `current`, or a thread's first after null; null if none is left.
    const Item* next(const Item* current) {
        int64_t index = current ? current - all_.items.data() + 1 : 0;
        if (index % run_ == 0) index = taken_.fetch_add(run_, std::memory_order_relaxed);
        return index < size() ? &all_.items[index] : nullptr;
    }

private:
    static constexpr int kRunsPerThread = 4;  // with fewer, one could be left with much at the end
    const Work& all_;
    const int64_t run_;
    std::atomic<int64_t> taken_{0};

    int64_t size() const { return static_cast<int64_t>(all_.items.size()); }
};

template <class T>
void attend(const Call& call, int threads) {
    const Work all = divide(call.batch, call.shape, call.group, threads);
    int64_t positions = 0;
    for (const Item& item : all.items)
        positions += call.batch.seq_lens[all.bundles[item.bundle].pieces[0].seq];
    // Keys of small blocks are copied to be found: to find them for a fetch would fetch them twice.
    const bool ahead = call.shape.block_size >= kLanes;
    Queue queue(all, call.shape.kv_heads, threads);
#pragma omp parallel num_threads(threads) if (all.items.size() > 1 && positions > kSerialPositions)
    {
        Workspace<T> work;
        for (const Item *item = queue.next(nullptr), *after; item; item = after) {
            after = queue.next(item);
            attend_item<T>(call, all, *item, ahead ? after : nullptr, work);
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
        bool outside = false;  // without an early end, many blocks are compared at once
        for (int64_t i = 0; i < blocks; ++i)
            outside |= table[i] < (i < unseen ? kNoBlock : 0) || table[i] >= shape.num_blocks;
        if (outside) return seq;
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
