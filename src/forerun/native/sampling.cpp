#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

namespace forerun {
namespace {

constexpr int kSumChunk = 256;                    // a draw first finds a chunk, then a token in it
constexpr int kShort = 64;
constexpr float kCuts[] = {0x1p-12f, 0x1p-24f};   // weights relative to the largest; those above are looked at first
constexpr int kBinShift = 18;                     // of float bits: sign, exponent and five bits of the fraction are left

void collect(const float* w, int n, float least, std::vector<float>& found) {
  found.resize(size_t(n));
  size_t count = 0;
  for (int i = 0; i < n; ++i) {                   // without a branch: which ones are kept can't be foreseen
    found[count] = w[i];
    count += size_t(w[i] >= least);
  }
  found.resize(count);
}

float kth_largest(const float* w, int n, int k, std::vector<float>& found) {
  if (k >= n) return 0.0f;
  for (float cut : {kCuts[0], kCuts[1], 0.0f}) {
    collect(w, n, cut, found);
    if (int(found.size()) >= k) break;
  }
  std::nth_element(found.begin(), found.begin() + (k - 1), found.end(), std::greater<float>());
  return found[size_t(k - 1)];
}

// The smallest of the largest values whose sum first reaches `needed`, `before` being the sum of those above `values`.
float last_kept(std::vector<float>& values, double before, double needed) {
  // halve what is left around a middle value, until the rest is short
  auto begin = values.begin(), end = values.end();
  while (end - begin > kShort) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, std::greater<float>());
    double above = before;
    for (auto at = begin; at != middle; ++at) above += double(*at);
    if (above >= needed) {
      end = middle;
    } else {
      before = above;
      begin = middle;
    }
  }
  std::sort(begin, end, std::greater<float>());
  for (auto at = begin; at != end; ++at) {
    const float v = *at;
    before += double(v);
    if (before >= needed) return v;
  }
  return begin == end ? 0.0f : *(end - 1);
}

// Weights below `floor` count as zero: what top-k has removed.
float top_p_threshold(const Kernels& kernels, const float* w, int n, float floor, double needed, std::vector<float>& found) {
  for (float cut : kCuts) {
    const float least = std::max(cut, floor);
    if (kernels.sum_at_least(w, least, n) < needed * (1.0 + 1e-13)) continue;   // a margin for another order of adding
    collect(w, n, least, found);
    return last_kept(found, 0.0, needed);
  }
  std::vector<double> mass((0x3f800000u >> kBinShift) + 1, 0.0);
  const auto bin = [](float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    return size_t(bits >> kBinShift);
  };
  for (int i = 0; i < n; ++i) {
    if (w[i] >= floor) mass[bin(w[i])] += double(w[i]);
  }
  double before = 0.0;
  size_t place = mass.size() - 1;
  while (place > 0 && before + mass[place] < needed) before += mass[place--];
  found.clear();
  for (int i = 0; i < n; ++i) {
    if (w[i] >= floor && bin(w[i]) == place) found.push_back(w[i]);
  }
  return last_kept(found, before, needed);
}

}  // namespace

