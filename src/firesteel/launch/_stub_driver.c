/* A CUDA driver without a GPU: every function succeeds, does nothing, and is recorded.
 *
 * It holds what driver.py and a Runner call, under the driver's names, and functions named stub_*
 * by which stub.py reads what happened. Where the real driver would refuse (an unknown function,
 * no current context, an empty grid) so does this one. It is a Python module only so that it is
 * built and found like one. The layouts are declared again rather than shared with _native.c, so
 * that a mistake in one shows in the tests.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default")))

#define SUCCESS 0
#define INVALID_VALUE 1
#define OUT_OF_MEMORY 2
#define INVALID_DEVICE 101
#define INVALID_CONTEXT 201
#define INVALID_HANDLE 400

#define FUNCTIONS(X)                                                                              \
    X(cuInit) X(cuDeviceGet) X(cuDeviceGetAttribute) X(cuDevicePrimaryCtxRetain)                  \
    X(cuCtxGetCurrent) X(cuCtxPushCurrent_v2) X(cuCtxPopCurrent_v2) X(cuCtxSynchronize)           \
    X(cuModuleLoadData) X(cuModuleGetFunction) X(cuModuleUnload) X(cuFuncLoad)                    \
    X(cuFuncSetAttribute) X(cuFuncGetAttribute) X(cuStreamIsCapturing) X(cuLaunchKernel)          \
    X(cuLaunchKernelEx) X(cuGetErrorName) X(cuGetErrorString)

#define AS_ID(name) ID_##name,
#define AS_NAME(name) #name,
enum { FUNCTIONS(AS_ID) NUM_NAMES };
static const char *const names[NUM_NAMES] = {FUNCTIONS(AS_NAME)};

enum {
    NUM_DEVICES = 8,
    MAX_DEPTH = 64,
    MAX_HANDLES = 1 << 20,
    MAX_CAPTURING = 64,
    MAX_ATTRIBUTES = 4,
    MAX_PARAMS = 66,
    RING = 4096,
};
#define CONTEXT_BASE UINT64_C(0xC0000000)
#define MODULE_BASE UINT64_C(0x10000000)
#define FUNCTION_BASE UINT64_C(0x20000000)
#define HANDLE_STEP 16

typedef struct {
    int id;
    char padding[4];
    char value[64];
} Attribute;

typedef struct {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    uint64_t stream;
    const Attribute *attributes;
    unsigned num_attributes;
} Config;

/* stub.py reads this layout. */
typedef struct {
    uint64_t function;
    uint64_t stream;
    uint64_t context;
    uint64_t params[MAX_PARAMS];
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t shared_bytes;
    uint32_t num_attributes;
    int32_t attribute_ids[MAX_ATTRIBUTES];
    int32_t attribute_values[MAX_ATTRIBUTES];
    uint32_t num_params;
} Record;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static uint64_t calls[NUM_NAMES];
static int failures[NUM_NAMES];
/* How many more calls fail; -1: all. */
static int64_t failure_times[NUM_NAMES];
static uint64_t capturing[MAX_CAPTURING];
static int num_capturing;
static uint64_t num_modules, num_functions;
static uint8_t num_params_of[MAX_HANDLES];
static Record ring[RING];
static uint64_t num_launches;

static __thread uint64_t contexts[MAX_DEPTH];
static __thread int depth;

/* Counts the call, and returns the failure that was asked for. The mutex is held. */
static int enter_locked(int id)
{
    calls[id]++;
    if (!failure_times[id])
        return SUCCESS;
    if (failure_times[id] > 0)
        failure_times[id]--;
    return failures[id];
}

static int enter(int id)
{
    pthread_mutex_lock(&mutex);
    int result = enter_locked(id);
    pthread_mutex_unlock(&mutex);
    return result;
}

static uint64_t current_context(void)
{
    return depth ? contexts[depth - 1] : 0;
}

static int is_handle(uint64_t handle, uint64_t base, uint64_t count)
{
    return handle >= base && handle % HANDLE_STEP == 0 && (handle - base) / HANDLE_STEP < count;
}

/* ---- the driver's functions ---- */

API int cuInit(unsigned flags)
{
    int result = enter(ID_cuInit);
    return result ? result : flags ? INVALID_VALUE : SUCCESS;
}

API int cuDeviceGet(int *device, int ordinal)
{
    int result = enter(ID_cuDeviceGet);
    if (result)
        return result;
    if (ordinal < 0 || ordinal >= NUM_DEVICES)
        return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

/* Compute capability 9.0: attributes 75 and 76. */
API int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    int result = enter(ID_cuDeviceGetAttribute);
    if (result)
        return result;
    if (device < 0 || device >= NUM_DEVICES)
        return INVALID_DEVICE;
    if (attribute != 75 && attribute != 76)
        return INVALID_VALUE;
    *value = attribute == 75 ? 9 : 0;
    return SUCCESS;
}

