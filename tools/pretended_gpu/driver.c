/* Stands in for libcuda.so.1, which Triton and torch load by name. build.py adds the names that return 0. */

int pretended_context(int card) __attribute__((weak)); /* Of pretended.c. */

int cuCtxGetCurrent(void **context) {
  *context = (void *)1;
  return 0;
}

int cuDevicePrimaryCtxGetState(int card, unsigned *flags, int *is_active) {
  *flags = 0;
  *is_active = pretended_context ? pretended_context(card) : 0;
  return 0;
}
