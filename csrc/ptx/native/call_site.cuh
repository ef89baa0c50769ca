// A CallSite is the place in a kernel that a report should name. Functions of ptx record the place of their caller; a
// helper above ptx that wants its own caller named takes a `ptx::CallSite site = ptx::CallSite()` as last parameter and
// hands it on. On a GPU it is empty and costs nothing.
#pragma once

namespace ffpa::ptx {

struct CallSite {};

}  // namespace ffpa::ptx
