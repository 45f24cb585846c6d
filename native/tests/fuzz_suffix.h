// Exits 1 where a suffix tree says something else than a scan of its texts.
#pragma once

namespace paceline {

void fuzz_suffix();

}  // namespace paceline
