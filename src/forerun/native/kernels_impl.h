// The kernels, written once over a vector of 16 lanes. Included by one source file for each instruction set, which
// defines `struct S` before. No library code here: what is inlined must not leak out of that source file.
#include "kernels.h"

namespace forerun {
namespace {

using F = S::F;
using I = S::I;

inline float bits_to_float(uint32_t u) {
  union { uint32_t u; float f; } x;
  x.u = u;
  return x.f;
}

// e^x to about 1 ulp: 2^n times a polynomial of degree 6 on [-ln2/2, ln2/2]. Below -87 it is 0.
inline F exp_lanes(F x) {
  const F low = S::set1(-87.0f), high = S::set1(88.0f);
  const F clipped = S::min(S::max(x, low), high);
  const F n = S::round(S::mul(clipped, S::set1(1.44269504088896341f)));
  F r = S::fma(n, S::set1(-0.693359375f), clipped);
  r = S::fma(n, S::set1(2.12194440e-4f), r);
  F p = S::set1(1.9875691500e-4f);
  p = S::fma(p, r, S::set1(1.3981999507e-3f));
  p = S::fma(p, r, S::set1(8.3334519073e-3f));
  p = S::fma(p, r, S::set1(4.1665795894e-2f));
  p = S::fma(p, r, S::set1(1.6666665459e-1f));
  p = S::fma(p, r, S::set1(5.0000001201e-1f));
  const F y = S::add(S::fma(p, S::mul(r, r), r), S::set1(1.0f));
  return S::zero_below(S::scale_pow2(y, n), x, low);
}

inline F sigmoid_lanes(F x) {
  return S::div(S::set1(1.0f), S::add(S::set1(1.0f), exp_lanes(S::sub(S::zero(), x))));
}

inline F tanh_lanes(F x) {      // 2 sigmoid(2x) - 1
  return S::fma(S::set1(2.0f), sigmoid_lanes(S::add(x, x)), S::set1(-1.0f));
}

void rms_norm(const float* x, const float* weight, float* out, int n, float eps) {
  F sum = S::zero();
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const F v = S::load(x + i);
    sum = S::fma(v, v, sum);
  }
  float total = S::hsum(sum);
  for (int j = i; j < n; ++j) total = S::fma1(x[j], x[j], total);
  const float scale = 1.0f / S::sqrt1(total / float(n) + eps);
  const F scales = S::set1(scale);
  for (i = 0; i + 16 <= n; i += 16) S::store(out + i, S::mul(S::mul(S::load(x + i), scales), S::load(weight + i)));
  for (; i < n; ++i) out[i] = (x[i] * scale) * weight[i];
}

void quantize(const float* x, int n, int8_t* quants, float* scales, int32_t* sums) {
  for (int b = 0; b < n / kBlock; ++b) {
    const float* v = x + b * kBlock;
    const F lo = S::load(v), hi = S::load(v + 16);
    const float most = S::hmax(S::max(S::abs(lo), S::abs(hi)));
    const float scale = most / 127.0f;
    const F inverse = S::set1(most > 0.0f ? 127.0f / most : 0.0f);
    scales[b] = scale;
    sums[b] = S::store_i8(quants + b * kBlock, S::round(S::mul(lo, inverse)), S::round(S::mul(hi, inverse)));
  }
}

// R rows of one tile of a quantised matrix.
template <Kind K, int R>
inline void tile_rows(const Matrix& w, const Rows& x, int row, int tile, F (&acc)[R]) {
  constexpr int kBytes = K == kQ8_0 ? 512 : 256;
  const int blocks = w.blocks();
  const uint8_t* quants = w.quants + size_t(tile) * blocks * kBytes;
  const uint16_t* scales = w.scales + size_t(tile) * blocks * kTile;
  const uint16_t* minima = K == kQ4_1 ? w.minima + size_t(tile) * blocks * kTile : nullptr;
  const int8_t* a[R];
  const float* a_scale[R];
  const int32_t* a_sum[R];
  for (int r = 0; r < R; ++r) {
    a[r] = x.quants + size_t(row + r) * x.n;
    a_scale[r] = x.scales + size_t(row + r) * (x.n / kBlock);
    a_sum[r] = x.sums + size_t(row + r) * (x.n / kBlock);
    acc[r] = S::zero();
  }
  constexpr int kBias = K == kQ8_0 ? S::kQ8Bias : K == kQ4_0 ? 8 : 0;
  for (int b = 0; b < blocks; ++b, quants += kBytes, scales += kTile) {
    // Few rows wait for the latency of a chain, so they have two; whole numbers may be added in any order.
    constexpr int kChains = R * 2 <= S::kRows ? 2 : 1;
    I dot[R * kChains];
    for (int r = 0; r < R; ++r) {
      dot[r] = kBias ? S::iset1(-kBias * a_sum[r][b]) : S::izero();
      if constexpr (kChains == 2) dot[r + R] = S::izero();
    }
    if constexpr (K == kQ8_0) {
      for (int g = 0; g < 8; ++g) {
        const typename S::B bytes = S::load_q8(quants + g * 64);
        I* chain = dot + (g % kChains) * R;
        for (int r = 0; r < R; ++r) chain[r] = S::dot_q8(chain[r], bytes, a[r] + b * kBlock + g * 4);
      }
    } else {
      for (int g = 0; g < 4; ++g) {
        typename S::B low, high;
        S::load_q4(quants + g * 64, low, high);
        I* chain = dot + (kChains - 1) * R;
        for (int r = 0; r < R; ++r) {
          dot[r] = S::dot_q4(dot[r], low, a[r] + b * kBlock + g * 4);
          chain[r] = S::dot_q4(chain[r], high, a[r] + b * kBlock + (g + 4) * 4);
        }
      }
    }
    if constexpr (kChains == 2) {
      for (int r = 0; r < R; ++r) dot[r] = S::iadd(dot[r], dot[r + R]);
    }
    const F scale = S::load_f16(scales);
    for (int r = 0; r < R; ++r) {
      acc[r] = S::fma(S::convert(dot[r]), S::mul(scale, S::set1(a_scale[r][b])), acc[r]);
    }
    if constexpr (K == kQ4_1) {
      const F minimum = S::load_f16(minima);
      minima += kTile;
      for (int r = 0; r < R; ++r) acc[r] = S::fma(minimum, S::set1(a_scale[r][b] * float(a_sum[r][b])), acc[r]);
    }
  }
}

template <int R>
inline void tile_rows_bf16(const Matrix& w, const Rows& x, int row, int tile, F (&acc)[R]) {
  const uint16_t* weights = reinterpret_cast<const uint16_t*>(w.quants) + size_t(tile) * w.inputs * kTile;
  const float* a[R];
  for (int r = 0; r < R; ++r) {
    a[r] = x.values + size_t(row + r) * x.n;
    acc[r] = S::zero();
  }
  for (int i = 0; i < w.inputs; ++i) {
    const F column = S::load_bf16(weights + size_t(i) * kTile);
    for (int r = 0; r < R; ++r) acc[r] = S::fma(column, S::set1(a[r][i]), acc[r]);
  }
}

template <Kind K, int R>
inline void tile_chunk(const Matrix& w, const Rows& x, int row, int tile, float* out, int stride, bool add) {
  F acc[R];
  if constexpr (K == kBF16) {
    tile_rows_bf16<R>(w, x, row, tile, acc);
  } else {
    tile_rows<K, R>(w, x, row, tile, acc);
  }
  const int first = tile * kTile, left = w.outputs - first;
  for (int r = 0; r < R; ++r) {
    float* to = out + size_t(row + r) * stride + first;
    if (left >= kTile) {
      S::store(to, add ? S::add(S::load(to), acc[r]) : acc[r]);
    } else {
      float lanes[kTile];
      S::store(lanes, acc[r]);
      for (int i = 0; i < left; ++i) to[i] = add ? to[i] + lanes[i] : lanes[i];
    }
  }
}

// The rows that are left after whole chunks, all at once: R of them or fewer.
template <Kind K, int R>
inline void tile_rest(const Matrix& w, const Rows& x, int row, int num_rows, int tile, float* out, int stride, bool add) {
  if constexpr (R > 0) {
    if (num_rows - row == R) return tile_chunk<K, R>(w, x, row, tile, out, stride, add);
    tile_rest<K, R - 1>(w, x, row, num_rows, tile, out, stride, add);
  }
}

template <Kind K>
void matmul_kind(const Matrix& w, const Rows& x, int num_rows, float* out, int stride, int begin, int end, bool add) {
  for (int tile = begin; tile < end; ++tile) {
    int row = 0;
    for (; row + S::kRows <= num_rows; row += S::kRows) tile_chunk<K, S::kRows>(w, x, row, tile, out, stride, add);
    tile_rest<K, S::kRows - 1>(w, x, row, num_rows, tile, out, stride, add);
  }
}

void matmul(const Matrix& w, const Rows& x, int num_rows, float* out, int stride, int begin, int end, bool add) {
  switch (w.kind) {
    case kQ4_0: return matmul_kind<kQ4_0>(w, x, num_rows, out, stride, begin, end, add);
    case kQ4_1: return matmul_kind<kQ4_1>(w, x, num_rows, out, stride, begin, end, add);
    case kQ8_0: return matmul_kind<kQ8_0>(w, x, num_rows, out, stride, begin, end, add);
    case kBF16: return matmul_kind<kBF16>(w, x, num_rows, out, stride, begin, end, add);
  }
}

void rotate(float* head, const float* cosine, const float* sine, int rotary_dim) {
  const int half = rotary_dim / 2;
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const F a = S::load(head + i), b = S::load(head + half + i), c = S::load(cosine + i), s = S::load(sine + i);
    S::store(head + i, S::fma(a, c, S::sub(S::zero(), S::mul(b, s))));
    S::store(head + half + i, S::fma(b, c, S::mul(a, s)));
  }
  for (; i < half; ++i) {
    const float a = head[i], b = head[half + i], c = cosine[i], s = sine[i];
    head[i] = S::fma1(a, c, 0.0f - b * s);
    head[half + i] = S::fma1(b, c, a * s);
  }
}

