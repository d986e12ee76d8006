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

// The panels that this thread of a team multiplies by.
INLINE Span own_panels(const PackedLinear& linear) {
    return part_of(panels_of(linear.out_features), omp_get_thread_num(), omp_get_num_threads());
}

// Multiply the rows of one block with this thread's panels; `next` is what it is needed for then.
template <class T>
void multiply_panels(const Product& product, Scalars<T> x, Span rows, const PackedLinear* next) {
    const int64_t count = rows.end - rows.begin, tiles = tiles_of<T>(count);
    const Span panels = own_panels(product.linear);
    for (int64_t p = panels.begin; p < panels.end; ++p) {
        const bool is_last = p + 1 == panels.end;
        const PackedLinear* const ahead = is_last ? next : &product.linear;
        const int64_t steps = ahead ? depth_of<T>(ahead->in_features) : 0;
        const auto* const fetched =
            ahead ? panel_at<T>(*ahead, is_last ? own_panels(*ahead).begin : p + 1) : nullptr;
        for (int64_t t = 0; t < tiles; ++t) {
            const Span tile = part_of(count, t, tiles);
            const auto run = tile_function<T, kTileRows<T>>(tile.end - tile.begin);
            run(product, x, panel_at<T>(product.linear, p), {fetched, part_of(steps, t, tiles)},
                rows.begin + tile.begin, p);
        }
    }
}

template <class T>
void multiply(const Product& product, int threads) {
    using Element = typename T::Element;
    using Scalar = typename T::Scalar;
    const int64_t in_features = product.linear.in_features;
    const int64_t blocks = (product.rows + kBlockRows - 1) / kBlockRows;
    const bool in_place = Rows<T>::in_place(product);
    Scalars<T> x = {static_cast<const Scalar*>(product.x), product.x_stride / T::kPerLane};
    std::unique_ptr<Scalar[]> packed;
    if (!in_place) {
        x.stride = packed_stride<T>(in_features);
        packed.reset(new Scalar[product.rows * x.stride]);
        x.first = packed.get();
        // A team is waited for longer than one thread packs a few rows.
#pragma omp parallel for num_threads(threads) if (product.rows * in_features > kSerialElements)
        for (int64_t row = 0; row < product.rows; ++row)
            Rows<T>::pack(static_cast<const Element*>(product.x) + row * product.x_stride,
                          in_features, packed.get() + row * x.stride);
    }
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t block = 0; block < blocks; ++block)
        multiply_panels<T>(product, x, part_of(product.rows, block, blocks),
                           block + 1 < blocks ? &product.linear : product.next);
}

void multiply_into(Form form, int element, const void* x, const PackedLinear& linear, void* out,
                   int64_t rows, const int64_t* strides, const PackedLinear* next, int threads) {
    if (rows == 0) return;
    const auto floats = for_element(element, multiply<Float32>, multiply<BFloat16>,
                                    multiply<Float16>);
    const auto integers = for_element(element, multiply<Int8<Float32>>, multiply<Int8<BFloat16>>,
                                      multiply<Int8<Float16>>);
    const auto run = linear.is_int8 ? integers : floats;
    run({form, x, out, rows, strides[0], strides[1], linear, next}, threads);
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
                   const int64_t* strides, const PackedLinear* next, int threads) {
    multiply_into(kRounded, element, x, *linear, out, rows, strides, next, threads);
}

void octavo_linear_to_float32(int element, const void* x, const PackedLinear* linear, void* out,
                              int64_t rows, const int64_t* strides, const PackedLinear* next,
                              int threads) {
    multiply_into(kFloats, element, x, *linear, out, rows, strides, next, threads);
}

void octavo_silu_linear(int element, const void* x, const PackedLinear* linear, void* out,
                        int64_t rows, const int64_t* strides, const PackedLinear* next,
                        int threads) {
    multiply_into(kSilu, element, x, *linear, out, rows, strides, next, threads);
}

}  // extern "C"
