/* Loaded before libibverbs in the guest: writes down what is registered and how queue pairs are set up, and can
 * pretend to be a device that registers little at once. The structures are libibverbs' stable interface; their
 * offsets are written out so that no headers are needed.
 *
 * NOTED_VERBS=FILE          where to write: "mr ADDRESS LENGTH", "qp MTU_CODE GID_INDEX TRAFFIC_CLASS LEVEL"
 * NOTED_MAX_MR_SIZE=BYTES   refuse larger registrations
 */
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_MR_SIZE_AT 80
#define PATH_MTU_AT 8
#define GID_INDEX_AT 76
#define TRAFFIC_CLASS_AT 78
#define SERVICE_LEVEL_AT 82
#define HAS_ADDRESS (1 << 7)

static void note(const char *line) {
  const char *name = getenv("NOTED_VERBS");
  FILE *file = name ? fopen(name, "a") : NULL;
  if (file) {
    fputs(line, file);
    fclose(file);
  }
}

/* By handle: Python loads libibverbs into a scope of its own, where RTLD_NEXT does not look. */
static void *real_one(const char *name) {
  return dlsym(dlopen("libibverbs.so.1", RTLD_LAZY), name);
}

static size_t limit(void) {
  const char *text = getenv("NOTED_MAX_MR_SIZE");
  return text ? strtoull(text, NULL, 10) : 0;
}

static int refused(void *address, size_t length) {
  char line[96];
  int no = limit() && length > limit();
  snprintf(line, sizeof line, "%s %llu %zu\n", no ? "refused" : "mr", (unsigned long long)(uintptr_t)address, length);
  note(line);
  if (no) errno = EINVAL;
  return no;
}

void *ibv_reg_mr(void *pd, void *address, size_t length, int access) {
  void *(*real)(void *, void *, size_t, int) = real_one("ibv_reg_mr");
  return refused(address, length) ? NULL : real(pd, address, length, access);
}

void *ibv_reg_mr_iova2(void *pd, void *address, size_t length, uint64_t iova, unsigned access) {
  void *(*real)(void *, void *, size_t, uint64_t, unsigned) = real_one("ibv_reg_mr_iova2");
  return refused(address, length) ? NULL : real(pd, address, length, iova, access);
}

int ibv_query_device(void *context, char *attributes) {
  int (*real)(void *, char *) = real_one("ibv_query_device");
  int code = real(context, attributes);
  if (!code && limit()) *(uint64_t *)(attributes + MAX_MR_SIZE_AT) = limit();
  return code;
}

int ibv_modify_qp(void *qp, unsigned char *attributes, int mask) {
  int (*real)(void *, unsigned char *, int) = real_one("ibv_modify_qp");
  char line[96];
  if (mask & HAS_ADDRESS) {
    snprintf(line, sizeof line, "qp %d %d %d %d\n", *(int *)(attributes + PATH_MTU_AT), attributes[GID_INDEX_AT],
             attributes[TRAFFIC_CLASS_AT], attributes[SERVICE_LEVEL_AT]);
    note(line);
  }
  return real(qp, attributes, mask);
}
