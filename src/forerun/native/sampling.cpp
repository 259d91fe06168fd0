#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

namespace forerun {
namespace {

constexpr int kSumChunk = 256;                    // a draw first finds a chunk, then a token in it
constexpr float kCuts[] = {0x1p-12f, 0x1p-24f};   // weights relative to the largest; those above are looked at first
constexpr int kBinShift = 18;                     // of float bits: sign, exponent and five bits of the fraction are left

void collect(const float* w, int n, float least, std::vector<float>& found) {
  found.clear();
  for (int i = 0; i < n; ++i) {
    if (w[i] >= least) found.push_back(w[i]);
  }
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
  std::sort(values.begin(), values.end(), std::greater<float>());
  for (float v : values) {
    before += double(v);
    if (before >= needed) return v;
  }
  return values.empty() ? 0.0f : values.back();
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

void law(const Kernels& kernels, const float* x, int n, const Transforms& t, float* p) {
  kernels.exp_weights(x, t.highest, t.divisor, p, n);
  thread_local std::vector<float> found;
  float threshold = 0.0f;
  if (t.top_k > 0) threshold = kth_largest(p, n, t.top_k, found);
  if (t.top_p < 1.0) {
    const double needed = t.top_p * kernels.sum_at_least(p, threshold, n);
    threshold = std::max(threshold, top_p_threshold(kernels, p, n, threshold, needed, found));
  }
  threshold = std::max(threshold, t.min_p);
  kernels.scale_at_least(p, threshold, float(kernels.sum_at_least(p, threshold, n)), p, n);
}

double surplus(const Kernels& kernels, const float* p, const float* q, float scale, int n) {
  return kernels.surplus(p, q, scale, n);
}

int draw(const Kernels& kernels, const float* law, double u, int n) {
  thread_local std::vector<double> sums;
  sums.clear();
  double total = 0.0;
  for (int begin = 0; begin < n; begin += kSumChunk) {
    sums.push_back(kernels.sum_at_least(law + begin, 0.0f, std::min(n - begin, kSumChunk)));
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
    if (!(law[i] > 0.0f)) continue;
    found = i;
    before += double(law[i]);
    if (!past_end && before > target) break;
  }
  return found;
}

}  // namespace forerun
