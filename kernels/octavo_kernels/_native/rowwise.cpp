// Row by row operations: norms, gated activations, weighted sums, rotary embedding.
//
// The caller has checked shapes, types and strides; sizes and strides are in elements. Each row is
// computed by one thread in one fixed order. Work below kSerialElements is not worth waking a team.

#include "activation.h"
#include "elements.h"
#include "rope.h"

namespace {

constexpr int64_t kSerialElements = 1 << 14;

// rows of `size` elements addressed by two strides: [outer, inner, size]
struct Rows {
    int64_t outer, inner, size;
};

template <class T>
INLINE void normalize_row(const typename T::Element* x, const float* weight,
                          typename T::Element* out, int64_t size, float eps) {
    Floats squares = {};
    for_pieces(size, [&](int64_t i, int count) {
        const Floats value = read<T>(x + i, count);
        squares = multiply_add(value, value, squares);
    });
    const float mean = across_sum(squares) / static_cast<float>(size);
    const Floats factor = splat(1.0f / __builtin_sqrtf(mean + eps));
    for_pieces(size, [&](int64_t i, int count) {
        write<T>(out + i, read<T>(x + i, count) * factor * read<Float32>(weight + i, count),
                 count);
    });
}

// Call `body` with where each row is read and where it is written; strides: of x, then of out.
template <class T, class Body>
void for_rows(const void* x, void* out, Rows rows, const int64_t* strides, int threads,
              Body body) {
    using E = typename T::Element;
    const int64_t count = rows.outer * rows.inner;
#pragma omp parallel for num_threads(threads) if (count * rows.size > kSerialElements)
    for (int64_t row = 0; row < count; ++row) {
        const int64_t o = row / rows.inner, i = row % rows.inner;
        body(static_cast<const E*>(x) + o * strides[0] + i * strides[1],
             static_cast<E*>(out) + o * strides[2] + i * strides[3]);
    }
}

template <class T>
void rms_norm(const void* x, const float* weight, void* out, Rows rows, const int64_t* strides,
              float eps, int threads) {
    using E = typename T::Element;
    for_rows<T>(x, out, rows, strides, threads, [&](const E* from, E* to) {
        normalize_row<T>(from, weight, to, rows.size, eps);
    });
}

template <class T>
INLINE void normalize_row_around_mean(const typename T::Element* x, const float* weight,
                                      const float* bias, typename T::Element* out, int64_t size,
                                      float eps) {
    const float whole = static_cast<float>(size);
    Floats sum = {}, squares = {};
    for_pieces(size, [&](int64_t i, int count) { sum = sum + read<T>(x + i, count); });
    const float mean = across_sum(sum) / whole;
    for_pieces(size, [&](int64_t i, int count) {
        // What is read past the row is zero, which is as far from the mean as that is from zero.
        float padded[kLanes];
        store(padded, read<T>(x + i, count) - splat(mean));
        const Floats centred = read<Float32>(padded, count);
        squares = multiply_add(centred, centred, squares);
    });
    const Floats factor = splat(1.0f / __builtin_sqrtf(across_sum(squares) / whole + eps));
    for_pieces(size, [&](int64_t i, int count) {
        const Floats centred = read<T>(x + i, count) - splat(mean);
        const Floats scaled = centred * factor * read<Float32>(weight + i, count);
        write<T>(out + i, scaled + read<Float32>(bias + i, count), count);
    });
}

template <class T>
void layer_norm(const void* x, const float* weight, const float* bias, void* out, Rows rows,
                const int64_t* strides, float eps, int threads) {
    using E = typename T::Element;
    for_rows<T>(x, out, rows, strides, threads, [&](const E* from, E* to) {
        normalize_row_around_mean<T>(from, weight, bias, to, rows.size, eps);
    });
}

template <class T>
void add_rms_norm(const void* x, const void* residual, const float* weight, void* out,
                  void* residual_out, int64_t rows, int64_t size, const int64_t* strides, float eps,
                  int threads) {
    using E = typename T::Element;
#pragma omp parallel for num_threads(threads) if (rows * size > kSerialElements)
    for (int64_t row = 0; row < rows; ++row) {
        const E* from = static_cast<const E*>(x) + row * strides[0];
        const E* carried = static_cast<const E*>(residual) + row * strides[1];
        E* sum = static_cast<E*>(residual_out) + row * strides[3];
        for_pieces(size, [&](int64_t i, int count) {
            write<T>(sum + i, read<T>(from + i, count) + read<T>(carried + i, count), count);
        });
        normalize_row<T>(sum, weight, static_cast<E*>(out) + row * strides[2], size, eps);
    }
}

// Call `body` with where each piece of contiguous elements begins, and its size.
template <class Body>
void for_all(int64_t count, int threads, Body body) {
    const int64_t pieces = (count + kLanes - 1) / kLanes;
#pragma omp parallel for num_threads(threads) if (count > kSerialElements)
    for (int64_t piece = 0; piece < pieces; ++piece) {
        const int64_t left = count - piece * kLanes;
        body(piece * kLanes, static_cast<int>(left < kLanes ? left : kLanes));
    }
}

template <class T>
void add(const void* x, void* residual, int64_t count, int threads) {
    const auto* from = static_cast<const typename T::Element*>(x);
    auto* to = static_cast<typename T::Element*>(residual);
    for_all(count, threads, [&](int64_t i, int size) {
        write<T>(to + i, read<T>(from + i, size) + read<T>(to + i, size), size);
    });
}

template <class T>
void scale(void* x, float factor, int64_t count, int threads) {
    auto* to = static_cast<typename T::Element*>(x);
    for_all(count, threads, [&](int64_t i, int size) {
        write<T>(to + i, read<T>(to + i, size) * splat(factor), size);
    });
}

template <class T, class Activation>
void activate_and_mul(const void* gate_up, void* out, int64_t rows, int64_t inner,
                      const int64_t* strides, int threads) {
    using E = typename T::Element;
#pragma omp parallel for num_threads(threads) if (rows * inner > kSerialElements)
    for (int64_t row = 0; row < rows; ++row) {
        const E* gates = static_cast<const E*>(gate_up) + row * strides[0];
        E* to = static_cast<E*>(out) + row * strides[1];
        for_pieces(inner, [&](int64_t i, int count) {
            const Floats gate = read<T>(gates + i, count), up = read<T>(gates + inner + i, count);
            write<T>(to + i, activate_and_multiply<Activation>(gate, up), count);
        });
    }
}

// Rows that are added up, times a weight each, in order: [tokens, count] of them.
struct Chosen {
    const int64_t* places;
    const float* weights;
    int64_t tokens, count;
};

template <class T>
void weighted_sum(const void* rows, const Chosen& chosen, void* out, int64_t size,
                  const int64_t* strides, int threads) {
    using E = typename T::Element;
    const int64_t count = chosen.count;
#pragma omp parallel for num_threads(threads) if (chosen.tokens * count * size > kSerialElements)
    for (int64_t token = 0; token < chosen.tokens; ++token) {
        const int64_t* const places = chosen.places + token * count;
        const float* const weights = chosen.weights + token * count;
        E* const to = static_cast<E*>(out) + token * strides[1];
        for_pieces(size, [&](int64_t i, int width) {
            Floats total = {};
            for (int64_t k = 0; k < count; ++k) {
                const E* const row = static_cast<const E*>(rows) + places[k] * strides[0];
                total += read<T>(row + i, width) * weights[k];
            }
            write<T>(to + i, total, width);
        });
    }
}

// strides: of the tokens of x and of out; heads lie head_dim apart
template <class T>
void apply_rope(const void* x, void* out, const Rope& rope, Rows rows, const int64_t* strides,
                int threads) {
    using E = typename T::Element;
#pragma omp parallel for num_threads(threads) \
    if (rows.outer * rows.inner * rows.size > kSerialElements)
    for (int64_t token = 0; token < rows.outer; ++token)
        for (int64_t head = 0; head < rows.inner; ++head)
            rotate_head<T>(rope, token,
                           static_cast<const E*>(x) + token * strides[0] + head * rows.size,
                           static_cast<E*>(out) + token * strides[1] + head * rows.size, rows.size);
}

}  // namespace

