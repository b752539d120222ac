/* Stands in for libcudart, cuBLAS and NCCL where there is no GPU: loaded before them (LD_PRELOAD), it answers a
 * torch that is built for CUDA. Memory of a card is memory of the host that reads as zero, kernels and collectives do
 * nothing, and every stream is idle at once. What was asked is written down, a line each, in PRETENDED_LOG.PID.
 *
 * PRETENDED_GPUS: how many cards this process sees (2). PRETENDED_HIDDEN: how many come before these.
 * PRETENDED_TRACE: events and waits of streams are written down too. order.py reads what is said of streams,
 * threads (tid) and NCCL.
 * Names that torch wants and that are not here return 0: build.py makes them. It finds what is here by lines that
 * begin with a type and a name, so definitions begin at the first column, and nothing else does. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define OK cudaSuccess
#define MOST_RANGES 200000
#define MOST_CARDS 64
#define TOTAL_BYTES (80ull << 30)
#define FREE_BYTES (78ull << 30)

static __thread int current_card = 0;

static int count_cards(void) {
  const char *told = getenv("PRETENDED_GPUS");
  return told ? atoi(told) : 2;
}

/* Of the machine, from 1: a process may see some of its cards only. */
static int number_card(int card) {
  const char *hidden = getenv("PRETENDED_HIDDEN");
  return (hidden ? atoi(hidden) : 0) + card + 1;
}

/* ---- The log ---- */

static FILE *log_file;
static int log_owner = 0; /* A fork begins a file of its own. */
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;

static void write_log(const char *format, ...) {
  const char *prefix = getenv("PRETENDED_LOG");
  if (!prefix)
    return;
  pthread_mutex_lock(&log_lock);
  if (!log_file || log_owner != getpid()) {
    char path[512];
    snprintf(path, sizeof path, "%s.%d", prefix, getpid());
    log_file = fopen(path, "a");
    log_owner = getpid();
  }
  va_list values;
  va_start(values, format);
  vfprintf(log_file, format, values);
  va_end(values);
  fputc('\n', log_file);
  fflush(log_file);
  pthread_mutex_unlock(&log_lock);
}

static long thread_id(void) { return syscall(SYS_gettid); }

static int is_traced(void) {
  static int answer = -1;
  if (answer < 0)
    answer = getenv("PRETENDED_TRACE") != 0;
  return answer;
}

/* For scenes, by ctypes. */
void pretended_note(const char *text) { write_log("note %s", text); }

static int locks_no_more = 0;
void pretended_lock_no_more(void) { locks_no_more = 1; }

/* ---- Which memory is whose ---- */

enum { PINNED = 1, ON_CARD = 2 };

typedef struct {
  char *start;
  size_t bytes;
  int kind;
  int card;
} Range;

static Range ranges[MOST_RANGES];
static int num_ranges = 0;
static pthread_mutex_t ranges_lock = PTHREAD_MUTEX_INITIALIZER;

static void add_range(void *start, size_t bytes, int kind) {
  write_log("memory %s %zu bytes tid %ld", kind == ON_CARD ? "malloc" : "pin", bytes, thread_id());
  pthread_mutex_lock(&ranges_lock);
  int slot = 0;
  while (slot < num_ranges && ranges[slot].start)
    slot++;
  if (slot == num_ranges)
    num_ranges++;
  ranges[slot] = (Range){start, bytes, kind, current_card};
  pthread_mutex_unlock(&ranges_lock);
}

static void remove_range(void *start) {
  write_log("memory free tid %ld", thread_id());
  pthread_mutex_lock(&ranges_lock);
  for (int i = 0; i < num_ranges; i++)
    if (ranges[i].start == start) {
      ranges[i].start = 0;
      break;
    }
  pthread_mutex_unlock(&ranges_lock);
}

static Range find_range(const void *address) {
  Range found = {0};
  pthread_mutex_lock(&ranges_lock);
  for (int i = 0; i < num_ranges; i++) {
    char *start = ranges[i].start;
    if (start && (char *)address >= start && (char *)address < start + ranges[i].bytes) {
      found = ranges[i];
      break;
    }
  }
  pthread_mutex_unlock(&ranges_lock);
  return found;
}

/* ---- Cards and contexts ---- */

static char has_context[MOST_CARDS];

/* As of the driver, a context costs hundreds of MB of a card: on a card that is not the rank's it is a fault. */
static void need_context(const char *who) {
  if (has_context[current_card])
    return;
  has_context[current_card] = 1;
  write_log("context on device %d by %s tid %ld", current_card, who, thread_id());
}

