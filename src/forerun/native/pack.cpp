#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"

namespace forerun {
namespace {

// One block of one output: a scale, a minimum, 32 bytes of quants.
struct Block {
  uint16_t scale = 0, minimum = 0;
  uint8_t quants[kBlock];
};

Block read_block(Kind kind, const uint8_t* from) {
  Block block;
  std::memcpy(&block.scale, from, 2);
  from += 2;
  if (kind == kQ8_0) {
    for (int i = 0; i < kBlock; ++i) block.quants[i] = uint8_t(from[i] ^ 0x80u);
    return block;
  }
  if (kind == kQ4_1) {
    std::memcpy(&block.minimum, from, 2);
    from += 2;
  }
  for (int i = 0; i < kBlock / 2; ++i) {      // GGUF: byte i holds inputs i and i + 16
    block.quants[i] = from[i] & 15;
    block.quants[i + 16] = from[i] >> 4;
  }
  return block;
}

int block_bytes(Kind kind) { return kind == kQ8_0 ? 34 : kind == kQ4_1 ? 20 : 18; }

}  // namespace

void pack(Kind kind, const uint8_t* source, int64_t row_bytes, const int64_t* row_map, int outputs, int inputs,
          uint8_t* quants, uint16_t* scales, uint16_t* minima) {
  const int tiles = (outputs + kTile - 1) / kTile;
  if (kind == kBF16) {
    uint16_t* to = reinterpret_cast<uint16_t*>(quants);
    for (int tile = 0; tile < tiles; ++tile) {
      for (int lane = 0; lane < kTile; ++lane) {
        const int output = tile * kTile + lane;
        const int64_t row = output < outputs ? row_map[output] : -1;
        for (int i = 0; i < inputs; ++i) {
          uint16_t value = 0;
          if (row >= 0) std::memcpy(&value, source + row * row_bytes + int64_t(i) * 2, 2);
          to[(int64_t(tile) * inputs + i) * kTile + lane] = value;
        }
      }
    }
    return;
  }
  const int blocks = inputs / kBlock;
  const int64_t bytes = kind == kQ8_0 ? 512 : 256;
  for (int tile = 0; tile < tiles; ++tile) {
    for (int b = 0; b < blocks; ++b) {
      const int64_t at = int64_t(tile) * blocks + b;
      uint8_t* to = quants + at * bytes;
      std::memset(to, 0, size_t(bytes));
      for (int lane = 0; lane < kTile; ++lane) {
        const int output = tile * kTile + lane;
        const int64_t row = output < outputs ? row_map[output] : -1;
        Block block;
        if (row >= 0) {
          block = read_block(kind, source + row * row_bytes + int64_t(b) * block_bytes(kind));
        } else {
          std::memset(block.quants, kind == kQ8_0 ? 0x80 : 0, sizeof block.quants);   // zero
        }
        scales[at * kTile + lane] = block.scale;
        if (kind == kQ4_1) minima[at * kTile + lane] = block.minimum;
        for (int i = 0; i < kBlock; ++i) {
          const int group = i / 4;
          if (kind == kQ8_0) {
            to[group * 64 + lane * 4 + i % 4] = block.quants[i];
          } else {
            uint8_t& both = to[(group % 4) * 64 + lane * 4 + i % 4];
            both = uint8_t(both | (group < 4 ? block.quants[i] : block.quants[i] << 4));
          }
        }
      }
    }
  }
}


namespace {

struct Fit {
  float scale = 0.0f, minimum = 0.0f, error = 0.0f;
  uint8_t quants[kBlock] = {};
};

// Rounds x to minimum + scale * q with q in 0 ... 15, and measures the error with scale and minimum as fp16.
Fit round_q4(const float* x, float scale, float minimum) {
  Fit fit;
  fit.scale = half_to_float(float_to_half(scale));
  fit.minimum = half_to_float(float_to_half(minimum));
  const float inverse = fit.scale > 0.0f ? 1.0f / fit.scale : 0.0f;
  for (int i = 0; i < kBlock; ++i) {
    const float q = std::min(15.0f, std::max(0.0f, std::nearbyint((x[i] - fit.minimum) * inverse)));
    const float off = x[i] - (fit.minimum + fit.scale * q);
    fit.quants[i] = uint8_t(q);
    fit.error += off * off;
  }
  return fit;
}

Fit best_q4(const float* x) {
  float low = x[0], high = x[0];
  for (int i = 1; i < kBlock; ++i) {
    low = std::min(low, x[i]);
    high = std::max(high, x[i]);
  }
  Fit best = round_q4(x, (high - low) / 15.0f, low);
  for (int step = 0; step < 10; ++step) {
    // a range a little narrower: the two ends are cut off for finer steps between
    const float shrink = 0.02f * float(step) * (high - low);
    Fit fit = round_q4(x, (high - low - 2.0f * shrink) / 15.0f, low + shrink);
    double q = 0, qq = 0, v = 0, qv = 0;
    for (int i = 0; i < kBlock; ++i) {
      q += fit.quants[i];
      qq += double(fit.quants[i]) * fit.quants[i];
      v += x[i];
      qv += double(fit.quants[i]) * x[i];
    }
    const double determinant = kBlock * qq - q * q;
    if (determinant > 0) {
      const double scale = (kBlock * qv - q * v) / determinant;
      if (scale > 0) {
        const Fit refit = round_q4(x, float(scale), float((v - scale * q) / kBlock));
        if (refit.error < fit.error) fit = refit;
      }
    }
    if (fit.error < best.error) best = fit;
  }
  return best;
}

void write_q8(const float* x, uint8_t* to) {
  float most = 0.0f;
  for (int i = 0; i < kBlock; ++i) most = std::max(most, std::fabs(x[i]));
  float best_error = -1.0f;
  for (int step = -2; step <= 2; ++step) {
    const uint16_t half = float_to_half(most / 127.0f * (1.0f + 0.001f * float(step)));
    const float scale = half_to_float(half), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    int8_t quants[kBlock];
    float error = 0.0f;
    for (int i = 0; i < kBlock; ++i) {
      const float q = std::min(127.0f, std::max(-127.0f, std::nearbyint(x[i] * inverse)));
      quants[i] = int8_t(q);
      error += (x[i] - q * scale) * (x[i] - q * scale);
    }
    if (best_error < 0.0f || error < best_error) {
      best_error = error;
      std::memcpy(to, &half, 2);
      std::memcpy(to + 2, quants, kBlock);
    }
  }
}

}  // namespace

void quantise(Kind kind, const float* rows, int64_t num_rows, int inputs, uint8_t* blocks) {
  const int64_t count = num_rows * (inputs / kBlock);
  for (int64_t b = 0; b < count; ++b, rows += kBlock, blocks += block_bytes(kind)) {
    if (kind == kQ8_0) {
      write_q8(rows, blocks);
      continue;
    }
    const Fit fit = best_q4(rows);
    const uint16_t scale = float_to_half(fit.scale), minimum = float_to_half(fit.minimum);
    std::memcpy(blocks, &scale, 2);
    std::memcpy(blocks + 2, &minimum, 2);
    for (int i = 0; i < kBlock / 2; ++i) blocks[4 + i] = uint8_t(fit.quants[i] | (fit.quants[i + 16] << 4));
  }
}

}  // namespace forerun
