// The element types of the kernels, and how rows of them are read, written and multiplied.
//
// The KV cache holds lanes: one float32, one float16, or a pair of bfloat16 (as the dot-product
// instruction of AVX-512 takes them). Attention multiplies a vector of lanes by one scalar, which
// stands for as many elements as a lane, and adds to float32:
//     Lane     a lane in memory
//     Wide     a vector of lanes, ready to be multiplied
//     Scalar   what each of its lanes is multiplied by: an element of a query, or a weight
//     kPerLane elements in a lane
//     kWide    registers that a Wide takes
#pragma once

#include "vector.h"

enum ElementCode { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

struct Float32 {
    typedef float Element;
    typedef float Lane;
    typedef float Scalar;
    typedef Floats Wide;
    static constexpr int kPerLane = 1, kWide = 1;

    INLINE Floats widen(const Element* from) { return load<Floats>(from); }
    INLINE void narrow(Element* to, Floats value) { store(to, value); }

    INLINE Wide lanes(const Lane* from, uint32_t) { return load<Floats>(from); }
    INLINE Scalar scalar(const Element* from) { return *from; }
    INLINE void scalars(Scalar* to, Floats value) { store(to, value); }
    INLINE Floats dot(Floats sum, Wide a, Scalar b) { return multiply_add(a, splat(b), sum); }
};

struct Float16 {
    typedef uint16_t Element;
    typedef uint16_t Lane;
    typedef float Scalar;
    typedef Floats Wide;
    static constexpr int kPerLane = 1, kWide = 1;

    INLINE Floats convert(Halves halves) {
#if defined(OCTAVO_AVX512)
        return (Floats)_mm512_cvtph_ps((__m256i)halves);
#elif defined(OCTAVO_AVX2)
        return (Floats)_mm256_cvtph_ps((__m128i)halves);
#elif defined(__aarch64__)
        return (Floats)vcvt_f32_f16((float16x4_t)halves);
#else
        const Lanes bits = __builtin_convertvector(halves, Lanes);
        const Lanes size = (bits & 0x7fffu) << 13;
        // The exponents' biases differ by 112; an exponent of 31 is infinity or NaN.
        const Lanes finite = (Lanes)((Floats)size * 0x1p112f);
        const Lanes value = size >= 0x0f800000u ? size | 0x7f800000u : finite;
        return (Floats)(value | (bits & 0x8000u) << 16);
#endif
    }
    INLINE Floats widen(const Element* from) { return convert(load<Halves>(from)); }

    // Rounds to nearest, ties to even.
    INLINE void narrow(Element* to, Floats value) {
#if defined(OCTAVO_AVX512)
        store(to, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(OCTAVO_AVX2)
        store(to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__aarch64__)
        store(to, vcvt_f16_f32((float32x4_t)value));
#else
        const Lanes sign = (Lanes)value & 0x80000000u, size = (Lanes)value ^ sign;
        const Lanes normal = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;
        // Adding 0.5 rounds where the last bit of a subnormal result is.
        const Lanes subnormal = (Lanes)((Floats)size + 0.5f) - 0x3f000000u;
        Lanes bits = size < 0x38800000u ? subnormal : normal;
        bits = size >= 0x47800000u ? splat_lane(0x7c00u) : bits;
        bits = value == value ? bits : splat_lane(0x7e00u);
        store(to, __builtin_convertvector(bits | sign >> 16, Halves));
#endif
    }

    INLINE Wide lanes(const Lane* from, uint32_t) { return widen(from); }
    INLINE Scalar scalar(const Element* from) { return convert(*from | Halves{})[0]; }
    INLINE void scalars(Scalar* to, Floats value) { store(to, value); }
    INLINE Floats dot(Floats sum, Wide a, Scalar b) { return multiply_add(a, splat(b), sum); }
};

struct BFloat16 {
    typedef uint16_t Element;
    typedef uint32_t Lane;
    static constexpr int kPerLane = 2;

    INLINE Floats widen(const Element* from) {
        return (Floats)(__builtin_convertvector(load<Halves>(from), Lanes) << 16);
    }

#if defined(OCTAVO_AVX512) && defined(__AVX512BF16__)
    typedef uint32_t Scalar;
    typedef Lanes Wide;
    static constexpr int kWide = 1;

    // Rounds to nearest, ties to even.
    INLINE void narrow(Element* to, Floats value) {
        store(to, _mm512_cvtneps_pbh((__m512)value));
    }
    // `mask` hides the half of a lane whose position is not seen.
    INLINE Wide lanes(const Lane* from, uint32_t mask) { return load<Lanes>(from) & mask; }
    INLINE Scalar scalar(const Element* from) { return load<Scalar>(from); }
    INLINE void scalars(Scalar* to, Floats value) {
        narrow(reinterpret_cast<Element*>(to), value);
    }
    INLINE Floats dot(Floats sum, Wide a, Scalar b) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)splat_lane(b));
    }
#else
    struct Scalar {
        float low, high;
    };
    struct Wide {
        Floats low, high;
    };
    static constexpr int kWide = 2;

    // Rounds to nearest, ties to even.
    INLINE void narrow(Element* to, Floats value) {
        const Lanes bits = (Lanes)value;
        const Lanes rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const Lanes quiet = (bits >> 16) | 0x40u;
        store(to, __builtin_convertvector(value == value ? rounded : quiet, Halves));
    }
    // `mask` hides the half of a lane whose position is not seen.
    INLINE Wide lanes(const Lane* from, uint32_t mask) {
        const Lanes pairs = load<Lanes>(from) & mask;
        return {(Floats)(pairs << 16), (Floats)(pairs & 0xffff0000u)};
    }
    INLINE Scalar scalar(const Element* from) {
        const uint32_t bits[2] = {uint32_t(from[0]) << 16, uint32_t(from[1]) << 16};
        return load<Scalar>(bits);
    }
    INLINE void scalars(Scalar* to, Floats value) { store(to, value); }
    INLINE Floats dot(Floats sum, Wide a, Scalar b) {
        return multiply_add(a.high, splat(b.high), multiply_add(a.low, splat(b.low), sum));
    }
#endif
};

// Choose the version of a function for the elements that the caller names.
template <class F>
INLINE F for_element(int64_t code, F float32, F bfloat16, F float16) {
    return code == kBFloat16 ? bfloat16 : code == kFloat16 ? float16 : float32;
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

// Round to T's precision.
template <class T>
INLINE Floats rounded(Floats value) {
    typename T::Element narrowed[kLanes];
    T::narrow(narrowed, value);
    return T::widen(narrowed);
}
