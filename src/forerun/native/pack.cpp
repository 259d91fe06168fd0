#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"

namespace forerun {
namespace {

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
  // Four bytes of a block stay together: four inputs of Q8_0; of Q4 four inputs and the four 16 places further on.
  const int blocks = inputs / kBlock, groups = kind == kQ8_0 ? 8 : 4, header = kind == kQ4_1 ? 4 : 2;
  const uint32_t flip = kind == kQ8_0 ? 0x80808080u : 0u;    // signed to unsigned
  for (int tile = 0; tile < tiles; ++tile) {
    for (int lane = 0; lane < kTile; ++lane) {
      const int output = tile * kTile + lane;
      const int64_t row = output < outputs ? row_map[output] : -1;
      const uint8_t* from = row < 0 ? nullptr : source + row * row_bytes;
      for (int b = 0; b < blocks; ++b) {
        const int64_t cell = (int64_t(tile) * blocks + b) * kTile + lane;
        uint8_t* to = quants + (cell - lane) * 4 * groups + lane * 4;
        uint16_t scale = 0, minimum = 0;
        if (from) {
          std::memcpy(&scale, from, 2);
          if (kind == kQ4_1) std::memcpy(&minimum, from + 2, 2);
        }
        scales[cell] = scale;
        if (kind == kQ4_1) minima[cell] = minimum;
        for (int g = 0; g < groups; ++g) {
          uint32_t four = 0;
          if (from) std::memcpy(&four, from + header + 4 * g, 4);
          four ^= flip;
          std::memcpy(to + g * 4 * kTile, &four, 4);
        }
        if (from) from += block_bytes(kind);
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
