// AVX2 with FMA, F16C and AVX-VNNI.
#define FORERUN_NAME "avx2_vnni"
#define FORERUN_VNNI 1
#include "simd_avx2.h"

namespace forerun {
const Kernels* kernels_avx2_vnni() { return &kTable; }
}  // namespace forerun
