// Packs weights of 8-bit integers.

#include "linear_int8.h"

namespace {

// from: one output's inputs; to: its lane of a panel. Returns what its integers are to be times.
template <class E>
float pack_output(const typename E::Element* from, int64_t in_features, uint32_t* to) {
    Ints most = {};
    for (int64_t i = 0; i < in_features; i += kGroupInputs)
        most = larger(values_of<E>(from + i, in_features - i).largest(), most);
    const Scale scale(most);
    for (int64_t i = 0; i < in_features; i += kGroupInputs) {
        uint32_t lanes[kSteps];
        quantize(values_of<E>(from + i, in_features - i), scale, lanes);
        for (const uint32_t lane : lanes) {
            *to = lane ^ kWeightOffset * 0x01010101u;  // adds the offset to each byte
            to += kPanelOutputs;
        }
    }
    return scale.value;
}

template <class E>
void pack_weight(const void* weight, const PackedLinear& linear, int threads) {
    const int64_t in_features = linear.in_features;
    const int64_t size = depth_of<Int8<E>>(in_features) * kPanelOutputs;
    uint32_t* const panels = static_cast<uint32_t*>(const_cast<void*>(linear.panels));
    float* const scales = reinterpret_cast<float*>(panels + panels_of(linear.out_features) * size);
#pragma omp parallel for num_threads(threads)
    for (int64_t panel = 0; panel < panels_of(linear.out_features); ++panel) {
        uint32_t* const to = panels + panel * size;
        float* const panel_scales = scales + panel * kPanelOutputs;
        memset(to, 0, size * sizeof *to);
        memset(panel_scales, 0, kPanelOutputs * sizeof *panel_scales);
        for (int v = 0; v < kPanelVectors; ++v) {
            const Outputs outputs = outputs_of(linear, panel, v);
            for (int64_t i = 0; i < outputs.count; ++i) {
                const auto* from = static_cast<const typename E::Element*>(weight) +
                                   (outputs.begin + i) * in_features;
                const int64_t lane = v * kLanes + i;
                panel_scales[lane] = pack_output<E>(from, in_features, to + lane);
            }
        }
    }
}

}  // namespace

extern "C" {

int64_t octavo_packed_int8_size(int64_t in_features, int64_t out_features) {
    const int64_t lanes = depth_of<Int8<Float32>>(in_features) + 1;  // the last are scales
    return panels_of(out_features) * lanes * kPanelOutputs * static_cast<int64_t>(sizeof(uint32_t));
}

void octavo_pack_int8_weight(int element, const void* weight, const PackedLinear* linear,
                             int threads) {
    const auto run = for_element(element, pack_weight<Float32>, pack_weight<BFloat16>,
                                 pack_weight<Float16>);
    run(weight, *linear, threads);
}

}  // extern "C"
