// What newer compilers reference and systems of manylinux_2_28 do not have. With these definitions a compiler of any later
// system builds a wheel for all of them; `auditwheel` proves it. Nothing of this is visible outside: release/hidden.map.
#include <new>
#include <sstream>

// glibc 2.32: whether reference counts may do without atomic operations. No is always right.
extern "C" {
extern char __libc_single_threaded;
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

namespace std {
// GLIBCXX_3.4.26 (default constructors) and GLIBCXX_3.4.29 (str): of this library, not of the system's.
template class basic_stringbuf<char>;
template class basic_ostringstream<char>;
template class basic_stringstream<char>;

// GLIBCXX_3.4.29
[[noreturn]] void __throw_bad_array_new_length();
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std

// GLIBCXX_3.4.32: what <iostream> references since gcc 13, so that the library initializes std::cout, which we do not use.
extern "C" __attribute__((visibility("hidden"))) void _ZSt21ios_base_library_initv() {}
