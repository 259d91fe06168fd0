// The whole decoder stack over packed weights: one call is one pass.
#pragma once
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace forerun {

struct LayerWeights {
  Matrix q, k, v, o, gate, up, down;
  // Vectors; null where the family has none. Biases are added after their matrix.
  const float *attn_norm = nullptr, *mlp_norm = nullptr, *post_attn_norm = nullptr, *post_mlp_norm = nullptr;
  const float *q_norm = nullptr, *k_norm = nullptr;
  const float *q_bias = nullptr, *k_bias = nullptr, *v_bias = nullptr, *o_bias = nullptr;
  const float *gate_bias = nullptr, *up_bias = nullptr, *down_bias = nullptr;
  int window = 0;                 // 0: none
  int rope = -1;                  // which tables of the pass; -1: no rotation
};

struct Config {
  int vocab_size, hidden, intermediate, num_heads, num_kv_heads, head_dim, rotary_dim;
  float norm_eps, attention_scale, attention_softcap, logit_softcap, embed_scale;
  Activation activation;
};

// Work that threads take in small pieces, so that a slow core gets less of it.
class Shares {
 public:
  void reset() { next_.store(0, std::memory_order_relaxed); }
  int take(int count) { return next_.fetch_add(count, std::memory_order_relaxed); }
 private:
  alignas(64) std::atomic<int> next_{0};
};

// kPage positions of all layers: keys and values. Zeros at first: a slot not yet written is harmless. Large pages lie
// in huge pages of the system where it has them.
class Page {
 public:
  explicit Page(size_t bytes);
  ~Page();
  Page(const Page&) = delete;
  Page& operator=(const Page&) = delete;
  uint16_t* data() const { return data_; }

 private:
  uint16_t* data_;
};

struct Feed {                     // the new rows of one sequence
  int first_row, num_rows;
  int num_cached;
  const uint8_t* tree;            // (num_rows, num_rows) or null
  const int64_t* pages;           // indices into the pool of pages, enough for num_cached + num_rows slots
};

struct Pass {
  int num_rows, num_feeds, num_wanted;
  const int32_t* tokens;          // (rows)
  const int32_t* positions;       // (rows)
  const float* const* cosines;    // by rope: (rows, rotary_dim / 2)
  const float* const* sines;
  const Feed* feeds;
  const int32_t* wanted;          // rows whose logits are wanted
  float* logits;                  // (wanted, vocab_size)
  int num_taps;
  const int32_t* tap_layers;
  float* taps;                    // (num_taps, rows, hidden)
};

class Decoder {
 public:
  Decoder(const Kernels* kernels, const Config& config, std::vector<LayerWeights> layers, const Matrix& embed,
          const Matrix& head, const float* norm, int num_threads);
  ~Decoder();

  int64_t new_page();
  void free_page(int64_t page);
  void copy_page(int64_t from, int64_t to);
  size_t page_bytes() const;
  void move_slot(const int64_t* pages, int from, int to);   // copies one position of all layers
  void run(const Pass& pass);
  Pool& pool() { return pool_; }

 private:
  struct Workspace;
  uint16_t* keys(int64_t page, int layer, int kv_head) const;
  uint16_t* values(int64_t page, int layer, int kv_head) const;

  struct Product {
    const Matrix* matrix;
    float* out;
    int stride;
    bool add;
  };
  void run_thread(const Pass& pass, int thread);
  Rows packed(int n) const;
  void pack_row(const float* x, int n, int row);
  void pack(const float* x, int n, int rows, int thread);
  void norm_and_pack(const float* x, int stride, int n, const float* weight, int rows, int thread);
  void multiply(std::initializer_list<Product> products, const Rows& x, int rows, Shares& shares);
  void finish_qkv(const Pass& pass, int layer, int thread);
  int first_segment(int layer, int position) const;   // that a row at this position sees
  void attend(const Pass& pass, int layer, int thread, Shares& shares);
  void combine(const Pass& pass, int layer, int thread);
  void finish_branch(float* x, const float* bias, const float* norm, int rows, int thread);
  static void matrix_column(const Matrix& w, int output, float* out);

  const Kernels* kernels_;
  Config config_;
  std::vector<LayerWeights> layers_;
  Matrix embed_, head_;
  const float* norm_;
  Pool& pool_;
  int padded_head_dim_;
  bool needs_values_ = false, needs_quants_ = false;   // the forms of activations that the matrices eat
  std::vector<std::unique_ptr<Page>> pages_;
  std::vector<int64_t> free_pages_;
  std::unique_ptr<Workspace> space_;
};

}  // namespace forerun
