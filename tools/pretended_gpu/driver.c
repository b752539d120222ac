/* Stands in for libcuda.so.1, which Triton and torch load by name. build.py adds the names that return 0. */

int pretended_context(int card) __attribute__((weak)); /* Of pretended.c. */

int cuCtxGetCurrent(void **context) {
  *context = (void *)1;
  return 0;
}

/* What Triton asks before it takes a kernel for one that can run. */
int cuDeviceGetAttribute(int *value, int attribute, int card) {
  *value = attribute == 97 ? 232448 : 1024; /* Shared memory of a block. */
  return 0;
}

int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : 0; /* Threads of a block; registers and memory beside. */
  return 0;
}

int cuDevicePrimaryCtxGetState(int card, unsigned *flags, int *is_active) {
  *flags = 0;
  *is_active = pretended_context ? pretended_context(card) : 0;
  return 0;
}
