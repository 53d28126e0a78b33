/* What a consumer does for each message, compiled: iterator.py has the same classes in Python and describes them, and consuming/__init__.py
 * chooses.
 *
 * An `async for` over `ReadyMessages` makes no coroutine of Python for a message. Each call of `anext` gives a coroutine of its own, a `Next`,
 * which notes who asks; nothing else happens before it is awaited. It returns a message that is ready, and otherwise passes on what the
 * coroutine that `wait` makes sends. An `async for` drops a `Next` before it asks for the following one, so the same object serves again.
 *
 * The limited API of Python 3.11: one binary for all later versions. Types are kept in static variables, because slots of types cannot find
 * their module in that API; a subinterpreter of its own cannot load the module, and uses the Python form.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>

#define LOOP_S 0.05 /* as in iterator.py */

static PyTypeObject *fields_type, *acks_type, *holding_type, *next_type;
static PyObject *name_add, *name_attempt, *name_batch, *name_bodies, *name_count, *name_decoded, *name_finish, *name_holding, *name_offset;
static PyObject *name_pull, *name_settler, *name_task;
/* The module `time`'s own `monotonic`. */
static PyObject *monotonic;

/* --- MessageFields ------------------------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    PyObject *body, *batch, *settler;
    long long pull, attempt;
    Py_ssize_t index;
    char is_settled;
} Fields;

/* A message with a body, whose reference it takes, also on failure. */
static PyObject *make_message(PyTypeObject *type, PyObject *settler, PyObject *batch, PyObject *body, Py_ssize_t index, long long attempt,
    long long pull)
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
    long long attempt, pull;
    if (!PyArg_ParseTupleAndKeywords(args, named, "OOnLL", names, &settler, &batch, &index, &attempt, &pull))
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
    {"attempt", T_LONGLONG, offsetof(Fields, attempt), 0, NULL},
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

/* --- TaskHolding ------------------------------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    PyObject *task, *message, *earlier;
} TaskHolding;

static PyObject *holding_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    static char *names[] = {"task", NULL};
    PyObject *task;
    if (!PyArg_ParseTupleAndKeywords(args, named, "O", names, &task))
        return NULL;
    TaskHolding *self = (TaskHolding *)PyType_GenericAlloc(type, 0);
    if (self != NULL)
        self->task = Py_NewRef(task);
    return (PyObject *)self;
}

static int holding_traverse(TaskHolding *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->task);
    Py_VISIT(self->message);
    Py_VISIT(self->earlier);
    return 0;
}

static int holding_clear(TaskHolding *self)
{
    Py_CLEAR(self->task);
    Py_CLEAR(self->message);
    Py_CLEAR(self->earlier);
    return 0;
}

static void holding_dealloc(TaskHolding *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    holding_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static int is_none(PyObject *field)
{
    return field == NULL || field == Py_None;
}

static PyMemberDef holding_members[] = {
    {"task", T_OBJECT, offsetof(TaskHolding, task), 0, NULL},
    {"message", T_OBJECT, offsetof(TaskHolding, message), 0, NULL},
    {"earlier", T_OBJECT, offsetof(TaskHolding, earlier), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot holding_slots[] = {
    {Py_tp_doc, "What a task holds."},
    {Py_tp_new, holding_new},
    {Py_tp_traverse, holding_traverse},
    {Py_tp_clear, holding_clear},
    {Py_tp_dealloc, holding_dealloc},
    {Py_tp_members, holding_members},
    {0, NULL},
};

static PyType_Spec holding_spec = {
    "qmq.client._ready.TaskHolding", sizeof(TaskHolding), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, holding_slots,
};

/* --- ReadyMessages ------------------------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    /* `held` is NULL if nothing is acknowledged. `task` is its function that returns the running task; `tasks` and `loop` are the dict of
     * running tasks and its key, where Python has them: looking there takes a third of the time. */
    PyObject *make, *clock, *refill, *wait, *held, *task, *tasks, *loop;
    int is_monotonic, is_one_by_one;
    /* That of the task which asked last and, one by one, that of the task which got the last message. */
    TaskHolding *holding, *given_to;
    /* A `Next` that may be free to serve again. */
    PyObject *spare;
    /* The run: messages `index` to `stop` of a batch; `begun_at` is the index of its first one. Without a run `part` is NULL, and both are 0. */
    PyObject *part, *batch, *bodies, *run_settler;
    Py_ssize_t begun_at, index, stop;
    long long pull, attempt;
    double until_s, now_s, rest_s;
} Ready;

