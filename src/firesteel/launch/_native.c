/* Makes planned launches from C: `Launcher`, and the bare loop that it is compared with.
 *
 * runner.py documents `run`, layout.py what a Launcher reads; portable.py is the same object in
 * Python. The path of `run` reads its integers, looks up one row, and calls the driver. It
 * allocates nothing, and writes to no memory that threads share but the arena's cell and the
 * counters, by atomic operations. What a launch needs lies on the C stack, or in memory that Python
 * has checked and that never changes after construction.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#ifdef Py_GIL_DISABLED
#include <sched.h>
#endif

/* layout.py refuses more. */
#define MAX_PARAMS 64
#define MAX_VALUES 128
#define MAX_FLOOR_PARAMS 66

/* The codes of `run`; portable.py has the same ones. */
#define MISS (-1)
#define FOREIGN_STREAM (-2)
#define FORKED (-3)
#define DRIVER_BASE 1000
#define PLACES 64
enum { PLACE_GET_CONTEXT = 16, PLACE_PUSH_CONTEXT, PLACE_POP_CONTEXT, PLACE_IS_CAPTURING };

/* The driver's ABI, declared here so that building needs no CUDA toolkit. */
typedef struct {
    int id;
    int padding;
    union {
        int number;
        char bytes[64];
    } value;
} LaunchAttribute;

typedef struct {
    unsigned grid_x, grid_y, grid_z;
    unsigned block_x, block_y, block_z;
    unsigned shared_bytes;
    void *stream;
    const LaunchAttribute *attributes;
    unsigned num_attributes;
} LaunchConfig;

_Static_assert(sizeof(LaunchAttribute) == 72, "CUlaunchAttribute");
_Static_assert(offsetof(LaunchAttribute, value) == 8, "CUlaunchAttribute.value");
_Static_assert(sizeof(LaunchConfig) == 56, "CUlaunchConfig");
_Static_assert(offsetof(LaunchConfig, stream) == 32, "CUlaunchConfig.hStream");
_Static_assert(sizeof(void *) == 8, "addresses travel as 64-bit integers");

typedef int (*LaunchKernelEx)(const LaunchConfig *, void *, void **, void **);
typedef int (*LaunchKernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            unsigned, void *, void **, void **);
typedef int (*StreamIsCapturing)(void *, int *);
typedef int (*ContextOut)(void **);
typedef int (*ContextIn)(void *);

#define COOPERATIVE {.id = 2, .value = {.number = 1}}
#define PROGRAMMATIC {.id = 6, .value = {.number = 1}}

/* By a launch's flags. */
static const struct {
    unsigned count;
    LaunchAttribute list[2];
} attributes_of_flags[] = {
    {0, {{.id = 0}}},
    {1, {PROGRAMMATIC}},
    {1, {COOPERATIVE}},
    {2, {COOPERATIVE, PROGRAMMATIC}},
};

/* What Python lays out, in fields of 8 bytes; layout.py has the same order.
 *
 * A parameter lies in `value` itself, or in place `value` of the call or of the row. */
enum { SOURCE_CONSTANT, SOURCE_CALL, SOURCE_ROW };

typedef struct {
    uint64_t source, value;
} Param;

typedef struct {
    void *function;
    uint64_t threads, shared_bytes, flags;
    uint64_t first_param, num_params;
    /* Integers of this launch in a row, after its grid. */
    uint64_t num_row_values;
} Launch;

typedef struct {
    uint64_t first_launch, num_launches;
} Sequence;

/* The stream that owns an arena, and the lock on its launches. */
typedef struct {
    int64_t owner;
    int64_t lock;
} ArenaCell;

#define FREE_ARENA (-1)

typedef struct {
    LaunchKernelEx launch_kernel;
    StreamIsCapturing is_capturing;
    ContextOut get_context;
    ContextIn push_context;
    ContextOut pop_context;
    void *context;
    int64_t max_tokens;
    const int32_t *index;
    const int64_t *rows;
    ArenaCell *arena;
    uint64_t num_values;
    const Sequence *sequences;
    const Launch *launches;
    const Param *params;
    /* One of each launch. */
    int64_t *counters;
} Program;

_Static_assert(sizeof(Launch) == 7 * 8 && sizeof(Program) == 15 * 8, "see layout.py");

