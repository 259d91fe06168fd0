// AArch64 with the dot-product extension: four registers are the vector.
#include <arm_neon.h>
#include <cstdint>

namespace forerun {
namespace {
struct S {
  struct F { float32x4_t x[4]; };
  struct I { int32x4_t x[4]; };
  struct B { int8x16_t x[4]; };
  static constexpr const char* kName = "neon";
  static constexpr int kRows = 2;
  static constexpr int kQ8Bias = 0;

  template <class Op> static F each(Op op) { return {{op(0), op(1), op(2), op(3)}}; }
  static F zero() { return set1(0.0f); }
  static F set1(float v) { return each([=](int) { return vdupq_n_f32(v); }); }
  static F load(const float* p) { return each([=](int i) { return vld1q_f32(p + 4 * i); }); }
  static void store(float* p, const F& v) { for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, v.x[i]); }
  static F load_f16(const uint16_t* p) {
    return each([=](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
  }
  static F load_bf16(const uint16_t* p) {
    return each([=](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
  }
  static F add(const F& a, const F& b) { return each([&](int i) { return vaddq_f32(a.x[i], b.x[i]); }); }
  static F sub(const F& a, const F& b) { return each([&](int i) { return vsubq_f32(a.x[i], b.x[i]); }); }
  static F mul(const F& a, const F& b) { return each([&](int i) { return vmulq_f32(a.x[i], b.x[i]); }); }
  static F div(const F& a, const F& b) { return each([&](int i) { return vdivq_f32(a.x[i], b.x[i]); }); }
  static F max(const F& a, const F& b) { return each([&](int i) { return vmaxq_f32(a.x[i], b.x[i]); }); }
  static F min(const F& a, const F& b) { return each([&](int i) { return vminq_f32(a.x[i], b.x[i]); }); }
  static F abs(const F& a) { return each([&](int i) { return vabsq_f32(a.x[i]); }); }
  static F fma(const F& a, const F& b, const F& c) { return each([&](int i) { return vfmaq_f32(c.x[i], a.x[i], b.x[i]); }); }
  static F round(const F& a) { return each([&](int i) { return vrndnq_f32(a.x[i]); }); }
  static F scale_pow2(const F& v, const F& n) {
    return each([&](int i) {
      const int32x4_t exponent = vaddq_s32(vcvtnq_s32_f32(n.x[i]), vdupq_n_s32(127));
      return vmulq_f32(v.x[i], vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
    });
  }
  static F zero_below(const F& y, const F& v, const F& low) {
    return each([&](int i) {
      return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(y.x[i]), vcgeq_f32(v.x[i], low.x[i])));
    });
  }
  static float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  static float sqrt1(float a) { return __builtin_sqrtf(a); }
  static float hsum(const F& a) {
    const float32x4_t s = vaddq_f32(vaddq_f32(a.x[0], a.x[2]), vaddq_f32(a.x[1], a.x[3]));
    const float32x2_t t = vadd_f32(vget_low_f32(s), vget_high_f32(s));
    return vget_lane_f32(t, 0) + vget_lane_f32(t, 1);
  }
  static float hmax(const F& a) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.x[0], a.x[2]), vmaxq_f32(a.x[1], a.x[3]))); }
  static int32_t store_i8(int8_t* p, const F& lo, const F& hi) {
    int32x4_t sum = vdupq_n_s32(0);
    for (int i = 0; i < 8; ++i) {
      const int32x4_t v = vcvtnq_s32_f32(i < 4 ? lo.x[i] : hi.x[i - 4]);
      sum = vaddq_s32(sum, v);
      const int8x8_t bytes = vmovn_s16(vcombine_s16(vmovn_s32(v), vmovn_s32(v)));
      vst1_lane_s32(reinterpret_cast<int32_t*>(p + 4 * i), vreinterpret_s32_s8(bytes), 0);
    }
    return vaddvq_s32(sum);
  }
  static I iset1(int32_t v) { return {{vdupq_n_s32(v), vdupq_n_s32(v), vdupq_n_s32(v), vdupq_n_s32(v)}}; }
  static I izero() { return iset1(0); }
  static I iadd(const I& a, const I& b) {
    return {{vaddq_s32(a.x[0], b.x[0]), vaddq_s32(a.x[1], b.x[1]), vaddq_s32(a.x[2], b.x[2]), vaddq_s32(a.x[3], b.x[3])}};
  }
  static F convert(const I& a) { return each([&](int i) { return vcvtq_f32_s32(a.x[i]); }); }
  static B load_q8(const uint8_t* p) {
    B out;
    for (int i = 0; i < 4; ++i) out.x[i] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p + 16 * i), vdupq_n_u8(128)));
    return out;
  }
  static void load_q4(const uint8_t* p, B& low, B& high) {
    for (int i = 0; i < 4; ++i) {
      const uint8x16_t both = vld1q_u8(p + 16 * i);
      low.x[i] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
      high.x[i] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
    }
  }
  static I dot_q8(const I& acc, const B& w, const int8_t* a) {
    const int8x16_t x = vreinterpretq_s8_s32(vld1q_dup_s32(reinterpret_cast<const int32_t*>(a)));
    return {{vdotq_s32(acc.x[0], w.x[0], x), vdotq_s32(acc.x[1], w.x[1], x), vdotq_s32(acc.x[2], w.x[2], x),
             vdotq_s32(acc.x[3], w.x[3], x)}};
  }
  static I dot_q4(const I& acc, const B& w, const int8_t* a) { return dot_q8(acc, w, a); }
};
}  // namespace
}  // namespace forerun

#include "kernels_impl.h"

namespace forerun {
const Kernels* kernels_neon() { return &kTable; }
}  // namespace forerun
