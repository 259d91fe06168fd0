#include "decoder.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(_WIN32)
#include <malloc.h>
#else
#include <sys/mman.h>
#endif

#include "half.h"

namespace forerun {
namespace {

constexpr size_t kHugePage = size_t(1) << 21;
constexpr int kAttendPiece = 8;           // rows of a prompt that a thread takes at a time, through all segments
constexpr int kFewRows = 16;              // up to so many rows of a sequence are spread over the threads by segments

// What the cache holds stays finite: a later row's infinity, times a weight of zero, would spoil an earlier row.
uint16_t cached_half(float x) { return float_to_half(std::min(65504.0f, std::max(-65504.0f, x))); }

int round_up(int n, int to) { return (n + to - 1) / to * to; }

}  // namespace

Page::Page(size_t bytes) {
  const size_t alignment = bytes >= kHugePage / 2 ? kHugePage : 64;
  bytes = (bytes + alignment - 1) / alignment * alignment;
#if defined(_WIN32)
  data_ = static_cast<uint16_t*>(_aligned_malloc(bytes, alignment));
#else
  void* memory = nullptr;
  data_ = posix_memalign(&memory, alignment, bytes) == 0 ? static_cast<uint16_t*>(memory) : nullptr;
#endif
  if (!data_) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  if (alignment == kHugePage) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
  std::memset(data_, 0, bytes);
}

Page::~Page() {
#if defined(_WIN32)
  _aligned_free(data_);
#else
  std::free(data_);
#endif
}

// The segments of positions that the rows of a feed see in some layer, and where its parts are, if it has few rows.
struct Span {
  int segments;
  bool few;
  size_t parts;
};

struct Decoder::Workspace {
  int rows = 0;
  std::vector<float> x, normed, q, k, v, attended, gate, up, branch, scales;
  std::vector<int8_t> quants;
  std::vector<int32_t> sums;
  std::vector<std::vector<float>> scratch, parts;   // by thread; of attention
  std::vector<float> few_parts;               // of the sequences with few rows
  std::vector<Span> spans;                    // by feed
  std::vector<Shares> shares;                 // one for each stage of a pass
};

Decoder::Decoder(const Kernels* kernels, const Config& config, std::vector<LayerWeights> layers, const Matrix& embed,
                 const Matrix& head, const float* norm, int num_threads)
    : kernels_(kernels), config_(config), layers_(std::move(layers)), embed_(embed), head_(head), norm_(norm),
      pool_(shared_pool(num_threads)), padded_head_dim_(round_up(config.head_dim, 16)), space_(new Workspace) {
  space_->scratch.resize(pool_.size());
  space_->parts.resize(pool_.size());
  std::vector<Matrix> all{head_};
  for (const LayerWeights& w : layers_) all.insert(all.end(), {w.q, w.k, w.v, w.o, w.gate, w.up, w.down});
  for (const Matrix& m : all) (m.kind == kBF16 ? needs_values_ : needs_quants_) = true;
  space_->shares = std::vector<Shares>(layers_.size() * 8 + 8);
}

Decoder::~Decoder() = default;

size_t Decoder::page_bytes() const {
  return size_t(layers_.size()) * config_.num_kv_heads * 2 * kPage * padded_head_dim_ * sizeof(uint16_t);
}

int64_t Decoder::new_page() {
  int64_t page;
  if (free_pages_.empty()) {
    page = int64_t(pages_.size());
    pages_.emplace_back();
  } else {
    page = free_pages_.back();
    free_pages_.pop_back();
  }
  pages_[page].reset(new Page(page_bytes()));
  return page;
}

void Decoder::free_page(int64_t page) {
  pages_[page].reset();
  free_pages_.push_back(page);
}

void Decoder::copy_page(int64_t from, int64_t to) { std::memcpy(pages_[to]->data(), pages_[from]->data(), page_bytes()); }

uint16_t* Decoder::keys(int64_t page, int layer, int kv_head) const {
  return pages_[page]->data() + (size_t(layer) * config_.num_kv_heads + kv_head) * 2 * kPage * padded_head_dim_;
}

uint16_t* Decoder::values(int64_t page, int layer, int kv_head) const {
  return keys(page, layer, kv_head) + size_t(kPage) * padded_head_dim_;
}

void Decoder::move_slot(const int64_t* pages, int from, int to) {
  const int dim = padded_head_dim_, a = from % kPage, b = to % kPage;
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    for (int head = 0; head < config_.num_kv_heads; ++head) {
      const uint16_t* k_from = keys(pages[from / kPage], int(layer), head) + size_t(a / 16) * 16 * dim + a % 16;
      uint16_t* k_to = keys(pages[to / kPage], int(layer), head) + size_t(b / 16) * 16 * dim + b % 16;
      for (int d = 0; d < dim; ++d) k_to[size_t(d) * 16] = k_from[size_t(d) * 16];
      std::memmove(values(pages[to / kPage], int(layer), head) + size_t(b) * dim,
                   values(pages[from / kPage], int(layer), head) + size_t(a) * dim, dim * sizeof(uint16_t));
    }
  }
}