typedef struct {
    PyObject_HEAD
    Program program;
    int64_t fork_generation;
    PyObject *keep;
} Launcher;

/* How many forks lie between the first process and this one. */
static int64_t fork_generation = 0;

static long driver_failure(int result, int place)
{
    return -((long)DRIVER_BASE + (long)PLACES * result + place);
}

/* The launches of two calls on one arena must not mix: the later ones of a call read what the
 * earlier ones wrote there. */
#ifdef Py_GIL_DISABLED
/* A holder writes the number of its process. So a child does not wait for a thread that held the
 * lock when its parent was forked, and that exists in the parent only. */
static void lock_arena(ArenaCell *arena)
{
    int64_t held = 1 + __atomic_load_n(&fork_generation, __ATOMIC_RELAXED);
    int64_t seen = 0;
    while (arena && !__atomic_compare_exchange_n(&arena->lock, &seen, held, 0, __ATOMIC_ACQUIRE,
                                                 __ATOMIC_RELAXED)) {
        if (seen == held) {
            seen = 0;
            sched_yield();
        }
    }
}

static void unlock_arena(ArenaCell *arena)
{
    if (arena)
        __atomic_store_n(&arena->lock, 0, __ATOMIC_RELEASE);
}
#else
/* The interpreter's lock does: `run` holds it from its first instruction to its last. */
static void lock_arena(ArenaCell *arena) { (void)arena; }
static void unlock_arena(ArenaCell *arena) { (void)arena; }
#endif

static long launch_all(const Program *program, const int64_t *row, void *stream,
                       const uint64_t *values)
{
    const Sequence *sequence = &program->sequences[*row++];
    const Launch *launch = &program->launches[sequence->first_launch];
    int64_t *counter = &program->counters[sequence->first_launch];
    int num_launches = (int)sequence->num_launches;
    long made = 0;
    for (int place = 0; place < num_launches; place++, launch++, counter++) {
        const int64_t *row_values = row + 3;
        if (row[0] && row[1] && row[2]) {
            const Param *param = &program->params[launch->first_param];
            const void *params[MAX_PARAMS];
            for (uint64_t i = 0; i < launch->num_params; i++, param++)
                params[i] = param->source == SOURCE_CALL  ? (const void *)&values[param->value]
                            : param->source == SOURCE_ROW ? (const void *)&row_values[param->value]
                                                          : (const void *)&param->value;
            LaunchConfig config = {
                (unsigned)row[0], (unsigned)row[1], (unsigned)row[2],
                (unsigned)launch->threads, 1, 1,
                (unsigned)launch->shared_bytes, stream,
                attributes_of_flags[launch->flags].list,
                attributes_of_flags[launch->flags].count,
            };
            int result = program->launch_kernel(&config, launch->function, (void **)params, NULL);
            if (result)
                return driver_failure(result, place);
            __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
            made++;
        }
        row = row_values + launch->num_row_values;
    }
    return made;
}

/* 0, or a code. A stream that captures may pass, and leaves the owner as it is. */
static long claim_arena(const Program *program, int64_t stream)
{
    int status = 0;
    int result = program->is_capturing((void *)stream, &status);
    if (result)
        return driver_failure(result, PLACE_IS_CAPTURING);
    if (status)
        return 0;
    int64_t owner = FREE_ARENA;
    if (__atomic_compare_exchange_n(&program->arena->owner, &owner, stream, 0, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE))
        return 0;
    return owner == stream ? 0 : FOREIGN_STREAM;
}

static int32_t find_row(const Program *program, int64_t num_tokens)
{
    return num_tokens < 0 || num_tokens > program->max_tokens ? -1 : program->index[num_tokens];
}

