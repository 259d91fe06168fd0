#include "select.h"

#if defined(__x86_64__) || defined(_M_X64)
#if defined(_MSC_VER) && !defined(__clang__)
#error "build with clang-cl on Windows: the kernels use its vector builtins"
#endif
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace forerun {
namespace {

struct Named {
  const char* name;
  const Kernels* (*kernels)();
  bool available;
};

#if defined(__x86_64__) || defined(_M_X64)
struct Features { bool avx2, avx_vnni, avx512; };

Features detect() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Features f{false, false, false};
  if (!__get_cpuid(1, &a, &b, &c, &d)) return f;
  const bool fma = c & (1u << 12), osxsave = c & (1u << 27), f16c = c & (1u << 29);
  if (!osxsave) return f;
  unsigned low = 0, high = 0;                              // which registers the operating system saves
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  const bool saves_ymm = (low & 0x6u) == 0x6u, saves_zmm = (low & 0xe6u) == 0xe6u;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
  const bool avx2 = b & (1u << 5);
  const bool avx512 = (b & (1u << 16)) && (b & (1u << 17)) && (b & (1u << 30)) && (b & (1u << 31)) && (c & (1u << 11));
  f.avx2 = saves_ymm && fma && f16c && avx2;
  f.avx512 = f.avx2 && saves_zmm && avx512;
  if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) f.avx_vnni = f.avx2 && (a & (1u << 4));
  return f;
}
#endif

std::vector<Named> all_sets() {
  std::vector<Named> sets;
#if defined(__x86_64__) || defined(_M_X64)
  static const Features f = detect();                      // a virtual machine takes tens of microseconds to answer
  sets.push_back({"avx512", kernels_avx512, f.avx512});
  sets.push_back({"avx2_vnni", kernels_avx2_vnni, f.avx_vnni});
  sets.push_back({"avx2", kernels_avx2, f.avx2});
#elif defined(__aarch64__)
#if defined(__linux__)
  const bool dot = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  const bool dot = true;                                   // every Apple processor with AArch64 macOS
#endif
  sets.push_back({"neon", kernels_neon, dot});
#endif
  sets.push_back({"portable", kernels_portable, true});
  return sets;
}

}  // namespace

std::vector<std::string> available_sets() {
  std::vector<std::string> names;
  for (const Named& set : all_sets()) {
    if (set.available) names.push_back(set.name);
  }
  return names;
}

const Kernels* select_kernels(const char* name) {
  for (const Named& set : all_sets()) {
    if (set.available && std::string(name) == set.name) return set.kernels();
  }
  return nullptr;
}

}  // namespace forerun
