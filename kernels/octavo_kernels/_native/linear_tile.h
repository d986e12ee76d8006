// One tile of a product: some rows times one panel of the weight, its sums in registers.
//
// What depends on how a weight is kept is in Rows and Tile, which linear_int8.h specialises.
#pragma once

#include <utility>

#include "activation.h"
#include "adapters.h"
#include "linear.h"

namespace {

// The most rows whose sums, beside a step's operands, stay in registers.
template <class T>
constexpr int kTileRows = (kRegisters - kPanelVectors * T::kWide - 2) / kPanelVectors;

// Steps that are always taken together.
template <class T>
constexpr int kGroupSteps = 1;

template <class T>
INLINE int64_t depth_of(int64_t in_features) {
    constexpr int kInputs = T::kPerLane * kGroupSteps<T>;
    return (in_features + kInputs - 1) / kInputs * kGroupSteps<T>;
}

INLINE int64_t panels_of(int64_t out_features) {
    return (out_features + kPanelOutputs - 1) / kPanelOutputs;
}

// The outputs that one vector of a panel holds.
struct Outputs {
    int64_t begin;
    int count;
};
INLINE Outputs outputs_of(const PackedLinear& linear, int64_t panel, int vector) {
    const int64_t all = linear.out_features, half = all / 2;
    const int64_t begin = linear.is_gated ? vector * half + panel * kLanes
                                          : panel * kPanelOutputs + vector * kLanes;
    const int64_t left = (linear.is_gated && vector == 0 ? half : all) - begin;
    return {begin, static_cast<int>(left < 0 ? 0 : left < kLanes ? left : kLanes)};
}

// Part `index` of `count` even parts of [0, size).
struct Span {
    int64_t begin, end;
};
INLINE Span part_of(int64_t size, int64_t index, int64_t count) {
    return {size * index / count, size * (index + 1) / count};
}

// What is written of the sums: as they are rounded; the same as float32; what a gated activation
// makes of them.
enum Form { kRounded, kFloats, kSilu, kGelu };

struct Product {
    Form form;
    const void* x;
    void* out;
    int64_t rows, x_stride, out_stride;
    PackedLinear linear;
    const PackedLinear* next;
    const RowTerm* terms;  // by row, or null; see adapters.h
};

// Rows as tiles read them, `stride` scalars apart.
template <class T>
struct Scalars {
    const typename T::Scalar* first;
    int64_t stride;
};

constexpr int kSharedRows = 4;     // rows of one adapter that are added to together
constexpr int kFetchedSpans = 16;  // how far ahead spans are fetched
constexpr int64_t kLineSpread = 2048;  // bytes; see in_place

// How rows become what tiles read.
template <class T>
struct Rows {
    // Whether a product may read its rows where they are: if neighbouring elements are a scalar,
    // and rows do not lie so that all of a tile's go into the same few lines of the cache.
    static bool in_place(const Product& product) {
        const int64_t stride = product.x_stride, bytes = sizeof(typename T::Element);
        return sizeof(typename T::Scalar) == sizeof(typename T::Lane) &&
               product.linear.in_features % T::kPerLane == 0 && stride % T::kPerLane == 0 &&
               stride * bytes % kLineSpread != 0;
    }
    static int64_t scalars(int64_t in_features) { return depth_of<T>(in_features); }
    static void pack(const typename T::Element* from, int64_t in_features,
                     typename T::Scalar* to) {
        for_pieces(in_features, [&](int64_t i, int size) {
            T::scalars(to + i / T::kPerLane, read<T>(from + i, size));
        });
    }
};

// Apply `body` to the numbers below N, each a constant, so that arrays by them stay in registers.
template <int... I, class Body>
INLINE void repeat(std::integer_sequence<int, I...>, Body body) {
    (body(std::integral_constant<int, I>{}), ...);
}
template <int N, class Body>
INLINE void repeat(Body body) {
    repeat(std::make_integer_sequence<int, N>{}, body);
}

// The panel that is used next, and the steps of it that a tile fetches into the cache.
template <class T>
struct Ahead {
    const typename T::Lane* panel;
    Span steps;
};

// Fetch what a row's adapter adds to the next panel of the product.
INLINE void fetch_next(const UpSpan* spans, const float* up) {
    __builtin_prefetch(spans + kFetchedSpans, 0, 2);
    const int64_t count = spans[0].count + spans[1].count;
    for (int64_t i = 0; i < count; ++i) __builtin_prefetch(up + (count + i) * kLanes, 0, 2);
}

// Add what one adapter adds to some rows' rounded sums of one panel, which are to be rounded again.
template <class T, int N>
INLINE void add_terms(const RowTerm* const (&terms)[kSharedRows],
                      Floats (*const (&sums)[kSharedRows])[kPanelVectors], int64_t panel) {
    const LowRank& low_rank = *terms[0]->low_rank;
    const UpSpan* const spans = low_rank.spans + panel * kPanelVectors;
    repeat<kPanelVectors>([&](auto v) {
        const float* up = low_rank.up + spans[v].begin * kLanes;
        Floats added[N] = {};
        for (int64_t i = spans[v].first; i < spans[v].first + spans[v].count; ++i, up += kLanes) {
            const Floats weights = load<Floats>(up);
            repeat<N>([&](auto n) {
                added[n] = multiply_add(weights, splat(terms[n]->shrunk[i]), added[n]);
            });
        }
        repeat<N>([&](auto n) {
            Floats& sum = (*sums[n])[v];
            sum = added[n] + Floats{} + rounded<T>(sum);
        });
    });
    for (int n = 0; n < N; ++n)
        if (terms[n]->fetches) fetch_next(spans, low_rank.up + spans[0].begin * kLanes);
}

// The same for the rows of a tile, some of one adapter at a time; `terms` are those of its rows.
template <class T>
__attribute__((noinline)) void add_adapters(const RowTerm* terms, Floats (*sums)[kPanelVectors], int rows, int64_t panel) {
    uint32_t left = (1u << rows) - 1;
    for (int r = 0; r < rows; ++r) {
        if (!(left >> r & 1) || !terms[r].low_rank) continue;
        const RowTerm* shared[kSharedRows] = {};
        Floats(*shared_sums[kSharedRows])[kPanelVectors] = {};
        int count = 0;
        for (int i = r; i < rows && count < kSharedRows; ++i) {
            if (!(left >> i & 1) || terms[i].low_rank != terms[r].low_rank) continue;
            left &= ~(1u << i);
            shared[count] = terms + i;
            shared_sums[count++] = sums + i;
        }
        if (count == kSharedRows) {
            add_terms<T, kSharedRows>(shared, shared_sums, panel);
            continue;
        }
        for (int n = 0; n < count; ++n) {
            shared[0] = shared[n];
            shared_sums[0] = shared_sums[n];
            add_terms<T, 1>(shared, shared_sums, panel);
        }
    }
}

// The sums of some rows with their biases and adapters, as far as they go into one panel.
struct Block {
    const Floats (*sums)[kPanelVectors];
    int rows;
    int64_t first_row, panel;
};

template <class T>
INLINE Floats bias_of(const PackedLinear& linear, Outputs outputs) {
    using E = typename T::Element;
    return linear.bias ? read<T>(static_cast<const E*>(linear.bias) + outputs.begin, outputs.count)
                       : Floats{};
}

template <class T>
void write_sums(const Product& product, const Block& block) {
    using E = typename T::Element;
    for (int v = 0; v < kPanelVectors; ++v) {
        const Outputs outputs = outputs_of(product.linear, block.panel, v);
        for (int r = 0; r < block.rows; ++r) {
            const int64_t at = (block.first_row + r) * product.out_stride + outputs.begin;
            const Floats sum = block.sums[r][v];
            if (product.form == kFloats)
                write<Float32>(static_cast<float*>(product.out) + at, rounded<T>(sum),
                               outputs.count);
            else
                write<T>(static_cast<E*>(product.out) + at, sum, outputs.count);
        }
    }
}

template <class T, class Activation>
void write_gated(const Product& product, const Block& block) {
    const Outputs gates = outputs_of(product.linear, block.panel, 0);
    for (int r = 0; r < block.rows; ++r) {
        const Floats gate = rounded<T>(block.sums[r][0]), up = rounded<T>(block.sums[r][1]);
        write<T>(static_cast<typename T::Element*>(product.out) +
                     (block.first_row + r) * product.out_stride + gates.begin,
                 activate_and_multiply<Activation>(gate, up), gates.count);
    }
}

template <class T, int R>
INLINE void write_tile(const Product& product, const Floats (&sums)[R][kPanelVectors], int64_t row,
                       int64_t panel) {
    using E = typename T::Element;
    const Outputs first = outputs_of(product.linear, panel, 0);
    const Outputs second = outputs_of(product.linear, panel, 1);
    if (product.form == kRounded && !product.linear.bias && !product.terms &&
        second.count == kLanes) {
        E* const out = static_cast<E*>(product.out) + row * product.out_stride;
        repeat<R>([&](auto r) {
            E* const to = out + r * product.out_stride;
            write<T>(to + first.begin, sums[r][0] + Floats{}, kLanes);  // as with a bias: no -0
            write<T>(to + second.begin, sums[r][1] + Floats{}, kLanes);
        });
        return;
    }
    const Floats biases[] = {bias_of<T>(product.linear, first), bias_of<T>(product.linear, second)};
    Floats kept[R][kPanelVectors];
    repeat<R>([&](auto r) {
        repeat<kPanelVectors>([&](auto v) { kept[r][v] = sums[r][v] + biases[v]; });
    });
    if (product.terms) add_adapters<T>(product.terms + row, kept, R, panel);
    const Block block = {kept, R, row, panel};
    if (product.form == kSilu)
        write_gated<T, Silu>(product, block);
    else if (product.form == kGelu)
        write_gated<T, Gelu>(product, block);
    else
        write_sums<T>(product, block);
}

template <class T, int R>
struct Tile {
    static void multiply(const Product& product, Scalars<T> x, const typename T::Lane* lanes,
                         Ahead<T> ahead, int64_t row, int64_t panel) {
        Floats sums[R][kPanelVectors] = {};
        // A pointer for every four rows: there are not enough registers for one each.
        constexpr int kPointers = (R + 3) / 4;
        const typename T::Scalar* rows[kPointers];
        repeat<kPointers>([&](auto i) { rows[i] = x.first + (row + 4 * i) * x.stride; });
        const auto add_products = [&]() __attribute__((always_inline)) {
            typename T::Wide weights[kPanelVectors];
            repeat<kPanelVectors>([&](auto v) {
                weights[v] = T::lanes(lanes + v * kLanes, 0xffffffffu);
            });
            repeat<R>([&](auto r) {
                const typename T::Scalar scalar = rows[r / 4][r % 4 * x.stride];
                repeat<kPanelVectors>(
                    [&](auto v) { sums[r][v] = T::dot(sums[r][v], weights[v], scalar); });
            });
            lanes += kPanelOutputs;
            repeat<kPointers>([&](auto i) { ++rows[i]; });
        };
        int64_t left = depth_of<T>(product.linear.in_features);
        // Fetches are spread over the tile: at once they would hold up its own loads.
        int64_t fetched = ahead.steps.end - ahead.steps.begin;
        fetched = fetched < left ? fetched : left;
        if (fetched > 0) {
            const int64_t gap = left / fetched;
            const typename T::Lane* fetch = ahead.panel + ahead.steps.begin * kPanelOutputs;
            left -= gap * fetched;
            for (; fetched > 0; --fetched, fetch += kPanelOutputs) {
                repeat<kPanelVectors>(
                    [&](auto v) { __builtin_prefetch(fetch + v * kLanes, 0, 2); });
                for (int64_t step = 0; step < gap; ++step) add_products();
            }
        }
        for (; left > 0; --left) add_products();
        write_tile<T, R>(product, sums, row, panel);
    }
};

template <class T>
using TileFunction = void (*)(const Product&, Scalars<T>, const typename T::Lane*, Ahead<T>,
                              int64_t, int64_t);

template <class T, int R>
TileFunction<T> tile_function(int64_t rows) {
    if constexpr (R == 1)
        return Tile<T, 1>::multiply;
    else
        return rows == R ? Tile<T, R>::multiply : tile_function<T, R - 1>(rows);
}

}  // namespace
