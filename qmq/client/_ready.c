/* What a consumer does for each message, compiled: ready_messages.py has the same classes in Python and describes them, and ready_form.py chooses.
 *
 * An `async for` over `ReadyMessages` makes no coroutine for a message that is ready: the object is its own awaitable, and `am_send` returns
 * the message. Only when no message is ready, `am_await` returns the iterator of the coroutine that `wait` makes. So one object serves any
 * number of tasks, and nothing happens before the `await`.
 *
 * The limited API of Python 3.11: one binary for all later versions. Types are kept in static variables, because slots of types cannot find
 * their module in that API; a subinterpreter of its own cannot load the module, and uses the Python form.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <structmember.h>

static PyTypeObject *fields_type, *acks_type;
static PyObject *name_attempt, *name_batch, *name_bodies, *name_count, *name_decoded, *name_offset, *name_pull, *name_settler;

/* --- MessageFields ------------------------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    PyObject *body, *batch, *settler;
    long long pull;
    Py_ssize_t index;
    int attempt;
    char is_settled;
} Fields;

/* A message with a body, whose reference it takes, also on failure. */
static PyObject *make_message(PyTypeObject *type, PyObject *settler, PyObject *batch, PyObject *body, Py_ssize_t index, int attempt, long long pull)
{
    Fields *self = body != NULL ? (Fields *)PyType_GenericAlloc(type, 0) : NULL;
    if (self == NULL) {
        Py_XDECREF(body);
        return NULL;
    }
    self->body = body;
    self->batch = Py_NewRef(batch);
    self->settler = Py_NewRef(settler);
    self->pull = pull;
    self->index = index;
    self->attempt = attempt;
    return (PyObject *)self;
}

static PyObject *fields_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    static char *names[] = {"settler", "batch", "index", "attempt", "pull", NULL};
    PyObject *settler, *batch;
    Py_ssize_t index;
    int attempt;
    long long pull;
    if (!PyArg_ParseTupleAndKeywords(args, named, "OOniL", names, &settler, &batch, &index, &attempt, &pull))
        return NULL;
    PyObject *bodies = PyObject_GetAttr(batch, name_decoded);
    if (bodies == Py_None) {
        Py_DECREF(bodies);
        bodies = PyObject_GetAttr(batch, name_bodies);
    }
    if (bodies == NULL)
        return NULL;
    PyObject *body = PySequence_GetItem(bodies, index);
    Py_DECREF(bodies);
    return make_message(type, settler, batch, body, index, attempt, pull);
}

static int fields_traverse(Fields *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->body);
    Py_VISIT(self->batch);
    Py_VISIT(self->settler);
    return 0;
}

static int fields_clear(Fields *self)
{
    Py_CLEAR(self->body);
    Py_CLEAR(self->batch);
    Py_CLEAR(self->settler);
    return 0;
}

