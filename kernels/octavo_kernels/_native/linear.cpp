// Matrix products with packed weights.
//
// Every output sums its products in the order of the inputs, in float32, by the same instruction:
// neither the number of rows, nor a row's place among them, nor the number of threads changes a
// bit. Rows are multiplied in tiles that fill the registers, read where they are if they can be; a
// panel of the weight stays in cache while all tiles of a block of rows pass over it, and the next
// one is fetched meanwhile.

#include "linear.h"

#include <omp.h>

#include <memory>

#include "linear_int8.h"

namespace {

constexpr int64_t kBlockRows = 192;  // rows that share one passage over the weight
constexpr int64_t kSerialElements = 1 << 14;

template <class T>
INLINE int64_t tiles_of(int64_t rows) {
    return (rows + kTileRows<T> - 1) / kTileRows<T>;
}

template <class T>
int64_t packed_size(int64_t in_features, int64_t out_features) {
    return panels_of(out_features) * depth_of<T>(in_features) * kPanelOutputs *
           static_cast<int64_t>(sizeof(typename T::Lane));
}

template <class T>
void pack_weight(const void* weight, const PackedLinear& linear, int threads) {
    using E = typename T::Element;
    const int64_t in_features = linear.in_features;
    const int64_t size = depth_of<T>(in_features) * kPanelOutputs * T::kPerLane;
    E* const panels = static_cast<E*>(const_cast<void*>(linear.panels));
#pragma omp parallel for num_threads(threads)
    for (int64_t panel = 0; panel < panels_of(linear.out_features); ++panel) {
        E* const to = panels + panel * size;
        memset(to, 0, size * sizeof *to);
        for (int v = 0; v < kPanelVectors; ++v) {
            const Outputs outputs = outputs_of(linear, panel, v);
            for (int i = 0; i < outputs.count; ++i) {
                const E* from = static_cast<const E*>(weight) + (outputs.begin + i) * in_features;
                E* lane = to + (v * kLanes + i) * T::kPerLane;
                for (int64_t k = 0; k < in_features; ++k)
                    lane[k / T::kPerLane * kPanelOutputs * T::kPerLane + k % T::kPerLane] = from[k];
            }
        }
    }
}

// An odd number of cache lines: rows are spread over all of the cache.
template <class T>
INLINE int64_t packed_stride(int64_t in_features) {
    return (Rows<T>::scalars(in_features) + 31) / 32 * 32 + 16;
}

template <class T>
INLINE const typename T::Lane* panel_at(const PackedLinear& linear, int64_t panel) {
    return static_cast<const typename T::Lane*>(linear.panels) +
           panel * depth_of<T>(linear.in_features) * kPanelOutputs;
}

// What one of `count` threads multiplies by.
struct Share {
    PackedLinear linear;
    int64_t index, count;

    Span panels() const { return part_of(panels_of(linear.out_features), index, count); }
};
INLINE Share own_share(const PackedLinear& linear) {
    return {linear, omp_get_thread_num(), omp_get_num_threads()};
}

// Multiply the rows of one block with a thread's panels; `next` is what it multiplies by then.
template <class T>
void multiply_panels(const Product& product, Scalars<T> x, Span rows, const Share& own,
                     const Share* next) {
    const int64_t count = rows.end - rows.begin, tiles = tiles_of<T>(count);
    const Span panels = own.panels();
    for (int64_t p = panels.begin; p < panels.end; ++p) {
        const bool is_last = p + 1 == panels.end;
        const Share* const ahead = is_last ? next : &own;
        const int64_t steps = ahead ? depth_of<T>(ahead->linear.in_features) : 0;
        const auto* const fetched =
            ahead ? panel_at<T>(ahead->linear, is_last ? ahead->panels().begin : p + 1) : nullptr;
        for (int64_t t = 0; t < tiles; ++t) {
            const Span tile = part_of(count, t, tiles);
            const auto run = tile_function<T, kTileRows<T>>(tile.end - tile.begin);
            run(product, x, panel_at<T>(product.linear, p), {fetched, part_of(steps, t, tiles)},
                rows.begin + tile.begin, p);
        }
    }
}

// Some rows of a product as tiles read them: where they are if they can be.
template <class T>
struct PreparedRows {
    using Scalar = typename T::Scalar;
    Scalars<T> x;
    std::unique_ptr<Scalar[]> packed;

