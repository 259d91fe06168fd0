// Sampling over rows of logits: the compiled twins of forerun/sampling/laws.py and verify.py.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace forerun {

struct Transforms {             // of one row
  float highest;                // its largest logit, finite
  float divisor;                // the temperature
  int top_k;                    // 0: off
  double top_p;                 // 1: off
  float min_p;                  // 0: off
};

// Writes the law of a row after temperature, top-k, top-p and min-p. x and p may not overlap.
void law(const Kernels& kernels, const float* x, int n, const Transforms& transforms, float* p);

// The mass of max(scale p - q, 0).
double surplus(const Kernels& kernels, const float* p, const float* q, float scale, int n);

// The index at which the running sum of a law (not normalised) first exceeds u times the whole, u in [0, 1). An index
// without mass is never returned.
int draw(const Kernels& kernels, const float* law, double u, int n);

}  // namespace forerun