// Scores of R queries with the keys in slots [begin, end), whole groups of 16.
template <int R>
void score(const Attend& a, const float* const* queries, int begin, int end, float* out, int stride) {
  // a chain of sums waits for itself, so there are several at a time
  constexpr int kGroups = (S::kRows < 8 ? 4 : 8) / R;
  const int dim = a.head_dim;
  const F scale = S::set1(a.scale);
  for (int slot = begin; slot < end; slot += 16 * kGroups) {
    const uint16_t* keys[kGroups];
    F dots[kGroups][R];
    for (int g = 0; g < kGroups; ++g) {             // past the end the last group is read again
      const int at = slot + 16 * g < end ? slot + 16 * g : slot;
      keys[g] = a.keys[at / kPage] + size_t(at % kPage) * dim;
      for (int r = 0; r < R; ++r) dots[g][r] = S::zero();
    }
    for (int d = 0; d < dim; ++d) {
      F q[R];
      for (int r = 0; r < R; ++r) q[r] = S::set1(queries[r][d]);
      for (int g = 0; g < kGroups; ++g) {
        const F k = S::load_f16(keys[g] + size_t(d) * 16);
        for (int r = 0; r < R; ++r) dots[g][r] = S::fma(k, q[r], dots[g][r]);
      }
    }
    for (int g = 0; g < kGroups && slot + 16 * g < end; ++g) {
      for (int r = 0; r < R; ++r) {
        F s = S::mul(dots[g][r], scale);
        if (a.softcap > 0.0f) s = S::mul(tanh_lanes(S::div(s, S::set1(a.softcap))), S::set1(a.softcap));
        S::store(out + r * stride + slot + 16 * g - begin, s);
      }
    }
  }
}

