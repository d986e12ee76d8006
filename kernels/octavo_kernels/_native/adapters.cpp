// What adapters add to products.
//
// A step's rows are first multiplied by their adapters' `down`, in tiles whose sums stay in
// registers; a product then adds `up` to a tile of its own, before that is written: see
// linear_tile.h.

#include "adapters.h"

#include <omp.h>

#include <algorithm>
#include <memory>

#include "linear_tile.h"

namespace {

constexpr int kShrinkRows = kRegisters == 32 ? 8 : 4;  // whose sums stay in registers
constexpr int64_t kSerialProducts = 1 << 15;  // of vectors: a team is waited for longer than those

INLINE int64_t rank_vectors(int64_t rank) { return (rank + kLanes - 1) / kLanes; }

template <class T>
void widen_rows(const void* x, int64_t stride, const int64_t* rows, int64_t count,
                int64_t in_features, float* to) {
    for (int64_t r = 0; r < count; ++r) {
        const auto* from = static_cast<const typename T::Element*>(x) + rows[r] * stride;
        for_pieces(in_features, [&](int64_t i, int size) {
            write<Float32>(to + r * in_features + i, read<T>(from + i, size), size);
        });
    }
}

// R rows of x [R, in_features] times one panel of `down`.
template <int R, int V>
void shrink_tile(const float* x, int64_t in_features, const float* down, float* to,
                 int64_t stride) {
    Floats sums[R][V] = {};
    for (int64_t k = 0; k < in_features; ++k, down += V * kLanes) {
        Floats weights[V];
        repeat<V>([&](auto v) { weights[v] = load<Floats>(down + v * kLanes); });
        repeat<R>([&](auto r) {
            const Floats scalar = splat(x[r * in_features + k]);
            repeat<V>([&](auto v) { sums[r][v] = multiply_add(weights[v], scalar, sums[r][v]); });
        });
    }
    repeat<R>([&](auto r) {
        repeat<V>([&](auto v) { store(to + r * stride + v * kLanes, sums[r][v] + Floats{}); });
    });
}

typedef void (*ShrinkTile)(const float*, int64_t, const float*, float*, int64_t);

template <int R, int V>
ShrinkTile shrink_function(int64_t rows, int64_t vectors) {
    if constexpr (V > 1)
        if (vectors < V) return shrink_function<R, V - 1>(rows, vectors);
    if constexpr (R > 1)
        if (rows < R) return shrink_function<R - 1, V>(rows, vectors);
    return shrink_tile<R, V>;
}

// Write the ranks of one vector of outputs; returns where they are.
UpSpan pack_outputs(const float* up, int64_t rank, Outputs outputs, float* to_up, int64_t begin) {
    const float* const rows = up + outputs.begin * rank;
    const auto adds = [&](int64_t k) {
        for (int i = 0; i < outputs.count; ++i)
            if (rows[i * rank + k] != 0.0f) return true;
        return false;
    };
    int64_t first = 0, end = rank;
    while (first < end && !adds(first)) ++first;
    while (first < end && !adds(end - 1)) --end;
    float* const to = to_up + begin * kLanes;
    std::fill_n(to, (end - first) * kLanes, 0.0f);
    for (int64_t k = first; k < end; ++k)
        for (int i = 0; i < outputs.count; ++i)
            to[(k - first) * kLanes + i] = rows[i * rank + k];
    return {static_cast<int32_t>(first), static_cast<int32_t>(end - first), begin};
}

void pack_down(const float* down, int64_t rank, int64_t in_features, float* to) {
    for (int64_t first = 0; first < rank; first += kDownVectors * kLanes) {
        const int64_t left = std::min<int64_t>(rank - first, kDownVectors * kLanes);
        const int64_t width = rank_vectors(left) * kLanes;
        for (int64_t k = 0; k < in_features; ++k, to += width)
            for (int64_t i = 0; i < width; ++i)
                to[i] = i < left ? down[(first + i) * in_features + k] : 0.0f;
    }
}

template <class T>
void add_row(const RowTerm& term, const PackedLinear& linear, void* product) {
    for (int64_t panel = 0; panel < panels_of(linear.out_features); ++panel) {
        Floats sums[1][kPanelVectors];
        const auto for_outputs = [&](auto body) {
            for (int v = 0; v < kPanelVectors; ++v) {
                const Outputs outputs = outputs_of(linear, panel, v);
                body(static_cast<typename T::Element*>(product) + outputs.begin, outputs.count,
                     sums[0][v]);
            }
        };
        for_outputs([](auto* from, int count, Floats& sum) { sum = read<T>(from, count); });
        add_adapters<T>(&term, sums, 1, panel);
        for_outputs([](auto* to, int count, Floats sum) { write<T>(to, sum, count); });
    }
}

template <class T>
void add_rows(const RowTerm* terms, const PackedLinear& linear, void* product, int64_t stride,
              const AdaptedRows& adapted, int threads) {
#pragma omp parallel for num_threads(threads) if (adapted.count > 1)
    for (int64_t i = 0; i < adapted.count; ++i) {
        const int64_t row = adapted.rows[i];
        add_row<T>(terms[row], linear, static_cast<typename T::Element*>(product) + row * stride);
    }
}

}  // namespace