/* For driver.c. */
int pretended_context(int card) { return has_context[card]; }

cudaError_t cudaGetDeviceCount(int *count) {
  *count = count_cards();
  return *count ? OK : cudaErrorNoDevice;
}

cudaError_t cudaGetDevice(int *card) {
  *card = current_card;
  return OK;
}

cudaError_t cudaSetDevice(int card) {
  if (card < 0 || card >= count_cards())
    return cudaErrorInvalidDevice;
  current_card = card;
  need_context("set_device");
  return OK;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int card) {
  memset(found, 0, sizeof *found);
  snprintf(found->name, sizeof found->name, "NVIDIA H100 80GB HBM3");
  found->totalGlobalMem = TOTAL_BYTES;
  found->sharedMemPerBlock = 49152;
  found->regsPerBlock = 65536;
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->major = 9;
  found->minor = 0;
  found->multiProcessorCount = 132;
  found->maxThreadsPerMultiProcessor = 2048;
  found->sharedMemPerMultiprocessor = 233472;
  found->regsPerMultiprocessor = 65536;
  found->sharedMemPerBlockOptin = 232448;
  found->l2CacheSize = 50 << 20;
  found->concurrentKernels = 1;
  found->unifiedAddressing = 1;
  found->canMapHostMemory = 1;
  found->maxBlocksPerMultiProcessor = 32;
  memset(&found->uuid, number_card(card), sizeof found->uuid);
  found->pciBusID = number_card(card);
  return OK;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int card) {
  switch (which) {
  case cudaDevAttrMultiProcessorCount:
    *value = 132;
    break;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin:
    *value = 232448;
    break;
  case cudaDevAttrComputeCapabilityMajor:
    *value = 9;
    break;
  case cudaDevAttrComputeCapabilityMinor:
    *value = 0;
    break;
  case cudaDevAttrMaxThreadsPerMultiProcessor:
    *value = 2048;
    break;
  case cudaDevAttrWarpSize:
    *value = 32;
    break;
  default:
    *value = 1;
  }
  return OK;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return OK;
}

cudaError_t cudaDeviceCanAccessPeer(int *answer, int card, int other) {
  *answer = 1;
  return OK;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int card) {
  snprintf(text, size, "0000:%02x:00.0", number_card(card));
  return OK;
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = CUDART_VERSION / 1000 * 1000;
  return OK;
}

cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

const char *cudaGetErrorString(cudaError_t error) { return "pretended error"; }
const char *cudaGetErrorName(cudaError_t error) { return "pretendedError"; }
static __thread cudaError_t last_error = cudaSuccess;
cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = OK;
  return error;
}

static int get_context_state(int card, unsigned *flags, int *is_active) {
  if (flags)
    *flags = 0;
  *is_active = has_context[card];
  return 0;
}

static int do_nothing(void) { return 0; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
  if (result)
    *result = cudaDriverEntryPointSuccess;
  *function = strcmp(name, "cuDevicePrimaryCtxGetState") ? (void *)do_nothing : (void *)get_context_state;
  return OK;
}

/* ---- Memory ---- */

cudaError_t cudaMalloc(void **found, size_t bytes) {
  need_context("malloc");
  if (posix_memalign(found, 2 << 20, bytes ? bytes : 1))
    return cudaErrorMemoryAllocation;
  memset(*found, 0, bytes);
  add_range(*found, bytes, ON_CARD);
  return OK;
}

cudaError_t cudaFree(void *memory) {
  if (memory) {
    remove_range(memory);
    free(memory);
  }
  return OK;
}

cudaError_t cudaHostAlloc(void **found, size_t bytes, unsigned flags) {
  need_context("hostalloc");
  if (posix_memalign(found, 4096, bytes ? bytes : 1))
    return cudaErrorMemoryAllocation;
  add_range(*found, bytes, PINNED);
  return OK;
}

cudaError_t cudaFreeHost(void *memory) {
  remove_range(memory);
  free(memory);
  return OK;
}

cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned flags) {
  need_context("hostregister");
  if (locks_no_more)
    return last_error = cudaErrorMemoryAllocation;
  add_range(memory, bytes, PINNED);
  return OK;
}