// acc (R, lanes vectors) += weights of positions [begin, end) times the values in slots begin + shift ...; the value of
// position i lies in slot slots[i] where there are `slots`.
template <int R, int lanes>
inline void add_values(const Attend& a, const float* weights, const int* slots, int begin, int end, int d, F (&acc)[R][4]) {
  for (int i = begin; i < end; ++i) {
    const int slot = slots[i];
    const uint16_t* v = a.values[slot / kPage] + size_t(slot % kPage) * a.head_dim + d;
    for (int j = 0; j < lanes; ++j) {
      const F vj = S::load_f16(v + 16 * j);
      for (int r = 0; r < R; ++r) acc[r][j] = S::fma(vj, S::set1(weights[r * kSegment + i]), acc[r][j]);
    }
  }
}

template <int R>
void add_values(const Attend& a, const float* weights, const int* slots, int begin, int end, int d, float* const* outs) {
  const int lanes = a.head_dim - d < 64 ? (a.head_dim - d) / 16 : 4;
  F acc[R][4];
  for (int r = 0; r < R; ++r) for (int j = 0; j < lanes; ++j) acc[r][j] = S::load(outs[r] + d + 16 * j);
  if (lanes == 4) add_values<R, 4>(a, weights, slots, begin, end, d, acc);
  else if (lanes == 3) add_values<R, 3>(a, weights, slots, begin, end, d, acc);
  else if (lanes == 2) add_values<R, 2>(a, weights, slots, begin, end, d, acc);
  else add_values<R, 1>(a, weights, slots, begin, end, d, acc);
  for (int r = 0; r < R; ++r) for (int j = 0; j < lanes; ++j) S::store(outs[r] + d + 16 * j, acc[r][j]);
}

