// From rows of weights as they lie in files to the tiles of kernels.h.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace forerun {

// `source` holds rows of GGUF blocks of `kind` (for bf16: rows of uint16), `row_bytes` apart. Output o of the matrix is
// row row_map[o] of it; -1 stands for a row of zeros. `inputs` is a multiple of 32, for bf16 any number. The buffers
// hold what `packed_bytes` says; the last tile is filled up with zeros.
void pack(Kind kind, const uint8_t* source, int64_t row_bytes, const int64_t* row_map, int outputs, int inputs,
          uint8_t* quants, uint16_t* scales, uint16_t* minima);

// Quantises rows of floats to GGUF blocks of q4_1 or q8_0, `inputs` a multiple of 32. For each block it tries several
// scales, fits scale and minimum to the rounded values by least squares, and keeps what has the least squared error.
void quantise(Kind kind, const float* rows, int64_t num_rows, int inputs, uint8_t* blocks);

}  // namespace forerun