cudaError_t cudaHostUnregister(void *memory) {
  need_context("hostunregister");
  remove_range(memory);
  return OK;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
  memset(found, 0, sizeof *found);
  Range range = find_range(address);
  if (!range.start) {
    found->type = cudaMemoryTypeUnregistered;
    return OK;
  }
  found->type = range.kind == ON_CARD ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  found->device = range.card;
  found->devicePointer = (void *)address;
  found->hostPointer = range.kind == PINNED ? (void *)address : 0;
  return OK;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  need_context("meminfo");
  *total_bytes = TOTAL_BYTES;
  *free_bytes = FREE_BYTES;
  return OK;
}

static const char *name_kind(Range range) {
  if (!range.start)
    return "pageable";
  return range.kind == ON_CARD ? "dev" : "pinned";
}

/* Copies to a card write zeros, so that what is read there is the same whatever kernels would have written. A copy
 * from or to pageable memory makes the host wait: it is written down. */
static void copy(void *target, const void *source, size_t bytes, const char *how) {
  Range into = find_range(target), from = find_range(source);
  if (!into.start || !from.start)
    write_log("pageable %s %zu bytes %s->%s", how, bytes, name_kind(from), name_kind(into));
  if (into.kind == ON_CARD)
    memset(target, 0, bytes);
  else
    memcpy(target, source, bytes);
}

cudaError_t cudaMemcpy(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind) {
  write_log("sync memcpy tid %ld", thread_id());
  copy(target, source, bytes, "sync");
  return OK;
}

cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  copy(target, source, bytes, "async");
  return OK;
}

cudaError_t cudaMemcpyPeerAsync(void *target, int into, const void *source, int from, size_t bytes,
                                cudaStream_t stream) {
  write_log("peer copy %d->%d", from, into);
  memset(target, 0, bytes);
  return OK;
}

cudaError_t cudaMemset(void *memory, int value, size_t bytes) {
  memset(memory, value, bytes);
  return OK;
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream) {
  memset(memory, value, bytes);
  return OK;
}

cudaError_t cudaGetSymbolAddress(void **found, const void *symbol) {
  static char buffer[1 << 16];
  *found = buffer;
  return OK;
}

/* ---- Streams and events ---- */

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
  need_context("stream");
  *stream = (cudaStream_t)malloc(16);
  return OK;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  return cudaStreamCreate(stream);
}

/* Streams and events are kept, so that no later one has the address: logs tell them apart by it. */
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return OK; }

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = 0;
  return OK;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) { return OK; }

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  write_log("sync stream %p tid %ld", (void *)stream, thread_id());
  return OK;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return OK;
}

/* Its later arguments differ between versions of CUDA; none is read. */
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
  *status = cudaStreamCaptureStatusNone;
  if (id)
    *id = 0;
  return OK;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  if (is_traced())
    write_log("wait %p %p tid %ld", (void *)event, (void *)stream, thread_id());
  return OK;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *given,
                                  unsigned flags) {
  callback(stream, OK, given);
  return OK;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *given) {
  function(given);
  return OK;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return OK; }

cudaError_t cudaDeviceSynchronize(void) {
  need_context("sync");
  write_log("sync device tid %ld", thread_id());
  return OK;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
  need_context("event");
  *event = (cudaEvent_t)malloc(16);
  return OK;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return cudaEventCreate(event); }

cudaError_t cudaEventDestroy(cudaEvent_t event) { return OK; }

/* Of an event of another card, these open a context on the current one all the same. */
cudaError_t cudaEventQuery(cudaEvent_t event) {
  need_context("event query");
  return OK;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (is_traced())
    write_log("rec %p %p tid %ld", (void *)event, (void *)stream, thread_id());
  return OK;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  need_context("event wait");
  write_log("sync event %p tid %ld", (void *)event, thread_id());
  return OK;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
  need_context("event time");
  *ms = 1.0f;
  return OK;
}

/* ---- Kernels ---- */

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->binaryVersion = 90;
  found->ptxVersion = 90;
  return OK;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int block,
                                                          size_t shared) {
  *blocks = 2;
  return OK;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int block,
                                                                   size_t shared, unsigned flags) {
  *blocks = 2;
  return OK;
}

void **__cudaRegisterFatBinary(void *binary) {
  static void *handle[4];
  return handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
unsigned __cudaPushCallConfiguration(void) { return 0; }
cudaError_t __cudaPopCallConfiguration(void) { return OK; }

/* ---- NCCL: every collective is over at once; their order is in the log ---- */

typedef struct {
  char id[17];
  int rank, size, card;
} Communicator;

ncclResult_t ncclGetVersion(int *version) {
  *version = 22800;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  static int count = 0;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, 64, "%08x%04x", getpid(), ++count);
  return ncclSuccess;
}

