// All layers of a decoder in one call.
//
// Each layer calls the operations that Python would call one by one, in their order and with their
// bits, on memory that the caller keeps: what is saved is the way through Python, some three
// hundred times a step, and that nothing else runs in the process meanwhile.

#include <optional>

#include "adapters.h"
#include "elements.h"
#include "linear.h"
#include "operations.h"
#include "shared_exchange.h"

namespace {

// What all layers share.
struct Model {
    int64_t element;  // an ElementCode
    int64_t hidden, inner, q_heads, rotary_dim, max_len, interleaved;
    int64_t gelu;             // whether that is the activation, instead of silu
    int64_t norms_all_heads;  // whether q_norm and k_norm take all heads as one row
    float eps, scale;
    float residual_scale;  // of what a block adds to the stream
};

// What adapters add to a layer's products, by adapter; null where none adds anything.
struct LayerAdapters {
    const LowRank *qkv, *o, *gate_up, *down;
};

// Of the pointers those to norms, a table and sinks are null for none.
struct Layer {
    const float *input_norm, *attention_norm, *mlp_norm, *output_norm, *q_norm, *k_norm;
    const float* cos_sin;  // [max_len, rotary_dim]
    PackedLinear qkv, o, gate_up, down;
    const float* sinks;
    int64_t window;  // 0 for none
    float soft_cap;  // 0 for none
    LayerAdapters adapters;
};

// The tokens of one step, and memory for them; rows are contiguous.
struct Step {
    const int64_t *positions, *slots;
    Batch batch;
    CacheShape cache;
    void* storage;  // of the cache; see kv_cache.h
    void *residual, *hidden;  // [tokens, hidden]
    void* heads;              // [tokens, (q_heads + 2 kv_heads) * head_dim]
    void* attended;           // [tokens, q_heads * head_dim]
    void* active;             // [tokens, inner]
    int (*sum)();             // adds what others have of hidden; 0 to go on, or null
    SharedExchange* exchange;  // does the same, or null; without either there are no others
    AdaptedRows adapted;
};

enum Stage { kWrite = 1, kAttention = 2, kSum = 3, kAdapters = 4 };

struct Runner {
    const Model& model;
    const Step& step;
    AdaptedStep* adapted;  // or null, if no row has an adapter
    int threads;

    int64_t element_bytes() const { return model.element == kFloat32 ? 4 : 2; }
    int64_t tokens() const { return step.batch.num_tokens; }
    char* at(void* base, int64_t elements) const {
        return static_cast<char*>(base) + elements * element_bytes();
    }

    // What adapters add to each row of a product of x; null for nothing.
    const RowTerm* terms(const PackedLinear& linear, const LowRank* adapters,
                         const void* x) const {
        if (!adapted) return nullptr;
        const int64_t in_features = linear.in_features;
        return adapted->shrink(model.element, x, in_features, in_features, adapters, threads);
    }

    void multiply(const PackedLinear& linear, const LowRank* adapters, const void* x, void* out,
                  const PackedLinear* next) const {
        const int64_t strides[] = {linear.in_features, linear.out_features};
        octavo_linear(model.element, x, &linear, out, tokens(), strides, next,
                      terms(linear, adapters, x), threads);
    }

    void normalize(const float* weight, const void* x, void* out) const {
        const int64_t strides[] = {model.hidden, 0, model.hidden, 0};
        octavo_rms_norm(model.element, x, weight, out, tokens(), 1, model.hidden, strides,
                        model.eps, threads);
    }

    // Returns kSum if the layers are to stop there, or 0.
    int sum() const {
        if (step.exchange) {
            const int64_t count = tokens() * model.hidden;
            const int element = static_cast<int>(model.element);
            return octavo_shared_sum(element, step.exchange, step.hidden, count) ? kSum : 0;
        }
        return step.sum && step.sum() ? kSum : 0;
    }

    // Adds hidden to the stream; returns what the next block reads: hidden, normalised, or the
    // stream itself where there is no norm.
    const void* advance(const float* weight) const {
        if (!weight) {
            octavo_add(model.element, step.hidden, step.residual, tokens() * model.hidden, threads);
            return step.residual;
        }
        const int64_t strides[] = {model.hidden, model.hidden, model.hidden, model.hidden};
        octavo_add_rms_norm(model.element, step.hidden, step.residual, weight, step.hidden,
                            step.residual, tokens(), model.hidden, strides, model.eps, threads);
        return step.hidden;
    }

    void normalize_heads(const float* weight, void* heads, int64_t count, int64_t stride) const {
        const int64_t size = step.cache.head_dim * (model.norms_all_heads ? count : 1);
        const int64_t strides[] = {stride, size, stride, size};
        octavo_rms_norm(model.element, heads, weight, heads, tokens(),
                        model.norms_all_heads ? 1 : count, size, strides, model.eps, threads);
    }