    PreparedRows(const Product& product, Span rows, int threads)
        : x{static_cast<const Scalar*>(product.x), product.x_stride / T::kPerLane} {
        using Element = typename T::Element;
        if (Rows<T>::in_place(product)) return;
        const int64_t in_features = product.linear.in_features, count = rows.end - rows.begin;
        x.stride = packed_stride<T>(in_features);
        packed.reset(new Scalar[count * x.stride]);
        Scalar* const first = packed.get() - rows.begin * x.stride;
        x.first = first;
        // A team is waited for longer than one thread packs a few rows.
#pragma omp parallel for num_threads(threads) if (count * in_features > kSerialElements)
        for (int64_t row = rows.begin; row < rows.end; ++row)
            Rows<T>::pack(static_cast<const Element*>(product.x) + row * product.x_stride,
                          in_features, first + row * x.stride);
    }
};

INLINE int64_t blocks_of(int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }

template <class T>
void multiply(const Product& product, int threads) {
    const PreparedRows<T> prepared(product, {0, product.rows}, threads);
    const int64_t blocks = blocks_of(product.rows);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const Share own = own_share(product.linear);
        const Share next = product.next ? own_share(*product.next) : own;
        for (int64_t block = 0; block < blocks; ++block)
            multiply_panels<T>(product, prepared.x, part_of(product.rows, block, blocks), own,
                               block + 1 < blocks ? &own : product.next ? &next : nullptr);
    }
}

// Weights of one shape behind each other in memory, and which rows each multiplies: those from
// starts[group] to starts[group + 1].
struct Groups {
    const PackedLinear& first;
    const int64_t* starts;
    int64_t count, bytes;  // of weights; of one of them

    Span rows(int64_t group) const { return {starts[group], starts[group + 1]}; }
    // The first group from `group` on that has rows, or `count`.
    int64_t with_rows(int64_t group) const {
        while (group < count && starts[group] == starts[group + 1]) ++group;
        return group;
    }
    // This thread's part of a group. Threads take turns, for small weights are not for all of them.
    Share share(int64_t group) const {
        Share own = own_share(first);
        own.index = (own.index + group) % own.count;
        own.linear.panels = static_cast<const char*>(first.panels) + group * bytes;
        return own;
    }
};

// A thread goes from group to group without waiting for others: no output is of two of them.
template <class T>
void multiply_own_parts(Product product, Scalars<T> x, const Groups& groups) {
    for (int64_t group = groups.with_rows(0); group < groups.count;) {
        const int64_t following = groups.with_rows(group + 1);
        const bool is_last = following == groups.count;
        const Share own = groups.share(group), next = groups.share(is_last ? group : following);
        const Span rows = groups.rows(group);
        const int64_t size = rows.end - rows.begin, blocks = blocks_of(size);
        product.linear = own.linear;
        for (int64_t block = 0; block < blocks; ++block) {
            const Span part = part_of(size, block, blocks);
            multiply_panels<T>(product, x, {rows.begin + part.begin, rows.begin + part.end}, own,
                               block + 1 < blocks ? &own : is_last ? nullptr : &next);
        }
        group = following;
    }
}

template <class T>
void multiply_groups(const Product& product, const int64_t* starts, int64_t count, int threads) {
    const int64_t in_features = product.linear.in_features;
    const int64_t out_features = product.linear.out_features;
    const int64_t bytes = product.linear.is_int8
                              ? octavo_packed_int8_size(in_features, out_features)
                              : packed_size<T>(in_features, out_features);
    const PreparedRows<T> prepared(product, {starts[0], starts[count]}, threads);
    const Groups groups = {product.linear, starts, count, bytes};
#pragma omp parallel num_threads(threads) if (threads > 1)
    multiply_own_parts<T>(product, prepared.x, groups);
}

