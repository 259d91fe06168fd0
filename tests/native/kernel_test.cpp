// The kernels without Python, to be run under sanitizers and under an emulator: every instruction set that this
// processor has must agree with the portable one to the bit, for odd sizes, row counts and window, chain and tree.
//
//   kernel_test          every set of widths with every number of threads
//   kernel_test quick    each set of widths and each number of threads once: a third of the time
//   kernel_test sets     only prints the instruction sets that this processor has
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "decoder.h"
#include "half.h"
#include "pack.h"
#include "select.h"

using namespace forerun;

namespace {

uint32_t state = 12345;
float uniform() {                     // in [-1, 1)
  state = state * 1664525u + 1013904223u;
  return float(state >> 8) / 8388608.0f - 1.0f;
}

struct Packed {
  Matrix matrix{};
  std::vector<uint8_t> quants;
  std::vector<uint16_t> scales, minima;
};

Packed make_matrix(Kind kind, int outputs, int inputs) {
  std::vector<float> rows(size_t(outputs) * inputs);
  for (float& x : rows) x = 0.2f * uniform();
  Packed p;
  const int tiles = (outputs + kTile - 1) / kTile, blocks = inputs / kBlock;
  std::vector<int64_t> map(outputs);
  for (int i = 0; i < outputs; ++i) map[i] = i;
  std::vector<uint8_t> source;
  int64_t row_bytes;
  if (kind == kBF16) {
    row_bytes = inputs * 2;
    source.resize(size_t(outputs) * row_bytes);
    for (size_t i = 0; i < rows.size(); ++i) {
      uint32_t bits;
      std::memcpy(&bits, &rows[i], 4);
      const uint16_t top = uint16_t(bits >> 16);
      std::memcpy(&source[2 * i], &top, 2);
    }
    p.quants.resize(size_t(tiles) * kTile * inputs * 2);
  } else {
    const Kind coded = kind == kQ4_0 ? kQ4_1 : kind;
    row_bytes = int64_t(blocks) * (coded == kQ8_0 ? 34 : 20);
    source.resize(size_t(outputs) * row_bytes);
    quantise(coded, rows.data(), outputs, inputs, source.data());
    if (kind == kQ4_0) {              // drop the minima: any nibbles will do
      std::vector<uint8_t> shorter;
      for (size_t b = 0; b < size_t(outputs) * blocks; ++b) {
        shorter.insert(shorter.end(), &source[b * 20], &source[b * 20] + 2);
        shorter.insert(shorter.end(), &source[b * 20] + 4, &source[b * 20] + 20);
      }
      source = shorter;
      row_bytes = int64_t(blocks) * 18;
    }
    p.quants.resize(size_t(tiles) * blocks * (kind == kQ8_0 ? 512 : 256));
    p.scales.resize(size_t(tiles) * blocks * kTile);
    if (kind == kQ4_1) p.minima.resize(p.scales.size());
  }
  pack(kind, source.data(), row_bytes, map.data(), outputs, inputs, p.quants.data(), p.scales.data(), p.minima.data());
  p.matrix = {kind, outputs, inputs, p.quants.data(), p.scales.data(), p.minima.data()};
  return p;
}

struct Net {
  Config config{};
  std::vector<Packed> matrices;
  std::vector<std::vector<float>> vectors;
  std::vector<LayerWeights> layers;
  Matrix embed, head;
  const float* norm;

