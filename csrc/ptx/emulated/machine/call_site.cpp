#include "ptx/emulated/machine/call_site.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace ffpa::emu {

std::string to_string(CallSite site) {
  const char* slash = std::strrchr(site.file, '/');
  return format("%s:%d", slash ? slash + 1 : site.file, site.line);
}

std::string format(const char* pattern, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(text, sizeof(text), pattern, arguments);
  va_end(arguments);
  return text;
}

}  // namespace ffpa::emu