void Decoder::run(const Pass& pass) {
  Workspace& s = *space_;
  const Config& c = config_;
  const int rows = pass.num_rows, hidden = round_up(c.hidden, kBlock), wide = round_up(c.intermediate, kBlock);
  const int q_width = round_up(c.num_heads * padded_head_dim_, kBlock), kv_width = c.num_kv_heads * padded_head_dim_;
  const int widest = std::max({hidden, wide, q_width});
  if (rows > s.rows) {
    s.rows = rows;
    s.x.assign(size_t(rows) * hidden, 0.0f);
    s.normed.assign(size_t(rows) * widest, 0.0f);
    s.branch.assign(size_t(rows) * hidden, 0.0f);
    s.q.assign(size_t(rows) * q_width, 0.0f);
    s.k.assign(size_t(rows) * kv_width, 0.0f);
    s.v.assign(size_t(rows) * kv_width, 0.0f);
    s.attended.assign(size_t(rows) * q_width, 0.0f);
    s.gate.assign(size_t(rows) * wide, 0.0f);
    s.up.assign(size_t(rows) * wide, 0.0f);
    s.quants.assign(size_t(rows) * widest, 0);
    s.scales.assign(size_t(rows) * (widest / kBlock), 0.0f);
    s.sums.assign(size_t(rows) * (widest / kBlock), 0);
  }
  size_t few_parts = 0, own_parts = 0;
  int most_rows = 0;
  const int group = c.num_heads / c.num_kv_heads, part = part_size(padded_head_dim_);
  s.spans.clear();
  for (int f = 0; f < pass.num_feeds; ++f) {
    const Feed& feed = pass.feeds[f];
    const Span span{(feed.num_cached + feed.num_rows - 1) / kSegment + 1, feed.num_rows <= kFewRows, few_parts};
    s.spans.push_back(span);
    most_rows = std::max(most_rows, feed.num_rows);
    if (span.few) few_parts += size_t(feed.num_rows) * c.num_heads * span.segments * part;
    else own_parts = std::max(own_parts, size_t(kAttendPiece) * group * span.segments * part);
  }
  s.few_parts.resize(std::max(s.few_parts.size(), few_parts));
  for (auto& parts : s.parts) parts.resize(std::max(parts.size(), own_parts));
  for (auto& scratch : s.scratch) scratch.resize(std::max(scratch.size(), size_t(attend_scratch(most_rows))));
  for (auto& shares : s.shares) shares.reset();
  pool_.run([&](int thread) { run_thread(pass, thread); });
}

