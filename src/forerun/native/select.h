// Which kernels this processor can run.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace forerun {
std::vector<std::string> available_sets();                 // best first; the last is "portable"
const Kernels* select_kernels(const char* name);           // null if it can't be run here
}  // namespace forerun