namespace {

// Writes weights, the largest 1, and returns the least weight that is kept.
float weigh(const Kernels& kernels, const float* x, int n, const Transforms& t, float* w) {
  kernels.exp_weights(x, t.highest, t.divisor, w, n);
  thread_local std::vector<float> found;
  float threshold = 0.0f;
  if (t.top_k > 0) threshold = kth_largest(w, n, t.top_k, found);
  if (t.top_p < 1.0) {
    const double needed = t.top_p * kernels.sum_at_least(w, threshold, n);
    threshold = std::max(threshold, top_p_threshold(kernels, w, n, threshold, needed, found));
  }
  return std::max(threshold, t.min_p);
}

struct Drawn {
  int token;
  double total;
};

// Of weights below `threshold` none is drawn.
Drawn draw_at_least(const Kernels& kernels, const float* law, float threshold, double u, int n) {
  thread_local std::vector<double> sums;
  sums.clear();
  double total = 0.0;
  for (int begin = 0; begin < n; begin += kSumChunk) {
    sums.push_back(kernels.sum_at_least(law + begin, threshold, std::min(n - begin, kSumChunk)));
    total += sums.back();
  }
  const double target = u * total;
  double before = 0.0;
  int chunk = -1, last = 0;                        // `last`: the last chunk that has mass
  for (int c = 0; c < int(sums.size()) && chunk < 0; ++c) {
    if (!(sums[size_t(c)] > 0.0)) continue;
    last = c;
    if (before + sums[size_t(c)] > target) {
      chunk = c;
    } else {
      before += sums[size_t(c)];
    }
  }
  const bool past_end = chunk < 0;                 // by rounding; then the last token that has mass
  int found = 0;
  for (int i = (past_end ? last : chunk) * kSumChunk, end = std::min(n, i + kSumChunk); i < end; ++i) {
    if (!(law[i] > 0.0f && law[i] >= threshold)) continue;
    found = i;
    before += double(law[i]);
    if (!past_end && before > target) break;
  }
  return {found, total};
}

}  // namespace

void law(const Kernels& kernels, const float* x, int n, const Transforms& t, float* p) {
  const float threshold = weigh(kernels, x, n, t, p);
  kernels.scale_at_least(p, threshold, float(kernels.sum_at_least(p, threshold, n)), p, n);
}

double surplus(const Kernels& kernels, const float* p, const float* q, float scale, int n) {
  return kernels.surplus(p, q, scale, n);
}

int draw(const Kernels& kernels, const float* law, double u, int n) {
  return draw_at_least(kernels, law, 0.0f, u, n).token;
}

Choice choose(const Kernels& kernels, const float* x, int n, const Transforms& t, double u) {
  if (t.divisor == 0.0f) return {int(std::find(x, x + n, t.highest) - x), 1.0f};
  thread_local std::vector<float> weights;
  weights.resize(size_t(n));
  const float threshold = weigh(kernels, x, n, t, weights.data());
  const Drawn drawn = draw_at_least(kernels, weights.data(), threshold, u, n);
  if (!std::isfinite(drawn.total)) return {-1, 0.0f};
  return {drawn.token, weights[size_t(drawn.token)] / float(drawn.total)};
}

int race(const float* law, int n, uint64_t key) {
  int first = 0;
  double best = 0.0;
  for (int i = 0; i < n; ++i) {
    if (!(law[i] > 0.0f)) continue;
    uint64_t h = key + uint64_t(i + 1) * 0x9E3779B97F4A7C15u;      // SplitMix64
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
    h ^= h >> 31;
    const double u = (double(h >> 12) + 0.5) * 0x1p-52;
    if (double(law[i]) < 0.999999 * best * (1.0 - u)) continue;    // -log u is at least 1 - u
    const double speed = double(law[i]) / -std::log(u);
    if (speed > best) {
      best = speed;
      first = i;
    }
  }
  return first;
}

void top_ids(const float* x, int n, int k, int64_t* ids) {
  constexpr int kBlock = 64;  // numbers that are passed over at once if none is large enough
  int count = 0;
  for (int i = 0; i < n; ++i) {
    if (count == k && i % kBlock == 0) {
      const float least = x[ids[k - 1]];
      for (; i + kBlock <= n; i += kBlock) {
        int larger = 0;
        for (int j = 0; j < kBlock; ++j) larger |= x[i + j] > least;
        if (larger) break;
      }
      if (i == n) break;
    }
    if (count == k && !(x[i] > x[ids[k - 1]])) continue;
    int place = count < k ? count++ : k - 1;
    for (; place > 0 && x[i] > x[ids[place - 1]]; --place) ids[place] = ids[place - 1];
    ids[place] = i;
  }
}

}  // namespace forerun
