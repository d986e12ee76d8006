// Products of 8-bit integers: a weight is quantised once, rows of x when they are multiplied.
//
// 64 neighbouring inputs of a row of x, a group, are integers in [-127, 127] times a scale, their
// largest magnitude / 127; so are all inputs of one output of the weight. The sum of a group's
// products is exact, and what follows is not fused: every instruction set gives the same bits.
//     y = (group 0's sum * its scale + group 1's sum * its scale + ...) * scale of the output
// A lane holds four inputs of a group, kLanes apart. Panels are as in linear.h, whole groups long;
// behind the last are the scales [panels, kPanelVectors * kLanes] of their outputs, float32.
//
// The instruction for bytes multiplies unsigned ones by signed ones. For it weights lie 128 higher,
// and a group's sum begins at -128 times the sum of the row's integers.
#pragma once

#include "linear_tile.h"

typedef int16_t Shorts __attribute__((vector_size(kLanes * 4)));

#if defined(OCTAVO_AVX512) && defined(__AVX512VNNI__)
#define OCTAVO_DOT_OF_BYTES 1
constexpr int kWeightOffset = 128;
#else
constexpr int kWeightOffset = 0;
#endif

// Elements of E, multiplied as integers.
template <class E>
struct Int8 {
    typedef typename E::Element Element;
    typedef uint32_t Lane;
    typedef uint32_t Scalar;
    static constexpr int kPerLane = 4;
#if defined(OCTAVO_DOT_OF_BYTES)
    static constexpr int kWide = 1;
#else
    static constexpr int kWide = 2;
#endif
};

constexpr int kGroupInputs = 64;

namespace {

template <class E>
constexpr int kGroupSteps<Int8<E>> = kGroupInputs / Int8<E>::kPerLane;
constexpr int kSteps = kGroupSteps<Int8<Float32>>;

#if defined(OCTAVO_DOT_OF_BYTES)
typedef Lanes WideBytes;

INLINE WideBytes wide_bytes(Lanes bytes) { return bytes; }
INLINE Ints add_products(Ints sum, WideBytes weights, uint32_t scalar) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)splat_lane(scalar));
}
#else
// Bytes 0 and 2 of each lane, and 1 and 3, as 16-bit integers.
struct WideBytes {
    Shorts even, odd;
};

INLINE WideBytes wide_bytes(Lanes bytes) {
    const Shorts pairs = (Shorts)bytes;
    return {(pairs << 8) >> 8, pairs >> 8};
}
// Sums of two neighbouring products each.
INLINE Ints pair_sums(Shorts a, Shorts b) {
#if defined(OCTAVO_AVX512)
    return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(OCTAVO_AVX2)
    return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
    return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    const Ints low_a = ((Ints)a << 16) >> 16, low_b = ((Ints)b << 16) >> 16;
    return low_a * low_b + ((Ints)a >> 16) * ((Ints)b >> 16);
#endif
}
INLINE Ints add_products(Ints sum, WideBytes weights, uint32_t scalar) {
    const WideBytes x = wide_bytes(splat_lane(scalar));
    return sum + pair_sums(weights.even, x.even) + pair_sums(weights.odd, x.odd);
}
#endif

// What stands behind a row's integers for each group of them.
struct Group {
    float scale;     // not finite if an element is not
    uint32_t start;  // of its sums
};
constexpr int kGroupScalars = sizeof(Group) / sizeof(uint32_t);

template <class Combine>
INLINE int32_t across(Ints value, Combine combine) {
    if constexpr (kLanes == 16) value = combine(value, (Ints)swap_lanes<8>((Floats)value));
    if constexpr (kLanes >= 8) value = combine(value, (Ints)swap_lanes<4>((Floats)value));
    value = combine(value, (Ints)swap_lanes<2>((Floats)value));
    return combine(value, (Ints)swap_lanes<1>((Floats)value))[0];
}

INLINE Ints larger(Ints a, Ints b) { return a > b ? a : b; }

// A group's elements as float32, zeros past the last.
struct Values {
    static constexpr int kVectors = kGroupInputs / kLanes;
    Floats of[kVectors];

    // Bits of magnitudes, which are ordered as they are, with those of NaN above all.
    Ints largest() const {
        Ints most = {};
        for (int i = 0; i < kVectors; ++i) most = larger((Ints)of[i] & 0x7fffffff, most);
        return most;
    }
};

template <class E>
INLINE Values values_of(const typename E::Element* from, int64_t size) {
    Values values = {};
    if (size >= kGroupInputs) {
        for (int i = 0; i < Values::kVectors; ++i) values.of[i] = E::widen(from + i * kLanes);
    } else {
        for_pieces(size, [&](int64_t i, int count) {
            values.of[i / kLanes] = read<E>(from + i, count);
        });
    }
    return values;
}

// What the elements of which these are the largest are divided by.
struct Scale {
    explicit Scale(Ints largest) {
        const int32_t bits = across(largest, larger);
        const float magnitude = load<float>(&bits);
        value = magnitude / 127.0f;
        // What is smaller than this has no inverse, and vanishes beside anything else.
        inverse = magnitude < 0x1p-100f ? 0.0f : 127.0f / magnitude;
    }
    float value, inverse;
};