/* Read the clock into `now_s`. */
static int read_clock(Ready *self)
{
#ifdef __linux__
    struct timespec now_ts;
    if (self->is_monotonic && clock_gettime(CLOCK_MONOTONIC, &now_ts) == 0) { /* what `time.monotonic` does, without making a number */
        self->now_s = (double)now_ts.tv_sec + 1e-9 * (double)now_ts.tv_nsec;
        return 0;
    }
#endif
    PyObject *now = PyObject_CallNoArgs(self->clock);
    if (now == NULL)
        return -1;
    self->now_s = PyFloat_AsDouble(now);
    Py_DECREF(now);
    return self->now_s == -1.0 && PyErr_Occurred() ? -1 : 0;
}

static PyObject *ready_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    static char *names[] = {"make", "clock", "refill", "wait", "held", "one_by_one", NULL};
    PyObject *make, *clock, *refill, *wait, *held, *task = NULL;
    int is_one_by_one = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args, named, "O!OOOO|$p", names, &PyType_Type, &make, &clock, &refill, &wait, &held, &is_one_by_one))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)make, fields_type)) {
        PyErr_SetString(PyExc_TypeError, "messages must be of a subclass of MessageFields");
        return NULL;
    }
    if (held != Py_None && (task = PyObject_GetAttr(held, name_task)) == NULL)
        return NULL;
    Ready *self = (Ready *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        Py_XDECREF(task);
        return NULL;
    }
    self->is_one_by_one = is_one_by_one;
    self->make = Py_NewRef(make);
    self->clock = Py_NewRef(clock);
    self->refill = Py_NewRef(refill);
    self->wait = Py_NewRef(wait);
    self->held = task != NULL ? Py_NewRef(held) : NULL;
    self->task = task;
    if (task != NULL) {
        self->tasks = PyObject_GetAttrString(held, "tasks");
        self->loop = PyObject_GetAttrString(held, "loop");
        if (self->tasks == NULL || self->loop == NULL) {
            Py_DECREF(self);
            return NULL;
        }
        if (!PyDict_Check(self->tasks))
            Py_CLEAR(self->tasks);
    }
    self->is_monotonic = clock == monotonic;
    if (read_clock(self) < 0)
        Py_CLEAR(self);
    else
        self->rest_s = self->now_s + LOOP_S;
    return (PyObject *)self;
}

static int ready_traverse(Ready *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->make);
    Py_VISIT(self->clock);
    Py_VISIT(self->refill);
    Py_VISIT(self->wait);
    Py_VISIT(self->held);
    Py_VISIT(self->task);
    Py_VISIT(self->tasks);
    Py_VISIT(self->loop);
    Py_VISIT(self->holding);
    Py_VISIT(self->given_to);
    Py_VISIT(self->spare);
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
    Py_CLEAR(self->held);
    Py_CLEAR(self->task);
    Py_CLEAR(self->tasks);
    Py_CLEAR(self->loop);
    Py_CLEAR(self->holding);
    Py_CLEAR(self->given_to);
    Py_CLEAR(self->spare);
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
    PyObject *batch = PyObject_GetAttr(part, name_batch);
    PyObject *settler = batch != NULL ? PyObject_GetAttr(part, name_settler) : NULL;
    PyObject *bodies = settler != NULL ? PyObject_GetAttr(batch, name_decoded) : NULL;
    if (bodies != NULL && !PyList_Check(bodies)) {
        PyErr_SetString(PyExc_TypeError, "the bodies must be decoded");
        Py_CLEAR(bodies);
    }
    if (bodies == NULL || get_number(part, name_offset, &offset) < 0 || get_number(part, name_attempt, &attempt) < 0
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
    self->attempt = attempt;
    self->until_s = until_s;
    Py_RETURN_NONE;
}

