// Preloaded into a process, counts the system calls that change a disk, and kills the process at one of them: before it
// happens, or half-way through a write. Nothing is counted before `crash_arm`.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static atomic_long count, at = -1;
static atomic_int armed;
static char prefix[4096];

void crash_arm(const char* folder, long number) {  // number 0: only count
  strncpy(prefix, folder, sizeof prefix - 1);
  at = number;
  count = 0;
  armed = 1;
}
long crash_count(void) { return count; }

static int due(void) { return atomic_fetch_add(&count, 1) + 1 == at; }
static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

static int names(int folder, const char* path) {
  if (!armed || !path) return 0;
  char link[64], base[4096];
  if (path[0] == '/') return !strncmp(path, prefix, strlen(prefix));
  snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
  ssize_t n = folder == AT_FDCWD ? readlink("/proc/self/cwd", base, sizeof base - 1) : readlink(link, base, sizeof base - 1);
  if (n < 0) return 0;
  base[n] = 0;
  return !strncmp(base, prefix, strlen(prefix));
}
static int file(int fd) {
  struct stat s;
  return armed && !fstat(fd, &s) && (S_ISREG(s.st_mode) || S_ISDIR(s.st_mode)) && names(fd, "");
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void* data, size_t size) {
  if (file(fd) && due()) {
    if (size > 1) REAL(write)(fd, data, size / 2);
    die();
  }
  return REAL(write)(fd, data, size);
}
ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  if (file(fd) && due()) {
    if (size > 1) REAL(pwrite)(fd, data, size / 2, offset);
    die();
  }
  return REAL(pwrite)(fd, data, size, offset);
}
ssize_t pwrite64(int fd, const void* data, size_t size, off_t offset) { return pwrite(fd, data, size, offset); }

#define ON_FILE(name, parameters, arguments, fd)  \
  int name parameters {                           \
    if (file(fd) && due()) die();                 \
    return REAL(name) arguments;                  \
  }
#define ON_NAME(name, parameters, arguments, folder, path) \
  int name parameters {                                    \
    if (names(folder, path) && due()) die();               \
    return REAL(name) arguments;                           \
  }
ON_FILE(fsync, (int fd), (fd), fd)
ON_FILE(fdatasync, (int fd), (fd), fd)
ON_FILE(ftruncate, (int fd, off_t size), (fd, size), fd)
ON_FILE(ftruncate64, (int fd, off64_t size), (fd, size), fd)
ON_NAME(rename, (const char* a, const char* b), (a, b), AT_FDCWD, b)
ON_NAME(renameat, (int f, const char* a, int g, const char* b), (f, a, g, b), g, b)
ON_NAME(unlink, (const char* a), (a), AT_FDCWD, a)
ON_NAME(unlinkat, (int f, const char* a, int flags), (f, a, flags), f, a)
ON_NAME(rmdir, (const char* a), (a), AT_FDCWD, a)
ON_NAME(mkdir, (const char* a, mode_t m), (a, m), AT_FDCWD, a)
ON_NAME(mkdirat, (int f, const char* a, mode_t m), (f, a, m), f, a)
ON_NAME(link, (const char* a, const char* b), (a, b), AT_FDCWD, b)
ON_NAME(symlink, (const char* a, const char* b), (a, b), AT_FDCWD, b)
ON_NAME(utimensat, (int f, const char* a, const struct timespec t[2], int flags), (f, a, t, flags), f, a)

static int open_any(const char* name, int folder, const char* path, int flags, mode_t mode) {
  static int (*real)(int, const char*, int, ...);
  if (!real) real = dlsym(RTLD_NEXT, "openat64");
  (void)name;
  if (flags & (O_CREAT | O_TRUNC) && names(folder, path) && due()) die();
  return real(folder, path, flags, mode);
}
#define OPEN(name, head, folder)                                     \
  int name(head const char* path, int flags, ...) {                  \
    va_list rest;                                                    \
    va_start(rest, flags);                                           \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest);                                                    \
    return open_any(#name, folder, path, flags, mode);               \
  }
#define NOTHING
#define FOLDER int folder,
OPEN(open, NOTHING, AT_FDCWD)
OPEN(open64, NOTHING, AT_FDCWD)
OPEN(openat, FOLDER, folder)
OPEN(openat64, FOLDER, folder)