// R queries from number `first` on, in one segment. Everything goes by position, so that a row of a tree performs the
// operations that it would perform in a chain: only where a key of this pass lies differs.
template <int R>
void attend_segment(const Attend& a, int first, int segment) {
  const int base = segment * kSegment, cached = a.num_cached - base;   // positions count from `base` here
  const float* queries[R];
  float* parts[R];
  int row[R], low[R], high[R];                              // of the positions that a query sees
  int begin = kSegment, end = 0;
  for (int r = 0; r < R; ++r) {
    row[r] = a.begin_row + (first + r) / a.group;
    queries[r] = a.queries + size_t(row[r]) * a.query_stride + size_t((first + r) % a.group) * a.head_dim;
    parts[r] = a.parts + (size_t(first + r) * a.part_stride + segment) * part_size(a.head_dim);
    const int last = a.positions[row[r]] - base;
    low[r] = a.window > 0 && last - a.window + 1 > 0 ? last - a.window + 1 : 0;
    high[r] = last + 1 < kSegment ? last + 1 : kSegment;
    begin = low[r] < begin ? low[r] : begin;
    end = high[r] > end ? high[r] : end;
  }
  begin = begin / 16 * 16;
  if (begin >= end) return;
  const int whole_end = (end + 15) / 16 * 16;
  float weights[R][kSegment];
  int slots[R][kSegment];
  const bool moved = a.tree && end > cached;                // some keys don't lie where their positions are
  const int in_place = !moved ? end : cached < begin ? begin : cached;
  if (begin < in_place) score<R>(a, queries, base + begin, base + in_place, &weights[0][begin], kSegment);
  for (int i = begin; i < in_place; ++i) slots[0][i] = base + i;
  if (moved) {
    const int from = a.num_cached / 16 * 16, to = a.num_cached + a.num_rows, width = (to - from + 15) / 16 * 16;
    score<R>(a, queries, from, to, a.scratch, width);
    for (int r = 0; r < R; ++r) {
      int position = cached;
      for (int other = 0; other <= row[r] && position < high[r]; ++other) {
        if (!a.tree[size_t(row[r]) * a.num_rows + other]) continue;
        if (position >= begin) {
          slots[r][position] = a.num_cached + other;
          weights[r][position] = a.scratch[r * width + a.num_cached + other - from];
        }
        ++position;
      }
    }
  }
  const float hidden = bits_to_float(0xff800000u);          // -inf
  for (int r = 0; r < R; ++r) {
    for (int i = begin; i < low[r] && i < whole_end; ++i) weights[r][i] = hidden;
    for (int i = high[r] > begin ? high[r] : begin; i < whole_end; ++i) weights[r][i] = hidden;
    F most = S::set1(hidden);
    for (int i = begin; i < whole_end; i += 16) most = S::max(most, S::load(&weights[r][i]));
    float top = S::hmax(most);
    if (top == hidden) top = 0.0f;                          // it sees nothing here
    const F tops = S::set1(top);
    F sum = S::zero();
    for (int i = begin; i < whole_end; i += 16) {
      const F e = exp_lanes(S::sub(S::load(&weights[r][i]), tops));
      S::store(&weights[r][i], e);
      sum = S::add(sum, e);
    }
    parts[r][0] = top;
    parts[r][1] = S::hsum(sum);
  }
  float* outs[R];
  for (int r = 0; r < R; ++r) {
    outs[r] = parts[r] + 16;
    for (int d = 0; d < a.head_dim; d += 16) S::store(outs[r] + d, S::zero());
  }
  for (int d = 0; d < a.head_dim; d += 64) {
    add_values<R>(a, &weights[0][0], slots[0], begin, in_place, d, outs);
    for (int r = 0; moved && r < R; ++r) {
      add_values<1>(a, weights[r], slots[r], in_place, high[r], d, &outs[r]);
    }
  }
}