/* Whether the run has a message and its time is not over; -1 on failure. */
static int is_ready(Ready *self)
{
    if (self->index >= self->stop)
        return 0;
    if (read_clock(self) < 0)
        return -1;
    return self->now_s <= self->until_s && self->index < self->stop;
}

/* One by one, a run hands out a message only when its task has finished the one before it. */
static int may_give(Ready *self)
{
    TaskHolding *before = self->given_to;
    return before == NULL || (is_none(before->message) && !is_none(before->task));
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

/* The holding of the running task, borrowed. */
static TaskHolding *holding_of_task(Ready *self)
{
    PyObject *task;
    if (self->tasks != NULL) {
        task = PyDict_GetItemWithError(self->tasks, self->loop);
        if (task == NULL && PyErr_Occurred())
            return NULL;
        task = Py_NewRef(task != NULL ? task : Py_None);
    } else if ((task = PyObject_CallNoArgs(self->task)) == NULL)
        return NULL;
    if (self->holding == NULL || task == Py_None || self->holding->task != task) {
        PyObject *found = PyObject_CallMethodObjArgs(self->held, name_holding, task, NULL);
        if (found != NULL && !PyObject_TypeCheck(found, holding_type)) {
            PyErr_SetString(PyExc_TypeError, "`holding` must return a TaskHolding of this module");
            Py_CLEAR(found);
        }
        PyObject *before = (PyObject *)self->holding;
        self->holding = (TaskHolding *)found;
        Py_XDECREF(before);
    }
    Py_DECREF(task);
    return self->holding;
}

/* --- Next: the coroutine of one call of `anext` --- */

enum { ASKED, RESTING, WAITING, OVER };

typedef struct {
    PyObject_HEAD
    Ready *ready;
    /* Who asks, and the last message that the task had then; NULL if nothing is acknowledged. */
    TaskHolding *holding;
    PyObject *last;
    /* The coroutine that `wait` made. */
    PyObject *waiting;
    int state;
} Next;

static int next_traverse(Next *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->ready);
    Py_VISIT(self->holding);
    Py_VISIT(self->last);
    Py_VISIT(self->waiting);
    return 0;
}

static int next_clear(Next *self)
{
    Py_CLEAR(self->ready);
    Py_CLEAR(self->holding);
    Py_CLEAR(self->last);
    Py_CLEAR(self->waiting);
    return 0;
}

