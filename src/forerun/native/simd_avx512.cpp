// AVX-512 (F, BW, DQ, VL) with VNNI: one register is the whole vector.
#include <immintrin.h>
#include <cstdint>

namespace forerun {
namespace {
struct S {
  using F = __m512;
  using I = __m512i;
  using B = __m512i;
  static constexpr const char* kName = "avx512";
  static constexpr int kRows = 8;
  static constexpr int kQ8Bias = 128;
  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static F load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
  }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F scale_pow2(F x, F n) { return _mm512_scalef_ps(x, n); }
  static F zero_below(F y, F x, F low) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, low, _CMP_GE_OQ), y); }
  static float fma1(float a, float b, float c) { return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c))); }
  static float sqrt1(float a) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(a))); }
  static __m256 fold(F a, bool is_max) {
    const __m256 lo = _mm512_castps512_ps256(a), hi = _mm512_extractf32x8_ps(a, 1);
    return is_max ? _mm256_max_ps(lo, hi) : _mm256_add_ps(lo, hi);
  }
  static float hsum(F a) {
    const __m256 x = fold(a, false);
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 1)));
  }
  static float hmax(F a) {
    const __m256 x = fold(a, true);
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_shuffle_ps(y, y, 1)));
  }
  static int32_t store_i8(int8_t* p, F lo, F hi) {
    const I a = _mm512_cvtps_epi32(lo), b = _mm512_cvtps_epi32(hi);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), _mm512_cvtepi32_epi8(b));
    return _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
  }
  static I izero() { return _mm512_setzero_si512(); }
  static I iset1(int32_t x) { return _mm512_set1_epi32(x); }
  static I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
  static F convert(I a) { return _mm512_cvtepi32_ps(a); }
  static B load_q8(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static void load_q4(const uint8_t* p, B& low, B& high) {
    const B both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
    low = _mm512_and_si512(both, mask);
    high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
  }
  static I dot_q8(I acc, B w, const int8_t* a) { return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(load4(a))); }
  static I dot_q4(I acc, B w, const int8_t* a) { return dot_q8(acc, w, a); }
  static int32_t load4(const int8_t* a) {
    int32_t x;
    __builtin_memcpy(&x, a, 4);
    return x;
  }
};
}  // namespace
}  // namespace forerun

#include "kernels_impl.h"

namespace forerun {
const Kernels* kernels_avx512() { return &kTable; }
}  // namespace forerun
