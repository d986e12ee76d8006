// All layers of a decoder of the Llama family in one call.
//
// Each layer calls the operations that Python would call one by one, in their order and with their
// bits, on memory that the caller keeps: what is saved is the way through Python, some three
// hundred times a step, and that nothing else runs in the process meanwhile.

#include "elements.h"
#include "linear.h"
#include "operations.h"
#include "shared_exchange.h"

namespace {

// What all layers share.
struct Model {
    int64_t element;  // an ElementCode
    int64_t hidden, inner, q_heads, rotary_dim, max_len, interleaved;
    const float* cos_sin;  // [max_len, rotary_dim]
    float eps, scale;
};

struct Layer {
    const float *input_norm, *q_norm, *k_norm, *mlp_norm;  // those of q and k null for none
    PackedLinear qkv, o, gate_up, down;
    const float* sinks;  // null for none
    int64_t window;      // 0 for none
    float soft_cap;      // 0 for none
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
};

enum Stage { kWrite = 1, kAttention = 2, kSum = 3 };

struct Runner {
    const Model& model;
    const Step& step;
    int threads;

    int64_t element_bytes() const { return model.element == kFloat32 ? 4 : 2; }
    int64_t tokens() const { return step.batch.num_tokens; }
    char* at(void* base, int64_t elements) const {
        return static_cast<char*>(base) + elements * element_bytes();
    }

    void multiply(const PackedLinear& linear, const void* x, void* out,
                  const PackedLinear* next) const {
        const int64_t strides[] = {linear.in_features, linear.out_features};
        octavo_linear(model.element, x, &linear, out, tokens(), strides, next, threads);
    }

    void add_and_normalize(const float* weight) const {
        const int64_t strides[] = {model.hidden, model.hidden, model.hidden, model.hidden};
        octavo_add_rms_norm(model.element, step.hidden, step.residual, weight, step.hidden,
                            step.residual, tokens(), model.hidden, strides, model.eps, threads);
    }

    void normalize_heads(const float* weight, void* heads, int64_t count, int64_t stride) const {
        const int64_t head_dim = step.cache.head_dim;
        const int64_t strides[] = {stride, head_dim, stride, head_dim};
        octavo_rms_norm(model.element, heads, weight, heads, tokens(), count, head_dim, strides,
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

    // Returns the stage that found `*invalid` to point outside an array, or 0.
    int attend(const Layer& layer, int64_t index, int64_t* invalid) const {
        const CacheShape& cache = step.cache;
        const int64_t q_size = model.q_heads * cache.head_dim;
        const int64_t kv_size = cache.kv_heads * cache.head_dim, row = q_size + 2 * kv_size;
        void *q = step.heads, *k = at(q, q_size), *v = at(q, q_size + kv_size);
        void* keys = at(step.storage, 2 * index * kv_size * cache.block_size);
        void* values = at(keys, kv_size * cache.block_size);
        multiply(layer.qkv, step.hidden, step.heads, &layer.o);
        if (layer.q_norm) {
            normalize_heads(layer.q_norm, q, model.q_heads, row);
            normalize_heads(layer.k_norm, k, cache.kv_heads, row);
        }
        const int64_t write_strides[] = {row, row, row, row}, strides[] = {row, q_size};
        *invalid = octavo_rope_and_write_kv_cache(
            &cache, q, k, v, q, keys, values, step.positions, model.cos_sin, step.slots, tokens(),
            model.q_heads, model.rotary_dim, model.max_len, static_cast<int>(model.interleaved),
            write_strides, threads);
        if (*invalid >= 0) return kWrite;
        *invalid = octavo_paged_attention(&cache, &step.batch, q, step.attended, keys, values,
                                          layer.sinks, model.q_heads / cache.kv_heads, strides,
                                          model.scale, layer.soft_cap, layer.window, threads);
        if (*invalid >= 0) return kAttention;
        multiply(layer.o, step.attended, step.hidden, &layer.gate_up);
        return sum();
    }

    // Returns as `attend` does. next: the layer that follows, or null
    int feed_forward(const Layer& layer, const Layer* next) const {
        const int64_t strides[] = {model.hidden, model.inner};
        octavo_silu_linear(model.element, step.hidden, &layer.gate_up, step.active, tokens(),
                           strides, &layer.down, threads);
        multiply(layer.down, step.active, step.hidden, next ? &next->qkv : nullptr);
        return sum();
    }
};

}  // namespace

extern "C" {

// From the embeddings in step->residual to the last layer's output in step->hidden, which is not
// yet added to step->residual. Returns 0, or the stage that stopped early, where `*invalid` is the
// token (kWrite) or the sequence (kAttention) whose numbers point outside an array.
int octavo_run_layers(const Model* model, const Layer* layers, int64_t count, const Step* step,
                      int64_t* invalid, int threads) {
    const Runner runner = {*model, *step, threads};
    const int64_t strides[] = {model->hidden, 0, model->hidden, 0};
    octavo_rms_norm(model->element, step->residual, layers[0].input_norm, step->hidden,
                    runner.tokens(), 1, model->hidden, strides, model->eps, threads);
    for (int64_t i = 0; i < count; ++i) {
        if (i > 0) runner.add_and_normalize(layers[i].input_norm);
        if (const int stage = runner.attend(layers[i], i, invalid)) return stage;
        runner.add_and_normalize(layers[i].mlp_norm);
        const Layer* next = i + 1 < count ? &layers[i + 1] : nullptr;
        if (const int stage = runner.feed_forward(layers[i], next)) return stage;
    }
    return 0;
}

}  // extern "C"