void Decoder::run_thread(const Pass& pass, int thread) {
  Workspace& s = *space_;
  const Config& c = config_;
  const int rows = pass.num_rows, hidden = round_up(c.hidden, kBlock), wide = round_up(c.intermediate, kBlock);
  const int q_width = round_up(c.num_heads * padded_head_dim_, kBlock), kv_width = c.num_kv_heads * padded_head_dim_;
  const int threads = pool_.size();
  int stage = 0;

  for (int row = thread; row < rows; row += threads) {
    float* x = s.x.data() + size_t(row) * hidden;
    matrix_column(embed_, pass.tokens[row], x);
    if (c.embed_scale != 1.0f) for (int i = 0; i < c.hidden; ++i) x[i] *= c.embed_scale;
  }
  for (int index = 0; index < int(layers_.size()); ++index) {
    const LayerWeights& w = layers_[index];
    // each thread norms and packs the rows that it has made itself, or waits for those that it hasn't
    norm_and_pack(s.x.data(), hidden, c.hidden, w.attn_norm, rows, thread);
    pool_.barrier();
    const Rows normed = packed(hidden);
    multiply({{&w.q, s.q.data(), q_width, false}, {&w.k, s.k.data(), kv_width, false}, {&w.v, s.v.data(), kv_width, false}},
             normed, rows, s.shares[stage++]);
    pool_.barrier();
    finish_qkv(pass, index, thread);
    pool_.barrier();
    attend(pass, index, thread, s.shares[stage++]);
    pool_.barrier();
    combine(pass, index, thread);
    pack(s.attended.data(), q_width, rows, thread);
    pool_.barrier();
    const bool post = w.post_attn_norm != nullptr;
    multiply({{&w.o, post ? s.branch.data() : s.x.data(), hidden, !post}}, packed(q_width), rows, s.shares[stage++]);
    pool_.barrier();
    finish_branch(s.x.data(), w.o_bias, w.post_attn_norm, rows, thread);
    norm_and_pack(s.x.data(), hidden, c.hidden, w.mlp_norm, rows, thread);
    pool_.barrier();
    multiply({{&w.gate, s.gate.data(), wide, false}, {&w.up, s.up.data(), wide, false}}, normed, rows, s.shares[stage++]);
    pool_.barrier();
    for (int row = thread; row < rows; row += threads) {
      float* g = s.gate.data() + size_t(row) * wide;
      float* u = s.up.data() + size_t(row) * wide;
      if (w.gate_bias) kernels_->add(g, w.gate_bias, c.intermediate);
      if (w.up_bias) kernels_->add(u, w.up_bias, c.intermediate);
      kernels_->gate(g, u, g, wide, c.activation);
      pack_row(g, wide, row);
    }
    pool_.barrier();
    const bool post_mlp = w.post_mlp_norm != nullptr;
    multiply({{&w.down, post_mlp ? s.branch.data() : s.x.data(), hidden, !post_mlp}}, packed(wide), rows, s.shares[stage++]);
    pool_.barrier();
    finish_branch(s.x.data(), w.down_bias, w.post_mlp_norm, rows, thread);
    for (int tap = 0; tap < pass.num_taps; ++tap) {
      if (pass.tap_layers[tap] != index) continue;
      for (int row = thread; row < rows; row += threads) {
        std::copy_n(s.x.data() + size_t(row) * hidden, c.hidden, pass.taps + (size_t(tap) * rows + row) * c.hidden);
      }
    }
  }
  if (pass.num_wanted == 0) return;
  pool_.barrier();                                            // a wanted row may be another thread's
  for (int i = thread; i < pass.num_wanted; i += threads) {   // wanted rows move to the front of the packed rows
    float* out = s.normed.data() + size_t(i) * hidden;
    kernels_->rms_norm(s.x.data() + size_t(pass.wanted[i]) * hidden, norm_, out, c.hidden, c.norm_eps);
    std::fill(out + c.hidden, out + hidden, 0.0f);
    pack_row(out, hidden, i);
  }
  pool_.barrier();
  multiply({{&head_, pass.logits, c.vocab_size, false}}, packed(hidden), pass.num_wanted, s.shares[stage++]);
  if (c.logit_softcap > 0.0f) {
    pool_.barrier();
    for (int i = thread; i < pass.num_wanted; i += threads) {
      kernels_->softcap(pass.logits + size_t(i) * c.vocab_size, c.vocab_size, c.logit_softcap);
    }
  }
}