static void fields_dealloc(Fields *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    fields_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyMemberDef fields_members[] = {
    {"body", T_OBJECT_EX, offsetof(Fields, body), 0, NULL},
    {"attempt", T_INT, offsetof(Fields, attempt), 0, NULL},
    {"is_settled", T_BOOL, offsetof(Fields, is_settled), 0, NULL},
    {"pull_sequence", T_LONGLONG, offsetof(Fields, pull), 0, NULL},
    {"_batch", T_OBJECT_EX, offsetof(Fields, batch), 0, NULL},
    {"_index", T_PYSSIZET, offsetof(Fields, index), 0, NULL},
    {"_settler", T_OBJECT_EX, offsetof(Fields, settler), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot fields_slots[] = {
    {Py_tp_doc, "The fields of a `Message`, which has the methods."},
    {Py_tp_new, fields_new},
    {Py_tp_traverse, fields_traverse},
    {Py_tp_clear, fields_clear},
    {Py_tp_dealloc, fields_dealloc},
    {Py_tp_members, fields_members},
    {0, NULL},
};

static PyType_Spec fields_spec = {
    "qmq.client._ready.MessageFields", sizeof(Fields), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, fields_slots,
};

/* --- GatheredAcks ------------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    long long first, last, limit;
} Acks;

static int acks_init(Acks *self, PyObject *args, PyObject *named)
{
    self->first = 0;
    self->last = self->limit = -1;
    return 0;
}

static int called(PyObject *result)
{
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

static int gather(Acks *self, long long pull)
{
    if (pull == self->last + 1 && pull <= self->limit) {
        self->last = pull;
        return 0;
    }
    return called(PyObject_CallMethod((PyObject *)self, "begin_acks", "L", pull));
}

static PyObject *acks_ack(Acks *self, PyObject *given)
{
    long long pull = PyLong_AsLongLong(given);
    if ((pull == -1 && PyErr_Occurred()) || gather(self, pull) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMemberDef acks_members[] = {
    {"ack_first", T_LONGLONG, offsetof(Acks, first), 0, NULL},
    {"ack_last", T_LONGLONG, offsetof(Acks, last), 0, NULL},
    {"ack_limit", T_LONGLONG, offsetof(Acks, limit), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef acks_methods[] = {
    {"ack", (PyCFunction)acks_ack, METH_O, "Acknowledge a message."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot acks_slots[] = {
    {Py_tp_doc, "The range of acknowledged messages."},
    {Py_tp_init, acks_init},
    {Py_tp_members, acks_members},
    {Py_tp_methods, acks_methods},
    {0, NULL},
};

static PyType_Spec acks_spec = {
    "qmq.client._ready.GatheredAcks", sizeof(Acks), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, acks_slots,
};

/* --- ReadyMessages ------------------------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    PyObject *make, *clock, *refill, *wait;
    int is_auto;
    PyObject *current, *settler;
    /* The run: messages `index` to `stop` of a batch; `begun_at` is the index of its first one. Without a run `part` is NULL, and both are 0. */
    PyObject *part, *batch, *bodies, *run_settler;
    Py_ssize_t begun_at, index, stop;
    long long pull;
    int attempt;
    double until_s;
} Ready;

static PyObject *ready_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    static char *names[] = {"make", "clock", "refill", "wait", "is_auto", NULL};
    PyObject *make, *clock, *refill, *wait;
    int is_auto;
    if (!PyArg_ParseTupleAndKeywords(args, named, "O!OOOp", names, &PyType_Type, &make, &clock, &refill, &wait, &is_auto))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)make, fields_type)) {
        PyErr_SetString(PyExc_TypeError, "messages must be of a subclass of MessageFields");
        return NULL;
    }
    Ready *self = (Ready *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    self->make = Py_NewRef(make);
    self->clock = Py_NewRef(clock);
    self->refill = Py_NewRef(refill);
    self->wait = Py_NewRef(wait);
    self->is_auto = is_auto;
    return (PyObject *)self;
}

static int ready_traverse(Ready *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->make);
    Py_VISIT(self->clock);
    Py_VISIT(self->refill);
    Py_VISIT(self->wait);
    Py_VISIT(self->current);
    Py_VISIT(self->settler);
    Py_VISIT(self->part);
    Py_VISIT(self->batch);
    Py_VISIT(self->bodies);
    Py_VISIT(self->run_settler);
    return 0;
}

static void forget_run(Ready *self)
{
    self->begun_at = self->index = self->stop = 0;
    Py_CLEAR(self->part);
    Py_CLEAR(self->batch);
    Py_CLEAR(self->bodies);
    Py_CLEAR(self->run_settler);
}

static int ready_clear(Ready *self)
{
    forget_run(self);
    Py_CLEAR(self->make);
    Py_CLEAR(self->clock);
    Py_CLEAR(self->refill);
    Py_CLEAR(self->wait);
    Py_CLEAR(self->current);
    Py_CLEAR(self->settler);
    return 0;
}