template <int R>
void attend_rest(const Attend& a, int first, int segment, int count) {
  if constexpr (R > 0) {
    if (count == R) return attend_segment<R>(a, first, segment);
    attend_rest<R - 1>(a, first, segment, count);
  }
}

// Fetches keys or values of a segment ahead of their use.
inline void fetch(const Attend& a, const uint16_t* const* pages, int segment) {
  const int num_pages = (a.num_cached + a.num_rows + kPage - 1) / kPage;
  for (int page = segment * kSegment / kPage; page < (segment + 1) * kSegment / kPage && page < num_pages; ++page) {
    const char* at = reinterpret_cast<const char*>(pages[page]);
    for (int byte = 0; byte < kPage * a.head_dim * 2; byte += 64) __builtin_prefetch(at + byte, 0, 2);
  }
}

void attend(const Attend& a) {
  const int count = (a.end_row - a.begin_row) * a.group;
  for (int segment = a.begin_segment; segment < a.end_segment; ++segment) {
    fetch(a, a.values, segment);
    if (segment + 1 < a.end_segment) fetch(a, a.keys, segment + 1);
    int query = 0;
    for (; query + kAttendQueries <= count; query += kAttendQueries) attend_segment<kAttendQueries>(a, query, segment);
    attend_rest<kAttendQueries - 1>(a, query, segment, count - query);
  }
}

void combine(const float* parts, int num_segments, int head_dim, float* out) {
  const int size = part_size(head_dim);
  float top = parts[0];
  for (int s = 1; s < num_segments; ++s) top = parts[s * size] > top ? parts[s * size] : top;
  float sum = 0.0f;
  for (int d = 0; d < head_dim; d += 16) S::store(out + d, S::zero());
  for (int s = 0; s < num_segments; ++s) {
    const float* part = parts + s * size;
    const F factor = exp_lanes(S::set1(part[0] - top));
    float lanes[16];
    S::store(lanes, factor);
    sum += lanes[0] * part[1];
    for (int d = 0; d < head_dim; d += 16) {
      S::store(out + d, S::fma(S::load(part + 16 + d), factor, S::load(out + d)));
    }
  }
  const F inverse = S::set1(1.0f / sum);
  for (int d = 0; d < head_dim; d += 16) S::store(out + d, S::mul(S::load(out + d), inverse));
}

void gate(const float* g, const float* up, float* out, int n, Activation activation) {
  for (int i = 0; i < n; i += 16) {       // rows are padded to whole vectors
    const F x = S::load(g + i);
    F y;
    if (activation == kSilu) {
      y = S::mul(x, sigmoid_lanes(x));
    } else {                              // x/2 (1 + tanh u) = x sigmoid(2u)
      const F x3 = S::mul(S::mul(x, x), x);
      const F u = S::mul(S::set1(0.7978845608028654f), S::fma(S::set1(0.044715f), x3, x));
      y = S::mul(x, sigmoid_lanes(S::add(u, u)));
    }
    S::store(out + i, S::mul(y, S::load(up + i)));
  }
}