API int cuDevicePrimaryCtxRetain(uint64_t *context, int device)
{
    int result = enter(ID_cuDevicePrimaryCtxRetain);
    if (result)
        return result;
    if (device < 0 || device >= NUM_DEVICES)
        return INVALID_DEVICE;
    *context = CONTEXT_BASE + (uint64_t)device * HANDLE_STEP;
    return SUCCESS;
}

API int cuCtxGetCurrent(uint64_t *context)
{
    int result = enter(ID_cuCtxGetCurrent);
    if (!result)
        *context = current_context();
    return result;
}

API int cuCtxPushCurrent_v2(uint64_t context)
{
    int result = enter(ID_cuCtxPushCurrent_v2);
    if (result)
        return result;
    if (!is_handle(context, CONTEXT_BASE, NUM_DEVICES) || depth == MAX_DEPTH)
        return INVALID_CONTEXT;
    contexts[depth++] = context;
    return SUCCESS;
}

API int cuCtxPopCurrent_v2(uint64_t *context)
{
    int result = enter(ID_cuCtxPopCurrent_v2);
    if (result)
        return result;
    if (!depth)
        return INVALID_CONTEXT;
    *context = contexts[--depth];
    return SUCCESS;
}

API int cuCtxSynchronize(void)
{
    int result = enter(ID_cuCtxSynchronize);
    return result ? result : depth ? SUCCESS : INVALID_CONTEXT;
}

/* A new handle in *out, from one of the two counters. */
static int make_handle(int id, uint64_t *out, uint64_t base, uint64_t *count)
{
    pthread_mutex_lock(&mutex);
    int result = enter_locked(id);
    if (!result && !depth)
        result = INVALID_CONTEXT;
    if (!result && *count == MAX_HANDLES)
        result = OUT_OF_MEMORY;
    if (!result)
        *out = base + (*count)++ * HANDLE_STEP;
    pthread_mutex_unlock(&mutex);
    return result;
}

API int cuModuleLoadData(uint64_t *module, const void *image)
{
    (void)image;
    return make_handle(ID_cuModuleLoadData, module, MODULE_BASE, &num_modules);
}

API int cuModuleGetFunction(uint64_t *function, uint64_t module, const char *name)
{
    (void)module;
    (void)name;
    return make_handle(ID_cuModuleGetFunction, function, FUNCTION_BASE, &num_functions);
}

static int check_handle(int id, uint64_t handle, uint64_t base, const uint64_t *count)
{
    pthread_mutex_lock(&mutex);
    int result = enter_locked(id);
    if (!result && !is_handle(handle, base, *count))
        result = INVALID_HANDLE;
    pthread_mutex_unlock(&mutex);
    return result;
}

static int check_function(int id, uint64_t function)
{
    return check_handle(id, function, FUNCTION_BASE, &num_functions);
}

API int cuModuleUnload(uint64_t module)
{
    return check_handle(ID_cuModuleUnload, module, MODULE_BASE, &num_modules);
}

API int cuFuncLoad(uint64_t function)
{
    return check_function(ID_cuFuncLoad, function);
}

API int cuFuncSetAttribute(uint64_t function, int attribute, int value)
{
    (void)attribute;
    (void)value;
    return check_function(ID_cuFuncSetAttribute, function);
}

/* 32 registers, 0 bytes of local memory, and 0 of all else. */
API int cuFuncGetAttribute(int *value, int attribute, uint64_t function)
{
    int result = check_function(ID_cuFuncGetAttribute, function);
    if (!result)
        *value = attribute == 4 ? 32 : 0;
    return result;
}

