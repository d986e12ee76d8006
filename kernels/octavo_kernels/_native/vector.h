// Vectors of float32 and 32-bit lanes, as wide as the instruction set this is compiled for.
//
// All functions work lane by lane (the two `across_*` excepted), hence a row's bits never depend on
// which rows share its registers. Bits may differ between instruction sets.
// Compile with -ffp-contract=off: whether a product is fused is decided here, not by the optimiser.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define OCTAVO_AVX512 1
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define OCTAVO_AVX2 1
constexpr int kLanes = 8, kRegisters = 16;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Lanes __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

template <class V>
INLINE V load(const void* from) {
    V value;
    memcpy(&value, from, sizeof value);
    return value;
}

template <class V>
INLINE void store(void* to, V value) {
    memcpy(to, &value, sizeof value);
}

INLINE Floats splat(float value) { return value - Floats{}; }
INLINE Lanes splat_lane(uint32_t value) { return value | Lanes{}; }

INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(OCTAVO_AVX512)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(OCTAVO_AVX2)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// a > b ? a : b, which compilers do not always turn into one instruction: b where either is NaN.
INLINE Floats larger(Floats a, Floats b) {
#if defined(OCTAVO_AVX512)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(OCTAVO_AVX2)
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// a < b ? a : b
INLINE Floats smaller(Floats a, Floats b) {
#if defined(OCTAVO_AVX512)
    return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(OCTAVO_AVX2)
    return (Floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return a < b ? a : b;
#endif
}

// Exchange lanes whose indices differ by `Step`.
template <int Step>
INLINE Floats swap_lanes(Floats value) {
#if defined(__clang__)
    Floats swapped;
    for (int i = 0; i < kLanes; ++i) swapped[i] = value[i ^ Step];
    return swapped;
#else
    Ints from;
    for (int i = 0; i < kLanes; ++i) from[i] = i ^ Step;
    return __builtin_shuffle(value, from);
#endif
}

INLINE float across_max(Floats value) {
    if constexpr (kLanes == 16) value = larger(value, swap_lanes<8>(value));
    if constexpr (kLanes >= 8) value = larger(value, swap_lanes<4>(value));
    value = larger(value, swap_lanes<2>(value));
    return larger(value, swap_lanes<1>(value))[0];
}

INLINE float across_sum(Floats value) {
    if constexpr (kLanes == 16) value += swap_lanes<8>(value);
    if constexpr (kLanes >= 8) value += swap_lanes<4>(value);
    value += swap_lanes<2>(value);
    return (value + swap_lanes<1>(value))[0];
}

// x * 2^n for whole n, -150 <= n < 128; n is also in the low bits of `shifted`.
INLINE Floats scale_by_power(Floats x, Floats n, Floats shifted) {
#if defined(OCTAVO_AVX512)
    (void)shifted;
    return (Floats)_mm512_scalef_ps((__m512)x, (__m512)n);
#else
    // Two factors, for 2^n alone may be too small to be a normal number.
    (void)n;
    const Ints whole = ((Ints)shifted << 9) >> 9;
    const Ints half = whole >> 1;
    return x * (Floats)((half + 127) << 23) * (Floats)((whole - half + 127) << 23);
#endif
}

// e^x, within about one unit in the last place for x <= 88; exactly 0 below -104; NaN stays.
INLINE Floats exponential(Floats x) {
    x = larger(splat(-104.0f), x);  // in this order NaN passes
    x = smaller(splat(88.0f), x);
    const Floats shift = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves an integer below
    const Floats shifted = multiply_add(x, splat(1.44269504f), shift);
    const Floats whole = shifted - shift;
    Floats r = multiply_add(whole, splat(-0.693145752f), x);  // ln 2 in two parts
    r = multiply_add(whole, splat(-1.42860677e-6f), r);
    Floats p = splat(1.9875691500e-4f);
    p = multiply_add(p, r, splat(1.3981999507e-3f));
    p = multiply_add(p, r, splat(8.3334519073e-3f));
    p = multiply_add(p, r, splat(4.1665795894e-2f));
    p = multiply_add(p, r, splat(1.6666665459e-1f));
    p = multiply_add(p, r, splat(5.0000001201e-1f));
    p = multiply_add(p, r * r, r) + 1.0f;
    return scale_by_power(p, whole, shifted);
}

// tanh x, within about two units in the last place; NaN stays.
INLINE Floats hyperbolic_tangent(Floats x) {
    const Lanes sign = (Lanes)x & 0x80000000u;
    const Floats size = (Floats)((Lanes)x ^ sign);
    const Floats large = 1.0f - 2.0f / (exponential(size + size) + 1.0f);
    const Floats square = x * x;
    Floats p = splat(-5.70498872745e-3f);
    p = multiply_add(p, square, splat(2.06390887954e-2f));
    p = multiply_add(p, square, splat(-5.37397155531e-2f));
    p = multiply_add(p, square, splat(1.33314422036e-1f));
    p = multiply_add(p, square, splat(-3.33332819422e-1f));
    const Floats small = multiply_add(p * square, x, x);
    return size < splat(0.625f) ? small : (Floats)((Lanes)large | sign);
}

// Apply `body(start, count)` to pieces of [0, size) of kLanes elements, the last maybe shorter.
template <class Body>
INLINE void for_pieces(int64_t size, Body body) {
    int64_t start = 0;
    for (; start + kLanes <= size; start += kLanes) body(start, kLanes);
    if (start < size) body(start, static_cast<int>(size - start));
}