void add(float* x, const float* y, int n) {
  int i = 0;
  for (; i + 16 <= n; i += 16) S::store(x + i, S::add(S::load(x + i), S::load(y + i)));
  for (; i < n; ++i) x[i] += y[i];
}

void softcap(float* x, int n, float cap) {
  const F c = S::set1(cap);
  for (int i = 0; i < n; i += 16) {
    float lanes[16];
    const int count = n - i < 16 ? n - i : 16;
    for (int j = 0; j < 16; ++j) lanes[j] = j < count ? x[i + j] : 0.0f;
    S::store(lanes, S::mul(tanh_lanes(S::div(S::load(lanes), c)), c));
    for (int j = 0; j < count; ++j) x[i + j] = lanes[j];
  }
}

inline F load_part(const float* x, int count) {             // lanes past `count` are zero
  if (count >= 16) return S::load(x);
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = i < count ? x[i] : 0.0f;
  return S::load(lanes);
}

inline void store_part(float* x, F v, int count) {
  if (count >= 16) return S::store(x, v);
  float lanes[16];
  S::store(lanes, v);
  for (int i = 0; i < count; ++i) x[i] = lanes[i];
}

void exp_weights(const float* x, float highest, float divisor, float* w, int n) {
  const F top = S::set1(highest), by = S::set1(divisor);
  for (int i = 0; i < n; i += 16) store_part(w + i, exp_lanes(S::div(S::sub(load_part(x + i, n - i), top), by)), n - i);
}

// Sums in double, in 16 lanes of two vectors that the compiler cuts to the registers there are.
typedef float F8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef double D8 __attribute__((vector_size(64)));

struct Sums {
  D8 low = {}, high = {};
  // Adds what `part` makes of each half of the 16 values from i on.
  template <class Part> void add(int i, const Part& part) {
    F8 x;
    part(i, x);
    low += __builtin_convertvector(x, D8);
    part(i + 8, x);
    high += __builtin_convertvector(x, D8);
  }
  double total() const {
    double sum = 0.0;
    for (int j = 0; j < 8; ++j) sum += low[j];
    for (int j = 0; j < 8; ++j) sum += high[j];
    return sum;
  }
};

inline void load_8(const float* x, int count, F8& out) {      // values past `count` are zero
  if (count >= 8) {
    __builtin_memcpy(&out, x, sizeof out);
    return;
  }
  out = F8{};
  for (int j = 0; j < count; ++j) out[j] = x[j];
}

double sum_at_least(const float* w, float threshold, int n) {
  Sums sums;
  for (int i = 0; i < n; i += 16) {
    sums.add(i, [&](int at, F8& x) {
      load_8(w + at, n - at, x);
      x = F8(I8(x) & I8(x >= threshold));
    });
  }
  return sums.total();
}

void scale_at_least(const float* w, float threshold, float divisor, float* p, int n) {
  const F least = S::set1(threshold), by = S::set1(divisor);
  for (int i = 0; i < n; i += 16) {
    const F v = load_part(w + i, n - i);
    store_part(p + i, S::div(S::zero_below(v, v, least), by), n - i);
  }
}

double surplus(const float* p, const float* q, float scale, int n) {
  Sums sums;
  for (int i = 0; i < n; i += 16) {
    sums.add(i, [&](int at, F8& x) {
      F8 y;
      load_8(p + at, n - at, x);
      load_8(q + at, n - at, y);
      x = scale * x - y;
      x = F8(I8(x) & I8(x > 0.0f));
    });
  }
  return sums.total();
}

constexpr Kernels kTable = {S::kName, rms_norm, quantize, matmul,      rotate,       attend,         combine, gate,
                            add,      softcap,  exp_weights, sum_at_least, scale_at_least, surplus};

}  // namespace
}  // namespace forerun