AdaptedStep::AdaptedStep(const AdaptedRows& adapted, int64_t tokens)
    : rows_(adapted.rows), terms_(tokens) {
    for (int64_t adapter = 0; adapter < adapted.num_adapters; ++adapter) {
        const int64_t begin = adapted.starts[adapter], end = adapted.starts[adapter + 1];
        for (int64_t first = begin; first < end; first += kShrinkRows)
            pieces_.push_back(
                {adapter, first, std::min(first + kShrinkRows, end), first == begin, nullptr});
    }
}

int64_t AdaptedStep::place(const LowRank* by_adapter) {
    int64_t size = 0, most = 0;
    for (const Piece& piece : pieces_) {
        const int64_t vectors = by_adapter[piece.adapter].vectors;
        size += (piece.end - piece.first) * vectors * kLanes;
        most = std::max(most, vectors);
    }
    if (size > static_cast<int64_t>(shrunk_.size())) shrunk_.resize(size);
    float* to = shrunk_.data();
    for (Piece& piece : pieces_) {
        const LowRank& low_rank = by_adapter[piece.adapter];
        piece.shrunk = to;
        for (int64_t i = piece.first; i < piece.end; ++i, to += low_rank.vectors * kLanes)
            terms_[rows_[i]] = {low_rank.vectors ? &low_rank : nullptr, to,
                                piece.is_first && i == piece.first};
    }
    return most;
}

const RowTerm* AdaptedStep::shrink(int64_t element, const void* x, int64_t x_stride,
                                   int64_t in_features, const LowRank* by_adapter, int threads) {
    const int64_t most = by_adapter ? place(by_adapter) : 0;
    if (most == 0) return nullptr;
    const auto widen = for_element(element, widen_rows<Float32>, widen_rows<BFloat16>,
                                   widen_rows<Float16>);
    const int64_t panels = (most + kDownVectors - 1) / kDownVectors;
    const int64_t count = static_cast<int64_t>(pieces_.size());
    const bool is_large = count * panels > 1 && count * kShrinkRows * in_features * most >
                                                    kSerialProducts;
#pragma omp parallel num_threads(threads) if (threads > 1 && is_large)
    {
        const std::unique_ptr<float[]> wide(new float[kShrinkRows * in_features]);
#pragma omp for
        for (int64_t item = 0; item < count * panels; ++item) {
            const Piece& piece = pieces_[item / panels];
            const LowRank& low_rank = by_adapter[piece.adapter];
            const int64_t first = item % panels * kDownVectors, rows = piece.end - piece.first;
            const int64_t vectors = std::min<int64_t>(low_rank.vectors - first, kDownVectors);
            if (vectors <= 0) continue;
            widen(x, x_stride, rows_ + piece.first, rows, in_features, wide.get());
            shrink_function<kShrinkRows, kDownVectors>(rows, vectors)(
                wide.get(), in_features, low_rank.down + first * kLanes * in_features,
                piece.shrunk + first * kLanes, low_rank.vectors * kLanes);
        }
    }
    return terms_.data();
}

extern "C" {

void octavo_low_rank_sizes(const PackedLinear* linear, int64_t rank, int64_t* sizes) {
    const int64_t spans = panels_of(linear->out_features) * kPanelVectors;
    sizes[0] = linear->in_features * rank_vectors(rank) * kLanes;
    sizes[1] = spans * rank * kLanes;
    sizes[2] = spans;
    sizes[3] = rank_vectors(rank);
}

int64_t octavo_pack_low_rank(const PackedLinear* linear, int64_t rank, const float* down,
                             const float* up, float* to_down, float* to_up, UpSpan* spans) {
    pack_down(down, rank, linear->in_features, to_down);
    int64_t begin = 0;
    for (int64_t panel = 0; panel < panels_of(linear->out_features); ++panel)
        for (int v = 0; v < kPanelVectors; ++v) {
            *spans = pack_outputs(up, rank, outputs_of(*linear, panel, v), to_up, begin);
            begin += spans++->count;
        }
    return begin * kLanes;
}

int64_t octavo_invalid_adapted(const AdaptedRows* adapted, int64_t tokens) {
    const int64_t* const starts = adapted->starts;
    for (int64_t g = 0; g < adapted->num_adapters; ++g)
        if (starts[g] < 0 || starts[g + 1] < starts[g] || starts[g + 1] > adapted->count) return g;
    for (int64_t i = 0; i < adapted->count; ++i)
        if (adapted->rows[i] < 0 || adapted->rows[i] >= tokens) return -2 - i;
    return -1;
}

int64_t octavo_add_low_rank(int element, const void* x, const PackedLinear* linear, void* product,
                            int64_t tokens, const int64_t* strides, const AdaptedRows* adapted,
                            const LowRank* by_adapter, int threads) {
    const int64_t invalid = octavo_invalid_adapted(adapted, tokens);
    if (invalid != -1) return invalid;
    AdaptedStep step(*adapted, tokens);
    const RowTerm* const terms =
        step.shrink(element, x, strides[0], linear->in_features, by_adapter, threads);
    if (terms)
        for_element(element, add_rows<Float32>, add_rows<BFloat16>, add_rows<Float16>)(
            terms, *linear, product, strides[1], *adapted, threads);
    return -1;
}

}  // extern "C"
