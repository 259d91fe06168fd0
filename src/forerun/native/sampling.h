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

struct Choice {
  int token;                    // -1: no finite law
  float mass;                   // of the token, under the law
};
// Draws from the law of a row, which is never written out. A divisor of 0: the largest logit, the first of equals.
Choice choose(const Kernels& kernels, const float* x, int n, const Transforms& transforms, double u);

// The first index of the largest law[i] / E_i, E the exponential variates keyed by `key` (forerun/sampling/streams.py).
int race(const float* law, int n, uint64_t key);

// The indices of the k largest values, largest first, the lower index first among equals. k is at most n.
void top_ids(const float* x, int n, int k, int64_t* ids);

}  // namespace forerun
