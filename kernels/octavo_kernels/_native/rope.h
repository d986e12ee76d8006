// Rotation of one head by the angles of a position.
#pragma once

#include "elements.h"

template <class T>
INLINE void rotate_halves(const typename T::Element* x, typename T::Element* out,
                          const float* cos_sin, int64_t half) {
    for_pieces(half, [&](int64_t i, int count) {
        const Floats cosine = read<Float32>(cos_sin + i, count);
        const Floats sine = read<Float32>(cos_sin + half + i, count);
        const Floats low = read<T>(x + i, count), high = read<T>(x + half + i, count);
        write<T>(out + i, multiply_add(low, cosine, -(high * sine)), count);
        write<T>(out + half + i, multiply_add(high, cosine, low * sine), count);
    });
}

// The same, of pairs that lie side by side.
template <class T>
INLINE void rotate_pairs(const typename T::Element* x, typename T::Element* out,
                         const float* cos_sin, int64_t half) {
    for_pieces(half, [&](int64_t i, int count) {
        typename T::Element lows[kLanes] = {}, highs[kLanes] = {};
        for (int j = 0; j < count; ++j) {
            lows[j] = x[2 * (i + j)];
            highs[j] = x[2 * (i + j) + 1];
        }
        const Floats cosine = read<Float32>(cos_sin + i, count);
        const Floats sine = read<Float32>(cos_sin + half + i, count);
        const Floats low = T::widen(lows), high = T::widen(highs);
        T::narrow(lows, multiply_add(low, cosine, -(high * sine)));
        T::narrow(highs, multiply_add(high, cosine, low * sine));
        for (int j = 0; j < count; ++j) {
            out[2 * (i + j)] = lows[j];
            out[2 * (i + j) + 1] = highs[j];
        }
    });
}

// Angles and how pairs lie, for all tokens.
struct Rope {
    const int64_t* positions;  // [tokens]
    const float* cos_sin;      // [max_len, rotary_dim]
    int64_t rotary_dim;
    int interleaved;
};

// out: head_dim elements, x itself or apart from it
template <class T>
INLINE void rotate_head(const Rope& rope, int64_t token, const typename T::Element* x,
                        typename T::Element* out, int64_t head_dim) {
    const float* angles = rope.cos_sin + rope.positions[token] * rope.rotary_dim;
    if (rope.interleaved)
        rotate_pairs<T>(x, out, angles, rope.rotary_dim / 2);
    else
        rotate_halves<T>(x, out, angles, rope.rotary_dim / 2);
    if (out != x && rope.rotary_dim < head_dim)
        memcpy(out + rope.rotary_dim, x + rope.rotary_dim,
               (head_dim - rope.rotary_dim) * sizeof *x);
}