extern "C" {

// strides: x outer, x inner, out outer, out inner
void octavo_rms_norm(int element, const void* x, const float* weight, void* out, int64_t outer,
                     int64_t inner, int64_t size, const int64_t* strides, float eps, int threads) {
    const auto run = for_element(element, rms_norm<Float32>, rms_norm<BFloat16>,
                                 rms_norm<Float16>);
    run(x, weight, out, {outer, inner, size}, strides, eps, threads);
}

// strides: as above
void octavo_layer_norm(int element, const void* x, const float* weight, const float* bias,
                       void* out, int64_t outer, int64_t inner, int64_t size,
                       const int64_t* strides, float eps, int threads) {
    const auto run = for_element(element, layer_norm<Float32>, layer_norm<BFloat16>,
                                 layer_norm<Float16>);
    run(x, weight, bias, out, {outer, inner, size}, strides, eps, threads);
}

// strides: of the rows of x, residual, out, residual_out
void octavo_add_rms_norm(int element, const void* x, const void* residual, const float* weight,
                         void* out, void* residual_out, int64_t rows, int64_t size,
                         const int64_t* strides, float eps, int threads) {
    const auto run = for_element(element, add_rms_norm<Float32>, add_rms_norm<BFloat16>,
                                 add_rms_norm<Float16>);
    run(x, residual, weight, out, residual_out, rows, size, strides, eps, threads);
}

// Adds x to residual, both contiguous.
void octavo_add(int element, const void* x, void* residual, int64_t count, int threads) {
    for_element(element, add<Float32>, add<BFloat16>, add<Float16>)(x, residual, count, threads);
}

// Multiplies x, contiguous.
void octavo_scale(int element, void* x, float factor, int64_t count, int threads) {
    for_element(element, scale<Float32>, scale<BFloat16>, scale<Float16>)(x, factor, count,
                                                                          threads);
}

// strides: of the rows of gate_up and out
void octavo_silu_and_mul(int element, const void* gate_up, void* out, int64_t rows, int64_t inner,
                         const int64_t* strides, int threads) {
    const auto run =
        for_element(element, activate_and_mul<Float32, Silu>, activate_and_mul<BFloat16, Silu>,
                    activate_and_mul<Float16, Silu>);
    run(gate_up, out, rows, inner, strides, threads);
}

// strides: as octavo_silu_and_mul
void octavo_gelu_and_mul(int element, const void* gate_up, void* out, int64_t rows, int64_t inner,
                         const int64_t* strides, int threads) {
    const auto run =
        for_element(element, activate_and_mul<Float32, Gelu>, activate_and_mul<BFloat16, Gelu>,
                    activate_and_mul<Float16, Gelu>);
    run(gate_up, out, rows, inner, strides, threads);
}

// places, weights: [tokens, count], contiguous; strides: of the rows of `rows` and out. Returns the
// first token that has a place outside [0, num_rows), before anything is written, or -1.
int64_t octavo_weighted_sum(int element, const void* rows, const int64_t* places,
                            const float* weights, void* out, int64_t num_rows, int64_t tokens,
                            int64_t count, int64_t size, const int64_t* strides, int threads) {
    for (int64_t i = 0; i < tokens * count; ++i)
        if (places[i] < 0 || places[i] >= num_rows) return i / count;
    const auto run = for_element(element, weighted_sum<Float32>, weighted_sum<BFloat16>,
                                 weighted_sum<Float16>);
    run(rows, {places, weights, tokens, count}, out, size, strides, threads);
    return -1;
}

// Returns the first token whose position is outside [0, max_len), before anything is written,
// or -1.
int64_t octavo_apply_rope(int element, const void* q, const void* k, void* q_out, void* k_out,
                          const int64_t* positions, const float* cos_sin, int64_t tokens,
                          int64_t q_heads, int64_t k_heads, int64_t head_dim, int64_t rotary_dim,
                          int64_t max_len, int interleaved, const int64_t* strides, int threads) {
    for (int64_t token = 0; token < tokens; ++token)
        if (positions[token] < 0 || positions[token] >= max_len) return token;
    const auto run = for_element(element, apply_rope<Float32>, apply_rope<BFloat16>,
                                 apply_rope<Float16>);
    const Rope rope = {positions, cos_sin, rotary_dim, interleaved};
    run(q, q_out, rope, {tokens, q_heads, head_dim}, strides, threads);
    run(k, k_out, rope, {tokens, k_heads, head_dim}, strides + 2, threads);
    return -1;
}

}  // extern "C"
