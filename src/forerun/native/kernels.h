// What a pass is made of, and the table of kernels that each instruction set fills.
//
// The layout of packed weights is the same for all instruction sets. A matrix (outputs x inputs) is cut into tiles of
// 16 outputs and, for quantised kinds, blocks of 32 inputs:
//
//   q8   64 bytes hold 16 outputs x 4 inputs (output-major, 4 neighbouring inputs together); 8 such groups to a block.
//        Bytes are unsigned: w + 128.
//   q4   64 bytes hold two groups in their nibbles: low nibbles group g, high nibbles group g + 4; 4 of them to a block.
//   bf16 32 bytes hold 16 outputs x 1 input.
//
// Quants of all tiles come first, [tile][block]; then the scales (fp16, 16 to a tile and block), then for q4_1 the
// minima likewise. Activations are int8 for each row and block of 32 inputs, with a float scale.
//
// Every output is one chain of operations in a fixed order, whatever the other rows of the pass are and whatever the
// number of threads is; all instruction sets perform that same chain, so they agree to the bit.
#pragma once
#include <cstddef>
#include <cstdint>

namespace forerun {

constexpr int kTile = 16;       // outputs in a tile; also the lanes of a vector
constexpr int kBlock = 32;      // inputs that share a scale
constexpr int kPage = 64;       // positions in a page of the cache
constexpr int kSegment = 128;   // positions whose softmax is taken on its own; see `attend`
constexpr int kAttendQueries = 4;  // queries that meet a key together

enum Kind : int { kQ4_0 = 0, kQ4_1 = 1, kQ8_0 = 2, kBF16 = 3 };
enum Activation : int { kSilu = 0, kGeluTanh = 1 };

struct Matrix {
  Kind kind;
  int outputs, inputs;          // inputs padded to a multiple of 32; outputs as they are
  const uint8_t* quants;        // 64-byte aligned
  const uint16_t* scales;       // fp16; null for bf16
  const uint16_t* minima;       // fp16; q4_1 only
  // always inlined: no copy of theirs may come out of an instruction set's source file
  [[gnu::always_inline]] int tiles() const { return (outputs + kTile - 1) / kTile; }
  [[gnu::always_inline]] int blocks() const { return inputs / kBlock; }
};

// Rows of activations in the forms that matrices eat. n = padded inputs.
struct Rows {
  const float* values;          // (rows, n), for bf16 weights
  const int8_t* quants;         // (rows, n)
  const float* scales;          // (rows, n / 32)
  const int32_t* sums;          // (rows, n / 32): sums of the quants of a block
  int n;
};

struct Attend {                 // the queries of one key head, of some rows of one sequence
  const float* queries;         // head h of row r at queries + r * query_stride + h * head_dim; rotated
  int query_stride;
  int group;                    // query heads of the key head
  int begin_row, end_row;       // of the sequence in this pass
  int num_rows;                 // of the sequence in this pass
  int num_cached;               // positions before this pass; row r of the pass lies in slot num_cached + r
  const int32_t* positions;     // of the rows
  const uint8_t* tree;          // (num_rows, num_rows), 1 where row r sees row j; null: a chain
  const uint16_t* const* keys;  // by page: [page slots / 16][head_dim][16] fp16
  const uint16_t* const* values;// by page: [page slots][head_dim] fp16
  int head_dim;                 // a multiple of 16
  int window;                   // 0: none
  float scale, softcap;         // softcap 0: none
  int begin_segment, end_segment;
  // What is found for head h of row r in a segment s: at parts + (((r - begin_row) * group + h) * part_stride + s) *
  // part_size(head_dim) the largest score, the sum of the weights, and from 16 floats on the weighted sum of the values.
  float* parts;
  int part_stride;
  float* scratch;               // attend_scratch(num_rows) floats
};

[[gnu::always_inline]] constexpr int part_size(int head_dim) { return 16 + head_dim; }
[[gnu::always_inline]] constexpr int attend_scratch(int num_rows) { return kAttendQueries * (num_rows + 48); }

struct Kernels {
  const char* name;
  void (*rms_norm)(const float* x, const float* weight, float* out, int n, float eps);
  void (*quantize)(const float* x, int n, int8_t* quants, float* scales, int32_t* sums);
  // out[row * stride + output] (+)= sum over inputs, for tiles [begin, end)
  void (*matmul)(const Matrix& w, const Rows& x, int num_rows, float* out, int stride, int begin, int end, bool add);
  void (*rotate)(float* head, const float* cosine, const float* sine, int rotary_dim);
  // Attention of each query to each segment of positions that it sees. A key counts at its position, wherever it lies.
  void (*attend)(const Attend& a);
  // Puts segments together, in their order: the result of one query, head_dim floats.
  void (*combine)(const float* parts, int num_segments, int head_dim, float* out);
  void (*gate)(const float* gate, const float* up, float* out, int n, Activation activation);
  void (*add)(float* x, const float* y, int n);
  void (*softcap)(float* x, int n, float cap);
  // Of sampling. Sums are in double, in 16 lanes.
  void (*exp_weights)(const float* x, float highest, float divisor, float* w, int n);   // e^((x - highest) / divisor)
  double (*sum_at_least)(const float* w, float threshold, int n);
  void (*scale_at_least)(const float* w, float threshold, float divisor, float* p, int n);
  double (*surplus)(const float* p, const float* q, float scale, int n);                // sum of max(scale p - q, 0)
};

const Kernels* kernels_portable();
const Kernels* kernels_avx2();
const Kernels* kernels_avx2_vnni();
const Kernels* kernels_avx512();
const Kernels* kernels_neon();

}  // namespace forerun