static long run_planned(const Launcher *self, int64_t num_tokens, int64_t stream,
                        const uint64_t *values)
{
    const Program *program = &self->program;
    ArenaCell *arena = program->arena;
    if (self->fork_generation != __atomic_load_n(&fork_generation, __ATOMIC_RELAXED))
        return FORKED;
    int32_t start = find_row(program, num_tokens);
    if (start < 0)
        return MISS;
    int owned = !arena || __atomic_load_n(&arena->owner, __ATOMIC_ACQUIRE) == stream;

    void *current = NULL;
    int result = program->get_context(&current);
    if (result)
        return driver_failure(result, PLACE_GET_CONTEXT);
    int pushes = current != program->context;
    if (pushes && (result = program->push_context(program->context)))
        return driver_failure(result, PLACE_PUSH_CONTEXT);
    /* In our context, because the default streams are those of the current one. */
    long made = owned ? 0 : claim_arena(program, stream);
    if (!made) {
        lock_arena(arena);
        made = launch_all(program, program->rows + start, (void *)stream, values);
        unlock_arena(arena);
    }
    if (pushes && (result = program->pop_context(&current)) && made >= 0)
        made = driver_failure(result, PLACE_POP_CONTEXT);
    return made;
}

/* Integers only: an object's __index__ could run anything, a GPU tensor's would synchronise. */
static int check_int(PyObject *value, const char *name)
{
    if (PyLong_Check(value))
        return 0;
    PyErr_Format(PyExc_TypeError, "%s: got %R, must be an int", name, value);
    return -1;
}

/* -1 for every integer outside int64: no table reaches that far. */
static int read_num_tokens(PyObject *value, int64_t *num_tokens)
{
    int overflow;
    if (check_int(value, "num_tokens") < 0)
        return -1;
    *num_tokens = PyLong_AsLongLongAndOverflow(value, &overflow);
    return 0;
}

/* Any integer that 64 bits hold, with a sign or without. */
static int read_call_value(PyObject *value, Py_ssize_t place, uint64_t *out)
{
    int overflow = 0;
    if (!PyLong_Check(value)) {
        PyErr_Format(PyExc_TypeError, "values[%zd]: got %R, must be an int", place, value);
        return -1;
    }
    *out = (uint64_t)PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow > 0) {
        *out = PyLong_AsUnsignedLongLong(value);
        overflow = *out == UINT64_MAX && PyErr_Occurred();
    }
    if (!overflow)
        return 0;
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "values[%zd]: got %R, must be in %lld..%llu", place, value,
                 (long long)INT64_MIN, (unsigned long long)UINT64_MAX);
    return -1;
}

static PyObject *launcher_run(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    const Launcher *self = (Launcher *)object;
    uint64_t values[MAX_VALUES];
    int64_t num_tokens, stream;
    int overflow;
    Py_ssize_t num_values = num_args - 2;
    if (num_values != (Py_ssize_t)self->program.num_values) {
        PyErr_Format(PyExc_TypeError, "run: got %zd values, must be %zd", num_values,
                     (Py_ssize_t)self->program.num_values);
        return NULL;
    }
    if (read_num_tokens(args[0], &num_tokens) < 0 || check_int(args[1], "stream") < 0)
        return NULL;
    stream = PyLong_AsLongLongAndOverflow(args[1], &overflow);
    if (overflow || stream < 0) {
        PyErr_Format(PyExc_ValueError, "stream: got %R, must be in 0..%lld", args[1],
                     (long long)INT64_MAX);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < num_values; i++)
        if (read_call_value(args[i + 2], i, &values[i]) < 0)
            return NULL;
    return PyLong_FromLong(run_planned(self, num_tokens, stream, values));
}

static PyObject *launcher_resolve(PyObject *object, PyObject *argument)
{
    const Program *program = &((Launcher *)object)->program;
    int64_t num_tokens;
    if (read_num_tokens(argument, &num_tokens) < 0)
        return NULL;
    int32_t start = find_row(program, num_tokens);
    return PyLong_FromLongLong(start < 0 ? -1 : program->rows[start]);
}

static PyObject *launcher_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"", "", NULL};
    Py_ssize_t program;
    PyObject *keep;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nO:Launcher", names, &program, &keep))
        return NULL;
    Launcher *self = (Launcher *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    memcpy(&self->program, (const void *)program, sizeof self->program);
    self->fork_generation = __atomic_load_n(&fork_generation, __ATOMIC_RELAXED);
    Py_INCREF(keep);
    self->keep = keep;
    return (PyObject *)self;
}

static int launcher_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((Launcher *)object)->keep);
    return 0;
}

