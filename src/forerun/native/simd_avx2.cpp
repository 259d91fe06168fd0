// AVX2 with FMA and F16C.
#define FORERUN_NAME "avx2"
#define FORERUN_VNNI 0
#include "simd_avx2.h"

namespace forerun {
const Kernels* kernels_avx2() { return &kTable; }
}  // namespace forerun