Rows Decoder::packed(int n) const {
  const Workspace& s = *space_;
  return {s.normed.data(), s.quants.data(), s.scales.data(), s.sums.data(), n};
}

void Decoder::pack_row(const float* x, int n, int row) {
  Workspace& s = *space_;
  if (needs_values_ && x != s.normed.data() + size_t(row) * n) std::copy_n(x, n, s.normed.data() + size_t(row) * n);
  if (needs_quants_) {
    const int blocks = n / kBlock;
    kernels_->quantize(x, n, s.quants.data() + size_t(row) * n, s.scales.data() + size_t(row) * blocks,
                       s.sums.data() + size_t(row) * blocks);
  }
}

void Decoder::pack(const float* x, int n, int rows, int thread) {
  for (int row = thread; row < rows; row += pool_.size()) pack_row(x + size_t(row) * n, n, row);
}

void Decoder::norm_and_pack(const float* x, int stride, int n, const float* weight, int rows, int thread) {
  for (int row = thread; row < rows; row += pool_.size()) {
    float* out = space_->normed.data() + size_t(row) * stride;
    kernels_->rms_norm(x + size_t(row) * stride, weight, out, n, config_.norm_eps);
    std::fill(out + n, out + stride, 0.0f);
    pack_row(out, stride, row);
  }
}

void Decoder::multiply(std::initializer_list<Product> products, const Rows& x, int rows, Shares& shares) {
  int total = 0;
  for (const Product& p : products) total += p.matrix->tiles();
  const int piece = std::max(1, std::min(16, total / (4 * pool_.size())));
  for (int begin = shares.take(piece); begin < total; begin = shares.take(piece)) {
    int first = 0;
    const int end = std::min(total, begin + piece);
    for (const Product& p : products) {
      const int tiles = p.matrix->tiles(), from = std::max(begin - first, 0), to = std::min(end - first, tiles);
      if (from < to) kernels_->matmul(*p.matrix, x, rows, p.out, p.stride, from, to, p.add);
      first += tiles;
    }
  }
}

void Decoder::finish_qkv(const Pass& pass, int layer, int thread) {
  Workspace& s = *space_;
  const Config& c = config_;
  const LayerWeights& w = layers_[layer];
  const int dim = padded_head_dim_, kv_width = c.num_kv_heads * dim;
  const int q_width = round_up(c.num_heads * dim, kBlock), half = c.rotary_dim / 2;
  for (int f = 0; f < pass.num_feeds; ++f) {
    const Feed& feed = pass.feeds[f];
    for (int r = 0; r < feed.num_rows; ++r) {
      const int row = feed.first_row + r, slot = feed.num_cached + r;
      if (row % pool_.size() != thread) continue;
      float* q = s.q.data() + size_t(row) * q_width;
      float* k = s.k.data() + size_t(row) * kv_width;
      float* v = s.v.data() + size_t(row) * kv_width;
      if (w.q_bias) kernels_->add(q, w.q_bias, c.num_heads * dim);
      if (w.k_bias) kernels_->add(k, w.k_bias, kv_width);
      if (w.v_bias) kernels_->add(v, w.v_bias, kv_width);
      const float* cosine = w.rope < 0 ? nullptr : pass.cosines[w.rope] + size_t(row) * half;
      const float* sine = w.rope < 0 ? nullptr : pass.sines[w.rope] + size_t(row) * half;
      for (int h = 0; h < c.num_heads; ++h) {
        if (w.q_norm) kernels_->rms_norm(q + h * dim, w.q_norm, q + h * dim, c.head_dim, c.norm_eps);
        if (cosine) kernels_->rotate(q + h * dim, cosine, sine, c.rotary_dim);
      }
      const int64_t page = feed.pages[slot / kPage];
      const int at = slot % kPage;
      for (int h = 0; h < c.num_kv_heads; ++h) {
        float* head = k + h * dim;
        if (w.k_norm) kernels_->rms_norm(head, w.k_norm, head, c.head_dim, c.norm_eps);
        if (cosine) kernels_->rotate(head, cosine, sine, c.rotary_dim);
        uint16_t* to = keys(page, layer, h) + size_t(at / 16) * 16 * dim + at % 16;
        for (int d = 0; d < dim; ++d) to[size_t(d) * 16] = cached_half(head[d]);
        to = values(page, layer, h) + size_t(at) * dim;
        for (int d = 0; d < dim; ++d) to[d] = cached_half(v[h * dim + d]);
      }
    }
  }
}