static void ready_dealloc(Ready *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    ready_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static int get_number(PyObject *from, PyObject *name, long long *number)
{
    PyObject *found = PyObject_GetAttr(from, name);
    if (found == NULL)
        return -1;
    *number = PyLong_AsLongLong(found);
    Py_DECREF(found);
    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

static int set_number(PyObject *in, PyObject *name, long long number)
{
    PyObject *value = PyLong_FromLongLong(number);
    int result = value != NULL ? PyObject_SetAttr(in, name, value) : -1;
    Py_XDECREF(value);
    return result;
}

static int end_run(Ready *self)
{
    PyObject *part = self->part;
    if (part == NULL)
        return 0;
    Py_INCREF(part);
    Py_ssize_t index = self->index, handed_out = index - self->begun_at;
    long long pull = self->pull, count;
    forget_run(self);
    int is_failed = get_number(part, name_count, &count) < 0 || set_number(part, name_offset, index) < 0
        || set_number(part, name_pull, pull) < 0 || set_number(part, name_count, count - handed_out) < 0;
    Py_DECREF(part);
    return is_failed ? -1 : 0;
}

static PyObject *ready_end(Ready *self, PyObject *unused)
{
    if (end_run(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *ready_begin(Ready *self, PyObject *args)
{
    PyObject *part;
    Py_ssize_t count;
    double until_s;
    long long offset, attempt, pull;
    if (!PyArg_ParseTuple(args, "Ond", &part, &count, &until_s) || end_run(self) < 0)
        return NULL;
    PyObject *batch = PyObject_GetAttr(part, name_batch), *settler = PyObject_GetAttr(part, name_settler);
    PyObject *bodies = batch != NULL && settler != NULL ? PyObject_GetAttr(batch, name_decoded) : NULL;
    if (bodies != NULL && !PyList_Check(bodies))
        PyErr_SetString(PyExc_TypeError, "the bodies must be decoded");
    if (PyErr_Occurred() || get_number(part, name_offset, &offset) < 0 || get_number(part, name_attempt, &attempt) < 0
        || get_number(part, name_pull, &pull) < 0) {
        Py_XDECREF(batch);
        Py_XDECREF(settler);
        Py_XDECREF(bodies);
        return NULL;
    }
    self->part = Py_NewRef(part);
    self->batch = batch;
    self->bodies = bodies;
    self->run_settler = settler;
    self->begun_at = self->index = (Py_ssize_t)offset;
    self->stop = (Py_ssize_t)offset + count;
    self->pull = pull;
    self->attempt = (int)attempt;
    self->until_s = until_s;
    Py_RETURN_NONE;
}

/* Whether the run has a message and its time is not over; -1 on failure. */
static int is_ready(Ready *self)
{
    if (self->index >= self->stop)
        return 0;
    PyObject *now = PyObject_CallNoArgs(self->clock);
    if (now == NULL)
        return -1;
    double now_s = PyFloat_AsDouble(now);
    Py_DECREF(now);
    if (now_s == -1.0 && PyErr_Occurred())
        return -1;
    return now_s <= self->until_s && self->index < self->stop;
}

/* The next message of the run, which has one. */
static PyObject *next_of_run(Ready *self)
{
    PyObject *body = Py_XNewRef(PyList_GetItem(self->bodies, self->index));
    PyObject *message
        = make_message((PyTypeObject *)self->make, self->run_settler, self->batch, body, self->index, self->attempt, self->pull);
    if (message != NULL) {
        self->index++;
        self->pull++;
    }
    return message;
}

static PyObject *ready_take(Ready *self, PyObject *unused)
{
    int found = is_ready(self);
    if (found < 0)
        return NULL;
    return found ? next_of_run(self) : PyObject_CallNoArgs(self->refill);
}

static void set_current(Ready *self, PyObject *message)
{
    PyObject *before = self->current, *settler_before = self->settler;
    self->current = Py_NewRef(message);
    self->settler = Py_XNewRef(((Fields *)message)->settler);
    Py_XDECREF(before);
    Py_XDECREF(settler_before);
}

static PyObject *ready_keep(Ready *self, PyObject *message)
{
    if (!PyObject_TypeCheck(message, fields_type)) {
        PyErr_SetString(PyExc_TypeError, "not a message");
        return NULL;
    }
    set_current(self, message);
    return Py_NewRef(message);
}

static PyObject *ready_forget(Ready *self, PyObject *unused)
{
    PyObject *message = self->current;
    if (message == NULL)
        Py_RETURN_NONE;
    self->current = NULL;
    return message;
}

/* The loop asks for the next message: acknowledge the current one. */
static int acknowledge(Ready *self)
{
    Fields *message = (Fields *)self->current;
    if (message == NULL)
        return 0;
    self->current = NULL;
    int result = 0;
    if (self->is_auto && !message->is_settled && self->settler != NULL) {
        PyObject *settler = Py_NewRef(self->settler);
        if (PyObject_TypeCheck(settler, acks_type))
            result = gather((Acks *)settler, message->pull);
        else
            result = called(PyObject_CallMethod(settler, "ack", "L", message->pull));
        Py_DECREF(settler);
    }
    Py_DECREF(message);
    return result;
}

static PyObject *ready_await(Ready *self)
{
    if (acknowledge(self) < 0)
        return NULL;
    int found = is_ready(self);
    if (found)
        return found < 0 ? NULL : Py_NewRef((PyObject *)self);
    PyObject *waiting = PyObject_CallNoArgs(self->wait);
    if (waiting == NULL)
        return NULL;
    PyObject *iterator = PyObject_CallMethod(waiting, "__await__", NULL);
    Py_DECREF(waiting);
    return iterator;
}

static PySendResult ready_send(Ready *self, PyObject *unused, PyObject **result)
{
    if (self->index >= self->stop) {
        PyErr_SetString(PyExc_RuntimeError, "no message is ready any more: call __await__ again");
        *result = NULL;
        return PYGEN_ERROR;
    }
    *result = next_of_run(self);
    if (*result == NULL)
        return PYGEN_ERROR;
    set_current(self, *result);
    return PYGEN_RETURN;
}

/* Python 3.12 and later call this one. */
static PyObject *ready_next(Ready *self)
{
    PyObject *message;
    if (ready_send(self, Py_None, &message) == PYGEN_RETURN) {
        PyErr_SetObject(PyExc_StopIteration, message);
        Py_DECREF(message);
    }
    return NULL;
}

static PyMemberDef ready_members[] = {
    {"current", T_OBJECT, offsetof(Ready, current), READONLY, NULL},
    {"settler", T_OBJECT, offsetof(Ready, settler), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef ready_methods[] = {
    {"begin", (PyCFunction)ready_begin, METH_VARARGS, "Hand out the first messages of a slice."},
    {"end", (PyCFunction)ready_end, METH_NOARGS, "Hand out no more of it."},
    {"take", (PyCFunction)ready_take, METH_NOARGS, "The next message, if it can be handed out without waiting."},
    {"keep", (PyCFunction)ready_keep, METH_O, "The loop gets this message."},
    {"forget", (PyCFunction)ready_forget, METH_NOARGS, "The loop has no message any more; returns the one that it had."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot ready_slots[] = {
    {Py_tp_doc, "Iterates over a consumer's messages."},
    {Py_tp_new, ready_new},
    {Py_tp_traverse, ready_traverse},
    {Py_tp_clear, ready_clear},
    {Py_tp_dealloc, ready_dealloc},
    {Py_tp_members, ready_members},
    {Py_tp_methods, ready_methods},
    {Py_am_aiter, Py_NewRef},
    {Py_am_anext, Py_NewRef},
    {Py_am_await, ready_await},
    {Py_am_send, ready_send},
    {Py_tp_iternext, ready_next},
    {0, NULL},
};

static PyType_Spec ready_spec = {
    "qmq.client._ready.ReadyMessages", sizeof(Ready), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, ready_slots,
};

/* --- bodies ------------------------------------------------------------------------------------------------------------- */

/* A number of four bytes, little endian. */
static Py_ssize_t number_at(const unsigned char *at)
{
    return (int32_t)((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24);
}

/* `bytes_column` in qmq/batch_columns.py, with Python's rules for slices whatever the offsets are. */
static PyObject *cut_bodies(PyObject *module, PyObject *args)
{
    PyObject *region;
    Py_ssize_t offsets_at, data_at, count, size;
    char *bytes;
    if (!PyArg_ParseTuple(args, "Snnn", &region, &offsets_at, &data_at, &count) || PyBytes_AsStringAndSize(region, &bytes, &size) < 0)
        return NULL;
    if (offsets_at < 0 || data_at < 0 || count < 0 || offsets_at > size || count >= (size - offsets_at) / 4) {
        PyErr_SetString(PyExc_ValueError, "the offsets of a column are outside the batch");
        return NULL;
    }
    const unsigned char *offsets = (const unsigned char *)bytes + offsets_at;
    Py_ssize_t end = data_at + number_at(offsets + 4 * count);
    Py_ssize_t data_bytes = PySlice_AdjustIndices(size, &data_at, &end, 1);
    PyObject *found = PyList_New(count);
    for (Py_ssize_t each = 0; found != NULL && each < count; each++) {
        Py_ssize_t first = number_at(offsets + 4 * each), last = number_at(offsets + 4 * each + 4);
        Py_ssize_t body_bytes = PySlice_AdjustIndices(data_bytes, &first, &last, 1);
        PyObject *body = PyBytes_FromStringAndSize(bytes + data_at + first, body_bytes);
        if (body == NULL || PyList_SetItem(found, each, body) < 0)
            Py_CLEAR(found);
    }
    return found;
}

static PyMethodDef functions[] = {
    {"cut_bodies", cut_bodies, METH_VARARGS, "The items of an offsets-and-bytes column."},
    {NULL, NULL, 0, NULL},
};

/* --- the module --------------------------------------------------------------------------------------------------------- */

static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec, const char *name)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type != NULL && PyModule_AddObjectRef(module, name, type) < 0)
        Py_CLEAR(type);
    return (PyTypeObject *)type;
}

static struct PyModuleDef ready_module = {
    PyModuleDef_HEAD_INIT, "qmq.client._ready", "What a consumer does for each message.", -1, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__ready(void)
{
    static const struct { PyObject **at; const char *text; } names[] = {
        {&name_attempt, "attempt"}, {&name_batch, "batch"}, {&name_bodies, "bodies"}, {&name_count, "count"},
        {&name_decoded, "decoded"}, {&name_offset, "offset"}, {&name_pull, "pull"}, {&name_settler, "settler"},
    };
    for (size_t each = 0; each < sizeof(names) / sizeof(names[0]); each++)
        if (*names[each].at == NULL && (*names[each].at = PyUnicode_InternFromString(names[each].text)) == NULL)
            return NULL;
    PyObject *module = PyModule_Create(&ready_module);
    if (module == NULL)
        return NULL;
    fields_type = add_type(module, &fields_spec, "MessageFields");
    acks_type = add_type(module, &acks_spec, "GatheredAcks");
    if (fields_type == NULL || acks_type == NULL || add_type(module, &ready_spec, "ReadyMessages") == NULL) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
