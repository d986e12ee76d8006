// Gated activations: gate / (1 + e^exponent(gate)) * up, in float32.
#pragma once

#include "vector.h"

struct Silu {
    INLINE Floats exponent(Floats gate) { return -gate; }
};
// By tanh: (1 + tanh(u)) / 2 = 1 / (1 + e^-2u), where 2u = sqrt(8 / pi) (gate + 0.044715 gate^3).
struct Gelu {
    INLINE Floats exponent(Floats gate) {
        return gate * -1.59576912f * (gate * gate * 0.044715f + 1.0f);
    }
};

template <class Activation>
INLINE Floats activate_and_multiply(Floats gate, Floats up) {
    return gate / (exponential(Activation::exponent(gate)) + 1.0f) * up;
}
