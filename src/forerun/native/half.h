// IEEE half precision to and from float, by integer arithmetic: the same on every processor.
#pragma once
#include <cstdint>

namespace forerun {

inline uint16_t float_to_half(float f) {         // round to nearest, ties to even
  union { float f; uint32_t u; } x;
  x.f = f;
  const uint32_t sign = (x.u >> 16) & 0x8000u;
  x.u &= 0x7fffffffu;
  if (x.u >= 0x47800000u) return uint16_t(sign | (x.u > 0x7f800000u ? 0x7e00u : 0x7c00u));
  if (x.u < 0x38800000u) {                // subnormal half: let an addition round it
    union { float f; uint32_t u; } magic;
    magic.u = 0x3f000000u;
    x.f += magic.f;
    return uint16_t(sign | (x.u - magic.u));
  }
  const uint32_t odd = (x.u >> 13) & 1u;
  return uint16_t(sign | ((x.u + 0xc8000fffu + odd) >> 13));
}

inline float half_to_float(uint16_t h) {
  union { uint32_t u; float f; } out, magic;
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, rest = h & 0x7fffu;
  if (rest >= 0x7c00u) {
    out.u = sign | 0x7f800000u | ((rest & 0x3ffu) << 13);
  } else if (rest >= 0x400u) {
    out.u = sign | ((rest + (112u << 10)) << 13);
  } else {
    magic.u = 113u << 23;
    out.u = (113u << 23) | (rest << 13);
    out.f -= magic.f;
    out.u |= sign;
  }
  return out.f;
}

}  // namespace forerun
