// Matrix products with packed weights.
//
// Every output sums its products in the order of the inputs, in float32, by the same instruction:
// neither the number of rows, nor a row's place among them, nor the number of threads changes a
// bit. Rows are multiplied in tiles that fill the registers; a panel of the weight stays in cache
// while all tiles of a block of rows pass over it, and the next one is fetched meanwhile.

#include "linear.h"

#include <omp.h>

#include <memory>

namespace {

constexpr int64_t kBlockRows = 192;  // rows that share one passage over the weight
constexpr int64_t kSerialElements = 1 << 14;

// The most rows whose sums, beside a step's operands, stay in registers.
template <class T>
constexpr int kTileRows = (kRegisters - kPanelVectors * T::kWide - 2) / kPanelVectors;

template <class T>
INLINE int64_t tiles_of(int64_t rows) {
    return (rows + kTileRows<T> - 1) / kTileRows<T>;
}

template <class T>
INLINE int64_t depth_of(int64_t in_features) {
    return (in_features + T::kPerLane - 1) / T::kPerLane;
}

INLINE int64_t panels_of(int64_t out_features) {
    return (out_features + kPanelOutputs - 1) / kPanelOutputs;
}

template <class T>
int64_t packed_size(int64_t in_features, int64_t out_features) {
    return panels_of(out_features) * depth_of<T>(in_features) * kPanelOutputs *
           static_cast<int64_t>(sizeof(typename T::Lane));
}

template <class T>
void pack_weight(const void* weight, void* panels, int64_t in_features, int64_t out_features,
                 int threads) {
    using E = typename T::Element;
    const int64_t depth = depth_of<T>(in_features), size = depth * kPanelOutputs * T::kPerLane;
#pragma omp parallel for num_threads(threads)
    for (int64_t panel = 0; panel < panels_of(out_features); ++panel) {
        E* to = static_cast<E*>(panels) + panel * size;
        memset(to, 0, size * sizeof *to);
        for (int64_t i = 0; i < kPanelOutputs && panel * kPanelOutputs + i < out_features; ++i) {
            const E* from =
                static_cast<const E*>(weight) + (panel * kPanelOutputs + i) * in_features;
            for (int64_t k = 0; k < in_features; ++k)
                to[(k / T::kPerLane * kPanelOutputs + i) * T::kPerLane + k % T::kPerLane] = from[k];
        }
    }
}

// Part `index` of `count` even parts of [0, size).
struct Span {
    int64_t begin, end;
};
INLINE Span part_of(int64_t size, int64_t index, int64_t count) {
    return {size * index / count, size * (index + 1) / count};
}

struct Product {
    const void* x;
    void* out;
    int64_t rows, x_stride, out_stride;
    PackedLinear linear;
};

// Scalars of a tile are [chunks, rows of the tile, kChunkStride]: the distance between the rows of a
// step is a constant, and no power of two.
constexpr int64_t kChunk = 512, kChunkStride = kChunk + 16;

template <class T>
INLINE int64_t chunks_of(int64_t in_features) {
    return (depth_of<T>(in_features) + kChunk - 1) / kChunk;
}

template <class T>
void pack_rows(const Product& product, Span rows, typename T::Scalar* to) {
    using E = typename T::Element;
    constexpr int64_t kElements = kChunk * T::kPerLane;
    const int64_t in_features = product.linear.in_features, count = rows.end - rows.begin;
    for (int64_t r = 0; r < count; ++r) {
        const E* from = static_cast<const E*>(product.x) + (rows.begin + r) * product.x_stride;
        for (int64_t c = 0; c * kElements < in_features; ++c) {
            const int64_t left = in_features - c * kElements;
            typename T::Scalar* row = to + (c * count + r) * kChunkStride;
            for_pieces(left < kElements ? left : kElements, [&](int64_t i, int size) {
                T::scalars(row + i / T::kPerLane, read<T>(from + c * kElements + i, size));
            });
        }
    }
}

// The panel that is used next, and the steps of it that a tile fetches into the cache.
template <class T>
struct Ahead {
    const typename T::Lane* panel;
    Span steps;
};

template <class T, int R>
INLINE void write_tile(const Product& product, Floats (*sums)[kPanelVectors], int64_t row,
                       int64_t output) {
    using E = typename T::Element;
    const E* bias = static_cast<const E*>(product.linear.bias);
    for (int v = 0; v < kPanelVectors; ++v) {
        const int64_t at = output + v * kLanes, left = product.linear.out_features - at;
        if (left <= 0) return;
        const int count = left < kLanes ? static_cast<int>(left) : kLanes;
        const Floats added = bias ? read<T>(bias + at, count) : Floats{};
        for (int r = 0; r < R; ++r)
            write<T>(static_cast<E*>(product.out) + (row + r) * product.out_stride + at,
                     sums[r][v] + added, count);
    }
}

template <class T, int R>
void multiply_tile(const Product& product, const typename T::Scalar* x,
                   const typename T::Lane* panel, Ahead<T> ahead, int64_t row, int64_t output) {
    Floats sums[R][kPanelVectors];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = Floats{};
    const typename T::Lane* fetch = ahead.panel + ahead.steps.begin * kPanelOutputs;
    int64_t fetched = ahead.panel ? ahead.steps.end - ahead.steps.begin : 0;
    int64_t left = depth_of<T>(product.linear.in_features);
    for (; left > 0; left -= kChunk, x += R * kChunkStride) {
        const int64_t steps = left < kChunk ? left : kChunk;
        for (int64_t d = 0; d < steps; ++d) {
            typename T::Wide weights[kPanelVectors];
            for (int v = 0; v < kPanelVectors; ++v)
                weights[v] = T::lanes(panel + v * kLanes, 0xffffffffu);
            panel += kPanelOutputs;
            if (fetched > 0) {
                for (int v = 0; v < kPanelVectors; ++v)
                    __builtin_prefetch(fetch + v * kLanes, 0, 2);
                fetch += kPanelOutputs;
                --fetched;
            }
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < kPanelVectors; ++v)
                    sums[r][v] = T::dot(sums[r][v], weights[v], x[r * kChunkStride + d]);
        }
    }
    write_tile<T, R>(product, sums, row, output);
}

