#include <cstring>

#include "kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace paceline {

const Kernels* portable_kernels();
#if defined(PACELINE_HAS_NEON)
const Kernels* neon_kernels();
#endif
#if defined(PACELINE_HAS_AVX2)
const Kernels* avx2_kernels();
#endif
#if defined(PACELINE_HAS_AVX512VNNI)
const Kernels* avx512vnni_kernels();
#endif

namespace {

#if defined(PACELINE_HAS_NEON)
bool has_dotprod() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(__APPLE__)
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &value, &size, nullptr, 0) == 0 && value;
#else
    return false;
#endif
}
#endif

#if defined(PACELINE_HAS_AVX2)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
#endif

#if defined(PACELINE_HAS_AVX512VNNI)
bool has_avx512vnni() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}
#endif

}  // namespace

const Kernels* kernels_by_name(const char* name) {
    if (std::strcmp(name, "portable") == 0) return portable_kernels();
#if defined(PACELINE_HAS_NEON)
    if (std::strcmp(name, "neon") == 0 && has_dotprod()) return neon_kernels();
#endif
#if defined(PACELINE_HAS_AVX2)
    if (std::strcmp(name, "avx2") == 0 && has_avx2()) return avx2_kernels();
#endif
#if defined(PACELINE_HAS_AVX512VNNI)
    if (std::strcmp(name, "avx512vnni") == 0 && has_avx512vnni()) return avx512vnni_kernels();
#endif
    return nullptr;
}

const Kernels* best_kernels() {
    for (const char* name : kKernelNames)
        if (const Kernels* found = kernels_by_name(name)) return found;
    return portable_kernels();
}

}  // namespace paceline
