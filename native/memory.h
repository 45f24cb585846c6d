// Memory for what is read from end to end in every step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace paceline {

// So many bytes, aligned to a cache line, of large pages where the system has them for who asks. With small ones a step
// looks up as many addresses as a model has pages, which under virtual machines takes a tenth of its time.
std::shared_ptr<uint8_t> lasting(size_t bytes);

}  // namespace paceline
