// Plain C++: the reference of all others. Slow where the compiler has no fused multiply-add to use.
#include <cmath>
#include <cstdint>

namespace forerun {
namespace {
struct S {
  struct F { float x[16]; };
  struct I { int32_t x[16]; };
  struct B { uint8_t x[64]; };
  static constexpr const char* kName = "portable";
  static constexpr int kRows = 1;
  static constexpr int kQ8Bias = 0;

  template <class Op> static F each(Op op) {
    F out;
    for (int i = 0; i < 16; ++i) out.x[i] = op(i);
    return out;
  }
  static F zero() { return each([](int) { return 0.0f; }); }
  static F set1(float v) { return each([=](int) { return v; }); }
  static F load(const float* p) { return each([=](int i) { return p[i]; }); }
  static void store(float* p, F v) { for (int i = 0; i < 16; ++i) p[i] = v.x[i]; }
  static float widen(uint32_t bits) {
    float f;
    __builtin_memcpy(&f, &bits, 4);
    return f;
  }
  static float half(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16, rest = h & 0x7fffu;
    if (rest >= 0x7c00u) return widen(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
    if (rest >= 0x400u) return widen(sign | ((rest + (112u << 10)) << 13));
    const float small = widen((113u << 23) | (rest << 13)) - widen(113u << 23);
    return sign ? -small : small;
  }
  static F load_f16(const uint16_t* p) { return each([=](int i) { return half(p[i]); }); }
  static F load_bf16(const uint16_t* p) { return each([=](int i) { return widen(uint32_t(p[i]) << 16); }); }
  static F add(const F& a, const F& b) { return each([&](int i) { return a.x[i] + b.x[i]; }); }
  static F sub(const F& a, const F& b) { return each([&](int i) { return a.x[i] - b.x[i]; }); }
  static F mul(const F& a, const F& b) { return each([&](int i) { return a.x[i] * b.x[i]; }); }
  static F div(const F& a, const F& b) { return each([&](int i) { return a.x[i] / b.x[i]; }); }
  static F max(const F& a, const F& b) { return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; }); }
  static F min(const F& a, const F& b) { return each([&](int i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; }); }
  static F abs(const F& a) { return each([&](int i) { return __builtin_fabsf(a.x[i]); }); }
  static F fma(const F& a, const F& b, const F& c) {
    return each([&](int i) { return __builtin_fmaf(a.x[i], b.x[i], c.x[i]); });
  }
  static F round(const F& a) { return each([&](int i) { return __builtin_nearbyintf(a.x[i]); }); }
  static F scale_pow2(const F& v, const F& n) {
    return each([&](int i) { return v.x[i] * widen(uint32_t(int32_t(n.x[i]) + 127) << 23); });
  }
  static F zero_below(const F& y, const F& v, const F& low) {
    return each([&](int i) { return v.x[i] >= low.x[i] ? y.x[i] : 0.0f; });
  }
  static float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  static float sqrt1(float a) { return __builtin_sqrtf(a); }
  template <class Op> static float fold(F a, Op op) {
    for (int half_width = 8; half_width > 0; half_width /= 2) {
      for (int i = 0; i < half_width; ++i) a.x[i] = op(a.x[i], a.x[i + half_width]);
    }
    return a.x[0];
  }
  static float hsum(const F& a) { return fold(a, [](float p, float q) { return p + q; }); }
  static float hmax(const F& a) { return fold(a, [](float p, float q) { return p > q ? p : q; }); }
  static int32_t store_i8(int8_t* p, const F& lo, const F& hi) {
    int32_t sum = 0;
    for (int i = 0; i < 32; ++i) {
      p[i] = int8_t(i < 16 ? lo.x[i] : hi.x[i - 16]);
      sum += p[i];
    }
    return sum;
  }
  static I iset1(int32_t v) {
    I out;
    for (int i = 0; i < 16; ++i) out.x[i] = v;
    return out;
  }
  static I izero() { return iset1(0); }
  static I iadd(I a, const I& b) {
    for (int i = 0; i < 16; ++i) a.x[i] += b.x[i];
    return a;
  }
  static F convert(const I& a) { return each([&](int i) { return float(a.x[i]); }); }
  static B load_q8(const uint8_t* p) {
    B out;
    __builtin_memcpy(out.x, p, 64);
    return out;
  }
  static void load_q4(const uint8_t* p, B& low, B& high) {
    for (int i = 0; i < 64; ++i) {
      low.x[i] = p[i] & 15;
      high.x[i] = p[i] >> 4;
    }
  }
  static I dot(I acc, const B& w, const int8_t* a, int bias) {
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 4; ++j) acc.x[i] += (int32_t(w.x[4 * i + j]) - bias) * a[j];
    }
    return acc;
  }
  static I dot_q8(const I& acc, const B& w, const int8_t* a) { return dot(acc, w, a, 128); }
  static I dot_q4(const I& acc, const B& w, const int8_t* a) { return dot(acc, w, a, 0); }
};
}  // namespace
}  // namespace forerun

#include "kernels_impl.h"

namespace forerun {
const Kernels* kernels_portable() { return &kTable; }
}  // namespace forerun