    // Makes of hidden what is to be added to the stream; returns kSum if the layers are to stop
    // there, or 0.
    int finish(const float* norm) const {
        if (sum()) return kSum;
        if (norm) normalize(norm, step.hidden, step.hidden);
        if (model.residual_scale != 1.0f)
            octavo_scale(model.element, step.hidden, model.residual_scale,
                         tokens() * model.hidden, threads);
        return 0;
    }

    // Rotates q, k and v where they lie, if so, and writes k and v; returns as they do.
    int64_t write(const Layer& layer, int64_t index, void* q, const void* k, const void* v) const {
        const CacheShape& cache = step.cache;
        const int64_t kv_size = cache.kv_heads * cache.head_dim;
        const int64_t row = model.q_heads * cache.head_dim + 2 * kv_size;
        const int64_t strides[] = {row, row, row, row};
        void *keys = keys_of(index), *values = at(keys, kv_size * cache.block_size);
        if (!layer.cos_sin)
            return octavo_write_kv_cache(&cache, k, v, keys, values, step.slots, tokens(), strides,
                                         threads);
        return octavo_rope_and_write_kv_cache(
            &cache, q, k, v, q, keys, values, step.positions, layer.cos_sin, step.slots, tokens(),
            model.q_heads, model.rotary_dim, model.max_len, static_cast<int>(model.interleaved),
            strides, threads);
    }

    void* keys_of(int64_t index) const {
        const CacheShape& cache = step.cache;
        return at(step.storage, 2 * index * cache.kv_heads * cache.head_dim * cache.block_size);
    }

    // Returns the stage that found `*invalid` to point outside an array, or 0.
    int attend(const Layer& layer, int64_t index, const void* x, int64_t* invalid) const {
        const CacheShape& cache = step.cache;
        const int64_t q_size = model.q_heads * cache.head_dim;
        const int64_t kv_size = cache.kv_heads * cache.head_dim, row = q_size + 2 * kv_size;
        void *q = step.heads, *k = at(q, q_size), *v = at(q, q_size + kv_size);
        multiply(layer.qkv, layer.adapters.qkv, x, step.heads, &layer.o);
        if (layer.q_norm) {
            normalize_heads(layer.q_norm, q, model.q_heads, row);
            normalize_heads(layer.k_norm, k, cache.kv_heads, row);
        }
        *invalid = write(layer, index, q, k, v);
        if (*invalid >= 0) return kWrite;
        void *keys = keys_of(index), *values = at(keys, kv_size * cache.block_size);
        const int64_t strides[] = {row, q_size};
        *invalid = octavo_paged_attention(&cache, &step.batch, q, step.attended, keys, values,
                                          layer.sinks, model.q_heads / cache.kv_heads, strides,
                                          model.scale, layer.soft_cap, layer.window, threads);
        if (*invalid >= 0) return kAttention;
        multiply(layer.o, layer.adapters.o, step.attended, step.hidden, &layer.gate_up);
        return finish(layer.attention_norm);
    }

    // Returns as `attend` does. next: the layer that follows, or null
    int feed_forward(const Layer& layer, const void* x, const Layer* next) const {
        const int64_t strides[] = {model.hidden, model.inner};
        const auto activate = model.gelu ? octavo_gelu_linear : octavo_silu_linear;
        activate(model.element, x, &layer.gate_up, step.active, tokens(), strides, &layer.down,
                 terms(layer.gate_up, layer.adapters.gate_up, x), threads);
        multiply(layer.down, layer.adapters.down, step.active, step.hidden,
                 next ? &next->qkv : nullptr);
        return finish(layer.output_norm);
    }
};

}  // namespace

extern "C" {

// From the embeddings in step->residual to the last layer's output in step->hidden, which is not
// yet added to step->residual. Returns 0, or the stage that stopped early, where `*invalid` is the
// token (kWrite) or the sequence (kAttention) whose numbers point outside an array, or (kAdapters)
// what octavo_invalid_adapted found before anything was done.
int octavo_run_layers(const Model* model, const Layer* layers, int64_t count, const Step* step,
                      int64_t* invalid, int threads) {
    std::optional<AdaptedStep> adapted;
    if (step->adapted.count > 0) {
        *invalid = octavo_invalid_adapted(&step->adapted, step->batch.num_tokens);
        if (*invalid != -1) return kAdapters;
        adapted.emplace(step->adapted, step->batch.num_tokens);
    }
    const Runner runner = {*model, *step, adapted ? &*adapted : nullptr, threads};
    const void* x = step->residual;
    if (layers[0].input_norm) {
        runner.normalize(layers[0].input_norm, step->residual, step->hidden);
        x = step->hidden;
    }
    for (int64_t i = 0; i < count; ++i) {
        if (i > 0) x = runner.advance(layers[i].input_norm);
        if (const int stage = runner.attend(layers[i], i, x, invalid)) return stage;
        x = runner.advance(layers[i].mlp_norm);
        const Layer* next = i + 1 < count ? &layers[i + 1] : nullptr;
        if (const int stage = runner.feed_forward(layers[i], x, next)) return stage;
    }
    return 0;
}

}  // extern "C"
