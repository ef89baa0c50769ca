// GPU side of ptx/call_site.cuh.
#pragma once

namespace ffpa::ptx {

struct CallSite {};

}  // namespace ffpa::ptx
