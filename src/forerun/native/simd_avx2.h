// Two 256-bit registers are the vector. Included by the two sources for AVX2, with and without VNNI.
#include <immintrin.h>
#include <cstdint>

namespace forerun {
namespace {
struct S {
  struct F { __m256 lo, hi; };
  struct I { __m256i lo, hi; };
  struct B { __m256i lo, hi; };
  static constexpr const char* kName = FORERUN_NAME;
  static constexpr int kRows = 2;
#if FORERUN_VNNI
  static constexpr int kQ8Bias = 128;
#else
  static constexpr int kQ8Bias = 0;         // bytes are made signed again, see dot_q8
#endif
  static F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, F x) {
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
  }
  static __m128i half(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static F load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(half(p)), _mm256_cvtph_ps(half(p + 8))}; }
  static __m256 widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
  static F load_bf16(const uint16_t* p) { return {widen(half(p)), widen(half(p + 8))}; }
  static F add(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
  static F sub(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
  static F mul(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
  static F div(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
  static F max(F a, F b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
  static F min(F a, F b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
  static F abs(F a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
  }
  static F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
  static F round(F a) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
  }
  static __m256 pow2(__m256 n) {            // n whole, in [-126, 127]
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
  }
  static F scale_pow2(F x, F n) { return {_mm256_mul_ps(x.lo, pow2(n.lo)), _mm256_mul_ps(x.hi, pow2(n.hi))}; }
  static F zero_below(F y, F x, F low) {
    return {_mm256_and_ps(y.lo, _mm256_cmp_ps(x.lo, low.lo, _CMP_GE_OQ)),
            _mm256_and_ps(y.hi, _mm256_cmp_ps(x.hi, low.hi, _CMP_GE_OQ))};
  }
  static float fma1(float a, float b, float c) {
    return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
  }
  static float sqrt1(float a) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(a))); }
  static float hsum(F a) {
    const __m256 x = _mm256_add_ps(a.lo, a.hi);
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 1)));
  }
  static float hmax(F a) {
    const __m256 x = _mm256_max_ps(a.lo, a.hi);
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_shuffle_ps(y, y, 1)));
  }
  static int32_t store_i8(int8_t* p, F lo, F hi) {
    alignas(32) int32_t lanes[32];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_cvtps_epi32(lo.lo));
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + 8), _mm256_cvtps_epi32(lo.hi));
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + 16), _mm256_cvtps_epi32(hi.lo));
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + 24), _mm256_cvtps_epi32(hi.hi));
    int32_t sum = 0;
    for (int i = 0; i < 32; ++i) {
      p[i] = int8_t(lanes[i]);
      sum += lanes[i];
    }
    return sum;
  }
  static I izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static I iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static I iadd(I a, I b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
  static F convert(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
  static __m256i bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static B load_q8(const uint8_t* p) { return {bytes(p), bytes(p + 32)}; }
  static void load_q4(const uint8_t* p, B& low, B& high) {
    const __m256i a = bytes(p), b = bytes(p + 32), mask = _mm256_set1_epi8(15);
    low = {_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)};
    high = {_mm256_and_si256(_mm256_srli_epi16(a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(b, 4), mask)};
  }
  static __m256i four(const int8_t* a) {
    int32_t x;
    __builtin_memcpy(&x, a, 4);
    return _mm256_set1_epi32(x);
  }
#if FORERUN_VNNI
  static I dot_q4(I acc, B w, const int8_t* a) {
    const __m256i x = four(a);
    return {_mm256_dpbusd_avx_epi32(acc.lo, w.lo, x), _mm256_dpbusd_avx_epi32(acc.hi, w.hi, x)};
  }
  static I dot_q8(I acc, B w, const int8_t* a) { return dot_q4(acc, w, a); }
#else
  static __m256i pairs(__m256i acc, __m256i w, __m256i x) {   // w below 129: two products fit into 16 bits
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
  }
  static I dot_q4(I acc, B w, const int8_t* a) {
    const __m256i x = four(a);
    return {pairs(acc.lo, w.lo, x), pairs(acc.hi, w.hi, x)};
  }
  static I dot_q8(I acc, B w, const int8_t* a) {              // |w| times a with w's sign
    const __m256i x = four(a), flip = _mm256_set1_epi8(-128);
    const __m256i lo = _mm256_xor_si256(w.lo, flip), hi = _mm256_xor_si256(w.hi, flip);
    return {pairs(acc.lo, _mm256_abs_epi8(lo), _mm256_sign_epi8(x, lo)),
            pairs(acc.hi, _mm256_abs_epi8(hi), _mm256_sign_epi8(x, hi))};
  }
#endif
};
}  // namespace
}  // namespace forerun

#include "kernels_impl.h"
