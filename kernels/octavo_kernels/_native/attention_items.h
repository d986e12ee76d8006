// Which rows of a step attend together, and to which tiles.
//
// Rows that read the same memory share its loads: those of one sequence and KV head, and those of
// sequences whose block tables begin with the same blocks, as the prefix cache lets them. Knows
// block tables and numbers of rows, no keys and no values.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_tile.h"
#include "operations.h"

// Neighbouring rows of one sequence, counted over its query tokens and, within a token, over the
// query heads of a KV head.
struct Piece {
    int64_t seq, first_row;
    int rows;
};

// Up to kMaxRows rows, of one sequence or of several that begin with the same blocks.
struct Bundle {
    Piece pieces[kMaxRows];
    int count, rows;
    int64_t shared;  // leading tiles that all pieces read from the same blocks; 0 for one piece
};

// A bundle at one KV head: what one thread does in one go.
struct Item {
    int64_t bundle, kv_head;
};

struct Work {
    std::vector<Bundle> bundles;
    std::vector<Item> items;
};

// Leading tiles that two sequences read from the same blocks.
INLINE int64_t common_tiles(const Batch& batch, int64_t block_size, int64_t a, int64_t b) {
    const int32_t* ours = batch.block_tables + a * batch.max_blocks;
    const int32_t* theirs = batch.block_tables + b * batch.max_blocks;
    const int64_t shorter = std::min(batch.seq_lens[a], batch.seq_lens[b]);
    int64_t same = 0;
    while (same * block_size < shorter && ours[same] == theirs[same]) ++same;
    return same * block_size / kTile;
}

// Add a piece to a bundle, unless those who are in it would share fewer tiles.
INLINE bool join(const Batch& batch, int64_t block_size, const Piece& piece, Bundle& bundle) {
    if (bundle.rows + piece.rows > kMaxRows) return false;
    const int64_t common = common_tiles(batch, block_size, bundle.pieces[0].seq, piece.seq);
    if (common < std::max<int64_t>(bundle.shared, 1)) return false;
    if (bundle.count == 1) bundle.shared = common;
    bundle.pieces[bundle.count++] = piece;
    bundle.rows += piece.rows;
    return true;
}

// Divide the rows of a step; `group` query heads share a KV head.
inline Work divide(const Batch& batch, const CacheShape& shape, int64_t group, int threads) {
    constexpr int kItemsPerThread = 4;  // with fewer, a thread would lack what sharing saves
    constexpr int kOpen = 64;
    const bool may_join = batch.num_seqs * shape.kv_heads >= kItemsPerThread * threads;
    int64_t open[kOpen];  // the last bundle that begins with a block, found by the block's number
    std::fill(open, open + kOpen, -1);
    Work work;
    work.bundles.reserve(batch.num_seqs);
    work.items.reserve(batch.num_seqs * shape.kv_heads);
    for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
        const int32_t* start = batch.query_start_loc + seq;
        const int64_t rows = (start[1] - start[0]) * group;
        const int64_t parts = (rows + kMaxRows - 1) / kMaxRows;
        const int64_t first = static_cast<int64_t>(work.bundles.size());
        if (parts == 1 && may_join) {
            int64_t& last = open[batch.block_tables[seq * batch.max_blocks] & (kOpen - 1)];
            const Piece piece = {seq, 0, static_cast<int>(rows)};
            if (last >= 0 && join(batch, shape.block_size, piece, work.bundles[last])) continue;
            last = first;
        }
        for (int64_t part = 0; part < parts; ++part) {
            const int64_t begin = rows * part / parts, end = rows * (part + 1) / parts;
            const int count = static_cast<int>(end - begin);
            work.bundles.push_back({{{seq, begin, count}}, 1, count, 0});
        }
        // All parts of a head in turn, for they read the same keys.
        for (int64_t head = 0; head < shape.kv_heads; ++head)
            for (int64_t part = 0; part < parts; ++part)
                work.items.push_back({first + part, head});
    }
    return work;
}

// Neighbouring tiles that neighbouring rows of an item read through one block table.
struct Span {
    int64_t seq, kv_head;
    int row, stop;
    int64_t first, last;  // positions that the rows see, both included
    int64_t begin, end;   // tiles
};

constexpr int kMaxSpans = kMaxRows + 1;

// The first position that the row at `position` sees; window 0 for all.
INLINE int64_t first_seen(int64_t position, int64_t window) {
    return window > 0 && position >= window ? position - window + 1 : 0;
}

// The position of a sequence's first query token.
INLINE int64_t first_query(const Batch& batch, int64_t seq) {
    const int32_t* start = batch.query_start_loc + seq;
    return batch.seq_lens[seq] - (start[1] - start[0]);
}

// Write the spans of an item in the order in which they are read: the tiles that its pieces share,
// then what each reads alone. Returns their number, at least 1.
inline int find_spans(const Batch& batch, int64_t group, int64_t window, const Bundle& bundle,
                      int64_t kv_head, Span* spans) {
    Span shared = {bundle.pieces[0].seq, kv_head, 0, bundle.rows, INT64_MAX, 0, 0, bundle.shared};
    Span own[kMaxRows];
    for (int p = 0, row = 0; p < bundle.count; row += bundle.pieces[p++].rows) {
        const Piece& piece = bundle.pieces[p];
        const int64_t computed = first_query(batch, piece.seq);
        const int64_t last = computed + (piece.first_row + piece.rows - 1) / group;
        const int64_t first = first_seen(computed + piece.first_row / group, window);
        own[p] = {piece.seq, kv_head, row, row + piece.rows, first, last,
                  std::max(first / kTile, bundle.shared), last / kTile + 1};
        shared.first = std::min(shared.first, first);
        shared.last = std::max(shared.last, last);
    }
    shared.begin = shared.first / kTile;
    shared.end = std::min(shared.last / kTile + 1, bundle.shared);
    int count = 0;
    if (shared.begin < shared.end) spans[count++] = shared;
    for (int p = 0; p < bundle.count; ++p)
        if (own[p].begin < own[p].end) spans[count++] = own[p];
    return count;
}