// The first group whose rows are not some of [0, rows) that follow those before it, or -1.
int64_t invalid_group(const int64_t* starts, int64_t count, int64_t rows) {
    for (int64_t group = 0; group < count; ++group)
        if (starts[group] < 0 || starts[group + 1] < starts[group] || starts[group + 1] > rows)
            return group;
    return -1;
}

int64_t multiply_groups_into(Form form, int element, const void* x, const PackedLinear& first,
                             const int64_t* starts, int64_t count, void* out, int64_t rows,
                             const int64_t* strides, int threads) {
    const int64_t invalid = invalid_group(starts, count, rows);
    if (invalid >= 0 || starts[0] == starts[count]) return invalid;
    const auto floats = for_element(element, multiply_groups<Float32>, multiply_groups<BFloat16>,
                                    multiply_groups<Float16>);
    const auto integers =
        for_element(element, multiply_groups<Int8<Float32>>, multiply_groups<Int8<BFloat16>>,
                    multiply_groups<Int8<Float16>>);
    const auto run = first.is_int8 ? integers : floats;
    run({form, x, out, rows, strides[0], strides[1], first, nullptr, nullptr}, starts, count,
        threads);
    return -1;
}

void multiply_into(Form form, int element, const void* x, const PackedLinear& linear, void* out,
                   int64_t rows, const int64_t* strides, const PackedLinear* next,
                   const RowTerm* terms, int threads) {
    if (rows == 0) return;
    const auto floats = for_element(element, multiply<Float32>, multiply<BFloat16>,
                                    multiply<Float16>);
    const auto integers = for_element(element, multiply<Int8<Float32>>, multiply<Int8<BFloat16>>,
                                      multiply<Int8<Float16>>);
    const auto run = linear.is_int8 ? integers : floats;
    run({form, x, out, rows, strides[0], strides[1], linear, next, terms}, threads);
}

}  // namespace

extern "C" {

int64_t octavo_packed_size(int element, int64_t in_features, int64_t out_features) {
    return for_element(element, packed_size<Float32>, packed_size<BFloat16>,
                       packed_size<Float16>)(in_features, out_features);
}

void octavo_pack_weight(int element, const void* weight, const PackedLinear* linear, int threads) {
    const auto run = for_element(element, pack_weight<Float32>, pack_weight<BFloat16>,
                                 pack_weight<Float16>);
    run(weight, *linear, threads);
}

void octavo_linear(int element, const void* x, const PackedLinear* linear, void* out, int64_t rows,
                   const int64_t* strides, const PackedLinear* next, const RowTerm* terms,
                   int threads) {
    multiply_into(kRounded, element, x, *linear, out, rows, strides, next, terms, threads);
}

void octavo_linear_to_float32(int element, const void* x, const PackedLinear* linear, void* out,
                              int64_t rows, const int64_t* strides, const PackedLinear* next,
                              const RowTerm* terms, int threads) {
    multiply_into(kFloats, element, x, *linear, out, rows, strides, next, terms, threads);
}

void octavo_silu_linear(int element, const void* x, const PackedLinear* linear, void* out,
                        int64_t rows, const int64_t* strides, const PackedLinear* next,
                        const RowTerm* terms, int threads) {
    multiply_into(kSilu, element, x, *linear, out, rows, strides, next, terms, threads);
}

void octavo_gelu_linear(int element, const void* x, const PackedLinear* linear, void* out,
                        int64_t rows, const int64_t* strides, const PackedLinear* next,
                        const RowTerm* terms, int threads) {
    multiply_into(kGelu, element, x, *linear, out, rows, strides, next, terms, threads);
}

int64_t octavo_grouped_linear(int element, const void* x, const PackedLinear* first,
                              const int64_t* starts, int64_t count, void* out, int64_t rows,
                              const int64_t* strides, int threads) {
    return multiply_groups_into(kRounded, element, x, *first, starts, count, out, rows, strides,
                                threads);
}

int64_t octavo_grouped_silu_linear(int element, const void* x, const PackedLinear* first,
                                   const int64_t* starts, int64_t count, void* out, int64_t rows,
                                   const int64_t* strides, int threads) {
    return multiply_groups_into(kSilu, element, x, *first, starts, count, out, rows, strides,
                                threads);
}

}  // extern "C"