int Decoder::first_segment(int layer, int position) const {
  const int window = layers_[layer].window;
  return window > 0 && position >= window ? (position - window + 1) / kSegment : 0;
}

void Decoder::attend(const Pass& pass, int layer, int thread, Shares& shares) {
  Workspace& s = *space_;
  const Config& c = config_;
  const int dim = padded_head_dim_, q_width = round_up(c.num_heads * dim, kBlock), part = part_size(dim);
  const int group = c.num_heads / c.num_kv_heads;
  int item = shares.take(1), first_item = 0;
  std::vector<const uint16_t*> key_pages, value_pages;
  for (int f = 0; f < pass.num_feeds; ++f) {
    const Feed& feed = pass.feeds[f];
    const Span& span = s.spans[f];
    const int begin_segment = first_segment(layer, feed.num_cached), count = span.segments - begin_segment;
    const int run = std::max(1, std::min(4, count * c.num_kv_heads / (6 * pool_.size())));   // segments to an item
    const int pieces = span.few ? (count + run - 1) / run : (feed.num_rows + kAttendPiece - 1) / kAttendPiece;
    const int num_items = pieces * c.num_kv_heads;
    for (; item < first_item + num_items; item = shares.take(1)) {
      const int kv_head = (item - first_item) % c.num_kv_heads, piece = (item - first_item) / c.num_kv_heads;
      Attend a;
      a.queries = s.q.data() + size_t(feed.first_row) * q_width + size_t(kv_head) * group * dim;
      a.query_stride = q_width;
      a.group = group;
      a.num_rows = feed.num_rows;
      a.begin_row = span.few ? 0 : piece * kAttendPiece;
      a.end_row = span.few ? feed.num_rows : std::min(feed.num_rows, a.begin_row + kAttendPiece);
      a.num_cached = feed.num_cached;
      a.positions = pass.positions + feed.first_row;
      a.tree = feed.tree;
      a.head_dim = dim;
      a.window = layers_[layer].window;
      a.scale = c.attention_scale;
      a.softcap = c.attention_softcap;
      a.begin_segment = span.few ? begin_segment + piece * run : first_segment(layer, a.positions[a.begin_row]);
      a.end_segment = span.few ? std::min(span.segments, a.begin_segment + run) : span.segments;
      if (!span.few && !feed.tree) a.end_segment = a.positions[a.end_row - 1] / kSegment + 1;
      const int queries = feed.num_rows * group;
      a.parts = span.few ? s.few_parts.data() + span.parts + size_t(kv_head) * queries * span.segments * part
                         : s.parts[thread].data();
      a.part_stride = span.segments;
      a.scratch = s.scratch[thread].data();
      const int num_pages = (feed.num_cached + feed.num_rows + kPage - 1) / kPage;
      key_pages.resize(num_pages);
      value_pages.resize(num_pages);
      // in a tree, what counts in this segment may lie before it
      const int first_page = std::min(a.begin_segment * kSegment, feed.num_cached) / kPage;
      for (int p = first_page; p < num_pages; ++p) {
        if (p == a.end_segment * kSegment / kPage) p = std::max(p, feed.num_cached / kPage);   // and those of this pass
        key_pages[p] = keys(feed.pages[p], layer, kv_head);
        value_pages[p] = values(feed.pages[p], layer, kv_head);
      }
      a.keys = key_pages.data();
      a.values = value_pages.data();
      kernels_->attend(a);
      if (span.few) continue;
      for (int row = a.begin_row; row < a.end_row; ++row) {
        const int begin = first_segment(layer, a.positions[row]), end = a.positions[row] / kSegment + 1;
        for (int h = 0; h < group; ++h) {
          kernels_->combine(a.parts + (size_t((row - a.begin_row) * group + h) * span.segments + begin) * part,
                            end - begin, dim,
                            s.attended.data() + size_t(feed.first_row + row) * q_width + size_t(kv_head * group + h) * dim);
        }
      }
    }
    first_item += num_items;
  }
}