  const float* vector(int n) {
    vectors.emplace_back(n);
    for (float& x : vectors.back()) x = 1.0f + 0.1f * uniform();
    return vectors.back().data();
  }
  Matrix matrix(Kind kind, int outputs, int inputs) {
    matrices.push_back(make_matrix(kind, outputs, inputs));
    return matrices.back().matrix;
  }
};

Net make_net(Kind kind, bool extras) {
  Net net;
  net.matrices.reserve(64);
  net.vectors.reserve(64);
  Config& c = net.config;
  c = {83, 64, 96, 6, 2, 32, 32, 1e-5f, 0.2f, extras ? 20.0f : 0.0f, extras ? 15.0f : 0.0f, extras ? 8.0f : 1.0f,
       extras ? kGeluTanh : kSilu};
  for (int i = 0; i < 2; ++i) {
    LayerWeights w;
    w.q = net.matrix(kind, 192, 64);
    w.k = net.matrix(kind, 64, 64);
    w.v = net.matrix(kind, 64, 64);
    w.o = net.matrix(kind, 64, 192);
    w.gate = net.matrix(kind, 96, 64);
    w.up = net.matrix(kind, 96, 64);
    w.down = net.matrix(kind, 64, 96);
    w.attn_norm = net.vector(64);
    w.mlp_norm = net.vector(64);
    if (extras) {
      w.post_attn_norm = net.vector(64);
      w.post_mlp_norm = net.vector(64);
      w.q_norm = net.vector(32);
      w.k_norm = net.vector(32);
      w.q_bias = net.vector(192);
      w.o_bias = net.vector(64);
    }
    w.window = extras && i == 0 ? 7 : 0;
    w.rope = 0;
    net.layers.push_back(w);
  }
  net.embed = net.matrix(kind, 83, 64);
  net.head = net.matrix(kBF16, 83, 64);
  net.norm = net.vector(64);
  return net;
}

// Feeds `widths` rows at a time and returns the logits of all rows.
std::vector<float> write(const Net& net, const Kernels* kernels, int threads, const std::vector<int>& widths, bool tree) {
  Decoder decoder(kernels, net.config, net.layers, net.embed, net.head, net.norm, threads);
  std::vector<int64_t> pages;
  std::vector<float> all;
  int cached = 0;
  for (int rows : widths) {
    while (int(pages.size()) * kPage < cached + rows) pages.push_back(decoder.new_page());
    std::vector<int32_t> tokens(rows), positions(rows), wanted(rows);
    std::vector<float> cosines(size_t(rows) * 16), sines(size_t(rows) * 16), logits(size_t(rows) * 83);
    std::vector<uint8_t> seen(size_t(rows) * rows, 0);
    for (int r = 0; r < rows; ++r) {
      tokens[r] = (cached + r) * 31 % 83;
      positions[r] = cached + r;
      wanted[r] = r;
      for (int j = 0; j <= r; ++j) seen[size_t(r) * rows + j] = 1;      // a chain, written as a tree
      for (int i = 0; i < 16; ++i) {                                    // any numbers of modulus about 1 will do
        cosines[size_t(r) * 16 + i] = 1.0f / float(1 + (positions[r] * (i + 1)) % 7);
        sines[size_t(r) * 16 + i] = 0.5f / float(1 + (positions[r] + i) % 5);
      }
    }
    const Feed feed{0, rows, cached, tree ? seen.data() : nullptr, pages.data()};
    const float* cosine = cosines.data();
    const float* sine = sines.data();
    Pass pass{rows, 1, rows, tokens.data(), positions.data(), &cosine, &sine, &feed, wanted.data(), logits.data(), 0,
              nullptr, nullptr};
    decoder.run(pass);
    cached += rows;
    all.insert(all.end(), logits.begin(), logits.end());
  }
  return all;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

int check(bool ok, const std::string& what) {
  std::printf("%s %s\n", ok ? "ok    " : "FAILED", what.c_str());
  return ok ? 0 : 1;
}

int check_halves() {
  int failed = 0;
  for (uint32_t h = 0; h < 0x10000u; ++h) {
    const bool nan = (h & 0x7c00u) == 0x7c00u && (h & 0x3ffu);
    if (!nan && float_to_half(half_to_float(uint16_t(h))) != h) ++failed;
  }
  return check(failed == 0, "every half survives the way to float and back");
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "quick") == 0;
  if (argc > 1 && std::strcmp(argv[1], "sets") == 0) {
    for (const std::string& set : available_sets()) std::printf("%s\n", set.c_str());
    return 0;
  }
  int failures = check_halves();
  const Kind kinds[] = {kQ4_0, kQ4_1, kQ8_0, kBF16};
  const char* names[] = {"q4_0", "q4_1", "q8_0", "bf16"};
  const std::vector<int> ones(75, 1), mixed{1, 2, 3, 4, 5, 8, 9, 16, 27}, whole{75};
  for (Kind kind : kinds) {
    for (bool extras : {false, true}) {
      const Net net = make_net(kind, extras);
      const std::vector<float> expected = write(net, kernels_portable(), 1, ones, false);
      bool finite = true;
      for (float x : expected) finite = finite && x - x == 0.0f;
      const std::string label = std::string(names[kind]) + (extras ? " with extras" : "");
      failures += check(finite, label + " is finite");
      for (const std::string& set : available_sets()) {
        const Kernels* kernels = select_kernels(set.c_str());
        bool ok = true;
        int place = 0;
        for (const auto& widths : {whole, mixed, ones}) {
          for (int threads : {1, 2, 3}) {
            if (quick && threads != place + 1) continue;
            ok = ok && same(expected, write(net, kernels, threads, widths, threads == 2));
          }
          ++place;
        }
        failures += check(ok, label + " on " + set + " equals portable, for all widths and threads");
      }
    }
  }
  std::printf("%d failed\n", failures);
  return failures ? 1 : 0;
}
