// Vectors of 32-bit lanes, and the two element types of the kernels.
//
// One lane holds one float32 or a pair of bfloat16, so that one body serves both types: `dot`
// multiplies lane by lane and adds to float32. All functions work lane by lane (the two `across_*`
// excepted), hence a row's bits never depend on which rows share its registers.
// Compile with -ffp-contract=off: whether a product is fused is decided here, not by the optimiser.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define OCTAVO_AVX512 1
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
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
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// Exchange lanes whose indices differ by `Step`.
template <int Step, class V>
INLINE V swap_lanes(V value) {
#if defined(OCTAVO_AVX512)
#define OCTAVO_AT(i) ((i) ^ Step)
    return __builtin_shufflevector(
        value, value, OCTAVO_AT(0), OCTAVO_AT(1), OCTAVO_AT(2), OCTAVO_AT(3), OCTAVO_AT(4),
        OCTAVO_AT(5), OCTAVO_AT(6), OCTAVO_AT(7), OCTAVO_AT(8), OCTAVO_AT(9), OCTAVO_AT(10),
        OCTAVO_AT(11), OCTAVO_AT(12), OCTAVO_AT(13), OCTAVO_AT(14), OCTAVO_AT(15));
#else
#define OCTAVO_AT(i) ((i) ^ Step)
    return __builtin_shufflevector(value, value, OCTAVO_AT(0), OCTAVO_AT(1), OCTAVO_AT(2),
                                   OCTAVO_AT(3), OCTAVO_AT(4), OCTAVO_AT(5), OCTAVO_AT(6),
                                   OCTAVO_AT(7));
#endif
#undef OCTAVO_AT
}

INLINE float across_max(Floats value) {
    if constexpr (kLanes == 16) value = larger(value, swap_lanes<kLanes / 2>(value));
    value = larger(value, swap_lanes<4>(value));
    value = larger(value, swap_lanes<2>(value));
    return larger(value, swap_lanes<1>(value))[0];
}

INLINE float across_sum(Floats value) {
    if constexpr (kLanes == 16) value += swap_lanes<kLanes / 2>(value);
    value += swap_lanes<4>(value);
    value += swap_lanes<2>(value);
    return (value + swap_lanes<1>(value))[0];
}

// x * 2^n for whole n, -150 < n < 128; n is also in the low bits of `shifted`.
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
    x = x > splat(88.0f) ? splat(88.0f) : x;
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

struct Float32 {
    typedef float Element;
    static constexpr int kPerLane = 1;

    INLINE Floats widen(const Element* from) { return load<Floats>(from); }
    INLINE void narrow(Element* to, Floats value) { store(to, value); }
    INLINE Floats dot(Floats sum, Lanes a, Lanes b) {
        return multiply_add((Floats)a, (Floats)b, sum);
    }
};

struct BFloat16 {
    typedef uint16_t Element;
    static constexpr int kPerLane = 2;

    INLINE Floats widen(const Element* from) {
        return (Floats)(__builtin_convertvector(load<Halves>(from), Lanes) << 16);
    }

    // Rounds to nearest, ties to even.
    INLINE void narrow(Element* to, Floats value) {
#if defined(OCTAVO_AVX512) && defined(__AVX512BF16__)
        store(to, _mm512_cvtneps_pbh((__m512)value));
#else
        const Lanes bits = (Lanes)value;
        const Lanes rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const Lanes quiet = (bits >> 16) | 0x40u;
        store(to, __builtin_convertvector(value == value ? rounded : quiet, Halves));
#endif
    }

    INLINE Floats dot(Floats sum, Lanes a, Lanes b) {
#if defined(OCTAVO_AVX512) && defined(__AVX512BF16__)
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
        const Lanes high = splat_lane(0xffff0000u);
        sum = multiply_add((Floats)(a << 16), (Floats)(b << 16), sum);
        return multiply_add((Floats)(a & high), (Floats)(b & high), sum);
#endif
    }
};

// Apply `body(start, count)` to pieces of [0, size) of kLanes elements, the last maybe shorter.
template <class Body>
INLINE void for_pieces(int64_t size, Body body) {
    int64_t start = 0;
    for (; start + kLanes <= size; start += kLanes) body(start, kLanes);
    if (start < size) body(start, static_cast<int>(size - start));
}

// Read `count` elements as float32; lanes past them are zero.
template <class T>
INLINE Floats read(const typename T::Element* from, int count) {
    if (count == kLanes) return T::widen(from);
    typename T::Element padded[kLanes] = {};
    for (int i = 0; i < count; ++i) padded[i] = from[i];
    return T::widen(padded);
}

// Write the first `count` lanes in T's precision.
template <class T>
INLINE void write(typename T::Element* to, Floats value, int count) {
    if (count == kLanes) return T::narrow(to, value);
    typename T::Element padded[kLanes];
    T::narrow(padded, value);
    for (int i = 0; i < count; ++i) to[i] = padded[i];
}