static void launcher_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_CLEAR(((Launcher *)object)->keep);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static PyMethodDef launcher_methods[] = {
    {"run", (PyCFunction)(void (*)(void))launcher_run, METH_FASTCALL,
     "run($self, num_tokens, stream, /, *values)\n--\n\n"
     "Makes the launches planned for num_tokens: how many, or a negative code."},
    {"resolve", launcher_resolve, METH_O,
     "resolve($self, num_tokens, /)\n--\n\nThe sequence planned for num_tokens, or -1."},
    {NULL, NULL, 0, NULL},
};

/* No tp_clear: `keep` is a tuple, and a cycle through it is broken by its other members. */
static PyType_Slot launcher_slots[] = {
    {Py_tp_doc, "Launcher(program, keep, /)\n--\n\n"
                "Makes the launches of the Program at an address; see firesteel.launch.runner."},
    {Py_tp_new, launcher_new},
    {Py_tp_traverse, launcher_traverse},
    {Py_tp_dealloc, launcher_dealloc},
    {Py_tp_methods, launcher_methods},
    {0, NULL},
};

static PyType_Spec launcher_spec = {
    .name = "firesteel.launch._native.Launcher",
    .basicsize = sizeof(Launcher),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = launcher_slots,
};

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static PyObject *raise_driver_error(const char *function, int result)
{
    PyObject *errors = PyImport_ImportModule("firesteel.errors");
    PyObject *type = errors ? PyObject_GetAttrString(errors, "DriverError") : NULL;
    if (type)
        PyErr_Format(type, "%s: got CUresult %d, must be 0", function, result);
    Py_XDECREF(type);
    Py_XDECREF(errors);
    return NULL;
}

static PyObject *launch_floor_ns(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_ssize_t address, function, stream;
    PyObject *numbers;
    void *params[MAX_FLOOR_PARAMS];
    uint64_t values[MAX_FLOOR_PARAMS];
    int threads, shared_bytes, num_launches;
    if (!PyArg_ParseTuple(args, "nniiO!ni:launch_floor_ns", &address, &function, &threads,
                          &shared_bytes, &PyTuple_Type, &numbers, &stream, &num_launches))
        return NULL;
    Py_ssize_t num_params = PyTuple_Size(numbers);
    if (address <= 0)
        return PyErr_Format(PyExc_ValueError,
                            "cu_launch_kernel_address: got %zd, must be in 1..%zd", address,
                            PY_SSIZE_T_MAX);
    if (num_params > MAX_FLOOR_PARAMS)
        return PyErr_Format(PyExc_ValueError, "params: got %zd items, must be 0..%d", num_params,
                            MAX_FLOOR_PARAMS);
    if (num_launches < 1)
        return PyErr_Format(PyExc_ValueError, "num_launches: got %d, must be in 1..%d",
                            num_launches, INT32_MAX);
    for (Py_ssize_t i = 0; i < num_params; i++) {
        values[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(numbers, i));
        if (values[i] == UINT64_MAX && PyErr_Occurred())
            return NULL;
        params[i] = &values[i];
    }
    int64_t start = now_ns();
    for (int i = 0; i < num_launches; i++) {
        int result = ((LaunchKernel)address)((void *)function, 1, 1, 1, (unsigned)threads, 1, 1,
                                             (unsigned)shared_bytes, (void *)stream, params, NULL);
        if (result)
            return raise_driver_error("cuLaunchKernel", result);
    }
    return PyFloat_FromDouble((double)(now_ns() - start) / num_launches);
}

static PyObject *note_fork(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    __atomic_fetch_add(&fork_generation, 1, __ATOMIC_RELAXED);
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"launch_floor_ns", launch_floor_ns, METH_VARARGS,
     "launch_floor_ns(cu_launch_kernel_address, function, threads, shared_bytes, params, stream, "
     "num_launches, /)\n--\n\nNanoseconds a launch of a bare loop of cuLaunchKernel."},
    {"note_fork", note_fork, METH_NOARGS,
     "note_fork()\n--\n\nMakes every Launcher that exists return FORKED."},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &launcher_spec, NULL);
    int result = PyModule_AddObjectRef(module, "Launcher", type);
    Py_XDECREF(type);
    return result;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "firesteel.launch._native",
    .m_doc = "Launches planned kernels from C.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&module_def);
}