template <class T>
using TileFunction = void (*)(const Product&, const typename T::Scalar*, const typename T::Lane*,
                              Ahead<T>, int64_t, int64_t);

template <class T, int R>
TileFunction<T> tile_function(int64_t rows) {
    if constexpr (R == 1)
        return multiply_tile<T, 1>;
    else
        return rows == R ? multiply_tile<T, R> : tile_function<T, R - 1>(rows);
}

// Multiply the rows of one block, whose scalars are packed, with this thread's panels.
template <class T>
void multiply_panels(const Product& product, const typename T::Scalar* scalars, Span rows,
                     int64_t tiles, Span panels) {
    using Lane = typename T::Lane;
    const int64_t depth = depth_of<T>(product.linear.in_features);
    const Lane* panel = static_cast<const Lane*>(product.linear.panels);
    const int64_t width = chunks_of<T>(product.linear.in_features) * kChunkStride;
    const int64_t size = depth * kPanelOutputs, count = rows.end - rows.begin;
    for (int64_t p = panels.begin; p < panels.end; ++p) {
        const Lane* next = p + 1 < panels.end ? panel + (p + 1) * size : nullptr;
        for (int64_t t = 0; t < tiles; ++t) {
            const Span tile = part_of(count, t, tiles);
            const auto run = tile_function<T, kTileRows<T>>(tile.end - tile.begin);
            run(product, scalars + tile.begin * width, panel + p * size,
                {next, part_of(depth, t, tiles)}, rows.begin + tile.begin, p * kPanelOutputs);
        }
    }
}

// Pack the rows of one block: every thread of a team its share of the tiles.
template <class T>
void pack_block(const Product& product, Span rows, int64_t tiles, typename T::Scalar* scalars) {
    const int64_t width = chunks_of<T>(product.linear.in_features) * kChunkStride;
#pragma omp for
    for (int64_t t = 0; t < tiles; ++t) {
        const Span tile = part_of(rows.end - rows.begin, t, tiles);
        pack_rows<T>(product, {rows.begin + tile.begin, rows.begin + tile.end},
                     scalars + tile.begin * width);
    }
}

template <class T>
void multiply(const Product& product, int threads) {
    const int64_t in_features = product.linear.in_features;
    const int64_t width = chunks_of<T>(in_features) * kChunkStride;
    const int64_t panels = panels_of(product.linear.out_features);
    const int64_t blocks = (product.rows + kBlockRows - 1) / kBlockRows;
    const int64_t most = (product.rows + blocks - 1) / blocks;
    const std::unique_ptr<typename T::Scalar[]> scalars(new typename T::Scalar[most * width]);
    // Where one thread packs all rows sooner than a team would wait for each other, it does so.
    const bool serial = blocks == 1 && product.rows * in_features <= kSerialElements;
    if (serial) pack_block<T>(product, {0, product.rows}, tiles_of<T>(product.rows), scalars.get());
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t block = 0; block < blocks; ++block) {
        const Span rows = part_of(product.rows, block, blocks);
        const int64_t tiles = tiles_of<T>(rows.end - rows.begin);
        if (!serial) pack_block<T>(product, rows, tiles, scalars.get());
        multiply_panels<T>(product, scalars.get(), rows, tiles,
                           part_of(panels, omp_get_thread_num(), omp_get_num_threads()));
        if (block + 1 < blocks) {
#pragma omp barrier
        }
    }
}

}  // namespace

extern "C" {

int64_t octavo_packed_size(int element, int64_t in_features, int64_t out_features) {
    return for_element(element, packed_size<Float32>, packed_size<BFloat16>,
                       packed_size<Float16>)(in_features, out_features);
}

void octavo_pack_weight(int element, const void* weight, void* panels, int64_t in_features,
                        int64_t out_features, int threads) {
    const auto run = for_element(element, pack_weight<Float32>, pack_weight<BFloat16>,
                                 pack_weight<Float16>);
    run(weight, panels, in_features, out_features, threads);
}

void octavo_linear(int element, const void* x, const PackedLinear* linear, void* out, int64_t rows,
                   const int64_t* strides, int threads) {
    if (rows == 0) return;
    const auto run = for_element(element, multiply<Float32>, multiply<BFloat16>,
                                 multiply<Float16>);
    run({x, out, rows, strides[0], strides[1], *linear}, threads);
}

}  // extern "C"