static void next_dealloc(Next *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    next_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyObject *ready_anext(Ready *self)
{
    TaskHolding *holding = NULL;
    if (self->held != NULL && (holding = holding_of_task(self)) == NULL)
        return NULL;
    Next *next;
    if (self->spare != NULL && Py_REFCNT(self->spare) == 1) {
        next = (Next *)Py_NewRef(self->spare);
        next_clear(next); /* one that was dropped before it was awaited still has what it noted */
    } else {
        next = (Next *)PyType_GenericAlloc(next_type, 0);
        if (next == NULL)
            return NULL;
        PyObject *before = self->spare;
        self->spare = Py_NewRef((PyObject *)next);
        Py_XDECREF(before);
    }
    next->state = ASKED;
    next->ready = (Ready *)Py_NewRef((PyObject *)self);
    if (holding != NULL) {
        next->holding = (TaskHolding *)Py_NewRef((PyObject *)holding);
        next->last = is_none(holding->message) ? NULL : Py_NewRef(holding->message);
    }
    return (PyObject *)next;
}

/* The task asks for the next message: acknowledge those that it had when it asked. */
static int acknowledge(Next *self)
{
    TaskHolding *holding = self->holding;
    if (self->last == NULL || holding == NULL)
        return 0;
    if (self->last != holding->message || !is_none(holding->earlier) || !PyObject_TypeCheck(self->last, fields_type))
        return called(PyObject_CallMethodObjArgs(self->ready->held, name_finish, holding, self->last, NULL));
    Fields *message = (Fields *)holding->message;
    holding->message = NULL;
    int result = 0;
    if (!message->is_settled && message->settler != NULL) {
        PyObject *settler = Py_NewRef(message->settler);
        if (PyObject_TypeCheck(settler, acks_type))
            result = gather((Acks *)settler, message->pull);
        else
            result = called(PyObject_CallMethod(settler, "ack", "L", message->pull));
        Py_DECREF(settler);
    }
    Py_DECREF(message);
    return result;
}

/* The task gets the message. */
static int keep(Next *self, PyObject *message)
{
    TaskHolding *holding = self->holding;
    if (holding == NULL)
        return 0;
    if (self->ready->is_one_by_one && self->ready->given_to != holding) {
        TaskHolding *before = self->ready->given_to;
        self->ready->given_to = (TaskHolding *)Py_NewRef((PyObject *)holding);
        Py_XDECREF(before);
    }
    if (!is_none(holding->message) || is_none(holding->task))
        return called(PyObject_CallMethodObjArgs(self->ready->held, name_add, holding, message, NULL));
    PyObject *before = holding->message;
    holding->message = Py_NewRef(message);
    Py_XDECREF(before);
    return 0;
}

/* It is over, with a message, whose reference it takes, or an error. */
static PySendResult finished(Next *self, PyObject *message, PyObject **result)
{
    self->state = OVER;
    if (message != NULL && keep(self, message) < 0)
        Py_CLEAR(message);
    next_clear(self);
    *result = message;
    return message != NULL ? PYGEN_RETURN : PYGEN_ERROR;
}

static PySendResult send_on(Next *self, PyObject *sent, PyObject **result)
{
    PySendResult how = PyIter_Send(self->waiting, sent, result);
    return how == PYGEN_NEXT ? how : finished(self, *result, result);
}

static PySendResult next_send(Next *self, PyObject *sent, PyObject **result)
{
    *result = NULL;
    if (self->state == WAITING)
        return send_on(self, sent, result);
    if (self->state == OVER) {
        PyErr_SetString(PyExc_RuntimeError, "cannot reuse already awaited coroutine");
        return PYGEN_ERROR;
    }
    Ready *ready = self->ready;
    if (self->state == ASKED && acknowledge(self) < 0)
        return finished(self, NULL, result);
    int found = is_ready(ready);
    if (found > 0 && ready->now_s > ready->rest_s) {
        ready->rest_s = ready->now_s + LOOP_S;
        self->state = RESTING;
        *result = Py_NewRef(Py_None); /* as `asyncio.sleep(0)` */
        return PYGEN_NEXT;
    }
    if (found > 0 && may_give(ready))
        return finished(self, next_of_run(ready), result);
    if (found < 0 || (self->waiting = PyObject_CallNoArgs(ready->wait)) == NULL)
        return finished(self, NULL, result);
    self->state = WAITING;
    return send_on(self, Py_None, result);
}

static PyObject *sent_result(PySendResult how, PyObject *result)
{
    if (how == PYGEN_RETURN) {
        PyErr_SetObject(PyExc_StopIteration, result);
        Py_CLEAR(result);
    }
    return result;
}

static PyObject *next_send_method(Next *self, PyObject *sent)
{
    PyObject *result;
    PySendResult how = next_send(self, sent, &result);
    return sent_result(how, result);
}

/* Python 3.12 and later call this one. */
static PyObject *next_iternext(Next *self)
{
    return next_send_method(self, Py_None);
}

/* As of a coroutine that Python made: (exception), or (type, value, traceback). */
static PyObject *next_throw(Next *self, PyObject *args)
{
    PyObject *type, *value = NULL, *trace = NULL, *result;
    if (!PyArg_ParseTuple(args, "O|OO", &type, &value, &trace))
        return NULL;
    if (self->state == WAITING) {
        PyObject *throw = PyObject_GetAttrString(self->waiting, "throw");
        result = throw != NULL ? PyObject_CallObject(throw, args) : NULL;
        Py_XDECREF(throw);
        if (result != NULL)
            return result; /* it waits for something else */
        PyObject *kind, *returned, *where;
        if (!PyErr_ExceptionMatches(PyExc_StopIteration)) {
            finished(self, NULL, &result);
            return NULL;
        }
        PyErr_Fetch(&kind, &returned, &where);
        PyErr_NormalizeException(&kind, &returned, &where);
        PyObject *message = PyObject_GetAttrString(returned, "value");
        Py_XDECREF(kind);
        Py_XDECREF(returned);
        Py_XDECREF(where);
        PySendResult how = finished(self, message, &result);
        return sent_result(how, result);
    }
    if (PyExceptionInstance_Check(type))
        PyErr_SetObject((PyObject *)Py_TYPE(type), type);
    else
        PyErr_SetObject(type, value != NULL ? value : Py_None);
    if (self->state != OVER)
        finished(self, NULL, &result);
    return NULL;
}

static PyObject *next_close(Next *self, PyObject *unused)
{
    if (self->state == WAITING) {
        PyObject *closed = PyObject_CallMethod(self->waiting, "close", NULL);
        if (called(closed) < 0)
            return NULL;
    }
    self->state = OVER;
    next_clear(self);
    Py_RETURN_NONE;
}

static PyObject *next_await(Next *self)
{
    if (self->state == RESTING || self->state == WAITING) {
        PyErr_SetString(PyExc_RuntimeError, "coroutine is being awaited already");
        return NULL;
    }
    return Py_NewRef((PyObject *)self);
}

static PyMethodDef next_methods[] = {
    {"send", (PyCFunction)next_send_method, METH_O, "Continue, as a coroutine."},
    {"throw", (PyCFunction)next_throw, METH_VARARGS, "Raise an exception where it waits."},
    {"close", (PyCFunction)next_close, METH_NOARGS, "End it."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot next_slots[] = {
    {Py_tp_doc, "The coroutine of one call of `anext`."},
    {Py_tp_traverse, next_traverse},
    {Py_tp_clear, next_clear},
    {Py_tp_dealloc, next_dealloc},
    {Py_tp_methods, next_methods},
    {Py_am_await, next_await},
    {Py_am_send, next_send},
    {Py_tp_iter, Py_NewRef},
    {Py_tp_iternext, next_iternext},
    {0, NULL},
};

static PyType_Spec next_spec = {
    "qmq.client._ready.Next", sizeof(Next), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, next_slots,
};

static PyMethodDef ready_methods[] = {
    {"begin", (PyCFunction)ready_begin, METH_VARARGS, "Hand out the first messages of a slice."},
    {"end", (PyCFunction)ready_end, METH_NOARGS, "Hand out no more of it."},
    {"take", (PyCFunction)ready_take, METH_NOARGS, "The next message, if it can be handed out without waiting."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot ready_slots[] = {
    {Py_tp_doc, "Iterates over a consumer's messages."},
    {Py_tp_new, ready_new},
    {Py_tp_traverse, ready_traverse},
    {Py_tp_clear, ready_clear},
    {Py_tp_dealloc, ready_dealloc},
    {Py_tp_methods, ready_methods},
    {Py_am_aiter, Py_NewRef},
    {Py_am_anext, ready_anext},
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

/* `bytes_column` in qmq/wire/batch_columns.py, with Python's rules for slices whatever the offsets are. */
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
        {&name_add, "add"}, {&name_attempt, "attempt"}, {&name_batch, "batch"}, {&name_bodies, "bodies"}, {&name_count, "count"},
        {&name_decoded, "decoded"}, {&name_finish, "finish"}, {&name_holding, "holding"}, {&name_offset, "offset"},
        {&name_pull, "pull"}, {&name_settler, "settler"}, {&name_task, "task"},
    };
    for (size_t each = 0; each < sizeof(names) / sizeof(names[0]); each++)
        if (*names[each].at == NULL && (*names[each].at = PyUnicode_InternFromString(names[each].text)) == NULL)
            return NULL;
    PyObject *clocks = PyImport_ImportModule("time");
    if (clocks == NULL)
        return NULL;
    Py_XDECREF(monotonic);
    monotonic = PyObject_GetAttrString(clocks, "monotonic");
    Py_DECREF(clocks);
    PyObject *module = monotonic != NULL ? PyModule_Create(&ready_module) : NULL;
    if (module == NULL)
        return NULL;
    fields_type = add_type(module, &fields_spec, "MessageFields");
    acks_type = add_type(module, &acks_spec, "GatheredAcks");
    holding_type = add_type(module, &holding_spec, "TaskHolding");
    next_type = add_type(module, &next_spec, "Next");
    if (fields_type == NULL || acks_type == NULL || holding_type == NULL || next_type == NULL
        || add_type(module, &ready_spec, "ReadyMessages") == NULL) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