static ncclResult_t make_communicator(ncclComm_t *found, int size, const char *id, int rank) {
  Communicator *made = calloc(1, sizeof *made);
  snprintf(made->id, sizeof made->id, "%.16s", id);
  made->rank = rank;
  made->size = size;
  made->card = current_card;
  *found = (ncclComm_t)made;
  write_log("nccl init %s rank %d of %d device %d", made->id, rank, size, current_card);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *found, int size, ncclUniqueId id, int rank) {
  return make_communicator(found, size, id.internal, rank);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *found, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
  return make_communicator(found, size, id.internal, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *found, int size, int rank, int num_ids, ncclUniqueId *ids,
                                      ncclConfig_t *config) {
  return make_communicator(found, size, ids->internal, rank);
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *found, ncclConfig_t *config) {
  write_log("nccl split");
  return make_communicator(found, 1, "split", 0);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t group, ncclResult_t *error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t group, int *size) {
  *size = ((Communicator *)group)->size;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t group, int *rank) {
  *rank = ((Communicator *)group)->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t group) {
  write_log("nccl abort %s device %d tid %ld", ((Communicator *)group)->id, current_card, thread_id());
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t group) {
  write_log("nccl destroy %s", ((Communicator *)group)->id);
  return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) { return "pretended error of NCCL"; }
const char *ncclGetLastError(ncclComm_t group) { return ""; }

static ncclResult_t note_call(const char *name, size_t count, ncclDataType_t type, ncclComm_t group,
                              cudaStream_t stream) {
  const char *id = ((Communicator *)group)->id;
  write_log("nccl %s %s %zu %d stream %p tid %ld", name, id, count, (int)type, (void *)stream, thread_id());
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *from, void *into, size_t count, ncclDataType_t type, ncclRedOp_t reduction,
                           ncclComm_t group, cudaStream_t stream) {
  return note_call("allreduce", count, type, group, stream);
}

ncclResult_t ncclAllGather(const void *from, void *into, size_t count, ncclDataType_t type, ncclComm_t group,
                           cudaStream_t stream) {
  return note_call("allgather", count, type, group, stream);
}

ncclResult_t ncclReduceScatter(const void *from, void *into, size_t count, ncclDataType_t type,
                               ncclRedOp_t reduction, ncclComm_t group, cudaStream_t stream) {
  return note_call("reducescatter", count, type, group, stream);
}

ncclResult_t ncclBroadcast(const void *from, void *into, size_t count, ncclDataType_t type, int root,
                           ncclComm_t group, cudaStream_t stream) {
  return note_call("broadcast", count, type, group, stream);
}

ncclResult_t ncclBcast(void *memory, size_t count, ncclDataType_t type, int root, ncclComm_t group,
                       cudaStream_t stream) {
  return note_call("bcast", count, type, group, stream);
}

ncclResult_t ncclReduce(const void *from, void *into, size_t count, ncclDataType_t type, ncclRedOp_t reduction,
                        int root, ncclComm_t group, cudaStream_t stream) {
  return note_call("reduce", count, type, group, stream);
}

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t group,
                      cudaStream_t stream) {
  return note_call("send", count, type, group, stream);
}

ncclResult_t ncclRecv(void *into, size_t count, ncclDataType_t type, int peer, ncclComm_t group,
                      cudaStream_t stream) {
  return note_call("recv", count, type, group, stream);
}

/* ---- cuBLAS: handles that are not null, and one algorithm for every product ---- */

int cublasCreate_v2(void **handle) {
  *handle = malloc(64);
  return 0;
}

int cublasGetMathMode(void *handle, int *mode) {
  *mode = 0;
  return 0;
}

int cublasGetPointerMode_v2(void *handle, int *mode) {
  *mode = 0;
  return 0;
}

size_t cublasLtGetVersion(void) { return 130000; }

int cublasLtMatmulDescCreate(void **description, int compute, int scale) {
  *description = malloc(64);
  return 0;
}

int cublasLtMatrixLayoutCreate(void **layout, int type, unsigned long rows, unsigned long columns, long leading) {
  *layout = malloc(64);
  return 0;
}

int cublasLtMatmulPreferenceCreate(void **preference) {
  *preference = malloc(64);
  return 0;
}

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                   void *preference, int requested, void *results, int *num_found) {
  *num_found = 1;
  return 0;
}