// Write a group's integers, rounded to nearest, ties to even; return their sum.
INLINE uint32_t quantize(const Values& values, Scale scale, uint32_t* to) {
    const Floats shift = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves an integer below
    Lanes sums = {};
    for (int i = 0; i < Values::kVectors; i += 4) {
        Lanes bytes = {};
        for (int k = 0; k < 4; ++k) {
            const Lanes integers =
                (Lanes)(values.of[i + k] * scale.inverse + shift) - (Lanes)shift;
            sums += integers;
            bytes |= (integers & 255u) << 8 * k;
        }
        store(to + i / 4 * kLanes, bytes);
    }
    return across((Ints)sums, [](Ints a, Ints b) { return (Ints)((Lanes)a + (Lanes)b); });
}

template <class E>
struct Rows<Int8<E>> {
    using T = Int8<E>;

    static bool in_place(const Product&) { return false; }
    static int64_t scalars(int64_t in_features) {
        const int64_t depth = depth_of<T>(in_features);
        return depth + depth / kSteps * kGroupScalars;
    }
    static void pack(const typename E::Element* from, int64_t in_features, uint32_t* to) {
        uint32_t* groups = to + depth_of<T>(in_features);
        for (int64_t i = 0; i < in_features; i += kGroupInputs) {
            const Values values = values_of<E>(from + i, in_features - i);
            const Scale scale(values.largest());
            const uint32_t sum = quantize(values, scale, to + i / T::kPerLane);
            store(groups, Group{scale.value, 0u - kWeightOffset * sum});
            groups += kGroupScalars;
        }
    }
};

// A place in each row of a tile. There are not enough registers for a pointer each.
template <int R>
struct Places {
    static constexpr int kPointers = (R + 3) / 4;
    const uint32_t* every_fourth[kPointers];
    int64_t stride;

    Places(const uint32_t* first, int64_t stride) : stride(stride) {
        repeat<kPointers>([&](auto i) { every_fourth[i] = first + 4 * i * stride; });
    }
    const uint32_t* operator[](int row) const { return every_fourth[row / 4] + row % 4 * stride; }
    void move(int64_t scalars) {
        repeat<kPointers>([&](auto i) { every_fourth[i] += scalars; });
    }
};

// Take one step of a group.
template <int R>
INLINE void add_step(Ints (&sums)[R][kPanelVectors], const Places<R>& rows,
                     const uint32_t* lanes) {
    WideBytes weights[kPanelVectors];
    repeat<kPanelVectors>([&](auto v) {
        weights[v] = wide_bytes(load<Lanes>(lanes + v * kLanes));
    });
    repeat<R>([&](auto r) {
        const uint32_t scalar = *rows[r];
        repeat<kPanelVectors>([&](auto v) {
            sums[r][v] = add_products(sums[r][v], weights[v], scalar);
        });
    });
}

// Add up the groups of some rows, as far as they go into one panel, without the outputs' scales.
template <int R>
__attribute__((noinline)) void add_groups(Scalars<Int8<Float32>> x, const uint32_t* lanes,
                                          int64_t depth, const uint32_t* fetch, int64_t fetched,
                                          Floats (*totals)[kPanelVectors]) {
    Places<R> rows(x.first, x.stride), groups(x.first + depth, x.stride);
    int64_t due = 0;
    for (int64_t done = 0; done < depth; done += kSteps) {
        Ints sums[R][kPanelVectors];
        repeat<R>([&](auto r) {
            const Ints start = (Ints)splat_lane(load<Group>(groups[r]).start);
            repeat<kPanelVectors>([&](auto v) { sums[r][v] = start; });
        });
        for (int step = 0; step < kSteps; ++step, lanes += kPanelOutputs, rows.move(1)) {
            add_step<R>(sums, rows, lanes);
            // Fetches are spread over the tile: at once they would hold up its own loads.
            for (due += fetched; due >= depth; due -= depth, fetch += kPanelOutputs)
                repeat<kPanelVectors>(
                    [&](auto v) { __builtin_prefetch(fetch + v * kLanes, 0, 2); });
        }
        repeat<R>([&](auto r) {
            const float scale = load<Group>(groups[r]).scale;
            repeat<kPanelVectors>([&](auto v) {
                totals[r][v] += __builtin_convertvector(sums[r][v], Floats) * scale;
            });
        });
        groups.move(kGroupScalars);
    }
}

template <class E, int R>
struct Tile<Int8<E>, R> {
    static void multiply(const Product& product, Scalars<Int8<E>> x, const uint32_t* lanes,
                         Ahead<Int8<E>> ahead, int64_t row, int64_t panel) {
        Floats totals[R][kPanelVectors] = {};
        const int64_t depth = depth_of<Int8<E>>(product.linear.in_features);
        add_groups<R>({x.first + row * x.stride, x.stride}, lanes, depth,
                      ahead.panel + ahead.steps.begin * kPanelOutputs,
                      ahead.steps.end - ahead.steps.begin, totals);
        const int64_t before = panels_of(product.linear.out_features) * depth + panel;
        const uint32_t* const scales =
            static_cast<const uint32_t*>(product.linear.panels) + before * kPanelOutputs;
        for (int v = 0; v < kPanelVectors; ++v) {
            const Floats scale = load<Floats>(scales + v * kLanes);
            for (int r = 0; r < R; ++r) totals[r][v] *= scale;
        }
        write_tile<E, R>(product, totals, row, panel);
    }
};

}  // namespace