API int cuStreamIsCapturing(uint64_t stream, int *status)
{
    pthread_mutex_lock(&mutex);
    int result = enter_locked(ID_cuStreamIsCapturing);
    if (!result) {
        *status = 0;
        for (int i = 0; i < num_capturing; i++)
            if (capturing[i] == stream)
                *status = 1;
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

static int launch(int id, const Config *config, uint64_t function, void **params)
{
    pthread_mutex_lock(&mutex);
    int result = enter_locked(id);
    unsigned long long blocks = 1, threads = 1;
    for (int i = 0; i < 3; i++) {
        blocks *= config->grid[i] != 0;
        threads *= config->block[i];
    }
    if (!result && !depth)
        result = INVALID_CONTEXT;
    if (!result && !is_handle(function, FUNCTION_BASE, num_functions))
        result = INVALID_HANDLE;
    if (!result &&
        (!blocks || !threads || threads > 1024 || config->num_attributes > MAX_ATTRIBUTES))
        result = INVALID_VALUE;
    if (!result) {
        Record *record = &ring[num_launches++ % RING];
        record->function = function;
        record->stream = config->stream;
        record->context = current_context();
        memcpy(record->grid, config->grid, sizeof record->grid);
        memcpy(record->block, config->block, sizeof record->block);
        record->shared_bytes = config->shared_bytes;
        record->num_attributes = config->num_attributes;
        for (unsigned i = 0; i < config->num_attributes; i++) {
            record->attribute_ids[i] = config->attributes[i].id;
            memcpy(&record->attribute_values[i], config->attributes[i].value, sizeof(int32_t));
        }
        record->num_params = num_params_of[(function - FUNCTION_BASE) / HANDLE_STEP];
        for (unsigned i = 0; i < record->num_params; i++)
            memcpy(&record->params[i], params[i], sizeof(uint64_t));
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

API int cuLaunchKernelEx(const Config *config, uint64_t function, void **params, void **extra)
{
    (void)extra;
    return launch(ID_cuLaunchKernelEx, config, function, params);
}

API int cuLaunchKernel(uint64_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                       uint64_t stream, void **params, void **extra)
{
    Config config = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, stream,
                     NULL, 0};
    (void)extra;
    return launch(ID_cuLaunchKernel, &config, function, params);
}

API int cuGetErrorName(int error, const char **text)
{
    int result = enter(ID_cuGetErrorName);
    *text = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_STUB";
    return result;
}

API int cuGetErrorString(int error, const char **text)
{
    int result = enter(ID_cuGetErrorString);
    *text = error == OUT_OF_MEMORY ? "out of memory" : "an error of the stub driver";
    return result;
}

/* ---- what stub.py calls ---- */

API int stub_num_names(void)
{
    return NUM_NAMES;
}

API const char *stub_name(int id)
{
    return names[id];
}

API uint64_t stub_calls(int id)
{
    pthread_mutex_lock(&mutex);
    uint64_t count = calls[id];
    pthread_mutex_unlock(&mutex);
    return count;
}

API void stub_fail(int id, int result, int64_t times)
{
    pthread_mutex_lock(&mutex);
    failures[id] = result;
    failure_times[id] = times;
    pthread_mutex_unlock(&mutex);
}

/* 0, or 1 when the set is full. */
API int stub_set_capturing(uint64_t stream, int is_capturing)
{
    int full = 0;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < num_capturing; i++)
        if (capturing[i] == stream)
            capturing[i--] = capturing[--num_capturing];
    if (is_capturing && !(full = num_capturing == MAX_CAPTURING))
        capturing[num_capturing++] = stream;
    pthread_mutex_unlock(&mutex);
    return full;
}

/* 0, or 1 when the function is unknown or has too many parameters. */
API int stub_set_num_params(uint64_t function, unsigned num_params)
{
    pthread_mutex_lock(&mutex);
    int wrong = num_params > MAX_PARAMS || !is_handle(function, FUNCTION_BASE, num_functions);
    if (!wrong)
        num_params_of[(function - FUNCTION_BASE) / HANDLE_STEP] = (uint8_t)num_params;
    pthread_mutex_unlock(&mutex);
    return wrong;
}

API uint64_t stub_num_launches(void)
{
    pthread_mutex_lock(&mutex);
    uint64_t count = num_launches;
    pthread_mutex_unlock(&mutex);
    return count;
}

/* Copies the last launches, at most RING, oldest first, and returns how many. */
API int stub_read_launches(Record *out)
{
    pthread_mutex_lock(&mutex);
    uint64_t count = num_launches < RING ? num_launches : RING;
    for (uint64_t i = 0; i < count; i++)
        out[i] = ring[(num_launches - count + i) % RING];
    pthread_mutex_unlock(&mutex);
    return (int)count;
}

/* Handles stay valid. Of the contexts, only this thread's stack is emptied. */
API void stub_reset(void)
{
    pthread_mutex_lock(&mutex);
    memset(calls, 0, sizeof calls);
    memset(failure_times, 0, sizeof failure_times);
    num_capturing = 0;
    num_launches = 0;
    depth = 0;
    pthread_mutex_unlock(&mutex);
}

static PyModuleDef_Slot module_slots[] = {
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "firesteel.launch._stub_driver",
    .m_doc = "A CUDA driver without a GPU; see firesteel.launch.stub.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__stub_driver(void)
{
    return PyModuleDef_Init(&module_def);
}