// Puts together what several threads have found for a thread's rows.
void Decoder::combine(const Pass& pass, int layer, int thread) {
  Workspace& s = *space_;
  const int dim = padded_head_dim_, q_width = round_up(config_.num_heads * dim, kBlock), part = part_size(dim);
  const int group = config_.num_heads / config_.num_kv_heads;
  for (int f = 0; f < pass.num_feeds; ++f) {
    const Feed& feed = pass.feeds[f];
    const Span& span = s.spans[f];
    if (!span.few) continue;
    for (int r = 0; r < feed.num_rows; ++r) {
      const int row = feed.first_row + r, position = pass.positions[row];
      if (row % pool_.size() != thread) continue;
      const int begin = first_segment(layer, position), end = position / kSegment + 1;
      for (int head = 0; head < config_.num_heads; ++head) {
        const size_t query = size_t(head / group) * feed.num_rows * group + size_t(r) * group + head % group;
        kernels_->combine(s.few_parts.data() + span.parts + (query * span.segments + begin) * part, end - begin, dim,
                          s.attended.data() + size_t(row) * q_width + size_t(head) * dim);
      }
    }
  }
}

void Decoder::finish_branch(float* x, const float* bias, const float* norm, int rows, int thread) {
  Workspace& s = *space_;
  const int hidden = round_up(config_.hidden, kBlock);
  for (int row = thread; row < rows; row += pool_.size()) {
    float* to = x + size_t(row) * hidden;
    float* branch = s.branch.data() + size_t(row) * hidden;
    if (!norm) {                          // the product was added in place
      if (bias) kernels_->add(to, bias, config_.hidden);
      continue;
    }
    if (bias) kernels_->add(branch, bias, config_.hidden);
    kernels_->rms_norm(branch, norm, branch, config_.hidden, config_.norm_eps);
    kernels_->add(to, branch, config_.hidden);
  }
}

// Reads one output of a packed matrix: an embedding.
void Decoder::matrix_column(const Matrix& w, int output, float* out) {
  const int tile = output / kTile, lane = output % kTile;
  if (w.kind == kBF16) {
    const uint16_t* from = reinterpret_cast<const uint16_t*>(w.quants) + size_t(tile) * w.inputs * kTile + lane;
    for (int i = 0; i < w.inputs; ++i) {
      union { uint32_t u; float f; } x;
      x.u = uint32_t(from[size_t(i) * kTile]) << 16;
      out[i] = x.f;
    }
    return;
  }
  const size_t bytes = w.kind == kQ8_0 ? 512 : 256;
  for (int b = 0; b < w.blocks(); ++b) {
    const size_t block = size_t(tile) * w.blocks() + b;
    const uint8_t* quants = w.quants + block * bytes;
    const float scale = half_to_float(w.scales[block * kTile + lane]);
    const float minimum = w.kind == kQ4_1 ? half_to_float(w.minima[block * kTile + lane]) : 0.0f;
    for (int i = 0; i < kBlock; ++i) {
      const int group = i / 4;
      int q;
      if (w.kind == kQ8_0) {
        q = int(quants[group * 64 + lane * 4 + i % 4]) - 128;
      } else {
        const uint8_t both = quants[(group % 4) * 64 + lane * 4 + i % 4];
        q = (group < 4 ? both & 15 : both >> 4) - (w.kind == kQ4_0 ? 8 : 0);
      }
      out[b * kBlock + i] = scale * float(q) + minimum;
    }
  }
}

}  // namespace forerun
